"""Compute activations again for the gradient, so that they need not be kept: all of a layer (gradient checkpointing,
arXiv:1604.06174), or those of a gated MLP that are cheap to compute.

The module knows functions of tensors, and layers of transformers' models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from leyden.engine import untyped
from leyden.errors import ConfigError

T = TypeVar("T")


def recomputed(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Return `function(*arguments, **named)`, and call it again for the gradient: only the inputs are kept."""
    if not torch.is_grad_enabled():
        return function(*arguments, **named)
    return untyped.checkpointed(function, *arguments, **named)


def gated_mlp(act: Any, gate: Tensor, up: Tensor, down: Callable[[Tensor], Tensor]) -> Tensor:
    """Return down(act(gate) * up).

    With the activation SiLU only `gate` and `up` are kept for the gradient, half of the tensors that autograd would
    keep. Do not call it inside `recomputed`, where it would save nothing.
    """
    if type(act).__name__ not in _SILU or not torch.is_grad_enabled():
        return down(act(gate) * up)
    product: Tensor = untyped.apply(_GatedSiLU, gate, up)
    address, n = product.data_ptr(), product.numel()

    # `down` wants to keep the product for its gradient. Its shape is kept instead.
    def pack(kept: Tensor) -> Tensor | torch.Size:
        return kept.shape if (kept.data_ptr(), kept.numel()) == (address, n) else kept

    def unpack(kept: Tensor | torch.Size) -> Tensor:
        return kept if isinstance(kept, Tensor) else _silu(gate.detach()).mul_(up.detach()).view(kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return down(product)


class _GatedSiLU(torch.autograd.Function):
    """Computes silu(gate) * up, and keeps only its inputs for the gradient."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        (by_product,) = gradients
        by_gate = torch.ops.aten.silu_backward(by_product * up, gate)
        return cast(Tensor, by_gate), _silu(gate).mul_(by_product)


_silu = torch.nn.functional.silu
_SILU: Final = ("SiLU", "SiLUActivation")
"""Classes of the activation in torch and in transformers."""


def recompute_layers(model: Any) -> None:
    """Let every layer of a transformers model keep only its input for the gradient.

    transformers' own option works only in training mode, in which dropout is on. This function works in evaluation
    mode, too. Raise ConfigError for a model without layers that transformers can checkpoint.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"gradient_checkpointing=True: {type(model).__name__} has no layers that can be computed again; "
            "lower max_tokens_per_microbatch instead"
        )
    for layer in layers:
        layer.forward = functools.partial(recomputed, layer.forward)
