"""The trainer: order, counters, metrics, checkpoints, and what it refuses."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import leyden.rl.trainer
from leyden.errors import CheckpointError, ConfigError, SimulatorError
from leyden.rl import PPO, Reward, SeedIteratorNotAvailable, Trainer, TrainingVesselBase, backtest, train
from leyden.training import Callback, Checkpoint, CsvWriter, EarlyStopping, LogLevel, LogWriter, MetricsWriter
from leyden.training.runs import open_run
from tests.rl.parts import Direction, NearZero, Position, Walk, vessel_of


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def trainer_of(**options: Any) -> Trainer:
    return Trainer(**({"max_iters": 2, "finite_env_type": "dummy", "concurrency": 2} | options))


class Told(Callback):
    """Notes every hook, with the counters that it saw."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, str]] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("on_") or name in ("on_progress", "on_exception"):
            return found

        def hook(trainer: Any, vessel: Any) -> None:
            self.heard.append((name, trainer.current_iter, trainer.current_stage))

        return hook


def test_a_fit_goes_through_its_stages_in_order() -> None:
    told = Told()
    trainer_of(val_every_n_iters=2, callbacks=[told]).fit(vessel_of())
    assert told.heard == [
        ("on_fit_start", 0, "train"),
        ("on_iter_start", 0, "train"),
        ("on_train_start", 0, "train"),
        ("on_train_end", 1, "train"),
        ("on_iter_end", 1, "train"),
        ("on_iter_start", 1, "train"),
        ("on_train_start", 1, "train"),
        ("on_train_end", 2, "train"),
        ("on_validate_start", 2, "val"),
        ("on_validate_end", 2, "val"),
        ("on_iter_end", 2, "val"),
        ("on_fit_end", 2, "val"),
    ]


def test_metrics_are_of_episodes_of_the_update_and_of_validations_under_their_own_name() -> None:
    trainer = trainer_of(val_every_n_iters=1)
    trainer.fit(vessel_of())
    assert {"reward", "steps_per_episode", "distance", "loss", "val/reward", "val/distance"} <= trainer.metrics.keys()
    assert trainer.current_iter == 2
    assert trainer.current_episode == 12  # those of validations are not counted
    assert 8 <= trainer.metrics["steps_per_episode"] <= 10
    assert "val/loss" not in trainer.metrics


def test_a_trainer_can_be_asked_before_it_has_run() -> None:
    trainer = trainer_of()
    assert (trainer.current_iter, trainer.current_episode, dict(trainer.metrics), trainer.should_stop) == (
        0,
        0,
        {},
        False,
    )
    assert trainer.state_dict()["current_iter"] == 0


def test_the_loggers_given_are_left_as_they_were() -> None:
    loggers: list[LogWriter] = []
    trainer = Trainer(max_iters=1, loggers=loggers, finite_env_type="dummy", concurrency=1)
    trainer.fit(vessel_of())
    trainer_of().fit(vessel_of())
    assert loggers == []


def test_each_initial_state_is_trained_on_once_before_any_is_again() -> None:
    seen: list[int] = []

    class Noted(Walk):
        def __init__(self, initial: int) -> None:
            seen.append(initial)
            super().__init__(initial)

    vessel = vessel_of(episode_per_iter=5, val_initial_states=None)
    vessel.simulator_fn = Noted
    trainer_of(max_iters=7, concurrency=3).fit(vessel)
    assert len(seen) == 35  # and none is begun for nothing
    assert sorted(seen[:17]) == sorted(seen[17:34]) == list(range(-8, 9))
    assert seen[:17] != seen[17:34]


def test_a_test_runs_every_initial_state_once_and_its_metrics_have_no_prefix(tmp_path: Path) -> None:
    writer = CsvWriter(tmp_path / "episodes.csv", rows="episode")
    trainer = trainer_of(loggers=writer)
    answered = trainer.test(vessel_of(test_initial_states=[1, 2, 3, 4, 5]))
    assert trainer.current_stage == "test"
    assert answered == trainer.metrics
    assert {"reward", "distance"} <= answered.keys()
    with (tmp_path / "episodes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted(int(row["seed_index"]) for row in rows) == [0, 1, 2, 3, 4]


def test_a_stage_without_initial_states_says_so() -> None:
    with pytest.raises(SeedIteratorNotAvailable, match="validate"):
        trainer_of(val_every_n_iters=1).fit(vessel_of(val_initial_states=None))
    with pytest.raises(ConfigError, match="val_initial_states is empty"):
        vessel_of(val_initial_states=[])


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"max_iters": None}, "max_iters is None"),
        ({"fast_dev_run": 0}, "fast_dev_run is 0"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"val_every_n_iters": 0}, "val_every_n_iters is 0"),
        ({"finite_env_type": "ray"}, "ray"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        trainer_of(**options).fit(vessel_of())


def test_a_test_needs_no_number_of_iterations() -> None:
    assert trainer_of(max_iters=None).test(vessel_of())["reward"] is not None


def test_fast_dev_run_takes_few_states_and_few_episodes() -> None:
    trainer = trainer_of(fast_dev_run=2, val_every_n_iters=1, max_iters=3)
    trainer.fit(vessel_of())
    assert trainer.current_episode == 6


def test_a_finished_run_goes_on_when_it_is_given_more_iterations(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    trainer_of(callbacks=[checkpoint]).fit(vessel_of())
    again = Checkpoint(tmp_path)
    trainer = trainer_of(max_iters=5, callbacks=[again])
    trainer.fit(vessel_of(), ckpt_path=again.latest())
    assert (trainer.current_iter, trainer.current_episode) == (5, 30)


def test_a_callback_may_come_or_go_between_save_and_resume(tmp_path: Path) -> None:
    trainer_of(val_every_n_iters=1, callbacks=[EarlyStopping(patience=9), Checkpoint(tmp_path)]).fit(vessel_of())
    trainer = trainer_of(max_iters=3, val_every_n_iters=1, callbacks=[EarlyStopping(patience=2, min_delta=9.0), Told()])
    trainer.fit(vessel_of(), ckpt_path=tmp_path)
    assert trainer.current_iter == 3


@pytest.mark.parametrize("where", ["directory", "step", "pth"])
def test_a_policy_goes_on_from_any_form_of_a_checkpoint(tmp_path: Path, where: str) -> None:
    vessel = vessel_of()
    trainer_of(callbacks=[Checkpoint(tmp_path, filename="{iter:03d}.pth")]).fit(vessel)
    path = {"directory": tmp_path, "step": tmp_path / "step-000002", "pth": tmp_path / "002.pth"}[where]
    other = vessel_of()
    trainer = trainer_of()
    trainer.fit(other, ckpt_path=path)
    assert trainer.current_iter == 2  # it was finished: nothing is trained
    assert same(vessel.state_dict()["policy"], other.state_dict()["policy"])
    assert same(Trainer.get_policy_state_dict(path), vessel.state_dict()["policy"])


def test_a_checkpoint_of_another_policy_is_refused(tmp_path: Path) -> None:
    trainer_of(callbacks=[Checkpoint(tmp_path)]).fit(vessel_of("ppo"))
    with pytest.raises(CheckpointError, match=r"state of .PPO., format 1; DQN"):
        trainer_of().fit(vessel_of("dqn"), ckpt_path=tmp_path)


def test_a_place_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        trainer_of().fit(vessel_of(), ckpt_path=tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        trainer_of().fit(vessel_of(), ckpt_path=tmp_path / "nowhere.pth")


def test_a_pth_file_with_code_in_it_runs_none_of_it(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "was_here",))

    file = tmp_path / "evil.pth"
    torch.save({"vessel": Evil()}, file)
    with pytest.raises(CheckpointError, match=r"evil\.pth"):
        trainer_of().fit(vessel_of(), ckpt_path=file)
    assert not (tmp_path / "was_here").exists()
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(CheckpointError, match=r"evil\.pth"):
        trainer_of().fit(vessel_of(), ckpt_path=file)


def test_the_lowest_level_of_any_writer_is_what_environments_keep() -> None:
    class Debugging(LogWriter):
        def write(self, row: Any) -> None: ...

    assert trainer_of()._min_loglevel() == LogLevel.PERIODIC
    loggers = [Debugging(loglevel=LogLevel.INFO), Debugging(loglevel=LogLevel.DEBUG)]
    assert trainer_of(loggers=loggers)._min_loglevel() == LogLevel.DEBUG


def test_callbacks_and_loggers_have_names(tmp_path: Path) -> None:
    loggers = [CsvWriter(tmp_path / "a.csv"), CsvWriter(tmp_path / "b.csv")]
    trainer = trainer_of(callbacks=[Told(), Told()], loggers=loggers)
    assert len(trainer.named_callbacks()) == 2
    assert list(trainer.named_loggers()) == ["csvwriter:a.csv", "csvwriter:b.csv", "logbuffer"]
    assert list(trainer.named_loggers().values()) == [*loggers, trainer.loggers[-1]]


def test_a_vessel_of_ones_own_may_answer_nothing() -> None:
    class Idle(TrainingVesselBase[int]):
        def train_seed_iterator(self) -> Any:
            return iter([1, 2, 3])

        def train(self, vector_env: Any) -> None:
            vector_env.reset()
            while vector_env.alive.any():
                vector_env.step([1] * vector_env.num_envs)
                vector_env.reset([i for i in range(vector_env.num_envs) if not vector_env.alive[i]])

    parts = vessel_of()
    vessel = Idle(
        simulator_fn=Walk,
        state_interpreter=Position(),
        action_interpreter=Direction(),
        policy=parts.policy,
        reward=NearZero(),
    )
    trainer = trainer_of(max_iters=1)
    trainer.fit(vessel)
    assert trainer.current_episode == 3
    assert trainer.metrics["distance"] > 0


def test_train_and_backtest_are_one_call_each(tmp_path: Path) -> None:
    parts = vessel_of()
    trained = train(
        Walk, Position(), Direction(), [1, 2, 3], parts.policy, NearZero(),
        {"episode_per_iter": 3, "update_kwargs": {"batch_size": 16, "repeat": 1}},
        {"max_iters": 2, "finite_env_type": "dummy"},
    )  # fmt: skip
    assert trained.current_iter == 2
    writer = CsvWriter(tmp_path / "backtest.csv", rows="episode")
    metrics = backtest(Walk, Position(), Direction(), [5, 6], parts.policy, writer, NearZero(), "dummy", 1)
    assert metrics["reward"] < 0
    assert len((tmp_path / "backtest.csv").read_text().splitlines()) == 3


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


class Fragile(Walk):
    """Breaks at its third step, now and then."""

    broken: ClassVar[list[int]] = []

    def step(self, action: int) -> None:
        super().step(action)
        if self.initial % 3 == 0 and self.left == 6 and self.broken.count(self.initial) < 1:
            self.broken.append(self.initial)
            raise RuntimeError("a wire came loose")

    def __init__(self, initial: int) -> None:
        super().__init__(initial)
        self.initial = initial


@pytest.mark.parametrize("policy", ["ppo", "dqn"])
def test_an_episode_that_is_lost_is_run_again_and_nothing_of_it_is_counted(policy: str) -> None:
    Fragile.broken.clear()
    vessel = vessel_of(policy, train_initial_states=list(range(12)), episode_per_iter=12)
    vessel.simulator_fn = Fragile
    trainer = trainer_of(max_iters=1, concurrency=3, env_options={"on_worker_error": "retry"})
    trainer.fit(vessel)
    assert sorted(Fragile.broken) == [0, 3, 6, 9]
    assert trainer.current_episode == 12
    buffer = vessel._buffer
    whole = sum(10 - abs(start) % 3 for start in range(12))
    kept = 3 * len(Fragile.broken) if policy == "dqn" else 0  # the steps before the one that failed
    assert buffer is not None
    assert len(buffer) == whole + kept


def test_a_simulator_that_raises_ends_the_run_and_says_where() -> None:
    vessel = vessel_of(train_initial_states=[3, 3, 3])
    vessel.simulator_fn = Fragile
    Fragile.broken.clear()
    with pytest.raises(SimulatorError, match="a wire came loose"):
        trainer_of().fit(vessel)


def test_a_data_set_that_is_asked_by_name_says_what_is_wanted() -> None:
    with pytest.raises(ConfigError, match="dict, which has no item 0"):
        trainer_of().test(vessel_of(test_initial_states={"a": 1, "b": 2}))


class Dropping(torch.nn.Module):
    """A body that draws from torch's own generator."""

    output_dim = 16

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = torch.nn.Linear(1, 16), torch.nn.Dropout(0.5)

    def forward(self, obs: Any) -> Any:
        return self.dropout(torch.tanh(self.layer(obs)))


def test_a_resumed_run_whose_network_draws_from_torchs_generator_is_the_uninterrupted_one(tmp_path: Path) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        vessel = vessel_of()
        vessel.policy = PPO(Dropping(), Position.observation_space, Direction.action_space, lr=3e-3)
        return vessel

    straight, resumed = make(), make()
    trainer_of(max_iters=4).fit(straight)
    trainer_of(max_iters=2, callbacks=[Checkpoint(tmp_path)]).fit(make())
    torch.manual_seed(99)
    trainer_of(max_iters=4).fit(resumed, ckpt_path=tmp_path)
    assert same(straight.policy.state_dict(), resumed.policy.state_dict())


@pytest.mark.parametrize("source", ["001.pth", "step-000001"])
def test_a_run_goes_on_from_an_older_checkpoint_and_the_newer_ones_are_put_aside(
    tmp_path: Path, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    def checkpoint() -> Checkpoint:
        return Checkpoint(tmp_path, "{iter:03d}.pth", keep=None)

    straight = vessel_of()
    trainer_of(max_iters=3, callbacks=[checkpoint()]).fit(straight)
    trainer_of(max_iters=1, callbacks=[checkpoint()]).fit(vessel_of(), ckpt_path=tmp_path / source)
    assert not (tmp_path / "superseded").exists()  # nothing was trained
    again, trainer = vessel_of(), trainer_of(max_iters=2, callbacks=[checkpoint()])
    trainer.fit(again, ckpt_path=tmp_path / source)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("001.pth", "002.pth", "latest.pth", "step-000001", "step-000002", "superseded")
    ]
    assert sorted(path.name for path in (tmp_path / "superseded").iterdir()) == [
        *("002.pth", "003.pth", "step-000002", "step-000003")
    ]
    assert "the checkpoint of iteration 3 is now" in caplog.text
    newest = checkpoint().latest()
    assert newest is not None and newest.iteration == 2
    other = vessel_of()
    trainer_of(max_iters=3).fit(other, ckpt_path=newest)  # the moved ones are whole too, and the same
    assert same(other.state_dict(), straight.state_dict())
    assert same(Trainer.get_policy_state_dict(tmp_path / "superseded"), straight.state_dict()["policy"])


def test_a_directory_with_another_runs_newer_checkpoints_is_refused(tmp_path: Path) -> None:
    trainer_of(max_iters=1, callbacks=[Checkpoint(tmp_path / "one")]).fit(vessel_of())
    trainer_of(max_iters=3, callbacks=[Checkpoint(tmp_path / "two")]).fit(vessel_of())
    with pytest.raises(CheckpointError, match="holds the checkpoint of iteration 3, this run is at 1"):
        trainer_of(max_iters=4, callbacks=[Checkpoint(tmp_path / "two")]).fit(vessel_of(), ckpt_path=tmp_path / "one")


def test_a_misspelt_metric_is_named_with_the_nearest_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"EarlyStopping needs the metric 'val/rewrad', .*did you mean 'val/reward'\?"
    ):
        trainer_of(val_every_n_iters=1, callbacks=[EarlyStopping("val/rewrad")]).fit(vessel_of())


def test_a_misspelt_metric_of_validations_is_suspected_long_before_the_first_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks = [
        EarlyStopping("val/rewrad"),
        Checkpoint(tmp_path, monitor="val/rewrad"),
        EarlyStopping("val/of_its_own"),
    ]
    with pytest.raises(ConfigError, match=r"needs the metric 'val/rewrad'"):
        trainer_of(max_iters=2, val_every_n_iters=9, callbacks=callbacks).fit(vessel_of())
    suspected = [message for message in caplog.messages if "did you mean" in message]
    assert suspected == [
        f"{reader} waits for the metric 'val/rewrad'; did you mean 'val/reward'?"
        for reader in ("Checkpoint", "EarlyStopping")
    ]


def test_qlibs_early_stopping_warns_of_a_missing_metric_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(val_every_n_iters=1, callbacks=[EarlyStopping("pa", compat="qlib")])
    trainer.fit(vessel_of())
    assert trainer.current_iter == 2
    assert "EarlyStopping needs the metric 'pa', which is not there" in caplog.text


def test_callbacks_take_their_options_in_qlibs_order(tmp_path: Path) -> None:
    stopping = EarlyStopping("reward", 0.5, 3, "min", 1.0, True)
    assert (stopping.min_delta, stopping.patience, stopping.mode) == (0.5, 3, "min")
    assert (stopping.baseline, stopping.restore_best_weights) == (1.0, True)
    checkpoint = Checkpoint(tmp_path, "{iter:03d}.pth", "copy", 2, 60.0, False)
    assert (checkpoint.filename, checkpoint.save_latest, checkpoint.every_n_iters) == ("{iter:03d}.pth", "copy", 2)
    assert (checkpoint.time_interval, checkpoint.save_on_fit_end) == (60.0, False)
    assert MetricsWriter(tmp_path).dirpath == tmp_path
    names = leyden.rl.trainer
    assert (names.Checkpoint, names.EarlyStopping, names.MetricsWriter) == (Checkpoint, EarlyStopping, MetricsWriter)


def test_metrics_that_a_stage_lacks_are_named_by_the_metrics_writer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Silent(Reward[int]):
        steps = 0

        def reward(self, simulator_state: int) -> float:
            Silent.steps += 1
            if Silent.steps <= 50:
                self.log("early", 1.0)
            return 0.0

    vessel = vessel_of()
    vessel.reward = Silent()
    trainer_of(max_iters=4, callbacks=[MetricsWriter(tmp_path)]).fit(vessel)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["MetricsWriter: stage 'train' of iteration 2 lacks early, which earlier rows have"]


def validated_after(trainer: Trainer, vessel: Any, **options: Any) -> list[int]:
    """Return the iterations after which a fit validates."""
    told = Told()
    trainer.callbacks.append(told)
    trainer.fit(vessel, **options)
    return [iteration for name, iteration, _ in told.heard if name == "on_validate_end"]


@pytest.mark.parametrize(
    ("every", "max_iters", "expected"),
    [(None, 2, [2]), (3, 2, [2]), (2, 3, [2]), (1, 2, [1, 2]), (2, 2, [2]), (None, 0, [])],
)
def test_states_to_validate_on_that_no_interval_uses_are_run_once_after_the_last_iteration(
    every: int | None, max_iters: int, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    trainer = trainer_of(val_every_n_iters=every, max_iters=max_iters)
    assert validated_after(trainer, vessel_of()) == expected
    said = [message for message in caplog.messages if "the validation set is run once" in message]
    assert len(said) == (expected == [2] and every in (None, 3))
    assert trainer.val_every_n_iters == every
    assert ("val/reward" in trainer.metrics) == bool(expected and expected[-1] == max_iters)
    assert validated_after(trainer_of(max_iters=2), vessel_of(val_initial_states=None)) == []


def test_train_validates_on_the_states_of_its_vessel_once() -> None:
    vessel = vessel_of()
    trainer = train(
        vessel.simulator_fn,
        vessel.state_interpreter,
        vessel.action_interpreter,
        [1, 2, 3],
        vessel.policy,
        vessel.reward,
        {"val_initial_states": [-4, 3], "episode_per_iter": 3},
        {"max_iters": 1, "finite_env_type": "dummy"},
    )
    assert "val/reward" in trainer.metrics


def test_states_to_validate_on_without_an_interval_and_an_end_are_refused_before_anything_begins() -> None:
    told = Told()
    with pytest.raises(ConfigError, match="nothing says when to use them; give the trainer val_every_n_iters"):
        trainer_of(max_iters=None, callbacks=[told]).fit(vessel_of())
    assert told.heard == []


def test_early_stopping_on_a_validation_needs_an_interval_although_the_end_is_validated() -> None:
    with pytest.raises(ConfigError, match="EarlyStopping monitors 'val/reward', but the loop has no interval"):
        trainer_of(callbacks=[EarlyStopping()]).fit(vessel_of())


@pytest.mark.parametrize("every", [None, 9])
def test_a_last_validation_that_failed_or_was_stopped_is_done_by_the_resumed_run(
    tmp_path: Path, every: int | None
) -> None:
    class Stopping(Callback):
        def on_train_end(self, loop: Any, vessel: Any) -> None:
            if loop.current_iter == 3:
                loop.stop()

    class Failing(Callback):
        def on_validate_start(self, loop: Any, vessel: Any) -> None:
            raise ZeroDivisionError

    def make(folder: Path, *callbacks: Callback) -> Trainer:
        saving = Checkpoint(folder / "checkpoints")
        return trainer_of(max_iters=3, val_every_n_iters=every, callbacks=[*callbacks, saving], run_dir=folder)

    stopped, failed = tmp_path / "stopped", tmp_path / "failed"
    assert validated_after(make(stopped, Stopping()), vessel_of()) == []
    with pytest.raises(ZeroDivisionError):
        make(failed, Failing()).fit(vessel_of())
    for folder in (stopped, failed):
        assert validated_after(make(folder), vessel_of(), resume=True) == [3]
        assert [(row.stage, row.iteration) for row in open_run(folder).metrics()] == [
            ("train", 1),
            ("train", 2),
            ("train", 3),
            ("val", 3),
        ]


def test_a_run_that_is_made_longer_validates_at_its_new_end(tmp_path: Path) -> None:
    def make(max_iters: int) -> Trainer:
        return trainer_of(max_iters=max_iters, callbacks=[Checkpoint(tmp_path / "checkpoints")], run_dir=tmp_path)

    assert validated_after(make(1), vessel_of()) == [1]
    assert validated_after(make(3), vessel_of(), resume=True) == [3]
    assert validated_after(make(3), vessel_of(), resume=True) == []
