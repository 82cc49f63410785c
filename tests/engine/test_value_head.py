"""A value head: estimates with a gradient, parameters with a learning rate of their own, saved with the state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from leyden.engine import EmbeddedBackend, IsolatedBackend, OptimParams, PolicyBackend
from leyden.errors import CheckpointError, ConfigError
from leyden.objectives.losses import Loss, LossTerms, TokenBatch, register_loss
from leyden.types import TrainingSequence
from tests.engine import tiny

torch.set_num_threads(1)
VALUED = OptimParams(learning_rate=0.0, value_learning_rate=0.05)


@dataclass(frozen=True, slots=True)
class SquaredError(Loss):
    """Constants of `squared_error`: a critic alone."""

    @property
    def uses_values(self) -> bool:
        return True


@register_loss("squared_error", SquaredError, columns=("returns",))
def squared_error(batch: TokenBatch, constants: SquaredError) -> LossTerms:
    """Return -(v - R)^2."""
    assert batch.values_N is not None
    errors_N = batch.values_N - batch.columns["returns"]
    return LossTerms(-errors_N.square(), sums={"error": errors_N.abs().sum()})


def sequences() -> list[TrainingSequence]:
    """The return of a token follows from the token before it."""
    ids = [[1, 50, 60, 70], [1, 60, 50, 60, 50]]
    return [
        TrainingSequence(
            each, [0.0] + [1.0] * (len(each) - 1), {"returns": [0.0] + [before / 50 for before in each[:-1]]}
        )
        for each in ids
    ]


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
async def test_values_have_the_gradient_of_autograd_and_only_the_head_moves_at_its_own_rate(kind: str):
    model = tiny.model(kind)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():  # what the head reads, by transformers itself
        hidden = [
            model(torch.tensor([s.token_ids]), output_hidden_states=True).hidden_states[-1][0] for s in sequences()
        ]
    features = torch.cat([h[:-1] for h in hidden])
    returns = torch.tensor([r for s in sequences() for r in s.columns["returns"][1:]])
    head = torch.nn.Linear(features.shape[1], 1)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.05, betas=(0.9, 0.99), weight_decay=0.0)
    async with EmbeddedBackend(model, value_head=True, device="cpu") as backend:
        for _ in range(5):
            result = await backend.forward_backward(sequences(), SquaredError())
            await backend.optim_step(VALUED)
            errors = head(features)[:, 0] - returns
            optimizer.zero_grad()
            errors.square().sum().backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            assert result.loss == pytest.approx(float(errors.detach().square().sum()), rel=1e-3)
        found = await backend.forward(sequences(), values=True)
        assert found.values is not None
        wanted = head(features)[:, 0].tolist()
        assert [v for s in found.values for v in s[1:]] == pytest.approx(wanted, rel=1e-3, abs=1e-4)
        assert [s[0] for s in found.values] == [0.0, 0.0]
        assert (await backend.forward(sequences())).values is None
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        await backend.forward_backward(sequences(), SquaredError())
        step = await backend.optim_step(OptimParams(learning_rate=1e-3))
    assert step.grad_norm > 0  # the values' gradient reaches the policy's own weights
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())


async def test_the_head_is_saved_in_the_state_and_not_in_the_exported_folder(tmp_path: Path):
    folder = tiny.make(tmp_path / "model")
    async with EmbeddedBackend(folder, value_head=True) as backend:
        for _ in range(3):
            await backend.forward_backward(sequences(), SquaredError())
            await backend.optim_step(OptimParams(learning_rate=1e-3, value_learning_rate=0.1))
        await backend.save_state(tmp_path / "state")
        await backend.save_pretrained(tmp_path / "hf")
        wanted = await backend.forward(sequences(), values=True)
        continued = await backend.forward_backward(sequences(), SquaredError())
        after = await backend.optim_step(VALUED)
    assert {"value_head.weight", "value_head.bias"} <= set(load_file(tmp_path / "state/model.safetensors"))
    assert "value_head.weight.exp_avg" in load_file(tmp_path / "state/optimizer.safetensors")
    assert not any("value" in name for name in load_file(tmp_path / "hf/model.safetensors"))
    async with EmbeddedBackend(folder, value_head=True) as backend:
        await backend.load_state(tmp_path / "state")
        assert await backend.forward(sequences(), values=True) == wanted
        assert await backend.forward_backward(sequences(), SquaredError()) == continued
        assert await backend.optim_step(VALUED) == after
    async with EmbeddedBackend(folder) as backend:
        with pytest.raises(CheckpointError, match=r"value_head\.bias"):
            await backend.load_state(tmp_path / "state")


@pytest.mark.parametrize("kind", [EmbeddedBackend, IsolatedBackend])
async def test_a_loss_that_uses_values_needs_a_head(kind: type[PolicyBackend], tmp_path: Path):
    folder = tiny.make(tmp_path / "model")
    without, with_head = kind(folder), kind(folder, value_head=True)
    assert (without.capabilities.values, with_head.capabilities.values) == (False, True)
    with_head.check_loss(SquaredError())
    with pytest.raises(ConfigError, match=r"'squared_error' uses values.* value_head=True"):
        without.check_loss(SquaredError())


async def test_values_travel_to_another_process(tmp_path: Path):
    folder = tiny.make(tmp_path / "model")
    async with IsolatedBackend(folder, value_head=True) as backend:
        await backend.forward_backward(sequences(), SquaredError())
        await backend.optim_step(VALUED)
        there = await backend.forward(sequences(), values=True)
    async with EmbeddedBackend(folder, value_head=True) as backend:
        await backend.forward_backward(sequences(), SquaredError())
        await backend.optim_step(VALUED)
        here = await backend.forward(sequences(), values=True)
    assert there.values is not None
    assert here.values is not None
    for ours, theirs in zip(here.values, there.values, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


async def test_a_model_whose_logits_are_scaled_after_its_head_is_refused():
    model: Any = tiny.model("granite", logits_scaling=2.0)
    with pytest.raises(ConfigError, match="value_head=True needs"):
        await EmbeddedBackend(model, value_head=True).start()


def test_a_negative_learning_rate_of_the_head_is_refused():
    with pytest.raises(ConfigError, match="value_learning_rate"):
        OptimParams(value_learning_rate=-1.0)
