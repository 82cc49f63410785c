"""DQN: targets by hand, the ring, equal to the bit, and that it learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from leyden.errors import CheckpointError, ConfigError
from leyden.rl.buffer import ReplayBuffer
from leyden.rl.collector import Collector
from leyden.rl.policy import DQN
from tests.rl.support import Counting, fill, vectorized

torch.set_num_threads(1)
PLANE = spaces.Box(-np.inf, np.inf, (2,), np.float32)


def dqn(**options) -> DQN:
    return DQN(None, PLANE, spaces.Discrete(2), **{"lr": 1e-2, **options})


class Table(nn.Module):
    """Q(s, a) of observation (s, _): what a table says."""

    def __init__(self, rows):
        super().__init__()
        self.rows = torch.tensor(rows)

    def forward(self, obs):
        return self.rows[obs[:, 0].long()]


def a_story() -> ReplayBuffer:
    """One environment: states 0, 1, 2, 3 with rewards 1, 2, 4; terminated. Then 0, 1 with reward 8; truncated in state 2."""
    buffer = ReplayBuffer(10, 1)
    transitions = [(0, 1, 1, 0, 0), (1, 2, 2, 0, 0), (2, 3, 4, 1, 0), (0, 1, 8, 0, 0), (1, 2, 16, 0, 1)]
    fill(
        buffer,
        [
            {
                "obs": [[state, 0]],
                "actions": [0],
                "rewards": [reward],
                "terminated": [terminated],
                "truncated": [truncated],
                "next_obs": [[after, 0]],
            }
            for state, after, reward, terminated, truncated in transitions
        ],
    )
    return buffer


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        # the online table prefers action 1 in states 1 and 2, where the target table says 20 and 40; its own best are 30 and 60
        ({"target_update_freq": 1}, [1 + 0.5 * 20, 2 + 0.5 * 40, 4, 8 + 0.5 * 20, 16 + 0.5 * 40]),
        ({"target_update_freq": 1, "is_double": False}, [1 + 0.5 * 30, 2 + 0.5 * 60, 4, 8 + 0.5 * 30, 16 + 0.5 * 60]),
        ({"target_update_freq": 0}, [1 + 0.5 * 3, 2 + 0.5 * 5, 4, 8 + 0.5 * 3, 16 + 0.5 * 5]),
        (
            {"target_update_freq": 1, "estimation_step": 2},
            [1 + 1 + 0.25 * 40, 2 + 2, 4, 8 + 8 + 0.25 * 40, 16 + 0.5 * 40],
        ),
        ({"target_update_freq": 1, "estimation_step": 5}, [1 + 1 + 1, 2 + 2, 4, 8 + 8 + 0.25 * 40, 16 + 0.5 * 40]),
    ],
)
def test_targets_are_those_worked_out_by_hand(options, wanted):
    policy = dqn(discount_factor=0.5, **options)
    policy.module = Table([[0.0, 0.0], [2.0, 3.0], [4.0, 5.0], [9.0, 9.0]])
    if policy.target is not None:
        policy.target = Table([[0.0, 0.0], [30.0, 20.0], [60.0, 40.0], [9.0, 9.0]])
    assert policy.targets(a_story(), np.arange(5)).tolist() == wanted


def test_by_default_a_target_network_changes_only_every_500_updates():
    policy, buffer = dqn(is_double=False), a_story()
    assert (policy.target_update_freq, policy.clip_loss_grad, policy.max_grad_norm) == (500, True, 10.0)
    first = policy.targets(buffer, np.arange(5))
    learn(policy, buffer, 499)
    assert torch.equal(policy.targets(buffer, np.arange(5)), first)
    learn(policy, buffer, 1)
    assert not torch.equal(policy.targets(buffer, np.arange(5)), first)


def learn(policy: DQN, buffer: ReplayBuffer, n_updates: int) -> None:
    policy.update(buffer, batch_size=buffer.n_new, repeat=n_updates)


@given(n_envs=st.integers(1, 3), size=st.integers(6, 14), n_seeds=st.integers(1, 12), n=st.integers(1, 4))
@settings(max_examples=60)
def test_the_ring_keeps_the_newest_and_successors_stay_within_their_episode(n_envs, size, n_seeds, n):
    venv = vectorized(Counting, n_envs, seeds=range(n_seeds))
    policy = DQN(None, venv.observation_space, venv.action_space, lr=1e-3, exploration=1.0)
    buffer = ReplayBuffer(size, n_envs)
    total = 0
    collector = Collector(policy, venv, buffer)
    while (result := collector.collect(n_episode=3)).n_episodes:
        total += result.n_steps
        assert len(buffer) == min(total, size) and buffer.n_new == result.n_steps
        for at in range(len(buffer)):
            seed, step = buffer.obs[at]
            assert buffer.next_obs[at].tolist() == [seed, step + 1]
            last = step + 1 == seed % 5 + 1
            assert buffer.terminated[at] == last
            after = buffer.successor[at]
            assert (after == -1) == last
            if after >= 0:
                assert buffer.obs[after].tolist() == [seed, step + 1]


def test_an_episode_that_was_broken_off_is_not_joined_to_the_next():
    buffer = ReplayBuffer(10, 1)
    step = {"obs": [[1, 0]], "actions": [0], "rewards": [0], "terminated": [0], "truncated": [0], "next_obs": [[2, 0]]}
    fill(buffer, [step])
    fill(buffer, [step])
    assert buffer.successor[:2].tolist() == [-1, -1]


def test_the_target_network_follows_every_so_many_steps():
    policy = dqn(target_update_freq=3)
    buffer = a_story()
    same = []
    for _ in range(6):
        policy.update(buffer, batch_size=5, repeat=1)
        target = policy.target.state_dict()
        same.append(all(torch.equal(tensor, target[name]) for name, tensor in policy.module.state_dict().items()))
    assert same == [False, False, True, False, False, True]


@pytest.mark.parametrize("clip", [True, False])
def test_the_loss_is_hubers_or_the_squared_error(clip):
    policy = dqn(clip_loss_grad=clip)
    buffer = a_story()
    targets = policy.targets(buffer, np.arange(5))
    values = policy.module(torch.from_numpy(buffer.obs[:5])).detach()[:, 0]
    wanted = 0.0
    for error in (values - targets).tolist():
        wanted += (0.5 * error**2 if abs(error) < 1 else abs(error) - 0.5) if clip else error**2
    assert float(policy._loss(buffer, np.arange(5)).detach()) == pytest.approx(wanted / 5, rel=1e-5)


def test_exploration_falls_with_the_decisions_taken_and_evaluation_is_greedy():
    policy = dqn(exploration=(1.0, 0.2, 100))
    obs = np.random.default_rng(0).normal(size=(25, 2)).astype(np.float32)
    seen = [policy.epsilon]
    for _ in range(5):
        policy.act(obs, explore=True)
        seen.append(policy.epsilon)
    assert seen == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    with torch.no_grad():
        best = policy.module(torch.from_numpy(obs)).argmax(-1).numpy()
    assert np.array_equal(policy.act(obs, explore=False).actions, best)
    many = np.repeat(obs[:1], 10_000, axis=0)
    other = (policy.act(many, explore=True).actions != best[0]).mean()
    assert other == pytest.approx(0.2 / 2, abs=0.015)


def test_each_new_transition_is_used_as_often_as_repeat_says():
    policy, buffer = dqn(), a_story()
    assert policy.update(buffer, batch_size=2, repeat=8)["gradient_steps"] == 5 * 8 / 2


def equal(one, other) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[name]) for name, value in one.items())
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_a_resumed_policy_and_buffer_equal_ones_that_went_on_to_the_bit(tmp_path):
    def make(seed: int):
        venv = vectorized("CartPole-v1", 3, seeds=range(100))
        policy = DQN(
            None, venv.observation_space, venv.action_space, lr=1e-3, seed=seed, target_update_freq=7, estimation_step=3
        )
        return policy, venv, policy.make_buffer(150, 3)

    def train(policy, venv, buffer, n):
        collector = Collector(policy, venv, buffer)
        metrics = []
        for _ in range(n):
            collector.collect(n_episode=4)
            metrics.append(policy.update(buffer, batch_size=16, repeat=4))
        return metrics

    policy, venv, buffer = make(5)
    train(policy, venv, buffer, 2)
    torch.save(policy.state_dict(), tmp_path / "policy.pt")
    saved = buffer.state_dict()
    resumed, later, ring = make(9)
    resumed.load_state_dict(torch.load(tmp_path / "policy.pt", weights_only=True))
    ring.load_state_dict(saved)
    later.use_seeds(range(8, 100))
    assert train(policy, venv, buffer, 2) == train(resumed, later, ring, 2)
    assert equal(policy.state_dict(), resumed.state_dict())
    assert equal(buffer.state_dict(), ring.state_dict())
    assert len(buffer) == 150  # it has wrapped
    twin, again, other = make(5)
    train(twin, again, other, 4)
    assert equal(twin.state_dict(), policy.state_dict())


def test_a_buffer_of_another_size_and_a_state_without_target_are_refused():
    with pytest.raises(CheckpointError, match="size 10, this one 12"):
        ReplayBuffer(12, 1).load_state_dict(a_story().state_dict())
    with pytest.raises(CheckpointError, match="target_update_freq"):
        dqn(target_update_freq=3).load_state_dict(dqn(target_update_freq=0).state_dict())
    with pytest.raises(ConfigError, match="room for 2 transitions"):
        ReplayBuffer(3, 2)
    with pytest.raises(ConfigError, match="scale the reward"):
        dqn(reward_normalization=True)
    with pytest.raises(ConfigError, match="Box"):
        DQN(None, PLANE, PLANE, lr=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [0, 1])
def test_it_holds_up_the_pole(seed):
    venv = vectorized("CartPole-v1", 4, seeds=range(10_000 * seed, 10_000 * seed + 5000))
    policy = DQN(
        None,
        venv.observation_space,
        venv.action_space,
        lr=2e-3,
        seed=seed,
        target_update_freq=100,
        exploration=(1.0, 0.05, 3000),
        clip_loss_grad=True,
        max_grad_norm=10.0,
    )
    collector = Collector(policy, venv, buffer := policy.make_buffer(50_000, 4))
    validation = vectorized("CartPole-v1", 4)
    for evaluate_at in range(2500, 42_500, 2500):
        while collector.total_steps < evaluate_at:
            collector.collect(n_episode=4)
            policy.update(buffer, batch_size=64, repeat=32)
        validation.use_seeds(range(80_000, 80_020))
        if Collector(policy, validation).collect(explore=False).metrics["reward"] >= 400:
            break  # Q-learning goes up and down; a trainer keeps the best, chosen on episodes of its own
    validation.use_seeds(range(90_000, 90_020))
    assert Collector(policy, validation).collect(explore=False).metrics["reward"] >= 195
