"""Bad simulators, data sets, policies, writers and checkpoints, through the trainer: each has one clear outcome."""

from __future__ import annotations

import csv
import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from gymnasium import spaces

from leyden.errors import CheckpointError, ConfigError, SimulatorError
from leyden.rl import (
    DQN,
    PPO,
    DataQueue,
    Policy,
    Reward,
    RewardCombination,
    SeedIteratorNotAvailable,
    Trainer,
    TrainingVessel,
)
from leyden.rl.env.factory import ENV_KINDS
from leyden.rl.policy.policies import PolicyOutput
from leyden.rl.spaces import difference
from leyden.training import Callback, Checkpoint, CsvWriter
from tests.rl.parts import Direction, NearZero, Position, Walk, vessel_of

KINDS = list(ENV_KINDS)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def trainer_of(**options: Any) -> Trainer:
    return Trainer(**({"max_iters": 2, "finite_env_type": "dummy", "concurrency": 2} | options))


class Bad(Walk):
    """Goes wrong where it starts at `where`, in the way `how`."""

    where, how = 99, ""

    def __init__(self, initial: int) -> None:
        super().__init__(initial)
        self.bad = initial == self.where

    def step(self, action: int) -> None:
        super().step(action)
        if self.bad and self.how == "raise":
            raise OSError("the quarry is closed")
        if self.bad and self.how == "stop":
            raise StopIteration
        if self.bad and self.how == "early":
            self.left = 0

    def get_state(self) -> Any:
        return float("nan") if self.bad and self.how == "nan" else super().get_state()


class WrongSight(Position):
    def __init__(self, how: str) -> None:
        self.how = how

    def interpret(self, simulator_state: int) -> Any:
        wrong: dict[str, Any] = {
            "shape": np.zeros(2, np.float32),
            "dtype": np.zeros(1),
            "bounds": np.array([99], np.float32),
        }
        return wrong[self.how] if simulator_state == 8 else super().interpret(simulator_state)


def children() -> int:
    return len(psutil.Process().children(recursive=True))


@pytest.mark.parametrize("kind", ["dummy", pytest.param("subproc", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raise", "the quarry is closed"),
        ("stop", "StopIteration in a simulator"),
        ("nan", "NaN"),
        ("shape", r"shape is \(2,\)"),
        ("dtype", "float64"),
        ("bounds", "out of bounds"),
    ],
)
def test_a_bad_simulator_ends_the_run_and_the_last_checkpoint_goes_on_without_it(
    tmp_path: Path, kind: Any, how: str, says: str
) -> None:
    """States -8 to 8 are taken in passes of 17: the bad one, 8, comes in the first pass, whichever iteration that is."""

    class Mine(Bad):
        pass

    Mine.where, Mine.how = 8, how
    vessel = vessel_of(episode_per_iter=4)
    vessel.simulator_fn = Mine
    if how in ("shape", "dtype", "bounds"):
        vessel.state_interpreter = WrongSight(how)
    vessel.seed = 3
    trainer_of(max_iters=0, finite_env_type=kind).fit(vessel)
    before = children()
    trainer = trainer_of(max_iters=9, finite_env_type=kind, callbacks=[Checkpoint(tmp_path)])
    with pytest.raises(SimulatorError, match=says):
        trainer.fit(vessel)
    assert children() <= before + 2  # a forkserver and its tracker at most
    done = trainer.current_iter
    good = vessel_of(episode_per_iter=4)
    good.seed = 3
    again = trainer_of(max_iters=9, callbacks=[Checkpoint(tmp_path)])
    again.fit(good, ckpt_path=tmp_path if done else None)
    assert (again.current_iter, again.current_episode) == (9, 36)


def test_a_simulator_that_stops_early_is_a_short_episode() -> None:
    class Mine(Bad):
        where, how = 8, "early"

    vessel = vessel_of(test_initial_states=[8, 6])
    vessel.simulator_fn = Mine
    assert trainer_of().test(vessel)["steps_per_episode"] == (1 + 10) / 2


def test_data_sets_without_a_length_are_refused_by_name() -> None:
    for states in (iter([1, 2]), DataQueue([1, 2])):
        with pytest.raises(ConfigError, match=r"val_initial_states is a .*, which has no length"):
            vessel_of(val_initial_states=states)


def test_a_lazy_data_set_is_read_by_index() -> None:
    class Lazy:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> int:
            assert type(index) is int
            return index

    trainer = trainer_of(val_every_n_iters=1, concurrency=8)  # more environments than initial states and episodes
    trainer.fit(vessel_of(train_initial_states=Lazy(), val_initial_states=Lazy(), episode_per_iter=3))
    assert trainer.current_episode == 6


def test_a_trial_with_few_states_does_not_narrow_the_run_after_it() -> None:
    seen: set[int] = set()

    class Noted(Walk):
        def __init__(self, initial: int) -> None:
            seen.add(initial)
            super().__init__(initial)

    vessel = vessel_of(episode_per_iter=17)
    vessel.simulator_fn = Noted
    trainer_of(fast_dev_run=1).fit(vessel)
    trainer_of(max_iters=1).fit(vessel)
    assert seen == set(range(-8, 9))


def test_progress_is_of_episodes() -> None:
    heard: list[tuple[str, int, int]] = []

    class Noted(Callback):
        def on_progress(self, loop: Any, progress: Any) -> None:
            heard.append((loop.current_stage, progress.done, progress.total))

    trainer_of(max_iters=1, val_every_n_iters=1, concurrency=1, callbacks=[Noted()]).fit(vessel_of())
    assert heard == [("train", n, 6) for n in range(1, 7)] + [("val", n, 3) for n in range(1, 4)]


def test_a_test_goes_on_with_the_record_of_the_fit(tmp_path: Path) -> None:
    trainer = trainer_of(
        loggers=[CsvWriter(tmp_path / "stages.csv"), CsvWriter(tmp_path / "episodes.csv", rows="episode")]
    )
    vessel = vessel_of()
    trainer.fit(vessel)
    trainer.test(vessel)
    with (tmp_path / "stages.csv").open(newline="") as file:
        assert [row["stage"] for row in csv.DictReader(file)] == ["train", "train", "val", "test"]
    with (tmp_path / "episodes.csv").open(newline="") as file:
        assert sorted(int(row["episode"]) for row in csv.DictReader(file)) == list(range(1, 18))


def test_two_writers_of_one_file_are_refused(tmp_path: Path) -> None:
    writers = [CsvWriter(tmp_path / "a.csv"), CsvWriter(tmp_path / "a.csv", rows="episode")]
    with pytest.raises(ConfigError, match=r"two writers write .*a\.csv"):
        trainer_of(loggers=writers).fit(vessel_of())


@pytest.mark.parametrize("rows", ["stage", "step"])
@pytest.mark.parametrize("name", ["reward", "steps_per_episode"])
def test_the_names_of_what_every_episode_has_are_taken(tmp_path: Path, rows: Any, name: str) -> None:
    class Naming(Reward[int]):
        def reward(self, simulator_state: int) -> float:
            self.log(name, 99)
            return 0.0

    vessel = vessel_of()
    vessel.reward = Naming()
    with pytest.raises(SimulatorError, match=f"metric '{name}' was logged; that is the environment's own"):
        trainer_of(loggers=CsvWriter(tmp_path / "a.csv", rows=rows)).fit(vessel)


def test_parts_of_a_reward_log_in_workers_too() -> None:
    class Flat(Reward[int]):
        def reward(self, simulator_state: int) -> Any:
            assert self.env is not None
            self.log("inside", np.float32(1))
            return np.float32(2)

    vessel = vessel_of()
    vessel.reward = RewardCombination({"flat": (Flat(), 0.5), "near": (NearZero(), 2.0)})
    metrics = trainer_of(finite_env_type="subproc").test(vessel)
    assert (metrics["inside"], metrics["flat"]) == (1.0, 1.0)
    assert metrics["near"] == pytest.approx(-0.2 * metrics["distance"])


@pytest.mark.parametrize("kind", ["dummy", "thread"])
def test_a_part_that_cannot_be_copied_is_named(kind: Any) -> None:
    class Locked(Position):
        def __init__(self) -> None:
            self.file = Path(__file__).open()  # noqa: SIM115 -- an open file is what cannot be copied

    vessel = vessel_of()
    vessel.state_interpreter = locked = Locked()
    with pytest.raises(ConfigError, match="Locked of its own"):
        trainer_of(finite_env_type=kind).fit(vessel)
    locked.file.close()


class Own(Policy):
    """A policy of a user's: it answers in some form, and remembers nothing."""

    observation_space, action_space = Position.observation_space, Direction.action_space  # type: ignore[assignment]

    def __init__(self, form: Any) -> None:
        self.form, self.updates = form, 0

    def act(self, obs: Any, *, explore: bool) -> PolicyOutput:
        return PolicyOutput(self.form(len(obs)))

    def make_buffer(self, size: int, num_envs: int) -> None:
        return None

    def update(self, buffer: Any, **kwargs: Any) -> dict[str, float]:
        assert buffer is None
        self.updates += 1
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: Any) -> None:
        self.updates = state["updates"]


@pytest.mark.parametrize(
    "form",
    [
        lambda n: np.ones(n, np.int32),
        lambda n: [1] * n,
        lambda n: [np.array(1)] * n,
        lambda n: torch.ones(n, dtype=torch.int64),
    ],
)
def test_actions_may_be_any_array_of_rows(form: Any) -> None:
    vessel = vessel_of(update_kwargs={})
    vessel.policy = policy = Own(form)
    trainer_of(concurrency=4).fit(vessel)
    assert policy.updates == 2


@pytest.mark.parametrize("form", [lambda n: np.int64(1), lambda n: None, lambda n: np.ones(n + 1, np.int64)])
def test_actions_that_are_no_rows_are_refused(form: Any) -> None:
    vessel = vessel_of()
    vessel.policy = Own(form)
    with pytest.raises(ConfigError, match=r"Own\.act returned actions of shape"):
        trainer_of().fit(vessel)


def test_a_replay_buffer_is_kept_when_a_resumed_run_has_other_environments(tmp_path: Path) -> None:
    one = vessel_of("dqn")
    trainer_of(callbacks=[Checkpoint(tmp_path)]).fit(one)
    other = vessel_of("dqn")
    trainer = trainer_of(max_iters=3, concurrency=5)
    trainer.fit(other, ckpt_path=tmp_path)
    buffer, before = other._buffer, one._buffer
    assert buffer is not None and before is not None
    assert (buffer.num_envs, len(buffer)) == (5, len(before) + buffer.n_new)  # type: ignore[arg-type, attr-defined]


def test_other_initial_states_are_refused_before_anything_begins(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    trainer_of(callbacks=[Checkpoint(tmp_path)], loggers=CsvWriter(table)).fit(vessel_of())
    table.write_text(table.read_text() + "later")
    trainer = trainer_of(max_iters=3, loggers=CsvWriter(table))
    with pytest.raises(CheckpointError, match="items=17, this one 2"):
        trainer.fit(vessel_of(train_initial_states=[1, 2]), ckpt_path=tmp_path)
    assert table.read_text().endswith("later")


@pytest.mark.parametrize("key", ["format", "current_iter", "rng", "vessel", "callbacks", "metrics"])
@pytest.mark.parametrize("value", ["missing", "text"])
def test_a_pth_file_that_was_changed_is_refused(tmp_path: Path, key: str, value: str) -> None:
    trainer_of(max_iters=1, callbacks=[Checkpoint(tmp_path, filename="a.pth")]).fit(vessel_of())
    content = torch.load(tmp_path / "a.pth", weights_only=True)
    content[key] = value
    if value == "missing":
        del content[key]
    torch.save(content, tmp_path / "b.pth")
    with pytest.raises(CheckpointError):
        trainer_of().fit(vessel_of(), ckpt_path=tmp_path / "b.pth")


def test_a_damaged_directory_is_passed_over_and_one_of_a_newer_version_is_not(tmp_path: Path) -> None:
    trainer_of(callbacks=[Checkpoint(tmp_path)]).fit(vessel_of())
    arrays = tmp_path / "step-000002" / "vessel" / "arrays.npz"
    arrays.write_bytes(arrays.read_bytes()[:-9])
    trainer = trainer_of(max_iters=1)
    trainer.fit(vessel_of(), ckpt_path=tmp_path)
    assert trainer.current_iter == 1
    with pytest.raises(CheckpointError, match=r"arrays\.npz has .* bytes"):
        trainer.fit(vessel_of(), ckpt_path=tmp_path / "step-000002")
    manifest = tmp_path / "step-000001" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 2}))
    with pytest.raises(CheckpointError, match="install that version"):
        trainer.fit(vessel_of(), ckpt_path=tmp_path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_iters": 1.5}, r"max_iters is 1\.5; it must be a whole number"),
        ({"concurrency": 1.5}, r"concurrency is 1\.5; it must be a whole number"),
        ({"loggers": [print]}, r"writers has <built-in function print> .*; give a LogWriter such as CsvWriter"),
        ({"loggers": "a.csv"}, "writers has 'a.csv' .*; give a LogWriter"),
        ({"loggers": Path("a.csv")}, "writers has .*a.csv.*; give a LogWriter"),
        (
            {"callbacks": [print]},
            "callbacks has <built-in function print> .*; give instances of leyden.training.Callback",
        ),
    ],
)
def test_an_option_of_another_kind_is_refused_when_the_trainer_is_made(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        trainer_of(**options)


class Counted(Walk):
    """Counts how often it was made."""

    made = 0

    def __init__(self, initial: int) -> None:
        type(self).made += 1
        super().__init__(initial)


def test_a_stage_that_the_vessel_lacks_is_found_before_anything_begins() -> None:
    class Mine(Counted):
        pass

    vessel = vessel_of(val_initial_states=None)
    vessel.simulator_fn = Mine
    with pytest.raises(SeedIteratorNotAvailable, match="to validate on; give val_initial_states"):
        trainer_of(val_every_n_iters=2).fit(vessel)
    with pytest.raises(SeedIteratorNotAvailable, match="to train on; give train_initial_states"):
        trainer_of().fit(vessel_of(train_initial_states=None))
    with pytest.raises(SeedIteratorNotAvailable, match="to test on; give test_initial_states"):
        trainer_of().test(vessel_of(test_initial_states=None))
    assert Mine.made == 0
    trainer_of().fit(vessel)  # without validations it is all there


def test_a_vessel_that_writes_its_own_seed_iterator_needs_no_initial_states() -> None:
    class Mine(TrainingVessel[int]):
        def val_seed_iterator(self) -> Any:
            return [1, 2]

    parts = vessel_of(val_initial_states=None)
    parts.__class__ = Mine
    trainer = trainer_of(max_iters=1, val_every_n_iters=1)
    trainer.fit(parts)
    assert "val/reward" in trainer.metrics


@pytest.mark.parametrize(
    ("observations", "actions", "says"),
    [
        (
            spaces.Box(-1, 1, (3,), np.float32),
            spaces.Discrete(2),
            r"PPO is made for observations .*shape \(3,\) is not \(1,\)",
        ),
        (spaces.Discrete(4), spaces.Discrete(2), "PPO is made for observations of Discrete.* Discrete is not Box"),
        (spaces.Dict({"a": spaces.Discrete(4)}), spaces.Discrete(2), "Dict is not Box"),
        (Position.observation_space, spaces.Discrete(3), "PPO is made for actions .*n 3 is not 2"),
    ],
)
def test_a_policy_of_other_spaces_is_refused_before_anything_begins(observations: Any, actions: Any, says: str) -> None:
    vessel = vessel_of()
    vessel.policy = PPO(None, observations, actions, lr=1e-3)
    with pytest.raises(ConfigError, match=says):
        trainer_of().fit(vessel)


def test_a_policy_of_the_same_form_with_other_bounds_is_taken() -> None:
    vessel = vessel_of()
    vessel.policy = PPO(None, spaces.Box(-1, 1, (1,), np.float64), spaces.Discrete(2), lr=1e-3)
    trainer_of(max_iters=1).fit(vessel)


def test_parts_of_spaces_that_differ_are_named() -> None:
    one = spaces.Dict({"a": spaces.Tuple([spaces.Discrete(4), spaces.MultiDiscrete([2, 3])])})
    other = spaces.Dict({"a": spaces.Tuple([spaces.Discrete(4), spaces.MultiDiscrete([2, 4])])})
    assert difference(one, one) is None
    assert difference(one, other) == "in 'a', in 1, nvec [2 3] is not [2 4]"
    assert difference(one, spaces.Dict({"b": spaces.Discrete(4)})) == "the parts ['a'] are not ['b']"


def test_a_name_that_an_episode_logs_and_the_update_returns_is_refused() -> None:
    class Naming(Reward[int]):
        def reward(self, simulator_state: int) -> float:
            self.log("loss", 99)
            return 0.0

    vessel = vessel_of()
    vessel.reward = Naming()
    with pytest.raises(ConfigError, match=r"'loss' is logged in episodes and returned by PPO\.update"):
        trainer_of().fit(vessel)


def test_a_name_that_the_trainer_writes_itself_is_refused() -> None:
    class Naming(Reward[int]):
        def reward(self, simulator_state: int) -> float:
            self.log("total_steps", 99)
            return 0.0

    vessel = vessel_of()
    vessel.reward = Naming()
    with pytest.raises(ConfigError, match="'total_steps', which the trainer writes itself"):
        trainer_of().fit(vessel)


@pytest.mark.parametrize("policy", ["ppo", "dqn"])
def test_a_resumed_run_takes_the_learning_rate_that_it_is_given_and_says_so(
    tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    def make(lr: float) -> Any:
        vessel: Any = vessel_of(policy)
        kind = PPO if policy == "ppo" else DQN
        vessel.policy = kind(None, Position.observation_space, Direction.action_space, lr=lr)
        return vessel

    first = make(3e-3)
    first.policy.optimizer.param_groups[0]["lr"] = 1e-3  # as a schedule would
    trainer_of(max_iters=1, callbacks=[Checkpoint(tmp_path)]).fit(first)
    same, other = make(3e-3), make(1e-5)
    trainer_of(max_iters=1).fit(same, ckpt_path=tmp_path)
    assert same.policy.optimizer.param_groups[0]["lr"] == 1e-3
    assert not caplog.records
    trainer_of(max_iters=1).fit(other, ckpt_path=tmp_path)
    assert other.policy.optimizer.param_groups[0]["lr"] == 1e-5
    assert "began with lr=0.003; this one continues with its own, lr=1e-05" in caplog.text


def test_a_network_of_ones_own_runs_on_one_thread_unless_another_number_is_given() -> None:
    seen: list[int] = []

    class Network(torch.nn.Module):
        output_dim = 4

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 4)

        def forward(self, obs: Any) -> Any:
            seen.append(torch.get_num_threads())
            return self.layer(obs)

    def threads(**options: Any) -> set[int]:
        seen.clear()
        vessel = vessel_of()
        vessel.policy = PPO(Network(), Position.observation_space, Direction.action_space, lr=1e-3, **options)
        trainer_of(max_iters=1).fit(vessel)
        return set(seen)

    torch.set_num_threads(2)
    try:
        assert threads() == {1}
        assert threads(num_threads=3) == {3}
        assert threads(num_threads=None) == {2} == {torch.get_num_threads()}
        with pytest.raises(ConfigError, match="num_threads is 0"):
            threads(num_threads=0)
    finally:
        torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_fits_and_tests_leave_nothing_behind_and_memory_level(kind: Any, tmp_path: Path) -> None:
    me = psutil.Process()

    def once(kind: Any = kind) -> None:
        writer = CsvWriter(tmp_path / "a.csv", rows="step")
        trainer = trainer_of(finite_env_type=kind, loggers=writer, max_iters=1)
        vessel = vessel_of()
        trainer.fit(vessel)
        trainer.test(vessel)

    def left() -> tuple[int, int, int, int]:
        gc.collect()
        mapped = Path("/proc/self/maps").read_text().count("leyden-env")
        return me.num_fds(), len(me.children(recursive=True)), mapped, me.num_threads()

    for _ in range(30):  # so many until the allocators of torch and NumPy have grown to their size
        once("dummy")
    for _ in range(3):
        once()
    before, memory = left(), me.memory_info().rss
    for _ in range(20):
        once()
    assert left() == before
    assert me.memory_info().rss - memory < 2 * 2**20
