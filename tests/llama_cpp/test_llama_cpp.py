"""What is read from a GGUF file computes what llama.cpp computes from it: tokens, weights, log-probabilities.

llama.cpp's cache and attention are in float32 here. What remains is that it rounds activations for matrices that are not
float32.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

from leyden.engine.gguf import export_gguf, import_gguf
from leyden.engine.gguf_tokenizer import SPLITS
from tests.llama_cpp.served import llama_cpp
from tests.llama_cpp.texts import texts

pytestmark = pytest.mark.llama_cpp
SPECIAL = ("<|begin|>", "<|end|>", "<|unk|>")


def write_gguf(
    file: Path, tokens: list[str], merges: list[str], pre: str, embedding: Any, kind: Any, *, space_prefix: Any = None
) -> Path:
    """Write a Llama of one layer that adds nothing, so that its logits are the products of normed embeddings."""
    size = embedding.shape[-1] if kind is None else gguf.quants.dequantize(embedding, kind).shape[-1]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(size)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(size)
    if merges:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
        writer.add_token_merges(merges)
    else:  # pieces with scores, after the bytes
        writer.add_tokenizer_model("llama")
        writer.add_token_types([3, 3, 2] + [6] * 256 + [1] * (len(tokens) - 259))
        writer.add_token_scores([0.0] * 259 + [-float(n) for n in range(len(tokens) - 259)])
    if space_prefix is not None:
        writer.add_add_space_prefix(space_prefix)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=kind)
    head = np.random.default_rng(1).standard_normal((len(tokens), size)).astype(np.float32) / 8
    head[: len(SPECIAL)] = 0  # llama.cpp gives no probabilities where it would end
    writer.add_tensor("output.weight", head)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((size, size), np.float32))
    for name, shape in {"ffn_gate": (32, size), "ffn_up": (32, size), "ffn_down": (size, 32)}.items():
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges that were learned without a split, so that each split changes the tokens of some text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=[*SPECIAL], initial_alphabet=alphabet)
    # as a token, "</s>" would be a control token for llama.cpp whatever the file says
    backend.train_from_iterator([text for text in texts(2000) if "</s>" not in text], trainer)
    inside = json.loads(backend.to_str())["model"]
    tokens = sorted(inside["vocab"], key=inside["vocab"].get)
    unreachable = ["Ġworld's", "zzq", "ĠHello,"]  # whole words that no merges lead to
    return [*tokens, *(each for each in unreachable if each not in tokens)], [" ".join(m) for m in inside["merges"]]


@pytest.mark.merge
@pytest.mark.parametrize("pre", SPLITS)
def test_a_text_has_llama_cpps_tokens(tmp_path: Path, vocabulary: tuple[list[str], list[str]], pre: str) -> None:
    tokens, merges = vocabulary
    file = write_gguf(tmp_path / "x.gguf", tokens, merges, pre, np.ones((len(tokens), 32), np.float32), None)
    tokenizer = AutoTokenizer.from_pretrained(import_gguf(file, tmp_path / "folder"))
    asked = ["a world's zzq Hello, x", *texts(400, SPECIAL[1:])]
    if pre in ("tekken", "gpt-4o", "llama4"):  # llama.cpp's pattern knows no marks and no capitals but A to Z
        asked = [text for text in asked if all(ord(letter) < 128 for letter in text)]
    with llama_cpp(file) as theirs:
        differ = [text for text in asked if tokenizer(text).input_ids != theirs.tokens(text)]
    assert differ == []


@pytest.mark.merge
@pytest.mark.parametrize("space_prefix", [None, True, False])
def test_a_vocabulary_with_scores_has_llama_cpps_tokens(tmp_path: Path, space_prefix: bool | None) -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(
        [text for text in texts(2000) if "</s>" not in text], trainers.BpeTrainer(vocab_size=1500)
    )
    learned = sorted(backend.get_vocab(), key=lambda token: (len(token) == 1, backend.token_to_id(token)))
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *learned]
    embedding = np.ones((len(tokens), 32), np.float32)
    file = write_gguf(tmp_path / "x.gguf", tokens, [], "default", embedding, None, space_prefix=space_prefix)
    tokenizer = AutoTokenizer.from_pretrained(import_gguf(file, tmp_path / "folder"))
    asked = texts(600, SPECIAL[:2])
    with llama_cpp(file) as theirs:
        differ = [text for text in asked if tokenizer(text).input_ids != theirs.tokens(text)]
    assert differ == []
    plain = [text for text in asked if not any(token in text for token in SPECIAL)]
    decoded = [tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) for text in plain]
    assert decoded == plain


KINDS = [
    kind
    for kind in gguf.GGMLQuantizationType
    if kind in gguf.quants._type_traits or kind.name in ("F16", "F32")  # what the package can dequantise
]


@pytest.mark.merge
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_quantised_matrix_is_read_as_llama_cpp_and_transformers_read_it(tmp_path: Path, kind: Any) -> None:
    tokens = [*SPECIAL, "h", "e", "he", *(f"word{n}" for n in range(250))]
    embedding = random_blocks(kind, len(tokens), 256)
    file = write_gguf(tmp_path / "x.gguf", tokens, ["h e"], "gpt-2", embedding, kind)
    read = AutoModelForCausalLM.from_pretrained(import_gguf(file, tmp_path / "folder"))
    chosen = range(3, len(tokens), 7)
    with torch.no_grad():
        ours = [read(torch.tensor([[token]])).logits[0, -1].log_softmax(-1) for token in chosen]
    with llama_cpp(file) as theirs:
        for token, mine in zip(chosen, ours, strict=True):
            for other, log_probability in theirs.log_probabilities([token], 50).items():
                assert math.isclose(log_probability, float(mine[other]), abs_tol=2e-4), (token, other)
    from transformers.integrations.gguf import dequant

    if int(kind) in dequant.GGML_BLOCK:
        raw = torch.from_numpy(embedding.reshape(-1))
        again = dequant.dequantize(raw, int(kind)).reshape(len(tokens), 256)
        assert torch.allclose(read.model.embed_tokens.weight, again, rtol=1e-6, atol=1e-7)


def random_blocks(kind: Any, rows: int, columns: int) -> Any:
    """Return a matrix whose bytes are random, also for kinds that the package can only read."""
    rng = np.random.default_rng(0)
    if kind.name in ("F32", "F16"):
        return rng.standard_normal((rows, columns)).astype(np.float32 if kind.name == "F32" else np.float16)
    n_values, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    wanted = rows * columns // n_values
    found: list[Any] = []
    while len(found) < wanted:  # a random scale may be infinite, or dwarf all others
        blocks = rng.integers(0, 256, (4 * wanted, n_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            largest = np.abs(gguf.quants.dequantize(blocks, kind)).max(-1)
        found.extend(blocks[(largest > 0.01) & (largest < 100)])
    return np.stack(found[:wanted]).reshape(rows, -1)


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def real_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("models") / request.param
    subprocess.run([sys.executable, "-m", "leyden", "models", "get", request.param, folder], check=True)
    return request.param, folder


@pytest.mark.timeout(600)
def test_a_pretrained_models_tokens_and_log_probabilities_are_llama_cpps(
    tmp_path: Path, real_model: tuple[str, Path]
) -> None:
    name, folder = real_model
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    special = [token.content for token in tokenizer.added_tokens_decoder.values()][::40][:30]
    # llama.cpp tells U+2581 from a space, the tokenizer of Gemma's authors does not
    asked = [text for text in texts(1200, special) if "\u2581" not in text]
    prose = tokenizer("The old ship left the harbour at dawn, and nobody on the quay waved. " * 50).input_ids
    lengths = (5, 60, 620)  # the last is beyond Gemma's sliding window
    with torch.no_grad():
        ours = {length: model(torch.tensor([prose[:length]])).logits[0, -1].log_softmax(-1) for length in lengths}
    # llama.cpp's GELU is a table in half precision, and its 8-bit products round activations
    for kind, largest in (("f32", 0.002), ("f16", 0.02), ("q8_0", 0.1)):
        file = export_gguf(folder, tmp_path / f"{kind}.gguf", type=kind)
        with llama_cpp(file) as theirs:
            differ = [text for text in asked if kind == "f32" and tokenizer(text).input_ids != theirs.tokens(text)]
            found = [(ours[length], theirs.log_probabilities(prose[:length], 20)) for length in lengths]
        file.unlink()
        expected = [
            sum(math.exp(value) * abs(value - float(mine[token])) for token, value in likeliest.items())
            for mine, likeliest in found
        ]
        print(f"{name} {kind}: {len(asked)} texts, expected differences of log-probabilities {expected}")
        assert differ == []
        assert max(expected) < largest
