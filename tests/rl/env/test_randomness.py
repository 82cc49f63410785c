"""Random numbers of simulators: each worker has its own, and a run that is repeated has the same."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from leyden.rl.env import EnvWrapper, vectorize_env
from leyden.rl.parts import StateInterpreter
from leyden.rl.seed import SeedPlan
from tests.rl.env.test_kinds import KINDS
from tests.rl.env.worlds import Position, Push, Walk, actions

REMOTE = ["subproc", "shmem"]


class Noisy(Walk):
    """Draws from the global generators when it is made."""

    def __init__(self, initial: int = 0) -> None:
        super().__init__(0)
        self.x = np.array([np.random.random(), random.random(), 0, 0], np.float32)


class OwnNoise(Walk):
    """Draws from its environment's generator in each step."""

    def step(self, action: float) -> None:
        super().step(action)
        assert self.env is not None
        self.x = self.env.np_random.random(4).astype(np.float32)


class Seen(StateInterpreter[np.ndarray, np.ndarray]):
    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def interpret(self, simulator_state: np.ndarray) -> np.ndarray:
        return simulator_state.copy()


def make(simulator: Any) -> Any:
    return lambda: EnvWrapper(simulator, Seen(), Push(), reward_fn=Position())


def first_draws(kind: Any = "subproc", **options: Any) -> np.ndarray:
    """(4, 2): what NumPy's and Python's generators gave in each of four environments."""
    with vectorize_env(make(Noisy), kind, 4, seeds=range(4), **options) as venv:
        return venv.reset()[:, :2].copy()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("start_method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow), "fork"])
def test_workers_draw_different_numbers_whatever_starts_them(start_method: Any) -> None:
    draws = first_draws(workers=4, start_method=start_method)
    assert len(np.unique(draws)) == 8


def test_vector_environments_of_one_process_differ_unless_it_seeds_its_generators_equally() -> None:
    def seeded() -> np.ndarray:
        np.random.seed(5)
        random.seed(5)
        return first_draws(workers=1)

    once, again = seeded(), seeded()
    assert np.array_equal(once, again)
    assert not np.isin(first_draws(workers=1), once).any()


def test_workers_are_seeded_by_an_option_too() -> None:
    assert np.array_equal(first_draws(seed=1, workers=1), first_draws(seed=1, workers=1))


def test_a_worker_that_takes_anothers_place_draws_new_numbers() -> None:
    with vectorize_env(
        make(Noisy), "subproc", 1, seeds=range(2), on_worker_error="retry", max_retries=3, seed=0
    ) as venv:
        before = venv.reset()[0].copy()
        os.kill(venv._workers[0].child.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        venv.step(actions(1))
        assert not np.isin(venv.reset()[0, :2], before).any()


def torch_draws(initial: Any = 0) -> Any:
    import torch

    walk = Walk(0)
    walk.x = torch.rand(4).numpy()
    return walk


@pytest.mark.slow
@pytest.mark.merge
def test_torch_is_seeded_where_it_is_loaded() -> None:
    import torch  # noqa: F401 -- a simulator that uses torch has it loaded before its first episode

    with vectorize_env(make(torch_draws), "subproc", 2, seeds=range(4), workers=2) as venv:
        venv.reset()
        while venv.alive.any():
            venv.step(actions(2))
        assert len(np.unique(venv.reset())) == 8


def noise_by_seed(kind: Any, n_envs: int, **options: Any) -> dict[int, float]:
    """What each seed's episode drew in its last step."""
    drawn: dict[int, float] = {}
    plan = SeedPlan(range(9), shuffle=True, seed=3)
    with vectorize_env(make(OwnNoise), kind, n_envs, seeds=plan, **options) as venv:
        venv.reset()
        while venv.alive.any():
            step = venv.step(actions(n_envs))
            for env, info in step.infos.items():
                drawn[info["episode"].seed_index] = float(step.obs[env, 0])
            if not venv.alive.all() and not venv.exhausted:
                venv.reset()
    return drawn


@pytest.mark.parametrize("kind", KINDS)
def test_an_environments_own_generator_depends_on_the_plan_and_the_episode_alone(kind: Any) -> None:
    expected = noise_by_seed("dummy", 3)
    assert len(set(expected.values())) == 9
    assert noise_by_seed(kind, 4) == expected
    if kind in REMOTE:
        assert noise_by_seed(kind, 4, workers=1) == expected


def test_every_set_of_seeds_without_a_seed_of_its_own_has_other_noise() -> None:
    def first(venv: Any) -> float:
        venv.reset()
        return float(venv.step(actions(1)).obs[0, 0])

    with vectorize_env(make(OwnNoise), "dummy", 1) as one, vectorize_env(make(OwnNoise), "dummy", 1) as two:
        begun = first(one)
        assert first(two) == begun
        one.use_seeds(None)
        assert first(one) != begun
