"""A nested state (weights, optimizer, counters) as files, and back: no pickle, every number to the
bit, no code is run.

    state.json    the containers and the plain values, with {"__array__": 3} or {"__tensor__": 3}
                  for each array or tensor
    arrays.npz    NumPy arrays; tensors too, those of bfloat16 and the like as their bits

What may be in a state: dicts (keys are strings or whole numbers), lists, tuples, None, booleans,
numbers, strings, NumPy arrays and numbers, torch tensors. Tensors come back on the CPU. NumPy and
torch are imported only when the state has something of theirs. The module also holds what
`TrainLoop` and its callbacks know of a vessel's state: `save_vessel`, `load_vessel`.
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


@runtime_checkable
class StatefulVessel(Protocol):
    """A vessel whose state is one value.

    It needs no `save` and `load` of its own: this module writes the state into the directory.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Return all values that the next step depends on. The module lists the allowed types."""
        ...

    def load_state_dict(self, state: Any, /) -> object:
        """Restore what `state_dict` returned."""
        ...


def save_vessel(vessel: Any, path: Path) -> Any:
    """Call `vessel.save(path)` and return its awaitable, if any; else write its `state_dict()` into
    the directory `path`.
    """
    if hasattr(vessel, "save"):
        return vessel.save(path)
    _require_state(vessel)
    write_state(vessel.state_dict(), path)
    return None


def load_vessel(vessel: Any, path: Path) -> Any:
    """Give the vessel the state that `save_vessel` wrote.

    Return an awaitable if `vessel.load` is async.
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
    """Write a state into the directory.

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

    Pass each container through `containers`, and turn NumPy's numbers into Python's.
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
            map_leaves(part, arrays, containers, f"{where}[{place}]")
            for place, part in enumerate(cast("list[Any]", value))
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
    if isinstance(container, tuple):
        return {_TUPLE: list(cast("tuple[Any, ...]", container))}
    if isinstance(container, dict):
        entries = cast("dict[Any, Any]", container)
        if any(type(key) is int for key in entries) or any(mark in entries for mark in _MARKS):
            return {_PAIRS: [[key, part] for key, part in entries.items()]}
        return entries
    return container


def _rebuilt(tree: Any, arrays: Mapping[str, Any]) -> Any:
    """Return a saved tree with its tuples, dicts of any keys, arrays and tensors in place of their
    markers.

    arrays: by the names that the markers carry. Tensors of dtypes that NumPy lacks are saved as bit
    patterns, and viewed as their own dtype here.
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
    """Return the value as an array, with the tensor's dtype if NumPy has no such dtype.

    In that case the array holds the tensor's bits.
    """
    if not _is_tensor(value):
        return value, None
    tensor = value.detach().cpu().contiguous()
    try:
        return tensor.numpy(), None
    except TypeError:
        torch: Any = sys.modules["torch"]
        bits = getattr(torch, _BITS[tensor.element_size()])
        return tensor.view(bits).numpy(), str(tensor.dtype).removeprefix("torch.")
