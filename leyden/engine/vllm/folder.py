"""Edit a Hugging Face model folder before a server loads it, by the bytes of its safetensors files.

A safetensors file consists of the length of its header (8 bytes, little-endian), the header (JSON: name to dtype, shape
and offsets), and the tensors' bytes. This module reads and writes these bytes itself, so that neither torch nor numpy
is loaded in the process that drives the server.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from leyden.errors import EngineError

OUTPUT_HEAD: Final = "lm_head.weight"
"""The name of a model's output head."""
_EMBEDDINGS: Final = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
"""The ends of the names that models give their embeddings."""
_HEAD_FILE: Final = "model-output-head.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_ITEM_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""The size of a number, by dtype."""
_ONE: Final = {"F64": b"\0\0\0\0\0\0\xf0\x3f", "F32": b"\0\0\x80\x3f", "F16": b"\0\x3c", "BF16": b"\x80\x3f"}
"""The bytes of the number 1, by dtype."""
_FLIP_SIGN: Final = bytes(byte ^ 0x80 for byte in range(256))
"""A table for `bytes.translate` that flips the highest bit of each byte: the sign of a number, in its last byte."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file of a model folder."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """The offset of the tensor's first byte from the start of the file."""
    end: int
    """The offset after its last byte."""


def stored_tensors(folder: Path) -> Iterator[StoredTensor]:
    """Yield every tensor of the folder's safetensors files."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            header: dict[str, Any] = json.loads(handle.read(length))
        for name, about in header.items():
            if name != "__metadata__":
                begin, end = about["data_offsets"]
                start = 8 + length
                yield StoredTensor(name, file, about["dtype"], tuple(about["shape"]), start + begin, start + end)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the folder's `config.json`. Raise EngineError if it cannot be read."""
    try:
        return json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise EngineError(f"{folder} is no model folder, because its config.json cannot be read: {error}") from error


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the model's text part, or the whole if it has only that."""
    return config.get("text_config", config)


def is_tied(folder: Path) -> bool:
    """Return whether the model's output head and its embeddings are one tensor."""
    config = read_config(folder)
    text = text_config(config)
    return bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))


def untie_embeddings(folder: Path) -> bool:
    """Give a model with tied embeddings, in a folder, its own output head with the same numbers. Return whether the
    model was tied.

    vLLM on a CPU keeps a packed copy of a tied output head, and does not update the copy when weights are reloaded. An
    output head that is its own tensor is reloaded like every other weight. Raise EngineError if the embeddings are not
    found.
    """
    if not is_tied(folder):
        return False
    config = read_config(folder)
    text = text_config(config)
    tensors = {tensor.name: tensor for tensor in stored_tensors(folder)}
    if OUTPUT_HEAD not in tensors:
        embeddings = next((each for name, each in tensors.items() if name.endswith(_EMBEDDINGS)), None)
        if embeddings is None:
            raise EngineError(
                f"{folder} has tied embeddings under none of the names {', '.join(_EMBEDDINGS)}, so they cannot be "
                "published to vLLM; train with lora=LoRA(), or use a model with an output head of its own"
            )
        _write_tensor(folder / _HEAD_FILE, OUTPUT_HEAD, embeddings)
        _add_to_index(folder, embeddings.end - embeddings.begin)
    for part in (config, text):
        if "tie_word_embeddings" in part or part is config:
            part["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return True


def _write_tensor(path: Path, name: str, tensor: StoredTensor) -> None:
    """Write one tensor to its own safetensors file, copying its bytes in chunks of 16 MiB."""
    length = tensor.end - tensor.begin
    about = {name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [0, length]}}
    header = json.dumps({"__metadata__": {"format": "pt"}, **about}).encode()
    header += b" " * (-len(header) % 8)  # the format aligns the tensors' bytes to 8
    with path.open("wb") as target, tensor.file.open("rb") as source:
        target.write(len(header).to_bytes(8, "little") + header)
        source.seek(tensor.begin)
        remaining = length
        while remaining:
            chunk = source.read(min(remaining, 2**24))
            target.write(chunk)
            remaining -= len(chunk)


def _add_to_index(folder: Path, n_bytes: int) -> None:
    """Add the output head to the index of a model of several files. Do nothing without an index, because vLLM then
    reads every file.
    """
    path = folder / _INDEX
    if path.exists():
        index = json.loads(path.read_text())
        index["weight_map"][OUTPUT_HEAD] = _HEAD_FILE
        index.setdefault("metadata", {})["total_size"] = index.get("metadata", {}).get("total_size", 0) + n_bytes
        path.write_text(json.dumps(index, indent=2) + "\n")


def groups_of(folder: Path) -> dict[str, list[StoredTensor]]:
    """Return the folder's tensors by name, with those of all layers under one name, such as
    `model.layers.*.mlp.up_proj.weight`.
    """
    groups: dict[str, list[StoredTensor]] = {}
    for tensor in stored_tensors(folder):
        groups.setdefault(re.sub(r"\.\d+\.", ".*.", tensor.name), []).append(tensor)
    return groups


def copy_with_changed(folder: Path, target: Path, tensors: list[StoredTensor]) -> None:
    """Copy a model folder to `target`, with every number of some tensors negated. A tensor of zeros becomes ones."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    for tensor in tensors:
        size = _ITEM_BYTES.get(tensor.dtype)
        if size is None:
            continue  # quantised: the sign of a number is not one bit
        with (target / tensor.file.name).open("r+b") as handle:
            handle.seek(tensor.begin)
            data = bytearray(handle.read(tensor.end - tensor.begin))
            if any(data):
                data[size - 1 :: size] = data[size - 1 :: size].translate(_FLIP_SIGN)
            else:
                data = bytearray(_ONE[tensor.dtype] * (len(data) // size))
            handle.seek(tensor.begin)
            handle.write(data)
