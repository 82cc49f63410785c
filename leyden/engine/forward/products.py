"""Matrix products of linear layers by oneDNN, where torch's own choice is slower.

torch computes float32 products on a CPU with MKL, whose AVX-512 kernels run on Intel's CPUs alone.
On an AMD CPU with AVX-512, oneDNN takes less than half the time, forwards and backwards. Every
build of torch for x86 brings it. Results are equal up to rounding. This module knows tensors and
linear layers; no model.

Shapes: N rows of the input, I features in, O features out.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.nn import functional

from leyden.engine import untyped

_SMALLEST: Final = 2**22
"""Multiplications from which a product is worth it. Each call of oneDNN costs 10 microseconds
more."""
_SMALLEST_WITH_GRADIENT: Final = 2**24
"""Multiplications from which a product with a gradient is worth it.

Each new shape costs 0.2 milliseconds once. Decoding repeats its shapes; gradients seldom do.
"""


def use_faster_products(model: torch.nn.Module) -> None:
    """Let every plain linear layer of a model compute large float32 products with `linear`, LoRA's
    layers and the layers that they wrap included.

    Do nothing where torch's own products are as fast.
    """
    if not has_faster_products():
        return
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.forward = functools.partial(_linear_of, module)


@functools.cache
def has_faster_products() -> bool:
    """Return whether `linear` is faster than torch on this machine, and right."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not _is_amd():
        return False
    generator = torch.Generator().manual_seed(0)
    x_NI, weight_OI = (torch.randn(*shape, generator=generator) for shape in ((5, 7), (3, 7)))
    try:
        found = _product(x_NI, weight_OI), _product(x_NI, weight_OI.clone().T.contiguous().T)
    except (RuntimeError, TypeError, AttributeError, NotImplementedError):
        return False  # another torch, which calls it otherwise
    return all(torch.allclose(each, x_NI @ weight_OI.T, atol=1e-5) for each in found)


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, as `torch.nn.functional.linear` does; x has shape (..., I)."""
    has_gradient = torch.is_grad_enabled() and (x.requires_grad or weight_OI.requires_grad)
    smallest = _SMALLEST_WITH_GRADIENT if has_gradient else _SMALLEST
    if (
        x.numel() * weight_OI.shape[0] < smallest
        or x.dim() < 2
        or x.dtype != torch.float32
        or weight_OI.dtype != torch.float32
        or x.device.type != "cpu"
        or not has_faster_products()
    ):
        return functional.linear(x, weight_OI, bias_O)
    if not has_gradient:
        return _product(x, weight_OI, bias_O)
    return untyped.apply(_Linear, x, weight_OI, bias_O)


def _linear_of(module: torch.nn.Linear, input: Tensor) -> Tensor:
    return linear(input, module.weight, cast(Tensor | None, module.bias))


class _Linear(torch.autograd.Function):
    """A linear layer with oneDNN's products for its gradient too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return _product(x, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias, where they are needed. `_product(a, b)` is a
        @ b.T.
        """
        x, weight_OI = ctx.saved_tensors
        by_output = gradients[0].contiguous()
        by_output_NO = by_output.flatten(0, -2)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            _product(by_output, weight_OI.T) if wants_x else None,
            _product(by_output_NO.T, x.flatten(0, -2).T) if wants_weight else None,
            by_output_NO.sum(0) if wants_bias else None,
        )


def _product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias by oneDNN. Both may be transposed views."""
    product: Any = torch.ops.mkldnn._linear_pointwise  # pyright: ignore[reportPrivateUsage] -- what torch.compile calls
    return product(x, weight_OI, bias_O, "none", [], "")


def _is_amd() -> bool:
    file = Path("/proc/cpuinfo")
    return file.exists() and "AuthenticAMD" in file.read_text()
