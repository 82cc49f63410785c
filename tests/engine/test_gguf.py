"""A GGUF file is read to the weights that it holds, or refused by name, and is written again from a trained folder."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

from leyden.engine import EmbeddedBackend
from leyden.engine.gguf import METADATA, export_gguf, import_gguf, imported
from leyden.errors import ConfigError, EngineError

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SHAPE, rms_norm_eps=1e-5, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SHAPE, rms_norm_eps=1e-6, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE | {"head_dim": 128}, rms_norm_eps=1e-6, tie_word_embeddings=False),
    "gemma3": Gemma3TextConfig(
        **SHAPE | {"head_dim": 256}, rms_norm_eps=1e-6, sliding_window=16, query_pre_attn_scalar=256
    ),
}


def random_model(architecture: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture], dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # fresh norms are all equal, which would hide a wrong one
                weight.add_(torch.randn_like(weight) * 0.1)
            elif name.endswith("bias"):
                weight.normal_(std=0.1)
    return model.eval()


def write_gguf(
    file: Path, architecture: str, model: Any, *, kind: str = "F32", template: str | None = None, **metadata: Any
) -> Path:
    """Write a model as llama.cpp's own converter does, with a tokenizer of bytes and a few words."""
    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1_000_000.0 if architecture == "gemma3" else 10_000.0)
    writer.add_file_type(0)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    begin, end = ("<bos>", "<eos>") if architecture == "gemma3" else ("<s>", "</s>")
    special = ["<pad>", begin, end, "<|im_end|>", "<|endoftext|>", "<unk>", "<mask>"]
    if architecture == "gemma3":  # as sentencepiece writes it, with a score for each token
        pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz", "he", "ll"]
        fill = [f"<0x{byte:02X}>" for byte in range(config.vocab_size - len(special) - len(pieces))]
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([0.0] * (config.vocab_size - len(pieces)) + [-float(n) for n in range(len(pieces))])
    else:
        pieces = [*sorted(bytes_to_letters().values()), "he", "ll"]
        fill = [f"<unused{n}>" for n in range(config.vocab_size - len(special) - len(pieces))]
        writer.add_tokenizer_model("gpt2")
        writer.add_token_merges(["h e", "l l"])
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*special, *fill, *pieces])
    writer.add_token_types([3] * len(special) + [6] * len(fill) + [1] * len(pieces))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(5)
    if template is not None:
        writer.add_chat_template(template)
    for key, value in metadata.items():
        writer.add_string(key.replace("__", "."), value)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config.num_hidden_layers)
    for name, weight in model.named_parameters():
        stem, _, suffix = name.rpartition(".")
        array = weight.detach().numpy()
        label = names.get_name(stem)
        if architecture == "llama" and (".attn_q" in label or ".attn_k" in label):
            heads = config.num_attention_heads if ".attn_q" in label else config.num_key_value_heads
            array = array.reshape(heads, 2, config.head_dim // 2, -1).swapaxes(1, 2).reshape(array.shape)
        if architecture == "gemma3" and "norm" in label:
            array = array + 1
        type_ = getattr(gguf.GGMLQuantizationType, kind if array.ndim > 1 else "F32")
        writer.add_tensor(
            f"{label}.{suffix}", gguf.quants.quantize(np.ascontiguousarray(array), type_), raw_dtype=type_
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def bytes_to_letters() -> dict[int, str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return bytes_to_unicode()


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(5, 45)[None]  # beyond the sliding window
    with torch.no_grad():
        return model(ids).logits


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "llama.gguf", "llama", random_model("llama"))


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_model_of_a_file_is_the_one_that_was_written(tmp_path: Path, architecture: str) -> None:
    model = random_model(architecture)
    file = write_gguf(tmp_path / "x.gguf", architecture, model)
    folder = import_gguf(file, tmp_path / "folder")
    read = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(read), logits(model))
    assert read.generation_config.eos_token_id == [2, 3, 4], "declared, and tokens at which llama.cpp stops"


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("kind", ["Q8_0", "F16", "Q4_0"])
def test_a_quantised_file_is_read_as_transformers_reads_it(tmp_path: Path, architecture: str, kind: str) -> None:
    file = write_gguf(tmp_path / "x.gguf", architecture, random_model(architecture), kind=kind)
    folder = import_gguf(file, tmp_path / "folder")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(theirs))
    tokenizers = [AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf")]
    assert tokenizers[0]("hello there").input_ids == tokenizers[1]("hello there").input_ids


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_folder_is_written_as_the_file_that_it_came_from(tmp_path: Path, architecture: str) -> None:
    file = write_gguf(tmp_path / "x.gguf", architecture, random_model(architecture))
    folder = import_gguf(file, tmp_path / "folder")
    again = export_gguf(folder, tmp_path / "again.gguf", type="f32")
    first, second = gguf.GGUFReader(file), gguf.GGUFReader(again)
    assert {key: field.contents() for key, field in first.fields.items()} == {
        key: field.contents() for key, field in second.fields.items()
    }
    weights = {tensor.name: tensor.data for tensor in second.tensors}
    assert weights.keys() == {tensor.name for tensor in first.tensors}
    assert all(np.array_equal(tensor.data, weights[tensor.name]) for tensor in first.tensors)


@pytest.mark.parametrize(("type_", "largest", "number"), [("f16", 1e-3, 1), ("q8_0", 1e-2, 7)])
def test_a_narrow_export_says_so_and_is_near(
    tmp_path: Path, llama: Path, type_: str, largest: float, number: int
) -> None:
    model = random_model("llama")
    folder = import_gguf(llama, tmp_path / "folder")
    again = export_gguf(folder, tmp_path / "again.gguf", type=type_)
    assert gguf.GGUFReader(again).fields["general.file_type"].contents() == number
    read = AutoModelForCausalLM.from_pretrained(import_gguf(again, tmp_path / "second"))
    for one, other in zip(read.parameters(), model.parameters(), strict=True):
        assert (one - other).abs().max() <= largest


async def test_a_backend_takes_a_file_trains_it_and_its_export_goes_back_to_gguf(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    async with EmbeddedBackend(llama, device="cpu", chat_template="chatml") as backend:
        await backend.statistics()
        await backend.save_pretrained(tmp_path / "trained")
    assert (tmp_path / "trained" / METADATA).is_file()
    export_gguf(tmp_path / "trained", tmp_path / "trained.gguf")
    assert "<|im_start|>" in AutoTokenizer.from_pretrained(tmp_path / "trained").chat_template
    assert imported(llama) == imported(llama)


def test_a_template_of_the_file_is_kept_and_another_one_chosen_by_name(tmp_path: Path) -> None:
    own = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    file = write_gguf(tmp_path / "x.gguf", "llama", random_model("llama"), template=own)
    assert AutoTokenizer.from_pretrained(import_gguf(file, tmp_path / "own")).chat_template == own
    gemma = AutoTokenizer.from_pretrained(import_gguf(file, tmp_path / "gemma", chat_template="gemma"))
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    text = gemma.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<s><start_of_turn>user\nBe short.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    with pytest.raises(
        ConfigError, match=r"chat_template is 'gema', and there is no such file; give 'chatml' or 'gemma'"
    ):
        import_gguf(file, tmp_path / "none", chat_template="gema")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def no_header(file: Path) -> None:
    file.write_bytes(b"GGML" + file.read_bytes()[4:])


def rename_a_tensor(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"blk.1.attn_q.weight", b"blk.1.attn_Q.weight"))


def unknown_quantisation(file: Path) -> None:
    name = b"output.weight"
    data = bytearray(file.read_bytes())
    at = data.rindex(name) + len(name) + 4 + 2 * 8
    data[at : at + 4] = struct.pack("<I", int(gguf.GGMLQuantizationType.F64))
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "is no GGUF file, or cut off"),
        (no_header, "is no GGUF file, or cut off"),
        (rename_a_tensor, r"the model has no place for blk\.1\.attn_Q\.weight"),
        (unknown_quantisation, "is no GGUF file, or cut off|F64"),
    ],
)
def test_a_damaged_file_is_refused_and_leaves_nothing(tmp_path: Path, llama: Path, damage: Any, message: str) -> None:
    damage(llama)
    with pytest.raises(EngineError, match=message):
        import_gguf(llama, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["llama.gguf"]


def test_what_would_not_compute_the_same_is_refused(tmp_path: Path) -> None:
    model = random_model("llama")
    scaled = write_gguf(tmp_path / "scaled.gguf", "llama", model, llama__rope__scaling__type="yarn")
    with pytest.raises(EngineError, match=r"its positions are scaled \(yarn\)"):
        import_gguf(scaled, tmp_path / "folder")
    few = write_gguf(tmp_path / "few.gguf", "llama", model)
    few.write_bytes(few.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(EngineError, match="the architecture 'mamba', which is not read; known are llama, qwen2"):
        import_gguf(few, tmp_path / "folder")


def test_a_folder_that_exists_and_one_that_came_from_elsewhere_are_refused(tmp_path: Path, llama: Path) -> None:
    folder = import_gguf(llama, tmp_path / "folder")
    with pytest.raises(ConfigError, match="folder exists; give a folder that does not"):
        import_gguf(llama, folder)
    (folder / METADATA).unlink()
    with pytest.raises(ConfigError, match=r"has no metadata\.gguf, so the model does not come from a GGUF file"):
        export_gguf(folder, tmp_path / "x.gguf")
    with pytest.raises(ConfigError, match="type is 'q2'; a GGUF file is written as f32, f16, q8_0"):
        export_gguf(folder, tmp_path / "x.gguf", type="q2")
