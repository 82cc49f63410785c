"""A GGUF file is read to the weights that it holds, or refused by name, and is written again from a trained folder."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

from leyden.engine import EmbeddedBackend
from leyden.engine.gguf import METADATA, export_gguf, import_gguf, imported
from leyden.engine.loading import load_policy
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


def random_model(architecture: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[architecture] if isinstance(architecture, str) else architecture
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # fresh norms are all equal, which would hide a wrong one
                weight.add_(torch.randn_like(weight) * 0.1)
            elif name.endswith("bias"):
                weight.normal_(std=0.1)
    return model.eval()


def write_gguf(
    file: Path,
    architecture: str,
    model: Any,
    *,
    kind: str = "F32",
    template: str | None = None,
    rope_freqs: Any = None,
    **metadata: Any,
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
    writer.add_value_length(metadata.pop(f"{architecture}__attention__value_length", config.head_dim))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    theta = getattr(config, "rope_parameters", {}).get("rope_theta", 10_000.0)
    writer.add_rope_freq_base(1_000_000.0 if architecture == "gemma3" else theta)
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
    writer.add_tokenizer_pre(metadata.pop("tokenizer__ggml__pre", "gpt-2"))
    writer.add_token_list([*special, *fill, *pieces])
    writer.add_token_types([3] * len(special) + [6] * len(fill) + [1] * len(pieces))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(5)
    if template is not None:
        writer.add_chat_template(template)
    for key, value in metadata.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key.replace("__", "."), value)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
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


def rename_a_tensor(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"blk.1.attn_q.weight", b"blk.1.attn_Q.weight"))


def unknown_quantisation(file: Path) -> None:
    name = b"output.weight"
    data = bytearray(file.read_bytes())
    at = data.rindex(name) + len(name) + 4 + 2 * 8
    data[at : at + 4] = struct.pack("<I", int(gguf.GGMLQuantizationType.F64))
    file.write_bytes(data)


def begins_with(head: bytes) -> Any:
    def damage(file: Path) -> None:
        file.write_bytes(head + file.read_bytes()[len(head) :])

    return damage


def empty(file: Path) -> None:
    file.write_bytes(b"")


def convert_to_big_endian(file: Path) -> None:
    begins_with(b"GGUF\0\0\0\3")(file)


def name_a_token_twice(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"<mask>", b"<unk>\0").replace(b"token_embd", b"token_emb\xff"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (empty, "is no GGUF file: it is empty"),
        (begins_with(b"GGML"), "is no GGUF file: it begins with b'GGML'"),
        (begins_with(b"GGUF\1\0\0\0"), "is of version 1 of GGUF, and versions 2 and 3 are read"),
        (convert_to_big_endian, r"is big-endian; `gguf-convert-endian .*llama\.gguf little`"),
        (begins_with(b"GGUF\3\0\0\0" + b"\xff" * 8), "is damaged: it is cut off"),
        (rename_a_tensor, r"the model has no place for blk\.1\.attn_Q\.weight"),
        (unknown_quantisation, r"is damaged: it is cut off: the data of its tensors|F64"),
        (name_a_token_twice, "is damaged: 'utf-8' codec"),
    ],
)
def test_a_damaged_file_is_refused_and_leaves_nothing(tmp_path: Path, llama: Path, damage: Any, message: str) -> None:
    damage(llama)
    with pytest.raises(EngineError, match=rf"llama\.gguf.*{message}"):
        import_gguf(llama, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["llama.gguf"]


def test_a_file_that_is_cut_off_anywhere_is_refused_with_its_size_and_leaves_nothing(
    tmp_path: Path, llama: Path
) -> None:
    whole = llama.read_bytes()
    ends = gguf.GGUFReader(llama)
    begins_tensors, begins_data = min(tensor.field.offset for tensor in ends.tensors), ends.data_offset
    metadata = [12, 20, 30, begins_tensors // 2, begins_tensors - 1, begins_tensors, begins_data - 200]
    data = [begins_data, begins_data + 1, len(whole) // 2, len(whole) - 1]
    for part, size in [*(("metadata", each) for each in metadata), *(("data of its tensors", each) for each in data)]:
        llama.write_bytes(whole[:size])
        with pytest.raises(EngineError, match=rf"cut off: (its|the) {part} would go on .* the file has {size:,}"):
            import_gguf(llama, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["llama.gguf"]


def test_what_would_not_compute_the_same_is_refused(tmp_path: Path) -> None:
    model = random_model("llama")
    scaled = write_gguf(tmp_path / "scaled.gguf", "llama", model, llama__rope__scaling__type="yarn")
    with pytest.raises(EngineError, match=r"rope\.scaling\.type is yarn, and the model .* has none"):
        import_gguf(scaled, tmp_path / "folder")
    few = write_gguf(tmp_path / "few.gguf", "llama", model)
    few.write_bytes(few.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(EngineError, match="the architecture 'mamba', which is not read; known are llama, qwen2"):
        import_gguf(few, tmp_path / "folder")
    split = write_gguf(tmp_path / "split.gguf", "llama", model, tokenizer__ggml__pre="default")
    with pytest.raises(EngineError, match=r"splits text by 'default', which is not read .known are .* smollm"):
        import_gguf(split, tmp_path / "folder")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general__type": "mmproj"}, "holds a projector of images; give the file of the language model"),
        ({"general__type": "adapter"}, "holds an adapter; merge it with llama.cpp's llama-export-lora"),
        ({"split__count": 3}, "is one of 3 pieces of a model; join them with llama.cpp's `llama-gguf-split --merge"),
        ({"llama__attention__value_length": 8}, "llama.attention.value_length is 8, and the model .* has 16"),
        ({"llama__expert_count": 8}, "llama.expert_count is 8, and the model .* has None"),
        ({"llama__logit_scale": 0.5}, "llama.logit_scale is 0.5, and the model .* has None"),
    ],
)
def test_what_is_no_whole_model_or_another_one_than_transformers_makes_is_refused(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    file = write_gguf(tmp_path / "x.gguf", "llama", random_model("llama"), **metadata)
    with pytest.raises(EngineError, match=message):
        import_gguf(file, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_the_scaled_positions_of_llama_3_are_read_and_written_and_no_others(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(
        **SHAPE | {"max_position_embeddings": 16384},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters=rope,
    )
    model = random_model(config)
    file = write_gguf(tmp_path / "x.gguf", "llama", model, rope_freqs=llama3_factors(rope, 16))
    folder = import_gguf(file, tmp_path / "folder")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model))
    again = gguf.GGUFReader(export_gguf(folder, tmp_path / "again.gguf", type="f32"))
    written = next(tensor.data for tensor in again.tensors if tensor.name == "rope_freqs.weight")
    assert np.allclose(written, llama3_factors(rope, 16), rtol=1e-6)
    other = write_gguf(tmp_path / "y.gguf", "llama", model, rope_freqs=llama3_factors(rope, 16) + 0.01)
    with pytest.raises(EngineError, match=r"rope_freqs.weight are not the scaled positions of Llama 3"):
        import_gguf(other, tmp_path / "other")


def llama3_factors(rope: dict[str, Any], head_size: int) -> Any:
    """Compute the factors one by one, as llama.cpp's `convert_hf_to_gguf.py` does."""
    factors: list[float] = []
    for n in range(0, head_size, 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (n / head_size)
        if wave < 8192 / 4:
            factors.append(1)
        elif wave > 8192:
            factors.append(rope["factor"])
        else:
            smooth = (8192 / wave - 1) / 3
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def test_a_file_that_lies_beside_another_model_is_read_with_its_own_tokenizer(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "bos_token": "<mask>"}')
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert AutoTokenizer.from_pretrained(import_gguf(llama, tmp_path / "folder")).bos_token == "<s>"


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, llama: Path) -> None:
    def append(done: int, total: int) -> None:
        with llama.open("ab") as file:
            file.write(b"more")

    with pytest.raises(EngineError, match=r"llama.gguf was changed while it was read"):
        import_gguf(llama, tmp_path / "folder", progress=append)
    assert [path.name for path in tmp_path.iterdir()] == ["llama.gguf"]


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, llama: Path) -> None:
    program = f"""
import resource, signal
from leyden.engine.gguf import import_gguf
from leyden.engine.loading import load_policy
from leyden.errors import EngineError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # the weights take more
try:
    import_gguf({str(llama)!r}, {str(tmp_path / "folder")!r})
except EngineError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "llama.gguf cannot be written to" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["llama.gguf"]


def test_processes_that_import_one_file_at_once_get_one_whole_folder(tmp_path: Path, llama: Path) -> None:
    program = f"from leyden.engine.gguf import imported; print(imported({str(llama)!r}))"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", program]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate()[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert [str(path) for path in (tmp_path / "cache/leyden/models").iterdir()] == list(folders)
    AutoModelForCausalLM.from_pretrained(folders.pop())


def test_a_folder_named_as_a_file_is_a_folder(tmp_path: Path, llama: Path) -> None:
    folder = import_gguf(llama, tmp_path / "folder.gguf")
    assert load_policy(folder, None, device="cpu", dtype=None).text is not None
    with pytest.raises(EngineError, match=r"folder.gguf is a folder, not a GGUF file"):
        import_gguf(folder, tmp_path / "other")


def test_a_folder_that_exists_and_one_that_came_from_elsewhere_are_refused(tmp_path: Path, llama: Path) -> None:
    folder = import_gguf(llama, tmp_path / "folder")
    with pytest.raises(ConfigError, match="folder exists; give a folder that does not"):
        import_gguf(llama, folder)
    (folder / METADATA).unlink()
    with pytest.raises(ConfigError, match=r"has no metadata\.gguf, so the model does not come from a GGUF file"):
        export_gguf(folder, tmp_path / "x.gguf")
    with pytest.raises(ConfigError, match="type is 'q2'; a GGUF file is written as f32, f16, q8_0"):
        export_gguf(folder, tmp_path / "x.gguf", type="q2")
