"""Linear layers by oneDNN equal torch's own in value and gradient, and are used where they are large."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from leyden.engine.forward.products import has_faster_products, linear, use_faster_products

torch.set_num_threads(1)
needs_onednn = pytest.mark.skipif(not has_faster_products(), reason="torch's own products are as fast here")
SHAPE = (33, 1024, 512)
"""N, I and O of a product that is large enough with a gradient."""


def tensors(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n, i, o = SHAPE
    return tuple(torch.randn(*size, generator=generator) for size in ((n, i), (o, i), (o,)))  # pyright: ignore[reportReturnType]


def uses_onednn(y: Tensor) -> bool:
    return "_Linear" in type(y.grad_fn).__name__


@needs_onednn
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("layout", ["plain", "three dimensions", "transposed input", "transposed weight", "columns"])
def test_a_product_has_the_value_and_the_gradient_of_torchs_own(layout: str, has_bias: bool):
    found: list[list[Tensor]] = []
    for compute in (linear, functional.linear):
        x, weight, bias = (each.requires_grad_() for each in tensors())
        inputs = {
            "plain": (x, weight),
            "three dimensions": (x.reshape(3, 11, -1), weight),
            "transposed input": (x.T.contiguous().T, weight),
            "transposed weight": (x, weight.T.contiguous().T),
            "columns": (torch.cat([x, x], -1)[:, : x.shape[1]], weight),
        }[layout]
        y = compute(*inputs, bias if has_bias else None)
        assert uses_onednn(y) == (compute is linear)
        y.square().sum().backward()
        found.append([y.detach(), *(each.grad for each in (x, weight, bias) if each.grad is not None)])
    assert len(found[0]) == 3 + has_bias
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@needs_onednn
def test_what_is_frozen_gets_no_gradient():
    x, weight, bias = tensors()
    y = linear(x.requires_grad_(), weight, bias)
    assert uses_onednn(y)
    y.sum().backward()
    assert x.grad is not None
    assert weight.grad is None
    with torch.inference_mode():
        torch.testing.assert_close(linear(x, weight, bias), functional.linear(x, weight, bias), rtol=1e-5, atol=1e-3)


def test_small_products_and_other_types_are_left_to_torch():
    x, weight, _ = tensors()
    assert not uses_onednn(linear(x[:2].requires_grad_(), weight))
    assert not uses_onednn(linear(x.bfloat16().requires_grad_(), weight.bfloat16()))
    one_row = torch.randn(8192).requires_grad_()
    assert not uses_onednn(linear(one_row, torch.randn(4096, 8192)))


@needs_onednn
def test_a_copy_of_a_model_has_weights_of_its_own():
    model: Any = torch.nn.Sequential(torch.nn.Linear(1024, 512))
    use_faster_products(model)
    x = tensors()[0].requires_grad_()
    assert uses_onednn(model(x))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            twin[0].weight.zero_()
            assert torch.equal(twin(x), twin[0].bias.expand(len(x), -1))
            assert not torch.equal(model(x), twin(x))
