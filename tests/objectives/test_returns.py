"""Advantages and n-step sums against the definitions, written as sums over single episodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.objectives.returns import RunningMoments, gae, n_step


def slow_advantage(rewards, values, after, discount, lam):
    """Of an episode's first step, as the exponentially weighted mean of k-step advantages (arXiv:1506.02438, eq. 11 to 16).

    after: what follows the last step (0, or the value of the final observation).
    """
    n = len(rewards)
    estimates = []
    for k in range(1, n + 1):
        reached = values[k] if k < n else after
        estimates.append(sum(discount**i * rewards[i] for i in range(k)) + discount**k * reached - values[0])
    if lam == 1:
        return estimates[-1]
    return (1 - lam) * sum(lam ** (k - 1) * estimates[k - 1] for k in range(1, n)) + lam ** (n - 1) * estimates[-1]


@given(data=st.data(), discount=st.sampled_from([0.0, 0.9, 1.0]), lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]))
@settings(max_examples=150)
def test_advantages_are_those_of_each_episode_alone_wherever_it_lies(data, discount, lam):
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    n_envs = data.draw(st.integers(1, 3))
    columns = []
    for _ in range(n_envs):  # episodes and idle stretches, one after another
        columns.append(data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=0, max_size=3)))
    height = max([1, *(sum(idle + length for idle, length in column) for column in columns)]) + 1
    rewards, values, bootstrap = (rng.normal(size=(height, n_envs)) for _ in range(3))
    rewards[rng.random(rewards.shape) < 0.1] = 7.0
    mask, ends = np.zeros((height, n_envs), bool), np.zeros((height, n_envs), bool)
    wanted = np.zeros((height, n_envs))
    for env, column in enumerate(columns):
        at = 0
        for idle, length in column:
            at += idle
            mask[at : at + length, env] = True
            ends[at + length - 1, env] = True
            for t in range(at, at + length):
                wanted[t, env] = slow_advantage(
                    rewards[t : at + length, env],
                    values[t : at + length, env],
                    bootstrap[at + length - 1, env],
                    discount,
                    lam,
                )
            at += length
    values[~mask] = np.nan  # idle entries may hold anything
    got = gae(rewards, values, ends, bootstrap, mask, discount=discount, gae_lambda=lam)
    np.testing.assert_allclose(got, wanted, atol=1e-9)


def test_an_episode_still_under_way_is_bootstrapped_at_its_last_known_step():
    one = np.ones((2, 1))
    got = gae(one, 3 * one, np.zeros((2, 1), bool), 5 * one, one > 0, discount=0.5, gae_lambda=0.0)
    assert got[:, 0] == pytest.approx([1 + 0.5 * 3 - 3, 1 + 0.5 * 5 - 3])


@given(
    rewards=st.lists(st.floats(-5, 5), min_size=1, max_size=8),
    start=st.integers(0, 7),
    n=st.integers(1, 5),
    discount=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
)
def test_n_step_sums_stop_at_the_episodes_end(rewards, start, n, discount):
    start %= len(rewards)
    successor = np.array([*range(1, len(rewards)), -1])
    sums, last, factor = n_step(np.array(rewards), successor, np.array([start]), n=n, discount=discount)
    taken = rewards[start : start + n]
    assert sums[0] == pytest.approx(sum(discount**i * r for i, r in enumerate(taken)))
    assert last[0] == start + len(taken) - 1
    assert factor[0] == pytest.approx(discount ** len(taken))


@given(batches=st.lists(st.lists(st.floats(-1e3, 1e3), min_size=0, max_size=6), min_size=1, max_size=6))
def test_running_moments_are_those_of_all_numbers_together(batches):
    moments = RunningMoments()
    for batch in batches:
        moments.update(np.array(batch, np.float64))
    together = np.concatenate([np.array(batch, np.float64) for batch in batches])
    if together.size:
        assert moments.mean == pytest.approx(together.mean(), abs=1e-6)
        assert moments.variance == pytest.approx(together.var(), rel=1e-6, abs=1e-6)
