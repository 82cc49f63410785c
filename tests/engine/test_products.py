"""Linear layers by oneDNN equal torch's own in value and gradient, and are used where they are large."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from leyden.engine.forward.products import (
    _PRODUCTS_BEFORE_PACKING,  # pyright: ignore[reportPrivateUsage]
    _WIDE,  # pyright: ignore[reportPrivateUsage]
    has_faster_products,
    has_faster_wide_products,
    linear,
    packed_bytes,
    use_faster_products,
    use_own_products,
)
from leyden.engine.untyped import step

torch.set_num_threads(1)
needs_onednn = pytest.mark.skipif(not has_faster_products(), reason="torch's own products are as fast here")
needs_packing = pytest.mark.skipif(not has_faster_wide_products(), reason="torch's own products are as fast here")
OUTPUTS = 512 if has_faster_products() else _WIDE
"""Outputs of a layer whose weights are packed."""
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


def packing_model() -> Any:
    """A model of one layer, whose next product without a gradient is computed with packed weights."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(1024, OUTPUTS))
    use_faster_products(model)
    with torch.inference_mode():
        for _ in range(_PRODUCTS_BEFORE_PACKING):
            model(torch.ones(2, 1024))
    assert packed_bytes(model) == 0
    return model


@needs_packing
@pytest.mark.parametrize("n_rows", [1, 7, 33, 300])
def test_packed_weights_give_the_products_of_the_others(n_rows: int):
    model = packing_model()
    x = torch.randn(n_rows, 1024, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        model(torch.ones(2, 1024))
        found = model(x)
        wanted = functional.linear(x, model[0].weight, model[0].bias)
    assert packed_bytes(model) == 4 * 1024 * OUTPUTS
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@needs_packing
@pytest.mark.parametrize("change", ["fused step", "copy", "copy in inference mode", "data", "load"])
def test_weights_that_change_are_not_read_from_the_old_packed_ones(change: str):
    model = packing_model()
    x, new = torch.ones(2, 1024), torch.full((OUTPUTS, 1024), 0.5)
    with torch.inference_mode():
        model(x)
    assert packed_bytes(model) > 0
    weight = model[0].weight
    if change == "fused step":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        weight.grad = new
        step(optimizer)
    elif change == "data":
        weight.data = new
    elif change == "load":
        model.load_state_dict({"0.weight": new, "0.bias": torch.zeros(OUTPUTS)})
    else:
        with torch.inference_mode() if change == "copy in inference mode" else torch.no_grad():
            weight.copy_(new)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), functional.linear(x, weight, model[0].bias), rtol=1e-5, atol=1e-4)
    assert packed_bytes(model) == 0


@needs_packing
def test_a_gradient_and_a_copy_have_no_packed_weights():
    model = packing_model()
    with torch.inference_mode():
        model(torch.ones(2, 1024))
    assert packed_bytes(model) > 0
    assert packed_bytes(copy.deepcopy(model)) == 0
    model(torch.ones(2, 1024)).sum().backward()
    assert packed_bytes(model) == 0


@needs_packing
def test_deterministic_products_do_not_depend_on_how_many_came_before():
    model = packing_model()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.inference_mode():
            for _ in range(2 * _PRODUCTS_BEFORE_PACKING):
                model(torch.ones(2, 1024))
    finally:
        torch.use_deterministic_algorithms(False)
    assert packed_bytes(model) == 0


@needs_packing
def test_a_trained_bias_of_frozen_weights_gets_its_gradient_after_packing():
    model = packing_model()
    with torch.inference_mode():
        model(torch.ones(2, 1024))
    model[0].weight.requires_grad_(False)
    for n_rows in (3, 64):  # with torch's own product, and with oneDNN's
        model(torch.ones(n_rows, 1024)).sum().backward()
        assert torch.equal(model[0].bias.grad, torch.full((OUTPUTS,), float(n_rows)))
        model.zero_grad()
    assert packed_bytes(model) == 0


@needs_packing
def test_a_model_that_is_given_back_reads_what_is_written_into_the_data_of_its_weights():
    model = packing_model()
    with torch.inference_mode():
        model(torch.ones(2, 1024))
        use_own_products(model)
        assert packed_bytes(model) == 0
        for _ in range(2 * _PRODUCTS_BEFORE_PACKING):
            model(torch.ones(2, 1024))
    model[0].weight.data += 1.0  # torch does not count this
    with torch.inference_mode():
        x = torch.ones(2, 1024)
        torch.testing.assert_close(model(x), functional.linear(x, model[0].weight, model[0].bias))


@needs_packing
@pytest.mark.skipif(has_faster_products(), reason="layers of any width gain here")
def test_only_layers_with_many_outputs_are_changed_where_the_others_are_as_fast():
    model: Any = torch.nn.Sequential(torch.nn.Linear(1024, _WIDE - 1), torch.nn.Linear(1024, _WIDE))
    use_faster_products(model)
    assert ["forward" in layer.__dict__ for layer in model] == [False, True]
    with torch.inference_mode():
        for _ in range(2 * _PRODUCTS_BEFORE_PACKING):
            model[1](torch.ones(1, 1024))
    assert packed_bytes(model) == 0, "one row at a time gains nothing"
    x, weight = torch.randn(64, 1024, requires_grad=True), torch.randn(_WIDE, 1024)
    assert not uses_onednn(linear(x, weight)), "a gradient is torch's"
    with torch.inference_mode():
        torch.testing.assert_close(linear(x, weight), functional.linear(x, weight), rtol=1e-5, atol=1e-3)
