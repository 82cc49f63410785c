"""Matrix products of linear layers by oneDNN, where torch's own choice is slower.

torch computes float32 products on a CPU with MKL, whose AVX-512 kernels run on Intel's CPUs alone. On an AMD CPU with
AVX-512, oneDNN takes less than half the time, forwards and backwards. On one with AVX2, it takes half to three quarters
of the time where a few rows meet tens of thousands of outputs, as in the output head of a decoding step, and MKL is as
fast elsewhere. Every build of torch for x86 brings oneDNN. Results are equal up to rounding. Decoding multiplies by the
same weights step after step, so a linear layer packs them into oneDNN's own layout once that pays. This module knows
tensors and linear layers; no model.

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
from leyden.engine.forward.model_forward import rounding

_onednn: Any = torch.ops.mkldnn
"""oneDNN's operators, as `torch.compile` calls them."""
_SMALLEST: Final = 2**22
"""Multiplications from which a product is worth it. Each call of oneDNN costs 10 microseconds more."""
_SMALLEST_WITH_GRADIENT: Final = 2**24
"""Multiplications from which a product with a gradient is worth it.

Each new shape costs 0.2 milliseconds once. Decoding repeats its shapes; gradients seldom do.
"""
_SMALLEST_PACKED: Final = 2**18
"""Elements from which weights are packed."""
_WIDE: Final = 2**14
"""Outputs from which a product without a gradient is faster on an AMD CPU with AVX2."""
_ROWS_OF_A_PRODUCT: Final = 64
"""Rows that the layout of packed weights is chosen for; fewer and more are as fast."""
_PRODUCTS_BEFORE_PACKING: Final = 16
"""Products without a gradient after which weights that have not changed are packed.

Packing takes as long as 10 to 25 products save, so waiting for 16 costs at most about twice the time of a choice that
knew how many products follow.
"""


def use_faster_products(model: torch.nn.Module) -> None:
    """Let every plain linear layer of a model compute large float32 products with oneDNN, LoRA's layers and the layers
    that they wrap included.

    Do nothing where torch's own products are as fast.
    """
    for module in model.modules():
        if type(module) is torch.nn.Linear and _is_faster(module.weight, has_gradient=False):
            module.forward = LinearForward(module)


def use_own_products(model: torch.nn.Module) -> None:
    """Let a model's linear layers compute as torch does again, and free their packed weights."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), LinearForward):
            del module.forward


def drop_packed(module: torch.nn.Module) -> None:
    """Free the packed weights of a linear layer, which are made again once that pays."""
    if isinstance(forward := module.__dict__.get("forward"), LinearForward):
        forward.drop()


def packed_bytes(model: torch.nn.Module) -> int:
    """Return the memory that a model's linear layers hold for packed weights."""
    forwards = (module.forward for module in model.modules())
    return sum(each.packed_bytes for each in forwards if isinstance(each, LinearForward))


@functools.cache
def has_faster_products() -> bool:
    """Return whether `linear` is faster than torch on this machine for layers of any width, and right."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and _is_right()


@functools.cache
def has_faster_wide_products() -> bool:
    """Return whether `linear` is faster than torch on this machine for layers with very many outputs, and right."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and _is_right()


@functools.cache
def _is_right() -> bool:
    """Return whether this is an AMD CPU on which oneDNN's operators give the right products."""
    cpu = Path("/proc/cpuinfo")
    if not cpu.exists() or "AuthenticAMD" not in cpu.read_text():
        return False
    generator = torch.Generator().manual_seed(0)
    x_NI, weight_OI = (torch.randn(*shape, generator=generator) for shape in ((5, 7), (3, 7)))
    try:
        layouts = weight_OI, weight_OI.clone().T.contiguous().T, _pack(weight_OI)
        found = [_product(x_NI, each) for each in layouts]
    except (RuntimeError, TypeError, AttributeError, NotImplementedError):
        return False  # another torch, which calls it otherwise
    wanted = x_NI @ weight_OI.T
    return all(float((each - wanted).abs().max()) <= rounding(wanted) for each in found)


def _is_faster(weight_OI: Tensor, *, has_gradient: bool) -> bool:
    return has_faster_products() or (not has_gradient and len(weight_OI) >= _WIDE and has_faster_wide_products())


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, as `torch.nn.functional.linear` does; x has shape (..., I)."""
    has_gradient = _has_gradient(x, weight_OI, bias_O)
    smallest = _SMALLEST_WITH_GRADIENT if has_gradient else _SMALLEST
    if (
        x.numel() * weight_OI.shape[0] < smallest
        or not _is_for_onednn(x, weight_OI)
        or not _is_faster(weight_OI, has_gradient=has_gradient)
    ):
        return functional.linear(x, weight_OI, bias_O)
    if not has_gradient:
        return _product(x, weight_OI, bias_O)
    return untyped.apply(_Linear, x, weight_OI, bias_O)


class LinearForward:
    """The `forward` of a linear layer: `linear`, with weights that are packed while they are used often and do not
    change.

    A product with a gradient drops the packed weights, because a gradient needs the most memory and a step of the
    optimizer follows. Where torch is to be deterministic nothing is packed: a product's last bits would depend on how
    many came before it. A copy begins without packed weights. torch does not count a write into `weight.data`, such as
    PEFT's when it merges an adapter, so nothing may write there while a model has these layers.
    """

    def __init__(self, module: torch.nn.Linear) -> None:
        self._module = module
        self._restart(None)

    def __call__(self, input: Tensor) -> Tensor:
        weight_OI, bias_O = self._module.weight, cast("Tensor | None", self._module.bias)
        is_single = input.numel() == input.shape[-1]
        if (
            weight_OI.numel() < _SMALLEST_PACKED
            or not _is_for_onednn(input, weight_OI)
            or (is_single and not has_faster_products())  # with AVX2 one row waits for the weights, packed or not
        ):
            return linear(input, weight_OI, bias_O)
        if (
            _has_gradient(input, weight_OI, bias_O)
            or weight_OI.is_inference()  # torch does not count its changes
            or torch.are_deterministic_algorithms_enabled()
        ):
            self.drop()
            return linear(input, weight_OI, bias_O)
        if (changes := untyped.changes(weight_OI)) != self._changes:
            self._restart(changes)
        packed = self._packed
        if packed is None:
            self._n_products += 1
            if self._n_products <= _PRODUCTS_BEFORE_PACKING:
                return linear(input, weight_OI, bias_O)
            packed = self._packed = _pack(weight_OI)
        return _product(input, packed, bias_O)

    def __reduce__(self) -> tuple[Any, ...]:
        return LinearForward, (self._module,)

    @property
    def packed_bytes(self) -> int:
        """The memory of the packed weights."""
        packed = self._packed  # another thread may drop it meanwhile
        return 0 if packed is None else packed.numel() * packed.element_size()

    def drop(self) -> None:
        """Drop the packed weights."""
        self._restart(None)

    def _restart(self, changes: tuple[int, int] | None) -> None:
        """Drop the packed weights and start counting products again.

        changes: what `untyped.changes` returns for the weights whose products are counted.
        """
        self._packed: Tensor | None = None  # first: another thread that finds the new `changes` must not read it
        self._n_products = 0
        self._changes = changes


class _Linear(torch.autograd.Function):
    """A linear layer with oneDNN's products for its gradient too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return _product(x, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias, where they are needed. `_product(a, b)` is a @ b.T."""
        x, weight_OI = ctx.saved_tensors
        by_output = gradients[0].contiguous()
        by_output_NO = by_output.flatten(0, -2)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            _product(by_output, weight_OI.T) if wants_x else None,
            _product(by_output_NO.T, x.flatten(0, -2).T) if wants_weight else None,
            by_output_NO.sum(0) if wants_bias else None,
        )


def _has_gradient(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in inputs)


def _is_for_onednn(x: Tensor, weight_OI: Tensor) -> bool:
    return x.dim() >= 2 and x.dtype == torch.float32 and weight_OI.dtype == torch.float32 and x.device.type == "cpu"


def _pack(weight_OI: Tensor) -> Tensor:
    """Return a copy of the weights in oneDNN's layout, which `_product` reads faster."""
    return _onednn._reorder_linear_weight(weight_OI.detach(), _ROWS_OF_A_PRODUCT)


def _product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias by oneDNN. Weights may be packed; both may be transposed views."""
    return _onednn._linear_pointwise(x, weight_OI, bias_O, "none", [], "")
