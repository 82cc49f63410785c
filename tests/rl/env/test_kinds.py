"""The contract of all kinds of vectorised environments."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
import pytest

from leyden._lib.components import accepts
from leyden.errors import ConfigError, SimulatorError
from leyden.rl.data_queue import DataQueue
from leyden.rl.env import EnvWrapper, FiniteBatchVectorEnv, FiniteThreadVectorEnv, vectorize_env
from leyden.rl.env.factory import ENV_KINDS, env_kind
from leyden.rl.env.vector import FiniteVectorEnv
from leyden.rl.seed import SeedPlan
from leyden.rl.spaces import GymSpaceValidationError
from leyden.training import EpisodeStats
from tests.rl.env.worlds import (
    DictSight,
    LimitedWalk,
    OnceUnlucky,
    Position,
    Push,
    Sight,
    TextSight,
    Unlucky,
    Walk,
    actions,
    factory,
    play,
)

KINDS = list(ENV_KINDS)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


class Witness:
    """A writer that notes what it hears."""

    def __init__(self, *, wants_steps: bool = False) -> None:
        self.wants_steps = wants_steps
        self.heard: list[tuple[Any, ...]] = []
        self.episodes: list[EpisodeStats] = []

    def on_env_all_ready(self) -> None:
        self.heard.append(("ready",))

    def on_env_reset(self, env_id: int, obs: Any) -> None:
        self.heard.append(("reset", env_id, float(obs[0])))

    def on_env_step(self, env_id: int, obs: Any, reward: float, done: bool, info: Any) -> None:
        self.heard.append(("step", env_id, float(obs[0]), reward, done, {**info["log"]}))

    def log_episode(self, episode: EpisodeStats) -> None:
        self.episodes.append(episode)

    def on_env_all_done(self) -> None:
        self.heard.append(("done",))


def trajectories(venv: FiniteVectorEnv) -> list[list[tuple[float, ...]]]:
    """What each environment saw, step by step."""
    seen: list[list[tuple[float, ...]]] = [[] for _ in range(venv.num_envs)]
    obs = venv.reset()
    while venv.alive.any():
        before, first = venv.alive.copy(), obs[:, 0].copy()
        step = venv.step(actions(venv.num_envs) * np.arange(1, venv.num_envs + 1, dtype=np.float32)[:, None] / 8)
        for env in np.flatnonzero(before):
            row = (first[env], step.obs[env, 0], step.rewards[env], step.terminated[env], step.truncated[env])
            seen[env].append(tuple(float(value) for value in row))
        obs = step.obs if venv.exhausted or venv.alive.all() else venv.reset()
    return seen


def test_every_seed_begins_one_episode_and_its_numbers_are_right(kind: Any) -> None:
    with vectorize_env(factory(), kind, 3, seeds=range(10, 21)) as venv:
        episodes = play(venv)
        assert venv.exhausted and not venv.alive.any()
    assert sorted(episode.seed_index for episode in episodes) == list(range(11))
    assert sorted(episode.seed_number for episode in episodes) == list(range(11))
    assert {episode.env_id for episode in episodes} == {0, 1, 2}
    for episode in episodes:
        item = 10 + episode.seed_index
        length = 3 + item % 7
        positions = [item + 0.25 * step for step in range(1, length + 1)]
        assert episode.length == length
        assert episode.reward == pytest.approx(sum(positions))
        assert episode.logs == {"position": pytest.approx(np.mean(positions))}


def test_all_kinds_give_the_same_trajectories_for_the_same_seeds_and_actions(kind: Any) -> None:
    with vectorize_env(factory(LimitedWalk), "dummy", 5, seeds=SeedPlan(range(17), shuffle=True, seed=4)) as venv:
        expected = trajectories(venv)
    with vectorize_env(factory(LimitedWalk), kind, 5, seeds=SeedPlan(range(17), shuffle=True, seed=4)) as venv:
        assert trajectories(venv) == expected


class Dawdling(Walk):
    """Slower in some episodes than in others."""

    def step(self, action: float) -> None:
        time.sleep(0.002 if self.initial % 3 == 0 else 0)
        super().step(action)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_which_worker_is_faster_changes_nothing(workers: int) -> None:
    with vectorize_env(factory(Walk), "dummy", 4, seeds=range(9)) as venv:
        expected = trajectories(venv)
    with vectorize_env(factory(Dawdling), "shmem", 4, seeds=range(9), workers=workers) as venv:
        assert trajectories(venv) == expected


def test_an_end_by_a_limit_is_a_truncation_and_no_termination(kind: Any) -> None:
    with vectorize_env(factory(LimitedWalk), kind, 2, seeds=[0, 7]) as venv:
        venv.reset()
        for _ in range(2):
            step = venv.step(actions(2))
            assert not step.terminated.any() and not step.truncated.any()
        step = venv.step(actions(2))
        assert step.terminated.tolist() == [True, False]
        assert step.truncated.tolist() == [False, True]
        assert not venv.alive.any()


def test_more_environments_than_seeds_leave_some_idle(kind: Any) -> None:
    with vectorize_env(factory(), kind, 5, seeds=range(2)) as venv:
        venv.reset()
        assert venv.alive.tolist() == [True, True, False, False, False]
        assert venv.exhausted
        venv.step(actions(5))


def test_no_seeds_at_all_are_known_at_once(kind: Any) -> None:
    with vectorize_env(factory(), kind, 2, seeds=[]) as venv:
        assert venv.exhausted
        assert venv.reset().shape == (2, 4)
        assert not venv.alive.any()
        with pytest.raises(ConfigError, match="call reset"):
            venv.step(actions(2))


def test_only_those_asked_for_are_stepped_and_reset(kind: Any) -> None:
    with vectorize_env(factory(), kind, 3, seeds=range(6)) as venv:
        assert venv.reset([1])[1, 0] == 0.0
        assert venv.alive.tolist() == [False, True, False]
        venv.reset()
        step = venv.step(actions(3), [0, 2])
        assert step.obs[:, 0].tolist() == [1.25, 0.0, 2.25]
        step = venv.step(actions(3), [1])
        assert step.obs[:, 0].tolist() == [1.25, 0.25, 2.25]


def test_an_abandoned_episode_gives_its_seed_back(kind: Any) -> None:
    plan = SeedPlan(range(4))
    with vectorize_env(factory(), kind, 2, seeds=plan) as venv:
        venv.reset()
        venv.step(actions(2))
        assert venv.reset([0])[0, 0] == 0.0  # seed 0 again
        assert len(play(venv)) == 4


def test_workers_live_on_from_one_set_of_seeds_to_the_next(kind: Any) -> None:
    with vectorize_env(factory(), kind, 2, seeds=range(3)) as venv:
        assert len(play(venv)) == 3
        venv.use_seeds(DataQueue(range(100, 104), shuffle=False))
        assert sorted(episode.seed_index for episode in play(venv)) == [0, 1, 2, 3]
        venv.use_seeds(item for item in (7, 8))
        assert [episode.length for episode in play(venv)] == [3, 4]
        venv.use_seeds(None)
        venv.reset()
        assert venv.alive.all() and not venv.exhausted


def test_nested_spaces_arrive_part_by_part(kind: Any) -> None:
    with vectorize_env(factory(sight=DictSight), kind, 3, seeds=[0, 5]) as venv:
        obs = venv.reset()
        assert obs["x"].shape == (3, 4) and obs["far"].tolist()[:2] == [0, 1]
        step = venv.step(actions(3))
        assert step.obs["x"][:2, 0].tolist() == [0.25, 5.25]
        bits, numbers = step.obs["both"]
        assert bits[:2].tolist() == [[0, 0, 1], [1, 0, 1]] and numbers[:2].tolist() == [[0, 3], [1, 3]]


@pytest.mark.parametrize("kind", ["dummy", "thread", "subproc"])
def test_a_space_of_no_fixed_size_is_kept_as_objects(kind: Any) -> None:
    with vectorize_env(factory(sight=TextSight), kind, 2, seeds=[1, 2]) as venv:
        venv.reset()
        assert venv.step(actions(2)).obs.tolist() == ["1.25", "2.25"]


def test_a_space_of_no_fixed_size_cannot_be_shared() -> None:
    with pytest.raises(ConfigError, match="subproc"):
        vectorize_env(factory(sight=TextSight), "shmem", 2, seeds=[1])


def test_a_writer_hears_episodes_and_only_if_it_wants_them_steps(kind: Any) -> None:
    quiet, curious = Witness(), Witness(wants_steps=True)
    with vectorize_env(factory(), kind, 1, quiet, seeds=[0]) as venv, venv.collector_guard():
        play(venv)
    assert [what[0] for what in quiet.heard] == ["ready", "reset", "done"]
    assert [episode.length for episode in quiet.episodes] == [3]
    with vectorize_env(factory(loglevel=10), kind, 1, [curious], seeds=[0]) as venv, venv.collector_guard():
        play(venv)
    assert [what[0] for what in curious.heard] == ["ready", "reset", "step", "step", "step", "done"]
    *_, last, _ = curious.heard
    assert last[1:5] == (0, 0.75, 0.75, True)
    log = last[5]
    assert log["position"] == (20, 0.75) and log["reward"] == (20, 0.75) and log["steps_per_episode"] == (20, 3.0)
    assert log["obs"][0] == 10 and log["policy_act"][1].tolist() == [0.25]


def test_actions_are_checked_before_anything_moves(kind: Any) -> None:
    with vectorize_env(factory(), kind, 2, seeds=[0, 1]) as venv:
        venv.reset()
        with pytest.raises(ConfigError, match="shape"):
            venv.step(np.zeros((3, 1), np.float32))
        with pytest.raises(ConfigError, match="float64"):
            venv.step(np.zeros((2, 1)))
        assert venv.step(actions(2)).obs[:, 0].tolist() == [0.25, 1.25]
        with pytest.raises(SimulatorError, match="out of bounds"):
            venv.step(actions(2, 5.0))


@pytest.mark.parametrize("place", ["construct", "step", "done", "get_state"])
def test_what_a_simulator_raises_comes_with_its_traceback_seed_and_step(kind: Any, place: str) -> None:
    items = [("", "", 0), ("raise", place, 1)]
    with vectorize_env(factory(Unlucky), kind, 1, seeds=items) as venv:
        with pytest.raises(SimulatorError, match="the quarry is closed") as caught:
            play(venv)
        assert caught.value.seed_index == 1
        assert caught.value.step == (0 if place == "construct" else 1 if place != "get_state" else caught.value.step)
        told = str(caught.value) + "".join(map(str, [caught.value.__cause__]))
        assert "OSError" in str(caught.value) and "quarry" in told
        if kind in ("subproc", "shmem"):
            assert "worlds.py" in str(caught.value)
        else:
            assert isinstance(caught.value.__cause__, OSError)


def test_a_stop_iteration_of_user_code_ends_nothing(kind: Any) -> None:
    items = [("", "", 0), ("stop", "step", 1), ("", "", 2)]
    with vectorize_env(factory(Unlucky), kind, 1, seeds=items) as venv:
        with pytest.raises(SimulatorError, match="StopIteration in a simulator") as caught:
            play(venv)
        assert caught.value.seed_index == 1


@pytest.mark.parametrize(("wrong", "says"), [("nan", "4 NaN"), ("shape", r"\(5,\), not \(4,\)"), ("dtype", "float64")])
def test_observations_that_the_space_does_not_contain_are_refused(kind: Any, wrong: str, says: str) -> None:
    with (
        vectorize_env(factory(Unlucky), kind, 1, seeds=[(wrong, "step", 0)]) as venv,
        pytest.raises(SimulatorError, match=says),
    ):
        play(venv)


def test_skipping_leaves_the_bad_seed_out_and_says_which(kind: Any) -> None:
    items = [
        ("raise" if number in (2, 5) else "", "construct" if number == 5 else "step", number) for number in range(8)
    ]
    with vectorize_env(factory(Unlucky), kind, 3, seeds=items, on_worker_error="skip") as venv:
        episodes = play(venv)
        assert sorted(episode.seed_index for episode in episodes) == [0, 1, 3, 4, 6, 7]
        assert sorted((lost.seed_index, lost.step) for lost in venv.lost) == [(2, 1), (5, 0)]
        assert all("quarry" in lost.reason for lost in venv.lost)


def test_a_lost_episode_is_said_in_the_step_that_lost_it(kind: Any) -> None:
    with vectorize_env(
        factory(Unlucky), kind, 2, seeds=[("", "", 4), ("raise", "step", 4)], on_worker_error="skip"
    ) as venv:
        venv.reset()
        venv.step(actions(2))
        step = venv.step(actions(2))
        assert step.infos[1]["lost"].seed_index == 1 and step.truncated.tolist() == [False, True]
        assert venv.alive.tolist() == [True, False]


def test_a_retried_seed_is_finished_exactly_once(kind: Any, tmp_path: Any) -> None:
    items = [(str(tmp_path), number) for number in range(7)]
    with vectorize_env(factory(OnceUnlucky), kind, 3, seeds=items, on_worker_error="retry") as venv:
        episodes = play(venv)
        assert sorted(episode.seed_index for episode in episodes) == list(range(7))
        assert len(venv.lost) == 7


def test_a_seed_that_always_fails_is_not_retried_for_ever(kind: Any) -> None:
    items = [("", "", 0), ("raise", "step", 1)]
    with vectorize_env(factory(Unlucky), kind, 2, seeds=items, on_worker_error="retry", max_retries=2) as venv:
        with pytest.raises(SimulatorError, match="3 times now") as caught:
            play(venv)
        assert caught.value.seed_index == 1


def test_closing_is_final_and_may_be_repeated(kind: Any) -> None:
    venv = vectorize_env(factory(), kind, 2, seeds=range(4))
    obs = venv.reset()
    venv.close()
    venv.close()
    assert obs[0, 1] == 1.0  # what was handed out can be read
    with pytest.raises(ConfigError, match="closed"):
        venv.reset()


def test_a_plan_that_was_saved_in_the_midst_goes_on_with_what_was_under_way(kind: Any) -> None:
    plan: SeedPlan[int] = SeedPlan(range(9), shuffle=True, seed=1)
    done: list[int] = []
    with vectorize_env(factory(), kind, 3, seeds=plan) as venv:
        venv.reset()
        while len(done) < 4:
            done += [info["episode"].seed_index for info in venv.step(actions(3)).infos.values() if "episode" in info]
            if not venv.alive.all():
                venv.reset()
        saved = plan.state_dict()
    again: SeedPlan[int] = SeedPlan(range(9), shuffle=True, seed=1)
    again.load_state_dict(saved)
    with vectorize_env(factory(), kind, 3, seeds=again) as venv:
        done += [episode.seed_index for episode in play(venv)]
    assert sorted(done) == list(range(9))


def test_a_gymnasium_environment_is_seeded_by_its_items(kind: Any) -> None:
    def cart_pole() -> Any:
        import gymnasium

        return gymnasium.make("CartPole-v1")

    def run() -> list[EpisodeStats]:
        ended: list[EpisodeStats] = []
        with vectorize_env(cart_pole, kind, 2, seeds=range(4)) as venv:
            venv.reset()
            while venv.alive.any():
                step = venv.step(np.ones(2, np.int64))
                ended += [info["episode"] for info in step.infos.values()]
                if not venv.alive.all():
                    venv.reset()
        return ended

    first = run()
    assert len(first) == 4 and first == run()
    assert all(episode.reward == episode.length for episode in first)


def test_environments_with_other_spaces_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match=r"same spaces; one has the observation_space Box.*another one Dict"):
        vectorize_env([factory(), factory(sight=DictSight)], "dummy")


def test_options_that_a_kind_has_no_use_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="step_timeout_seconds"):
        vectorize_env(factory(), "dummy", 1, step_timeout_seconds=1.0)
    with pytest.raises(ConfigError, match="env_type='forked' is not known; names: dummy, shmem, subproc, thread"):
        vectorize_env(factory(), "forked", 1)
    with pytest.raises(ConfigError, match="concurrency is 0; it must be a whole number, at least 1"):
        vectorize_env(factory(), "dummy", 0)


def test_a_kind_of_another_package_is_named_by_its_path() -> None:
    with vectorize_env(factory(), "leyden.rl.env.in_process:FiniteThreadVectorEnv", 2, workers=1) as venv:
        assert isinstance(venv, FiniteThreadVectorEnv)


class ManyWalks:
    """Walks as rows of arrays; the same numbers as Walk's."""

    def __init__(self, n: int) -> None:
        self.num_envs = n
        self.observation_space = Sight.observation_space
        self.action_space = Push.action_space
        self.x = np.zeros((n, 4), np.float32)
        self.left = np.zeros(n, np.int64)

    def reset(self, indices: np.ndarray, items: Any) -> np.ndarray:
        self.x[indices] = np.arange(4, dtype=np.float32) + np.array(items, np.float32)[:, None]
        self.left[indices] = 3 + np.array(items) % 7
        return self.x[indices]

    def step(self, actions: np.ndarray) -> Any:
        self.x += actions
        self.left -= 1
        return self.x, self.x[:, 0].astype(np.float64), self.left <= 0, np.zeros(self.num_envs, np.bool_)


def test_a_batched_simulator_gives_the_same_trajectories_as_one_by_one() -> None:
    with vectorize_env(factory(), "dummy", 5, seeds=range(17)) as venv:
        expected = trajectories(venv)
    with FiniteBatchVectorEnv(ManyWalks(5), seeds=range(17)) as venv:
        assert trajectories(venv) == expected
    with FiniteBatchVectorEnv(ManyWalks(5), seeds=range(17)) as venv:
        assert sorted(episode.seed_index for episode in play(venv)) == list(range(17))


def test_a_batched_simulator_whose_rows_are_wrong_is_refused() -> None:
    simulator = ManyWalks(3)
    with FiniteBatchVectorEnv(simulator, seeds=range(3)) as venv:
        venv.reset()
        simulator.x[1] = np.nan
        with pytest.raises(SimulatorError, match="4 NaN") as caught:
            venv.step(actions(3))
        assert isinstance(caught.value.__cause__, GymSpaceValidationError)


def test_components_shared_by_environments_see_their_own(kind: Any) -> None:
    def make() -> Any:
        return EnvWrapper(Walk, Sight(), Push(), reward_fn=Position())

    with vectorize_env([make, make], kind, seeds=range(2)) as venv:
        assert len(play(venv)) == 2


def test_the_loops_writers_hear_of_it(kind: Any, tmp_path: Any) -> None:
    from leyden.training import LogWriter

    class Mine(LogWriter):
        def __init__(self, rows: Any) -> None:
            super().__init__(rows=rows)
            self.rows: list[Any] = []

        def write(self, row: Any) -> None:
            self.rows.append(row)

    episodes, steps = Mine("episode"), Mine("step")
    with vectorize_env(factory(), kind, 2, [episodes, steps], seeds=range(4)) as venv, venv.collector_guard():
        play(venv)
    assert len(episodes.rows) == 4 and len(steps.rows) == 3 + 4 + 5 + 6


class Choosy(gymnasium.Env[Any, Any]):
    """Has options of its own, and refuses others."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        assert not options
        return np.array([seed], np.float32), {}


gymnasium.register("Choosy-v0", Choosy)


def test_environments_of_gymnasiums_registry_are_made_by_their_id(kind: Any) -> None:
    options = {"workers": 2} if accepts(env_kind(kind), "workers") else {}
    with vectorize_env("CartPole-v1", kind, 2, seeds=[3, 4, 5], **options) as venv:
        obs = np.array(venv.reset())
        env = gymnasium.make("CartPole-v1")
        assert np.array_equal(obs, [env.reset(seed=3)[0], env.reset(seed=4)[0]])


def test_such_environments_begin_with_a_seed_and_nothing_else() -> None:
    with vectorize_env(["tests.rl.env.test_kinds:Choosy-v0", "Choosy-v0"]) as venv:
        assert np.array(venv.reset()).tolist() == [[0], [1]]


@pytest.mark.parametrize("name", ["CartPoll-v1", "no_such_module:CartPole-v1"])
def test_an_id_that_gymnasium_does_not_know_is_refused(kind: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot make the environment {name!r}"):
        vectorize_env(name, kind, seeds=[1])


def test_an_item_that_is_no_seed_is_not_dropped_in_silence() -> None:
    with (
        vectorize_env("CartPole-v1", seeds=["a market"]) as venv,
        pytest.raises(SimulatorError, match="'a market' is no integer"),
    ):
        venv.reset()
