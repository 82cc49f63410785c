"""Save a nested state (weights, optimizer, counters) in files, and read it back.

    state.json    the containers and the plain values, with {"__array__": 3} or {"__tensor__": 3}
                  for each array or tensor
    arrays.npz    the arrays and tensors; a tensor of a type that NumPy lacks (bfloat16) as its bits

The files hold no pickle, so reading runs no code of theirs, and every number is kept to the bit. A state may hold dicts
(keys are strings or whole numbers), lists, tuples, None, booleans, numbers, strings, NumPy arrays and numbers, and
torch tensors, which are read back to the CPU. NumPy and torch are imported only if the state has arrays or tensors.
`save_vessel` and `load_vessel` are how `TrainLoop` and its callbacks save the state of a vessel.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, cast, runtime_checkable

from leyden.errors import CheckpointError, ConfigError

_STATE, _ARRAYS = "state.json", "arrays.npz"
_TENSOR, _ARRAY, _TUPLE, _PAIRS = "__tensor__", "__array__", "__tuple__", "__pairs__"
_MARKS: Final = (_TENSOR, _ARRAY, _TUPLE, _PAIRS)
_BITS: Final = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""Types of the same size, by bytes, as which the bits of a tensor are saved."""


@runtime_checkable
class StatefulVessel(Protocol):
    """A vessel whose state is one value, which a checkpoint writes and reads for it.

    Such a vessel needs no `save` and `load` methods.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Return all values that the next step depends on: containers, numbers, texts, arrays and tensors."""
        ...

    def load_state_dict(self, state: Any, /) -> object:
        """Restore a state that `state_dict` returned."""
        ...


def save_vessel(vessel: Any, path: Path) -> Any:
    """Write the vessel's state into the directory `path`: by its `save(path)`, or its `state_dict()`.

    Return the result of `save`, which is an awaitable if `save` is asynchronous, else None. Raise ConfigError if the
    vessel has neither method.
    """
    if hasattr(vessel, "save"):
        return vessel.save(path)
    _require_state(vessel)
    write_state(vessel.state_dict(), path)
    return None


def load_vessel(vessel: Any, path: Path) -> Any:
    """Restore the vessel's state from the directory that `save_vessel` wrote.

    Return an awaitable if `vessel.load` is asynchronous. Raise ConfigError if the vessel has neither `load` nor
    `load_state_dict`.
    """
    if hasattr(vessel, "load"):
        return vessel.load(path)
    _require_state(vessel)
    return vessel.load_state_dict(read_state(path))


def _require_state(vessel: Any) -> None:
    if not isinstance(vessel, StatefulVessel):
        raise ConfigError(
            f"{type(vessel).__name__} has neither save(path) and load(path) nor state_dict() and load_state_dict(state); "
            "a vessel needs one pair to be saved"
        )


def write_state(state: Any, path: Path) -> None:
    """Write a state into the directory `path`, which exists.

    Raise CheckpointError, which names the entry, for a value that a state cannot hold.
    """
    arrays: dict[str, Any] = {}

    def keep(value: Any, where: str) -> Any:
        mark = _TENSOR if _is_tensor(value) else _ARRAY
        name = str(len(arrays))
        arrays[name], kind = _as_array(value)
        return {mark: name, "dtype": kind} if kind else {mark: name}

    tree = map_leaves(state, keep, containers=_as_json)
    (path / _STATE).write_text(json.dumps(tree), encoding="utf-8")
    if arrays:
        np = importlib.import_module("numpy")
        with (path / _ARRAYS).open("wb") as file:
            np.savez(file, **arrays)


def read_state(path: Path) -> Any:
    """Return the state that `write_state` wrote. Raise CheckpointError if it is damaged."""
    try:
        tree = json.loads((path / _STATE).read_text(encoding="utf-8"))
        arrays: Any = {}
        if (path / _ARRAYS).exists():
            arrays = dict(importlib.import_module("numpy").load(path / _ARRAYS, allow_pickle=False))
        return _rebuilt(tree, arrays)
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise CheckpointError(f"the state in {path} cannot be read: {error!r}") from error


def map_leaves(
    value: Any,
    arrays: Callable[[Any, str], Any],
    containers: Callable[[Any], Any] = lambda it: it,
    where: str = "state",
) -> Any:
    """Return the state with each array and tensor replaced by `arrays(value, where)`.

    NumPy's numbers become Python's.
    containers: called with each container, from the innermost outwards; returns its replacement.
    where: the name of the value, such as `state['policy'][0]`, for messages.
    Raise CheckpointError, which names the entry, for a value that a state cannot hold.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        if bad := [key for key, _ in items if type(key) not in (str, int)]:
            raise CheckpointError(f"{where} has the key {bad[0]!r}; keys of a state are strings or whole numbers")
        return containers({key: map_leaves(part, arrays, containers, f"{where}[{key!r}]") for key, part in items})
    if isinstance(value, (list, tuple)):
        parts = [
            map_leaves(part, arrays, containers, f"{where}[{index}]")
            for index, part in enumerate(cast("list[Any]", value))
        ]
        return containers(tuple(parts) if isinstance(value, tuple) else parts)
    if _is_tensor(value):
        return arrays(value, where)
    np: Any = sys.modules.get("numpy")
    if np is not None and isinstance(value, np.generic):
        return map_leaves(value.item(), arrays, containers, where)
    if np is not None and isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return arrays(value, where)
    for kind in (int, float, str):  # an enum, a subclass: its plain value
        if isinstance(value, kind):
            return kind(value)
    raise CheckpointError(
        f"{where} is a {type(value).__name__}; a state holds containers, numbers, strings, numeric arrays and tensors"
    )


def _as_json(container: Any) -> Any:
    """Return a container for JSON. A tuple, and a dict with an int or a mark as a key, become {mark: list}."""
    if isinstance(container, tuple):
        return {_TUPLE: list(cast("tuple[Any, ...]", container))}
    if isinstance(container, dict):
        entries = cast("dict[Any, Any]", container)
        if any(type(key) is int for key in entries) or any(mark in entries for mark in _MARKS):
            return {_PAIRS: [[key, part] for key, part in entries.items()]}
        return entries
    return container


def _rebuilt(tree: Any, arrays: Mapping[str, Any]) -> Any:
    """Return a saved tree with its tuples, dicts of any keys, arrays and tensors in place of their markers.

    arrays: the saved arrays, by the names in the markers.
    """
    if isinstance(tree, list):
        return [_rebuilt(part, arrays) for part in cast("list[Any]", tree)]
    if not isinstance(tree, dict):
        return tree
    entries = cast("dict[str, Any]", tree)
    if _TUPLE in entries:
        return tuple(_rebuilt(part, arrays) for part in entries[_TUPLE])
    if _PAIRS in entries:
        return {key: _rebuilt(part, arrays) for key, part in entries[_PAIRS]}
    if _ARRAY in entries:
        return arrays[entries[_ARRAY]]
    if _TENSOR in entries:
        torch: Any = importlib.import_module("torch")
        tensor = torch.from_numpy(arrays[entries[_TENSOR]])
        return tensor.view(getattr(torch, entries["dtype"])) if "dtype" in entries else tensor
    return {key: _rebuilt(part, arrays) for key, part in entries.items()}


def _is_tensor(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _as_array(value: Any) -> tuple[Any, str | None]:
    """Return an array and None, or for a tensor whose dtype NumPy lacks, its bits and the dtype's name."""
    if not _is_tensor(value):
        return value, None
    tensor = value.detach().cpu().contiguous()
    try:
        return tensor.numpy(), None
    except TypeError:
        torch: Any = sys.modules["torch"]
        bits = getattr(torch, _BITS[tensor.element_size()])
        return tensor.view(bits).numpy(), str(tensor.dtype).removeprefix("torch.")
