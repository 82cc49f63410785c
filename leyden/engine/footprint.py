"""Estimate the memory and the disk that training a model takes, from the headers of its files, before it is loaded.

The estimate knows folders of safetensors and the options of `EmbeddedBackend`; no library is loaded. It is meant to be
right to 30 %: weights, gradients and moments are counted, activations follow from the sizes of the layers by factors
that were measured.
"""

from __future__ import annotations

import logging
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from leyden._lib.formatting import size
from leyden._lib.host.limits import memory_limit, visible_gpus
from leyden._lib.logs import notice
from leyden.engine.policy_backend import LoRA
from leyden.engine.source import BaseModel
from leyden.engine.threads import SMALLEST_SHARED
from leyden.errors import ConfigError
from leyden.training.runs.run_description import tensor_shapes

logger = logging.getLogger("leyden.engine")

_BASE_BYTES: Final = 500_000_000
"""Python, torch and transformers."""
_ROLLOUT_BYTES: Final = 2_500
"""The record of a short rollout in the store."""
_CACHED: Final = ("k_proj.weight", "v_proj.weight")
_NOT_LAYERS: Final = re.compile(r"embed|lm_head|wte|wpe")
_KEPT: Final = {"full": 0.8, "lora": 1.4, "recomputed": 0.35}
"""Numbers that a token leaves for the gradient, as a share of the inputs and outputs of all layers; measured with
SmolLM2 135M and Gemma 3 270M."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes of memory and disk that training a model takes."""

    weights: int
    trained: int
    """Gradients, optimizer moments, and float32 copies of narrower weights."""
    activations: int
    """One micro-batch, with copies of the output head: packed for sampling, and in the gradient of its chunks."""
    state: int
    """One checkpoint. A copy is in memory while it is written, when a micro-batch seldom is."""
    model: int
    """The files of the run's `model/` folder."""
    cache: int
    """Keys and values of one token."""
    n_weights: int

    @property
    def fixed(self) -> int:
        """The memory that no smaller micro-batch saves."""
        return self.weights + self.trained + _BASE_BYTES

    @property
    def peak(self) -> int:
        return self.fixed + max(self.activations, self.state)


def footprint(options: Mapping[str, Any]) -> Footprint | None:
    """Return what a backend with these options of `EmbeddedBackend` will take; None unless the model is a folder."""
    model = options.get("model")
    base = BaseModel.of(model) if isinstance(model, str | Path) else None
    shapes = tensor_shapes(Path(base.folder if base else model)) if isinstance(model, str | Path) else {}
    if not shapes:
        return None
    width = 4 if options.get("dtype") in (None, "float32") else 8 if options["dtype"] == "float64" else 2
    n = sum(map(math.prod, shapes.values()))
    layers = {name: shape for name, shape in shapes.items() if len(shape) == 2 and not _NOT_LAYERS.search(name)}
    features = sum(map(sum, layers.values()))
    lora = LoRA.of(options.get("lora"))
    if lora is None:
        n_trained, trained_width = n, width
    else:
        chosen = (
            sum(shape)
            for name, shape in (shapes if lora.target_modules != "all-linear" else layers).items()
            if len(shape) == 2 and _is_target(lora, name)
        )
        n_trained, trained_width = lora.rank * sum(chosen), 4
    kept = "recomputed" if options.get("gradient_checkpointing") else "full" if lora is None else "lora"
    tokens = options.get("max_tokens_per_microbatch") or 2048
    head = max((math.prod(shape) for name, shape in shapes.items() if name not in layers), default=0)
    return Footprint(
        weights=n * width + (0 if lora is None else 4 * n_trained),
        trained=n_trained * (trained_width + 8 + (8 if trained_width < 4 else 0)),
        activations=width * int(tokens * features * _KEPT[kept] + head * (3 if lora is None else 2)),
        state=12 * n_trained,
        model=4 * n_trained if lora is not None and base is None and not lora.merge else n * width,
        cache=width * sum(shape[0] for name, shape in shapes.items() if name.endswith(_CACHED)),
        n_weights=n,
    )


def check_room(
    backends: Sequence[Mapping[str, Any]], *, directory: Path | None, resume: bool, n_checkpoints: int, n_rollouts: int
) -> None:
    """Say in one line what training will take, and warn if it probably does not fit. A model of less than 16 million
    weights passes in silence.

    backends: the options of the trained backend, then those of others, such as a reference.
    directory: the run's folder.
    resume: whether the run continues an earlier one, whose files are there already.
    n_checkpoints: how many checkpoints are kept.
    Raise ConfigError if the weights, gradients and moments do not fit into the machine's memory, or one checkpoint and
    the model of a new run into the free space of the disk.
    """
    found = [each for options in backends if (each := footprint(options))]
    if not found or found[0].n_weights < SMALLEST_SHARED or len(found) < len(backends):
        return
    policy, others = found[0], sum(each.weights for each in found[1:])
    memory = policy.peak + others
    disk = policy.model + (n_checkpoints + 1) * policy.state + n_rollouts * _ROLLOUT_BYTES  # one is being written
    parts = {
        "weights": policy.weights,
        "other models": others,
        "gradients and moments": policy.trained,
        "a micro-batch or a checkpoint being written": max(policy.activations, policy.state),
    }
    notice(
        logger,
        "the run will take about %s of memory (%s; and %s for each token under way) and up to %s of disk (%d checkpoints of "
        "%s, model %s)",
        size(memory),
        ", ".join(f"{name} {size(n_bytes)}" for name, n_bytes in parts.items() if n_bytes),
        size(policy.cache),
        size(disk),
        n_checkpoints + 1,
        size(policy.state),
        size(policy.model),
    )
    device = backends[0].get("device")
    if device == "cpu" or (device is None and not visible_gpus()):
        total, free = memory_limit()
        help_ = "train an adapter (lora={'rank': 16}), lower max_tokens_per_microbatch, or see docs/how-to/memory.md"
        if policy.fixed + others > total:
            raise ConfigError(
                f"the run needs {size(policy.fixed + others)} of memory beside its micro-batches, and this machine or its "
                f"control group has {size(total)}; {help_}"
            )
        if memory > free:
            logger.warning(
                "the run will take about %s of memory, and %s are free now; %s", size(memory), size(free), help_
            )
    if directory is not None:
        free = shutil.disk_usage(directory).free
        help_ = "free some, choose another run_dir, keep one checkpoint (keep_last=1), or train an adapter (lora=)"
        if policy.state + policy.model > free and not resume:
            raise ConfigError(
                f"the run needs {size(policy.state + policy.model)} of disk for one checkpoint and the model, and "
                f"{directory} has {size(free)}; {help_}"
            )
        if disk > free and not resume:
            logger.warning(
                "the run will take up to %s of disk, and %s has %s; %s", size(disk), directory, size(free), help_
            )


def _is_target(lora: LoRA, name: str) -> bool:
    modules, path = lora.target_modules, name.removesuffix(".weight")
    if modules == "all-linear":
        return True
    return bool(re.fullmatch(modules, path)) if isinstance(modules, str) else path.rpartition(".")[2] in modules
