"""A collect is exactly what was asked for, and what the buffer holds is what happened."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.errors import ConfigError
from leyden.rl.buffer import RolloutBuffer
from leyden.rl.collector import Collector
from leyden.rl.policy import AllOne, PolicyOutput, RandomPolicy
from tests.rl.support import Counting, vectorized


class Alternating(AllOne):
    """Action 1 at even steps, and the observation's step as an extra."""

    def act(self, obs, *, explore):
        steps = obs[:, 1].astype(np.int64)
        return PolicyOutput(1 - steps % 2, {"seen": steps})


def policy_for(venv) -> AllOne:
    return AllOne(venv.observation_space, venv.action_space)


@given(n_envs=st.integers(1, 5), n_episode=st.integers(1, 12), n_seeds=st.integers(0, 15))
@settings(max_examples=60)
def test_exactly_the_episodes_asked_for_are_begun_and_every_seed_serves_once(n_envs, n_episode, n_seeds):
    venv = vectorized(Counting, n_envs, seeds=range(n_seeds))
    collector = Collector(policy_for(venv), venv)
    seen: list[float] = []
    while True:
        result = collector.collect(n_episode=n_episode)
        assert not venv.alive.any()
        assert result.n_episodes == min(n_episode, n_seeds - len(seen))
        seen += result.lengths.tolist()
        if result.n_episodes < n_episode:
            break
    assert sorted(seen) == sorted(seed % 5 + 1 for seed in range(n_seeds))
    assert collector.state_dict() == {"total_episodes": n_seeds, "total_steps": sum(seen)}


@given(n_envs=st.integers(1, 4), n_seeds=st.integers(1, 9))
@settings(max_examples=40)
def test_the_buffer_holds_each_episode_step_by_step(n_envs, n_seeds):
    venv = vectorized(Counting, n_envs, seeds=range(n_seeds))
    buffer = RolloutBuffer(60, n_envs)
    result = Collector(Alternating(venv.observation_space, venv.action_space), venv, buffer).collect()
    assert len(buffer) == result.n_steps == buffer.mask.sum()
    rows = buffer.n_rows
    episodes = []
    for env in range(n_envs):
        wanted_step = 0
        for t in np.flatnonzero(buffer.mask[:rows, env]):
            seed, step = buffer.obs[t, env]  # type: ignore[index]
            assert step == wanted_step == buffer.extras["seen"][t, env]
            assert buffer.rewards[t, env] == buffer.actions[t, env] == 1 - step % 2
            wanted_step += 1
            if buffer.terminated[t, env]:
                assert wanted_step == seed % 5 + 1
                episodes.append(seed)
                wanted_step = 0
        assert wanted_step == 0
    assert sorted(episodes) == list(range(n_seeds))


def test_a_result_has_means_over_episodes_and_progress_is_told_at_their_ends():
    venv = vectorized(Counting, 2, seeds=range(4))  # lengths 1, 2, 3, 4
    told: list[tuple[int, int]] = []
    result = Collector(policy_for(venv), venv).collect(on_progress=lambda *counts: told.append(counts))
    assert result.metrics == {"reward": 2.5, "steps_per_episode": 2.5}
    assert result.lengths.tolist() == [1, 2, 3, 4]
    assert told[-1] == (4, 10)


def test_nested_observations_arrive_as_a_struct_of_arrays():
    venv = vectorized(Counting, 2, seeds=range(5), nested=True)
    buffer = RolloutBuffer(20, 2)
    Collector(RandomPolicy(venv.observation_space, venv.action_space), venv, buffer).collect()
    flat = buffer.flat(buffer.obs)
    assert isinstance(flat, dict)
    assert flat["seed"].shape == (15, 1) and flat["seed"].dtype == np.float64
    assert flat["step"].shape == (15,) and flat["step"].dtype == np.int64


def test_a_rollout_buffer_without_a_limit_grows_with_the_episodes():
    venv = vectorized(Counting, 3, length=1500)
    buffer = RolloutBuffer(None, 3)
    collector = Collector(Alternating(venv.observation_space, venv.action_space), venv, buffer)
    for n_episode in (4, 5):
        assert collector.collect(n_episode=n_episode).n_steps == len(buffer) == 1500 * n_episode
        steps = buffer.obs[: buffer.n_rows, 0, 1]  # type: ignore[call-overload, index]
        assert steps.tolist() == [*range(1500)] * 2


def test_a_full_rollout_buffer_is_an_error_that_names_its_size():
    venv = vectorized(Counting, 2, length=5)
    collector = Collector(policy_for(venv), venv, RolloutBuffer(9, 2))
    with pytest.raises(ConfigError, match=r"size is 9 transitions.*Leave buffer_size out"):
        collector.collect(n_episode=2)
    with pytest.raises(ConfigError, match="have episodes under way"):
        collector.collect(n_episode=2)
    exact = vectorized(Counting, 2, length=5)
    assert Collector(policy_for(exact), exact, RolloutBuffer(10, 2)).collect(n_episode=2).n_steps == 10


def test_idle_environments_do_not_use_up_the_buffer():
    venv = vectorized(Counting, 3, seeds=[0, 0, 4, 4, 4, 0, 4])
    buffer = RolloutBuffer(23, 3)
    assert Collector(policy_for(venv), venv, buffer).collect().n_steps == len(buffer) == 23


def test_all_one_fills_any_action_and_refuses_what_is_none():
    space = spaces.Box(0, 1, (2,), np.float32)
    acted = AllOne(space, space).act(np.zeros((3, 2), np.float32), explore=False).actions
    assert acted.dtype == np.float32 and acted.tolist() == [[1, 1]] * 3
    with pytest.raises(ConfigError, match=r"fill_value=2\.0"):
        AllOne(space, space, 2.0)


def test_a_random_policy_continues_where_it_was_saved():
    space = spaces.Box(0, 1, (2,), np.float32)
    obs = np.zeros((3, 2), np.float32)
    one, two = RandomPolicy(space, space, seed=1), RandomPolicy(space, space, seed=2)
    one.act(obs, explore=True)
    two.load_state_dict(one.state_dict())
    assert np.array_equal(one.act(obs, explore=True).actions, two.act(obs, explore=True).actions)


def test_any_gymnasium_id_is_collected_from():
    with vectorized("CartPole-v1", 2, seeds=range(3)) as venv:
        result = Collector(RandomPolicy(venv.observation_space, venv.action_space), venv).collect()
    assert result.n_episodes == 3 and result.rewards.tolist() == result.lengths.tolist()


def test_neither_collecting_nor_a_rule_loads_torch():
    program = "import sys, leyden.rl.collector, leyden.rl.env, leyden.rl.policy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
