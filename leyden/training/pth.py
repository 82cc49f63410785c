"""Checkpoints of one `.pth` file, for people and programs that use `torch.load`.

    {"kind", "format", "current_iter", "metrics", "callbacks", "loggers", "rng", ...,
     "vessel": {"policy": ...}}

The file holds plain containers, numbers, strings and tensors, so `torch.load(path, weights_only=True)` reads it. A
NumPy array is saved as {"__array__": tensor}; `SavedFile` has it as an array again. torch is imported when a file is
written or read. Unlike the directories of `checkpoint.py`, such a file has no checksum.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from leyden._lib.atomic import open_aside
from leyden._lib.extras import import_optional
from leyden._lib.json import is_object
from leyden.errors import CheckpointError
from leyden.training.state_files import StatefulVessel, map_leaves

_FORMAT: Final = 1
_KIND: Final = "leyden checkpoint"
_ARRAY: Final = "__array__"


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A checkpoint of one file, to resume from: `loop.run(vessel, resume=read_pth(path))`."""

    path: Path
    iteration: int
    """Finished iterations."""
    state: dict[str, Any]
    """The value that `TrainLoop.run_state` returned."""
    vessel_state: Any
    """The value that the vessel's `state_dict` returned."""
    callbacks_path: Path | None = None
    """Always None: a `.pth` file holds no files of callbacks."""

    def restore(self, vessel: Any) -> Any:
        """Restore the vessel's state. Raise CheckpointError if it has no `load_state_dict`.

        Return the result of `load_state_dict`, an awaitable if that is asynchronous.
        """
        if not isinstance(vessel, StatefulVessel):
            raise CheckpointError(
                f"{type(vessel).__name__} has no load_state_dict(); resume it from a checkpoint's directory, not from {self.path}"
            )
        return vessel.load_state_dict(self.vessel_state)


def write_pth(path: Path, loop_state: Mapping[str, Any], vessel_state: Any) -> None:
    """Write the state of a loop and a vessel to a file, durably and in one step.

    loop_state: from `TrainLoop.run_state`.
    vessel_state: from the vessel's `state_dict`.
    Raise CheckpointError, which names the entry, for a value that a state cannot hold.
    """
    torch = _torch()

    def tensor(value: Any, where: str) -> Any:
        """Return a tensor on the CPU, or an array as a marked tensor. Raise CheckpointError for a dtype torch lacks."""
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            # torch.save writes the whole storage of a view, so copy it
            return value if value.untyped_storage().nbytes() == value.numel() * value.element_size() else value.clone()
        try:
            return {_ARRAY: torch.from_numpy(value.copy())}
        except TypeError as error:
            raise CheckpointError(f"{where} is an array of {value.dtype}, which torch has no dtype for") from error

    def unmarked(container: Any) -> Any:
        if is_object(container) and _ARRAY in container:
            raise CheckpointError(
                f"a state has the key {_ARRAY!r}; in a .pth file {_ARRAY!r} stands for an array, rename it"
            )
        return container

    plain = {
        **map_leaves(dict(loop_state), tensor),
        "kind": _KIND,
        "format": _FORMAT,
        "vessel": map_leaves(vessel_state, tensor, unmarked, where="vessel"),
    }
    with open_aside(path, "wb", private=False) as file:
        torch.save(plain, file)


def read_pth(path: str | Path) -> SavedFile:
    """Read a file that `Checkpoint(filename="....pth")` wrote, without running code of the file.

    Raise CheckpointError if the file cannot be read, is damaged, or was not written by Leyden.
    """
    path, torch = Path(path), _torch()
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # torch raises what its parsers raise
        raise CheckpointError(
            f"{path} is damaged, or holds more than plain containers and tensors, which is not loaded: {error}"
        ) from error
    if not isinstance(content, dict) or cast("dict[str, Any]", content).get("kind") != _KIND or "vessel" not in content:
        raise CheckpointError(f"{path} is not a checkpoint of Leyden; its vessel or its kind is missing")
    state = cast("dict[str, Any]", content)
    if not isinstance(state.get("format"), int) or not isinstance(state.get("current_iter"), int):
        raise CheckpointError(f"{path} does not say of which format and iteration it is; it was not written by Leyden")
    if state["format"] > _FORMAT:
        raise CheckpointError(
            f"{path} has format {state['format']}, this Leyden reads up to {_FORMAT}; install a newer one"
        )
    vessel = with_arrays(state.pop("vessel"))
    for name in ("kind", "format"):
        del state[name]
    return SavedFile(path, state["current_iter"], state, vessel)


def with_arrays(value: Any) -> Any:
    """Return the content of a `.pth` file with each {"__array__": tensor} as a NumPy array."""
    if isinstance(value, dict):
        entries = cast("dict[Any, Any]", value)
        if list(entries) == [_ARRAY]:
            return entries[_ARRAY].numpy()
        return {key: with_arrays(part) for key, part in entries.items()}
    if isinstance(value, (list, tuple)):
        parts = [with_arrays(part) for part in cast("list[Any]", value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def _torch() -> Any:
    return sys.modules.get("torch") or import_optional("torch", extra="torch", needed_by="a checkpoint in a .pth file")
