"""Save and restore a learner's weights, optimizer and random state: as safetensors and JSON, never as a pickle.

`engine.json` is written last, so a directory without it is not a complete state. The module knows the learner and the
decoder's random generator. The checkpoint store decides when and where a state is saved.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from leyden.engine.learner import TorchLearner
from leyden.engine.untyped import load_tensors, save_tensors
from leyden.errors import CheckpointError

_FORMAT = 1
"""The version of the files' format."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
"""The names of AdamW's moments in torch."""


@dataclass(frozen=True, slots=True)
class LoadedState:
    """A state that has been read and fits the learner, and is not applied yet."""

    weights: dict[str, Tensor]
    """The master weights by the parameter's name."""
    moments: dict[str, Tensor]
    """The optimizer's moments, by the parameter's name, a dot and the moment's name."""
    steps: dict[str, float]
    """The number of optimizer steps by the parameter's name. Parameters without a step are missing."""
    policy_version: int
    random_state: tuple[Any, ...]
    """The state of the sampler's `random.Random`."""


@dataclass(frozen=True, slots=True)
class StateFiles:
    """The contents of a state's files, which any thread can write."""

    tensors: dict[str, dict[str, Tensor]]
    """The tensors by name, by file."""
    texts: dict[str, str]
    """The text by file. The last file is written after all others, and marks the state as complete."""

    @property
    def n_bytes(self) -> int:
        """The size of the tensors."""
        return sum(tensor.nbytes for tensors in self.tensors.values() for tensor in tensors.values())

    def copied(self) -> StateFiles:
        """Return the files with copies of the tensors in the CPU's memory, which later training steps do not change."""
        tensors = {
            file: {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
            for file, tensors in self.tensors.items()
        }
        return StateFiles(tensors, self.texts)

    def write(self, path: Path) -> None:
        """Write the files into the directory `path`, which is made if missing. Raise OSError if that fails."""
        path.mkdir(parents=True, exist_ok=True)
        for file, tensors in self.tensors.items():
            try:
                save_tensors(tensors, path / file)
            except SafetensorError as error:  # raised, for example, if the disk is full
                raise OSError(f"{path / file} could not be written: {error}") from error
        for file, text in self.texts.items():
            (path / file).write_text(text)


def state_files(learner: TorchLearner, *, policy_version: int, rng: random.Random) -> StateFiles:
    """Return the files of a state: weights, optimizer state and random state. The tensors are not copied."""
    weights = {name: tensor.detach().contiguous() for name, tensor in learner.masters.items()}
    moments: dict[str, Tensor] = {}
    steps: dict[str, float] = {}
    for name, parameter in learner.masters.items():
        state = cast(dict[str, Tensor], learner.optimizer.state.get(parameter, {}))
        if state:
            steps[name] = float(state["step"])
            moments.update({f"{name}.{moment}": state[moment].contiguous() for moment in _MOMENTS})
    about = {"format": _FORMAT, "policy_version": policy_version, "random_state": rng.getstate()}
    return StateFiles(
        {"model.safetensors": weights, "optimizer.safetensors": moments},
        {"optimizer.json": json.dumps({"optimizer": "AdamW", "steps": steps}), "engine.json": json.dumps(about)},
    )


def read_state(path: Path, learner: TorchLearner) -> LoadedState:
    """Read a state and check that it fits the learner, which is not changed.

    Raise CheckpointError if the state is missing, damaged or of another model.
    """
    if not (path / "engine.json").is_file():
        raise CheckpointError(
            f"{path} holds no engine state: engine.json is missing; give a directory that save_state wrote"
        )
    try:
        about = json.loads((path / "engine.json").read_text())
        if about.get("format") != _FORMAT:
            raise CheckpointError(
                f"{path} has engine state format {about.get('format')!r}, and this version of Leyden reads {_FORMAT}; load it "
                "with the version that wrote it"
            )
        weights = load_tensors(path / "model.safetensors")
        moments = load_tensors(path / "optimizer.safetensors")
        steps = json.loads((path / "optimizer.json").read_text())["steps"]
        internal = about["random_state"]
        random_state = (internal[0], tuple(internal[1]), internal[2])
        random.Random().setstate(random_state)
        version = int(about["policy_version"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"the engine state in {path} is damaged: {type(error).__name__}: {error}") from error
    moments_of = {f"{n}.{moment}": learner.masters[n] for n in steps if n in learner.masters for moment in _MOMENTS}
    for found, wanted in ((weights, learner.masters), (moments, moments_of)):
        if difference := first_difference(found, wanted):
            raise CheckpointError(f"the engine state in {path} belongs to another model: {difference}")
    return LoadedState(weights, moments, steps, version, random_state)


def restore_learner(learner: TorchLearner, state: LoadedState) -> None:
    """Replace the learner's weights and optimizer state by a state's, to the bit, and clear the gradient.

    Call it between two decode steps, because the decoder reads the same weights.
    """
    with torch.inference_mode(False), torch.no_grad():
        learner.clear_gradient()
        learner.optimizer.state.clear()
        for name, parameter in learner.masters.items():
            parameter.copy_(state.weights[name])
            if name in state.steps:
                learner.optimizer.state[parameter] = {
                    "step": torch.tensor(state.steps[name], dtype=torch.float32, device=parameter.device),
                    **{moment: state.moments[f"{name}.{moment}"].to(parameter.device) for moment in _MOMENTS},
                }
        learner.publish()
        learner.offload()


def first_difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str | None:
    """Return how stored tensors differ from a model's (`wanted`) in names and shapes; None if they do not."""
    there, here = ({name: tuple(tensor.shape) for name, tensor in each.items()} for each in (found, wanted))
    different = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    if not different:
        return None
    name, shapes = different[0], [each.get(different[0], "missing") for each in (there, here)]
    return f"{len(different)} tensors differ, the first is {name!r}: {shapes[0]} in the file, {shapes[1]} in the model"
