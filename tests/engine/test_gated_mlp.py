"""A gated MLP keeps half of its activations for the gradient, which is that of the plain formula."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from leyden.engine.forward.recompute import gated_mlp

torch.set_num_threads(1)


class Down(torch.nn.Linear):
    """Remembers its last input, without keeping it alive."""

    seen: weakref.ref[Any]

    def forward(self, input: Tensor) -> Tensor:
        self.seen = weakref.ref(input.untyped_storage())
        return super().forward(input)


def parts() -> tuple[Tensor, Tensor, Down]:
    torch.manual_seed(0)
    return torch.randn(5, 7, 12, requires_grad=True), torch.randn(5, 7, 12, requires_grad=True), Down(12, 4)


@pytest.mark.parametrize("act", [torch.nn.SiLU(), torch.nn.GELU()])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_value_and_gradient_are_those_of_the_plain_formula(act: Any, is_frozen: bool):
    found: list[list[Tensor]] = []
    for compute in (gated_mlp, lambda act, gate, up, down: down(act(gate) * up)):
        gate, up, down = parts()
        down.weight.requires_grad_(not is_frozen)
        y = compute(act, gate, up, down)
        y.sin().sum().backward()
        found.append([y.detach(), *(each.grad for each in (gate, up, down.weight, down.bias) if each.grad is not None)])
    assert len(found[0]) == 5 - is_frozen
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


def test_the_product_is_not_kept_for_the_gradient():
    gate, up, down = parts()
    y = gated_mlp(torch.nn.SiLU(), gate, up, down)
    assert down.seen() is None
    plain = down(torch.nn.SiLU()(gate) * up)
    assert down.seen() is not None, "the weak reference sees what autograd keeps"
    assert torch.allclose(y, plain)


def test_without_a_gradient_nothing_is_kept():
    gate, up, down = parts()
    with torch.no_grad():
        y = gated_mlp(torch.nn.SiLU(), gate, up, down)
    assert y.grad_fn is None
