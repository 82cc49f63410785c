"""The recurrent network, and the policies on top of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from leyden.errors import ConfigError
from leyden.rl.policy import DQN, PPO
from leyden_compat.order_execution import (
    BarsProcessedDataProvider,
    CategoricalActionInterpreter,
    FullHistoryStateInterpreter,
    Recurrent,
    SingleAssetOrderExecutionSimple,
)
from tests.compat.order_execution.bars_of import order, six_ticks


def observed() -> tuple[spaces.Dict, dict[str, np.ndarray]]:
    """The observations of an order before each of its first two steps, as a batch."""
    bars = six_ticks()
    interpreter = FullHistoryStateInterpreter(
        3, 6, 2, BarsProcessedDataProvider(data=bars, feature_columns_today=["close", "volume"])
    )
    made = SingleAssetOrderExecutionSimple(order(), data=bars, ticks_per_step=2)
    seen = [interpreter(made.get_state())]
    made.step(2.0)
    seen.append(interpreter(made.get_state()))
    return interpreter.observation_space, {name: np.stack([obs[name] for obs in seen]) for name in seen[0]}


def tensors(batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in batch.items()}


@pytest.mark.parametrize("rnn_type", ["rnn", "lstm", "gru"])
def test_it_answers_features_and_every_weight_gets_a_gradient(rnn_type: Any) -> None:
    space, batch = observed()
    network = Recurrent(space, hidden_dim=8, output_dim=5, rnn_type=rnn_type, rnn_num_layers=2)
    features = network(tensors(batch))
    assert features.shape == (2, 5)
    features.sum().backward()
    assert all(weight.grad is not None for weight in network.parameters())  # and there is none that nothing uses


def test_what_has_not_happened_yet_changes_nothing() -> None:
    space, batch = observed()
    network = Recurrent(space, hidden_dim=8)
    later = {name: array.copy() for name, array in batch.items()}
    later["data_processed"][1, 2:] = 7.0
    later["position_history"][1, 2:] = 7.0
    assert torch.equal(network(tensors(batch)), network(tensors(later)))
    later["data_processed"][1, 1] = 9.0  # the newest tick that is known
    assert not torch.equal(network(tensors(batch))[1], network(tensors(later))[1])


@pytest.mark.parametrize("policy", [PPO, DQN])
def test_policies_act_on_it(policy: Any) -> None:
    space, batch = observed()
    actions = CategoricalActionInterpreter(4, max_step=3).action_space
    made = policy(Recurrent(space, hidden_dim=8), space, actions, lr=1e-3)
    assert made.act(batch, explore=False).actions.shape == (2,)


def test_an_observation_without_a_history_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Recurrent needs acquiring, .* use FullHistoryStateInterpreter"):
        Recurrent(spaces.Dict({"position": spaces.Box(0, 1)}))
    with pytest.raises(ConfigError, match="rnn_type is 'tcn'"):
        Recurrent(observed()[0], rnn_type="tcn")  # type: ignore[arg-type]
