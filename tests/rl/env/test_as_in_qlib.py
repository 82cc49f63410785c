"""Calls as programs for Qlib write them: by position, with one DataQueue that all environments share."""

from __future__ import annotations

from typing import Any

import pytest

from leyden.errors import ConfigError
from leyden.rl.data_queue import DataQueue
from leyden.rl.env import EnvWrapper, FiniteDummyVectorEnv, vectorize_env
from leyden.training import LogCollector, LogLevel
from tests.rl.env.test_kinds import KINDS, Witness
from tests.rl.env.worlds import Position, Push, Sight, Walk, factory, play


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def wrapped(seeds: Any) -> Any:
    return lambda: EnvWrapper(Walk, Sight(), Push(), seeds, Position(), None, LogCollector(LogLevel.PERIODIC))


def test_environments_with_one_queue_take_each_item_once(kind: Any) -> None:
    writer = Witness()
    with DataQueue(list(range(20)), 1, True, 1, 4) as queue:
        venv = vectorize_env(wrapped(queue), kind, 3, [writer])
        assert sorted(episode.seed_index for episode in play(venv)) == list(range(20))
        venv.close()
    assert len(writer.episodes) == 20


def test_an_environment_by_itself_takes_from_the_queue() -> None:
    with DataQueue(list(range(3)), 1, False) as queue:
        env = wrapped(queue)()
        assert [float(env.reset()[0][0]) for _ in range(3)] == [0.0, 1.0, 2.0]


def test_environments_with_iterators_of_their_own_are_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"vectorize_env\(seeds=\.\.\.\)"):
        vectorize_env([wrapped([1, 2]), wrapped([1, 2])], kind)


def test_a_queue_that_only_some_environments_have_is_refused_as_such(kind: Any) -> None:
    with DataQueue([1]) as queue, pytest.raises(ConfigError, match=r"seed iterators.*vectorize_env\(seeds=\.\.\.\)"):
        vectorize_env([wrapped(queue), wrapped(None)], kind)


def test_seeds_in_two_places_are_refused() -> None:
    with DataQueue([1]) as queue, pytest.raises(ConfigError, match="leave `seed_iterator` out"):
        vectorize_env(wrapped(queue), "dummy", 1, seeds=[1, 2])


def test_kinds_are_made_of_a_logger_and_factories() -> None:
    with FiniteDummyVectorEnv(None, [factory()] * 2) as venv:
        venv.reset()
        assert venv.alive.all()
