"""Read a GGUF file, llama.cpp's format, into a Hugging Face folder, and write such a folder as a GGUF file again.

Weights are dequantised to float32 by the package `gguf`. From a file in float32, llama.cpp computes the same
log-probabilities (to 0.006 nats on SmolLM2 and Gemma 3, with its cache in float16); from a quantised one it differs by
some tenths, because it quantises activations, too. Each tensor of the file must have its place in the model and each
parameter its tensor; whatever is left over is refused, because a model with a random layer would train without a
complaint.

The folder keeps the file's metadata (`metadata.gguf`: tokenizer, hyperparameters, no weights), from which the trained
weights are written as GGUF again. To support an architecture, add a line to `_ARCHITECTURES`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import os
import shutil
import struct
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError

from leyden._lib.atomic import commit_directory
from leyden._lib.extras import import_optional
from leyden.engine.chat_templates import chat_template_text
from leyden.engine.gguf_tokenizer import byte_level_tokenizer, scored_tokenizer
from leyden.errors import ConfigError, EngineError

METADATA: Final = "metadata.gguf"
GGUF_TYPES: Final = ("f32", "f16", "q8_0")
_FILE_TYPES: Final = {"f32": 0, "f16": 1, "q8_0": 7}
_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_OTHER_KINDS: Final = {
    "mmproj": "a projector of images; give the file of the language model that it belongs to",
    "adapter": "an adapter; merge it with llama.cpp's llama-export-lora and give the merged file",
    "imatrix": "statistics for quantising; give the model's file",
}
"""Kinds of GGUF files that hold no model, by `general.type`, with what to give instead."""
_READ: Final = frozenset(
    {
        "context_length",
        "block_count",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "rope.freq_base",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.layer_norm_rms_epsilon",
        "attention.key_length",
    }
)
"""The hyperparameters that the configuration of every architecture takes from the file."""
_LLAMA3_ROPE: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of Llama 3's scaled positions, of which a file has only the outcome, the tensor `rope_freqs`."""
_ROPE_TENSOR: Final = "rope_freqs.weight"
_LAYERS_OF_27B: Final = (46, 62)
"""Gemma 2 and 3 with 27 billion weights, whose attention llama.cpp scales by another size, which no file says."""
_ENDS: Final = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|endoftext|>")
"""Control tokens at which llama.cpp ends a response, besides those that the file declares."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Architecture:
    """How one architecture's tensors in GGUF differ from the parameters of transformers."""

    to_model: Callable[[str, Array, Any], Array] = lambda name, weight, config: weight
    to_file: Callable[[str, Array, Any], Array] = lambda name, weight, config: weight


def _interleave(name: str, weight: Array, config: Any) -> Array:
    """Return rotary weights in transformers' order, the two halves of a head one after the other."""
    if (heads := _rotary_heads(name, config)) is None:
        return weight
    return (
        weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def _deinterleave(name: str, weight: Array, config: Any) -> Array:
    """Return rotary weights in llama.cpp's order, in which the two halves of a head alternate."""
    if (heads := _rotary_heads(name, config)) is None:
        return weight
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def _rotary_heads(name: str, config: Any) -> int | None:
    if ".attn_q." in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".attn_k." in name else None


_SAME: Final = _Architecture()
_LLAMA: Final = _Architecture(_interleave, _deinterleave)
_GEMMA: Final = _Architecture(  # llama.cpp multiplies by the weight of a norm, transformers by 1 + weight
    lambda name, weight, config: weight - 1 if name.endswith("norm.weight") else weight,
    lambda name, weight, config: weight + 1 if name.endswith("norm.weight") else weight,
)
_ARCHITECTURES: Final = {
    "llama": _LLAMA,
    "qwen2": _SAME,
    "qwen3": _SAME,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
}
"""The names under `general.architecture` that can be read."""


def import_gguf(
    file: str | Path,
    folder: str | Path,
    *,
    chat_template: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the model of a GGUF file as a Hugging Face folder in float32, and return the folder.

    Takes the time to dequantise: a minute for 270 million weights with a vocabulary of 262,144.

    folder: must not exist; it is complete or absent, also after a kill.
    chat_template: "gemma", "chatml", or a file with a Jinja template; None: the file's own, if it has one.
    progress: called with the number of tensors that are done, and of all.
    Raise EngineError for a file that is damaged, whose architecture or quantisation is not known, or whose tensors are
    not those of the model. Raise ConfigError for an unknown template and for a folder that exists.
    """
    return _import(Path(file), Path(folder), chat_template, progress, _identity(Path(file)))


def imported(file: str | Path, *, chat_template: str | None = None) -> Path:
    """Return the folder of a GGUF file in the user's cache, and import the file first if it is not there."""
    file, identity, digest = Path(file), _identity(Path(file)), hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(2**20):
            digest.update(block)
    if chat_template is not None:
        digest.update(chat_template_text(chat_template).encode())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leyden" / "models"
    folder = root / f"{file.stem}-{digest.hexdigest()[:16]}"
    if not folder.exists():
        try:
            _import(file, folder, chat_template, None, identity)
        except ConfigError:
            if not folder.exists():  # otherwise another process imported it meanwhile
                raise
    return folder


def _import(
    file: Path,
    folder: Path,
    chat_template: str | None,
    progress: Callable[[int, int], None] | None,
    identity: tuple[int, ...],
) -> Path:
    reader = _opened(file)
    architecture = _checked(file, reader)
    template = None if chat_template is None else chat_template_text(chat_template)
    n_bytes = 4 * sum(int(tensor.n_elements) for tensor in reader.tensors)
    aside = folder.with_name(f".{folder.name}.tmp")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(folder.parent):
            if folder.exists():
                raise ConfigError(f"{folder} exists; give a folder that does not, or use this one as the model")
            shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
            if (free := shutil.disk_usage(folder.parent).free) < n_bytes:
                raise EngineError(
                    f"{folder} needs {n_bytes / 1e9:.1f} GB, because weights are written in float32, and the disk has "
                    f"{free / 1e9:.1f} GB left"
                )
            aside.mkdir(mode=0o700)
            try:
                _write_folder(file, reader, architecture, template, aside, progress)
                if _identity(file) != identity:
                    raise EngineError(f"{file} was changed while it was read; import it when nothing writes to it")
                commit_directory(aside, folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{file} cannot be written to {folder}: {error}") from error
    return folder


def export_gguf(folder: str | Path, file: str | Path, *, type: str = "f16") -> Path:
    """Write the model in a folder that was imported from GGUF, or trained from such a one, as a GGUF file.

    type: "f32", "f16" or "q8_0", of matrices; vectors stay float32.
    Raise ConfigError for a folder without the metadata of a GGUF file, for an unknown type, and for a file that exists.
    """
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] (its paths are untyped)

    folder, file = Path(folder), Path(file)
    check_export(file, type)
    if not (folder / METADATA).is_file():
        raise ConfigError(
            f"{folder} has no {METADATA}, so the model does not come from a GGUF file; convert it with llama.cpp's "
            "convert_hf_to_gguf.py"
        )
    metadata = _opened(folder / METADATA)
    architecture, alignment = _text(metadata, "general.architecture"), int(metadata.alignment)
    config: Any = _transformers("AutoConfig").from_pretrained(folder).get_text_config()
    gguf = _gguf()
    names = gguf.get_tensor_name_map(_arch(architecture), config.num_hidden_layers)
    wanted = {"f32": gguf.GGMLQuantizationType.F32, "f16": gguf.GGMLQuantizationType.F16}.get(
        type, gguf.GGMLQuantizationType.Q8_0
    )
    infos: list[tuple[str, tuple[int, ...], int]] = []
    pieces: list[bytes] = []
    for weights in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(weights).items():
            weight = tensor.to(torch.float32).numpy()
            label = _file_name(names, name)
            if label is None:
                raise EngineError(f"{weights}: {name} has no place in a GGUF file of the architecture {architecture}")
            weight = _ARCHITECTURES[architecture].to_file(label, weight, config)
            kind = wanted if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
            if kind == gguf.GGMLQuantizationType.Q8_0 and weight.shape[-1] % 32:
                kind = gguf.GGMLQuantizationType.F16
            infos.append((label, weight.shape, int(kind)))
            pieces.append(np.ascontiguousarray(gguf.quants.quantize(weight, kind)).tobytes())
    if _rope_of(config).get("rope_type") == "llama3":
        factors = _llama3_factors(config, _rope_of(config))
        infos.append((_ROPE_TENSOR, factors.shape, int(gguf.GGMLQuantizationType.F32)))
        pieces.append(factors.tobytes())
    header = _metadata_bytes(folder / METADATA, metadata, n_tensors=len(infos), file_type=_FILE_TYPES[type])
    aside = file.with_name(f".{file.name}.tmp-{os.getpid()}")
    try:
        with aside.open("wb") as out:
            out.write(header)
            offset = 0
            for (label, shape, kind), piece in zip(infos, pieces, strict=True):
                encoded = label.encode()
                out.write(struct.pack("<Q", len(encoded)) + encoded + struct.pack("<I", len(shape)))
                out.write(struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", kind, offset))
                offset += len(piece) + -len(piece) % alignment
            for piece in (b"", *pieces):
                if piece:
                    out.write(piece)
                out.write(bytes(-out.tell() % alignment))
            out.flush()
            os.fsync(out.fileno())
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)
    return file


def check_export(file: Path, type: str) -> None:
    """Raise ConfigError unless a GGUF file of this type can be written to `file`, which must not exist."""
    if type not in GGUF_TYPES:
        raise ConfigError(f"type is {type!r}; a GGUF file is written as {', '.join(GGUF_TYPES)}")
    if file.exists():
        raise ConfigError(f"{file} exists; give another name or delete it")


def _write_folder(
    file: Path,
    reader: Any,
    architecture: str,
    template: str | None,
    folder: Path,
    progress: Callable[[int, int], None] | None,
) -> None:
    link = folder / "model.gguf"  # alone, because transformers would take the tokenizer of a folder that has one
    link.symlink_to(file.resolve())
    where = {"pretrained_model_name_or_path": str(folder), "gguf_file": link.name}
    try:
        config: Any = _transformers("AutoConfig").from_pretrained(**where)
        if _text(reader, "tokenizer.ggml.model") == "gpt2":
            tokenizer: Any = byte_level_tokenizer(file, reader.fields)
        else:
            tokenizer = scored_tokenizer(_transformers("AutoTokenizer").from_pretrained(**where), reader.fields)
    except EngineError:
        raise
    except Exception as error:  # transformers raises whatever its readers do
        raise EngineError(f"{file}: its configuration or tokenizer cannot be read: {error!r}") from error
    link.unlink()
    head_size = reader.fields.get(f"{architecture}.attention.key_length")
    if head_size is not None:
        config.head_dim = int(head_size.contents())
    if architecture.startswith("gemma"):
        is_27b = config.num_hidden_layers in _LAYERS_OF_27B
        config.query_pre_attn_scalar = config.hidden_size / config.num_attention_heads if is_27b else config.head_dim
    _check_metadata(file, reader, architecture, config)
    for name in ("quantization_config", "_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    with torch.device("meta"):
        model: Any = _transformers("AutoModelForCausalLM").from_config(config, dtype=torch.float32)
    weights: dict[str, torch.Tensor] = {}
    for name, weight in _weights(file, reader, architecture, model):
        weights[name] = weight
        if progress is not None:
            progress(len(weights), len(reader.tensors))
    if (rows := int(weights[_embeddings_of(model)].shape[0])) < len(tokenizer):
        raise EngineError(
            f"{file}: its tokenizer has {len(tokenizer):,} tokens and its embeddings {rows:,}, so they belong to two models"
        )
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    config.architectures = [type(model).__name__]
    ends = _end_ids(reader, tokenizer)
    model.generation_config = _transformers("GenerationConfig")(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / METADATA).write_bytes(_metadata_bytes(file, reader, n_tensors=0))


def _weights(file: Path, reader: Any, architecture: str, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's parameters by name, dequantised.

    Raise EngineError unless the file and the model have the same tensors.
    """
    gguf = _gguf()
    names = gguf.get_tensor_name_map(_arch(architecture), model.config.num_hidden_layers)
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    labels = {label: name for name in shapes if (label := _file_name(names, name)) is not None}
    tensors = [tensor for tensor in reader.tensors if tensor.name != _ROPE_TENSOR]
    present = {tensor.name for tensor in tensors}
    if unknown := sorted(present - labels.keys()):
        raise EngineError(
            f"{file}: the model has no place for {', '.join(unknown[:3])}{' and others' if len(unknown) > 3 else ''}, "
            "so it would not compute what llama.cpp computes"
        )
    if absent := sorted(labels.keys() - present):
        raise EngineError(f"{file}: {', '.join(absent[:3])}{' and others are' if len(absent) > 3 else ' is'} missing")
    for tensor in tensors:
        try:
            weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise EngineError(
                f"{file}: {tensor.name} is quantised as {tensor.tensor_type.name}, which the package gguf "
                f"{getattr(gguf, '__version__', '')} cannot dequantise: {error}"
            ) from error
        name = labels[tensor.name]
        weight = _ARCHITECTURES[architecture].to_model(tensor.name, weight.astype(np.float32, copy=False), model.config)
        if weight.shape != shapes[name]:
            raise EngineError(f"{file}: {tensor.name} has the shape {weight.shape}, and the model's is {shapes[name]}")
        yield name, torch.tensor(weight)  # a copy, because the file's memory is read-only


def _opened(file: Path) -> Any:
    """Return the reader of a GGUF file. Raise EngineError for another kind of file, and for one that is cut off."""
    gguf = _gguf()
    if not file.is_file():
        raise EngineError(f"{file} is a folder, not a GGUF file" if file.is_dir() else f"there is no file {file}")
    with file.open("rb") as opened:
        head = opened.read(8)
    version = int.from_bytes(head[4:], "little")
    if head[:4] != _MAGIC:
        raise EngineError(f"{file} is no GGUF file: it " + (f"begins with {head[:4]!r}" if head else "is empty"))
    if len(head) == 8 and not version & 0xFFFF:
        raise EngineError(f"{file} is big-endian; `gguf-convert-endian {file} little` of the package gguf converts it")
    if len(head) == 8 and version not in _VERSIONS:
        raise EngineError(
            f"{file} is of version {version} of GGUF, and versions 2 and 3 are read; let a current llama.cpp convert the "
            "model again"
        )

    class Reader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            if end > (size := len(self.data)):
                part = "the data of its tensors" if hasattr(self, "data_offset") else "its metadata"
                raise ValueError(f"it is cut off: {part} would go on to byte {end:,}, and the file has {size:,}")
            read: Any = super()  # pyright: ignore[reportUnknownVariableType] (a class of an untyped package)
            return read._get(offset, dtype, count, override_order)

    try:
        return Reader(file)
    except Exception as error:  # the reader raises whatever numpy does with a damaged file
        raise EngineError(f"{file} is damaged: {error}; copy or download it again") from error


def _checked(file: Path, reader: Any) -> str:
    """Return the architecture of a file. Raise EngineError unless it holds a whole model of a known one."""
    architecture = _text(reader, "general.architecture")
    kind = "mmproj" if architecture == "clip" else _text(reader, "general.type")
    if kind in _OTHER_KINDS:
        raise EngineError(f"{file} holds {_OTHER_KINDS[kind]}")
    if (n := int(_text(reader, "split.count") or 1)) > 1:
        raise EngineError(
            f"{file} is one of {n} pieces of a model; join them with llama.cpp's `llama-gguf-split --merge FIRST OUT`"
        )
    if architecture not in _ARCHITECTURES:
        raise EngineError(
            f"{file} holds a model of the architecture {architecture!r}, which is not read; known are "
            f"{', '.join(_ARCHITECTURES)}. Give the folder of safetensors that the file was made from"
        )
    return architecture


def _metadata_bytes(file: Path, reader: Any, *, n_tensors: int, file_type: int | None = None) -> bytes:
    """Return the header of a GGUF file with the metadata of this one, ready for `n_tensors` descriptions of tensors.

    file_type: the number of the quantisation to write into the metadata; None: as in the file.
    """
    end = min((tensor.field.offset for tensor in reader.tensors), default=None)
    with file.open("rb") as opened:
        raw = bytearray(opened.read(end))
    raw[8:16] = struct.pack("<Q", n_tensors)
    field = reader.fields.get("general.file_type")
    if file_type is not None and field is not None:
        at = field.offset + sum(part.nbytes for part in field.parts[:-1])
        raw[at : at + 4] = struct.pack("<I", file_type)
    return bytes(raw)


def _end_ids(reader: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a response: the declared ones, and those that llama.cpp knows by their text."""
    ends = {tokenizer.eos_token_id}
    for key in ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"):
        if key in reader.fields:
            ends.add(int(reader.fields[key].contents()))
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    ends.update(vocabulary[text] for text in _ENDS if text in vocabulary)
    return sorted(end for end in ends if end is not None)


def _check_metadata(file: Path, reader: Any, architecture: str, config: Any) -> None:
    """Give the configuration what transformers does not read. Raise EngineError for a hyperparameter with which
    llama.cpp would compute something else than the model.
    """
    rope = next((tensor for tensor in reader.tensors if tensor.name == _ROPE_TENSOR), None)
    if rope is not None:
        scaled = {"rope_type": "llama3", "factor": float(np.max(rope.data)), **_LLAMA3_ROPE}
        factors = _llama3_factors(config, scaled)
        if factors.shape != rope.data.shape or not np.allclose(factors, rope.data, rtol=1e-5):
            raise EngineError(f"{file}: {_ROPE_TENSOR} are not the scaled positions of Llama 3, and no others are read")
        name = "rope_parameters" if hasattr(config, "rope_parameters") else "rope_scaling"  # of transformers 5, and 4
        setattr(config, name, _rope_of(config) | scaled)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    expected = {
        "attention.value_length": head_size,
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "attention.sliding_window_pattern": 6 if architecture == "gemma3" else None,
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "rope.dimension_count": head_size,
        "rope.freq_base_swa": 10_000.0 if architecture == "gemma3" else None,
        "rope.scaling.type": "none",
    }
    for key, field in reader.fields.items():
        prefix, _, name = key.partition(".")
        if prefix == architecture and name not in _READ and (value := field.contents()) != expected.get(name):
            raise EngineError(
                f"{file}: {key} is {value}, and the model that transformers makes of the file has {expected.get(name)}; "
                "give the folder of safetensors that the file was made from"
            )


def _rope_of(config: Any) -> dict[str, Any]:
    if (rope := getattr(config, "rope_parameters", None)) is not None:
        return dict(rope)
    return {"rope_theta": config.rope_theta, **(config.rope_scaling or {})}  # transformers 4


def _llama3_factors(config: Any, scaled: dict[str, Any]) -> Array:
    """Return what divides the frequencies of each pair of a head, as llama.cpp's converter computes it."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / head_size
    waves = 2 * np.pi * _rope_of(config)["rope_theta"] ** exponents
    low, high, length = (scaled[name] for name in _LLAMA3_ROPE)
    share = np.clip((length / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - share) / scaled["factor"] + share)).astype(np.float32)


def _identity(file: Path) -> tuple[int, ...]:
    found = file.stat() if file.exists() else None
    return () if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Generator[None]:
    """Wait until no other process imports into a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _file_name(names: Any, name: str) -> str | None:
    stem, _, suffix = name.rpartition(".")
    label = names.get_name(stem)
    return None if label is None else f"{label}.{suffix}"


def _embeddings_of(model: Any) -> str:
    wanted = model.get_input_embeddings().weight
    return next(name for name, weight in model.named_parameters() if weight is wanted)


def _arch(architecture: str) -> Any:
    return next(key for key, value in _gguf().MODEL_ARCH_NAMES.items() if value == architecture)


def _gguf() -> Any:
    return import_optional("gguf", extra="torch", needed_by="reading or writing a GGUF file")


def _transformers(name: str) -> Any:
    return getattr(importlib.import_module("transformers"), name)  # untyped


def _text(reader: Any, key: str) -> str:
    return str(reader.fields[key].contents()) if key in reader.fields else ""
