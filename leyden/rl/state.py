"""A state of nested dicts and lists, with tensors and arrays in it, as files: JSON and safetensors, never pickle.

Reading one runs no code of it. It knows neither policies nor checkpoints: what is in a state is the business of whoever has one.
To let states hold another kind of value, add it to `_Writer.encoded` and `_decoded`.
"""

from __future__ import annotations

import base64
import binascii
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from leyden.errors import CheckpointError

__all__ = ["read_state", "write_state"]

_FORMAT = 1
_STATE, _TENSORS, _ARRAYS = "state.json", "tensors.safetensors", "arrays.safetensors"
_MARKS = frozenset({"$tensor", "$array", "$tuple", "$items", "$bytes"})


def write_state(path: Path, state: Any) -> None:
    """Write `state` into the directory `path`, which is made if it is not there.

    A state is None, a bool, a number, a string, bytes, a torch tensor, a NumPy array or scalar, or a dict, list or tuple of states; the
    keys of a dict are strings or numbers. Raises CheckpointError for anything else, and says where in the state it is.
    """
    path.mkdir(parents=True, exist_ok=True)
    writer = _Writer()
    encoded = writer.encoded(state, "")
    if writer.tensors:
        from safetensors.torch import save_file

        save_file(writer.tensors, path / _TENSORS)
    if writer.arrays:
        from safetensors.numpy import save_file as save_arrays

        save_arrays(writer.arrays, path / _ARRAYS)
    (path / _STATE).write_text(json.dumps({"format": _FORMAT, "state": encoded}), encoding="utf-8")


def read_state(path: Path) -> Any:
    """What `write_state` wrote there. Raises CheckpointError, naming the file, for anything else."""
    try:
        content = json.loads((path / _STATE).read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise CheckpointError(f"{path / _STATE} has format {content['format']!r}; this version reads {_FORMAT}")
        return _decoded(content["state"], _tensors(path / _TENSORS), _arrays(path / _ARRAYS))
    except CheckpointError:
        raise
    except Exception as error:  # safetensors' own error, a missing file, JSON of another form: all say that it is damaged
        raise CheckpointError(f"the state in {path} cannot be read: {type(error).__name__}: {error}") from error


def _tensors(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    from safetensors.torch import load_file

    return load_file(path)


def _arrays(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    from safetensors.numpy import load_file

    return load_file(path)


class _Writer:
    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self.arrays: dict[str, np.ndarray] = {}

    def encoded(self, value: Any, place: str) -> Any:
        """The value as JSON; tensors and arrays are put aside under their place."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, np.generic):
            return self.encoded(value.item(), place)
        if isinstance(value, np.ndarray):
            return self._array(cast("np.ndarray", value), place)
        if isinstance(value, Mapping):
            return self._mapping(cast("Mapping[Any, Any]", value), place)
        if isinstance(value, list | tuple):
            items = cast("Sequence[Any]", value)
            encoded = [self.encoded(item, f"{place}[{index}]") for index, item in enumerate(items)]
            return encoded if isinstance(value, list) else {"$tuple": encoded}
        torch: Any = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            self.tensors[place or "."] = cast("Any", value).detach().cpu().contiguous().clone()
            return {"$tensor": place or "."}
        raise CheckpointError(
            f"the state has a {type(value).__name__} at {place or 'its top'}; "
            "a state holds numbers, strings, bytes, tensors, arrays, dicts, lists and tuples"
        )

    def _array(self, array: np.ndarray, place: str) -> dict[str, Any]:
        if array.dtype.kind not in "biuf":
            raise CheckpointError(f"the state has an array of {array.dtype} at {place or 'its top'}; arrays hold numbers")
        self.arrays[place or "."] = np.ascontiguousarray(array).reshape(array.shape)
        return {"$array": place or "."}

    def _mapping(self, mapping: Mapping[Any, Any], place: str) -> dict[str, Any]:
        plain = all(isinstance(key, str) for key in mapping) and _MARKS.isdisjoint(mapping)
        if plain:
            return {key: self.encoded(value, f"{place}.{key}" if place else key) for key, value in mapping.items()}
        return {"$items": [[self._key(key, place), self.encoded(value, f"{place}[{key!r}]")] for key, value in mapping.items()]}

    def _key(self, key: Any, place: str) -> Any:
        if not isinstance(key, str | int | float):
            raise CheckpointError(f"the state has the key {key!r} at {place or 'its top'}; keys are strings or numbers")
        return key


def _decoded(value: Any, tensors: Mapping[str, Any], arrays: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, tensors, arrays) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    mapping = cast("dict[str, Any]", value)
    if len(mapping) == 1:
        (mark, content), *_ = mapping.items()
        match mark:
            case "$tensor":
                return tensors[content]
            case "$array":
                return arrays[content]
            case "$tuple":
                return tuple(_decoded(item, tensors, arrays) for item in content)
            case "$items":
                return {key: _decoded(item, tensors, arrays) for key, item in content}
            case "$bytes":
                try:
                    return base64.b64decode(content, validate=True)
                except binascii.Error as error:
                    raise CheckpointError(f"the state holds bytes that are not base64: {error}") from None
            case _:
                pass
    return {key: _decoded(item, tensors, arrays) for key, item in mapping.items()}
