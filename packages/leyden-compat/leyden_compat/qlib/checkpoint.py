"""Read checkpoints that Qlib wrote, without executing code from them.

Qlib's `Checkpoint` saves `trainer.state_dict()` with pickle: the policy's weights, counters, metrics and the states of
callbacks and loggers. Only containers, numbers, NumPy scalars and tensors are read. Anything else in the file is
refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch

from leyden.errors import CheckpointError

_SAFE: Final[list[Any]] = [
    float,
    int,
    np.dtype,
    np.ndarray,
    np.float64,
    np.float32,
    np.int64,
    np.bool_,
    type(np.dtype(np.float64)),
    type(np.dtype(np.float32)),
    type(np.dtype(np.int64)),
    type(np.dtype(np.bool_)),
]
"""Types that Qlib's states hold besides plain containers and tensors. None of them runs code of the file."""

_SCALAR_NAMES: Final = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
"""The function that makes a NumPy scalar, in NumPy 1 and 2."""
_DEFAULT_DICT: Final = "collections.defaultdict"

# Prefixes of the weights' names: Qlib's, and Leyden's for the same network
_PPO_PARTS: Final = (
    ("actor.extractor.", "actor."),
    ("actor.layer_out.0.", "actor_head."),
    ("critic.extractor.", "critic."),
    ("critic.value_out.", "critic_head."),
)
_DQN_PARTS: Final = (("model.extractor.", "body."), ("model.layer_out.0.", "head."))
_UNUSED: Final = (".prev_rnn.",)
"""Parts of names of layers in Qlib's `Recurrent` on which no output depends."""


@dataclass(frozen=True)
class QlibCheckpoint:
    """A checkpoint of Qlib's trainer, or the weights of one of its policies."""

    path: Path
    iteration: int | None
    """Finished iterations; None for a file of weights alone."""
    episode: int | None
    """Episodes so far, validations included, as Qlib counts them; None for weights alone."""
    metrics: Mapping[str, float]
    weights: Mapping[str, torch.Tensor]
    """The policy's weights, by Qlib's names."""

    def native_weights(self) -> dict[str, torch.Tensor]:
        """Return the weights of Qlib's PPO or DQN under the names that Leyden's policy of the same network has.

        Raise CheckpointError for the weights of another policy.
        """
        parts = _PPO_PARTS if any(name.startswith("actor.extractor.") for name in self.weights) else _DQN_PARTS
        renamed: dict[str, torch.Tensor] = {}
        unknown: list[str] = []
        for name, value in self.weights.items():
            if name.startswith(("_actor_critic.", "model_old.")) or any(part in name for part in _UNUSED):
                continue
            for old, new in parts:
                if name.startswith(old):
                    renamed[new + name.removeprefix(old)] = value
                    break
            else:
                unknown.append(name)
        if unknown or not renamed:
            raise CheckpointError(
                f"{self.path} holds the weights of no PPO or DQN of qlib.rl.order_execution (such as {', '.join(unknown[:3])!r}); "
                "load `weights` into a policy of your own"
            )
        return renamed


def read_checkpoint(path: str | Path) -> QlibCheckpoint:
    """Read a `.pth` file of Qlib's `Checkpoint`, or a file of a policy's weights.

    Raise CheckpointError for a file that cannot be read, that holds no weights, or that would execute code: the message
    names what it would call.
    """
    path = Path(path)
    try:
        refused = [name for name in torch.serialization.get_unsafe_globals_in_checkpoint(path) if not _is_safe(name)]
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except Exception as error:  # torch raises what its parsers raise
        raise CheckpointError(f"{path} is no file of torch.save: {type(error).__name__}: {error}") from error
    if refused:
        raise CheckpointError(
            f"{path} would execute code when it is loaded: it calls {', '.join(sorted(refused))}. It was not loaded. If you trust "
            "the file, load it where it was written, and save `trainer.state_dict()['vessel']['policy']` alone"
        )
    try:
        with torch.serialization.safe_globals(
            [*_SAFE, *((_scalar(), name) for name in _SCALAR_NAMES), (_empty, _DEFAULT_DICT)]
        ):
            found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path} holds a {type(found).__name__}; a checkpoint is a mapping")
    state = cast("Mapping[str, Any]", found)
    vessel = state.get("vessel")
    whole = isinstance(vessel, Mapping)
    weights: Any = cast("Mapping[str, Any]", vessel).get("policy") if whole else state
    if (
        not isinstance(weights, Mapping)
        or not weights
        or not all(isinstance(value, torch.Tensor) for value in cast("Mapping[str, Any]", weights).values())
    ):
        raise CheckpointError(
            f"{path} holds no weights: neither `vessel.policy` nor the file itself is names and tensors"
        )
    trainer: Mapping[str, Any] = state if whole else {}
    metrics = {name: float(value) for name, value in dict(trainer.get("metrics") or {}).items()}
    return QlibCheckpoint(
        path,
        trainer.get("current_iter"),
        trainer.get("current_episode"),
        metrics,
        cast("Mapping[str, torch.Tensor]", weights),
    )


def convert_checkpoint(path: str | Path, output: str | Path) -> QlibCheckpoint:
    """Write the weights of Qlib's PPO or DQN as a `weight_file` of Leyden's.

    path: the `.pth` file of Qlib.
    output: the file to write.
    Return the checkpoint that was read. Raise CheckpointError for a file that cannot be read, that would execute code,
    or that holds the weights of another policy.
    """
    read = read_checkpoint(path)
    torch.save(read.native_weights(), output)
    return read


def _empty(*_: Any) -> dict[Any, Any]:
    return {}


def _scalar() -> Any:
    return np.float64(0).__reduce__()[0]


def _is_safe(name: str) -> bool:
    """Return whether a checkpoint may name this global. `builtins.` is optional in names."""
    known: set[str] = {*_SCALAR_NAMES, _DEFAULT_DICT}
    for safe in _SAFE:
        known.add(f"{safe.__module__}.{safe.__qualname__}")
    return name.removeprefix("builtins.") in {each.removeprefix("builtins.") for each in known}
