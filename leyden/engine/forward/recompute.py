"""Gradient checkpointing (arXiv:1604.06174): activations are computed again for the
gradient, not kept.

It knows functions of tensors and layers of transformers' models, nothing of what they compute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.utils.checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from leyden.errors import ConfigError

T = TypeVar("T")


def recomputed(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Return `function(*arguments)`; only its inputs are kept for the gradient.

    Without a gradient, just call it.
    """
    if not torch.is_grad_enabled():
        return function(*arguments, **named)
    checkpoint = cast(Callable[..., Any], torch.utils.checkpoint.checkpoint)  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped
    # Dropout is off, so no random state has to be restored.
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, **named)


def recompute_layers(model: Any) -> None:
    """Let every layer of a transformers model keep only its input for the gradient.

    transformers' own switch works in training mode alone, in which dropout is on; this one does in
    evaluation mode. Raise ConfigError for a model without layers that transformers can checkpoint.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"gradient_checkpointing=True: {type(model).__name__} has no layers that can be computed again; "
            "lower max_tokens_per_microbatch instead"
        )
    for layer in layers:
        layer.forward = functools.partial(recomputed, layer.forward)
