"""A run that was stopped and resumed equals the one that was not, to the bit; its files too."""

import asyncio
import csv
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.errors import CheckpointError, ConfigError
from leyden.training import (
    Callback,
    Checkpoint,
    CsvWriter,
    EarlyStopping,
    JsonlWriter,
    LogWriter,
    MetricsRow,
    MetricsWriter,
    TrainLoop,
)
from tests.training.toy import AsyncToyVessel, ToyVessel


class StopAt(Callback):
    """Stops while step `n` (from 0) is under way."""

    def __init__(self, n: int | None) -> None:
        self.n = n

    def on_train_start(self, loop: TrainLoop, vessel: Any) -> None:
        if loop.current_iter == self.n:
            loop.stop()


def make(
    folder: Path, *, max_iters: int = 8, stop_at: int | None = None, every: int = 1
) -> tuple[TrainLoop, Checkpoint]:
    checkpoint = Checkpoint(folder / "checkpoints", every_n_iters=every)
    loop = TrainLoop(
        max_iters=max_iters,
        val_every_n_iters=2,
        validate_first=True,
        callbacks=[checkpoint, StopAt(stop_at), EarlyStopping(patience=50), MetricsWriter(folder)],
        writers=[CsvWriter(folder / "metrics.csv"), JsonlWriter(folder / "metrics.jsonl")],
    )
    return loop, checkpoint


def files(folder: Path) -> dict[str, Any]:
    """Everything written, without wall-clock times."""
    content: dict[str, Any] = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            content[path.name] = [{**row, "seconds": ""} for row in csv.DictReader(file)]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    content["jsonl"] = [{**json.loads(line), "seconds": ""} for line in lines]
    return content


def uninterrupted(folder: Path, max_iters: int = 8) -> ToyVessel:
    random.seed(7)
    vessel = ToyVessel()
    make(folder, max_iters=max_iters)[0].run(vessel)
    return vessel


@pytest.mark.parametrize("stop_at", [0, 1, 4, 7])
@pytest.mark.parametrize("every", [1, 3])
def test_stopped_and_resumed_equals_uninterrupted(tmp_path: Path, stop_at: int, every: int) -> None:
    whole = uninterrupted(tmp_path / "whole")
    random.seed(7)
    make(tmp_path / "parts", stop_at=stop_at, every=every)[0].run(ToyVessel())
    random.seed(99)  # what the resumed process would have
    loop, checkpoint = make(tmp_path / "parts", every=every)
    vessel = ToyVessel(seed=5)
    saved = checkpoint.latest()
    assert saved is not None and saved.iteration == stop_at + 1
    loop.run(vessel, resume=saved)
    assert (vessel.weight, vessel.steps) == (whole.weight, whole.steps)
    assert vessel.random.getstate() == whole.random.getstate()
    assert files(tmp_path / "parts") == files(tmp_path / "whole")


def test_an_asynchronous_run_resumes_a_synchronous_one(tmp_path: Path) -> None:
    whole = uninterrupted(tmp_path / "whole")
    random.seed(7)
    make(tmp_path / "parts", stop_at=3)[0].run(ToyVessel())
    loop, checkpoint = make(tmp_path / "parts")
    vessel = AsyncToyVessel(seed=5)
    asyncio.run(loop.arun(vessel, resume=checkpoint.latest()))
    assert vessel.toy.weight == whole.weight
    assert files(tmp_path / "parts") == files(tmp_path / "whole")


def test_a_finished_run_goes_on_when_it_is_given_more_iterations(tmp_path: Path) -> None:
    whole = uninterrupted(tmp_path / "whole", max_iters=8)
    uninterrupted(tmp_path / "parts", max_iters=4)
    loop, checkpoint = make(tmp_path / "parts", max_iters=8)
    vessel = ToyVessel()
    loop.run(vessel, resume=checkpoint.latest())
    assert (vessel.weight, files(tmp_path / "parts")) == (whole.weight, files(tmp_path / "whole"))


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    uninterrupted(tmp_path)
    before, steps = files(tmp_path), Checkpoint(tmp_path / "checkpoints").store.steps()
    loop, checkpoint = make(tmp_path)
    vessel = ToyVessel()
    loop.run(vessel, resume=checkpoint.latest())
    assert vessel.steps == list(range(8))
    assert (files(tmp_path), checkpoint.store.steps()) == (before, steps)


def test_time_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    uninterrupted(tmp_path, max_iters=2)
    loop, checkpoint = make(tmp_path, max_iters=3)
    saved = checkpoint.latest()
    assert saved is not None
    loop.run(ToyVessel(), resume=saved)
    assert loop.total_seconds > saved.state["total_seconds"] > 0


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    uninterrupted(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000007", "step-000008"]


def test_a_fresh_run_refuses_to_mix_its_checkpoints_with_those_of_another(tmp_path: Path) -> None:
    uninterrupted(tmp_path)
    before = files(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds the checkpoint of iteration 8, this run is at 0; resume"):
        TrainLoop(max_iters=9, callbacks=[Checkpoint(tmp_path / "checkpoints")]).run(ToyVessel())
    assert files(tmp_path) == before


def test_a_callback_whose_state_is_lost_is_named_and_a_new_one_starts_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uninterrupted(tmp_path, max_iters=2)
    checkpoint = Checkpoint(tmp_path / "checkpoints")
    stopping = EarlyStopping("reward", patience=50)
    loop = TrainLoop(max_iters=4, callbacks=[checkpoint, stopping])
    loop.run(ToyVessel(), resume=checkpoint.latest())
    assert stopping.best is not None
    assert "earlystopping:val/reward" in caplog.text and "csvwriter:metrics.csv" in caplog.text


class Counter(Callback):
    """Learns something in the very hook in which checkpoints are made."""

    def __init__(self) -> None:
        self.count = 0

    def on_iter_end(self, loop: TrainLoop, vessel: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_a_checkpoint_holds_what_other_callbacks_learned_in_the_same_hook(tmp_path: Path) -> None:
    for max_iters in (2, 5):
        checkpoint, counters = Checkpoint(tmp_path), [Counter(), Counter()]
        loop = TrainLoop(max_iters=max_iters, callbacks=[checkpoint, *counters])
        loop.run(ToyVessel(), resume=checkpoint.latest())
        assert [counter.count for counter in counters] == [max_iters, max_iters]


class Unsaveable(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"where": Path()}


def test_a_state_that_is_not_json_is_refused_by_the_name_of_its_callback(tmp_path: Path) -> None:
    loop = TrainLoop(max_iters=1, callbacks=[Checkpoint(tmp_path), Unsaveable()])
    with pytest.raises(CheckpointError, match=r"callback 'unsaveable' is not JSON: .*PosixPath"):
        loop.run(ToyVessel())
    assert Checkpoint(tmp_path).latest() is None


def names(folder: Path, pattern: str) -> list[str]:
    return [path.name for path in folder.glob(pattern)]


class Heavy(AsyncToyVessel):
    async def save(self, path: Path) -> None:
        (path / "weights.bin").write_bytes(bytes(100_000_000))


async def test_a_cancelled_save_is_completed_before_the_run_ends(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    task = asyncio.create_task(TrainLoop(max_iters=2, callbacks=[checkpoint]).arun(Heavy()))
    while not names(tmp_path, ".tmp-*/state.json"):  # noqa: ASYNC110 -- only the file says that the save is under way
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert names(tmp_path, "*") == ["step-000001"]
    assert checkpoint.store.damage(1) is None


class Scripted(ToyVessel):
    """Validation rewards from a list."""

    def __init__(self, rewards: list[float]) -> None:
        super().__init__()
        self.rewards = rewards

    def validate(self, iteration: int) -> dict[str, Any]:
        return {"reward": self.rewards[iteration - 1]}


def stopped_after(rewards: list[float], **options: Any) -> int:
    loop = TrainLoop(max_iters=len(rewards), val_every_n_iters=1, callbacks=[EarlyStopping(**options)])
    loop.run(Scripted(rewards))
    return loop.current_iter


def test_early_stopping_counts_looks_without_improvement() -> None:
    assert stopped_after([0, 1, 2, 3, 4], patience=1) == 5
    assert stopped_after([0, 1, 1, 0, 5], patience=2) == 4
    assert stopped_after([5, 4, 4, 3, 3], patience=2, mode="min") == 5
    assert stopped_after([0, 0.1, 0.2, 0.3], patience=2, min_delta=0.5) == 3
    assert stopped_after([float("nan"), float("nan"), 1], patience=2) == 2


def test_patience_0_stops_at_the_first_validation_that_does_not_improve() -> None:
    assert stopped_after([0, 1, 2, 3]) == 4
    assert stopped_after([0, 1, 1, 3]) == 3
    assert stopped_after([float("nan"), 1]) == 1


def test_an_improvement_below_the_baseline_uses_up_patience() -> None:
    assert stopped_after([0, 1, 2, 3, 4], patience=2, baseline=9) == 2
    assert stopped_after([0, 1, 5, 3, 4], patience=3, baseline=4) == 5
    assert stopped_after([9, 8, 2, 2, 2], patience=3, baseline=4, mode="min") == 5


def keras_2_9(rewards: list[float], patience: int, baseline: float | None) -> int:
    """The rule as Keras 2.9 has it, which Qlib copied; epochs from 0. Answers how many there are."""
    wait, best = 0, -math.inf
    for epoch, current in enumerate(rewards):
        wait += 1
        if current > best:
            best = current
            if baseline is None or current > baseline:
                wait = 0
        if wait >= patience and epoch > 0:
            return epoch + 1
    return len(rewards)


@settings(max_examples=60)
@given(
    rewards=st.lists(st.integers(0, 4).map(float), min_size=1, max_size=8),
    patience=st.integers(0, 3),
    baseline=st.none() | st.just(2.0),
)
def test_compat_qlib_has_the_patience_rule_of_keras_2_9(
    rewards: list[float], patience: int, baseline: float | None
) -> None:
    options: dict[str, Any] = {"patience": patience, "baseline": baseline, "compat": "qlib"}
    assert stopped_after(rewards, monitor="val/reward", **options) == keras_2_9(rewards, patience, baseline)


def test_the_default_monitor_is_the_validation_reward_and_for_qlib_the_training_reward() -> None:
    watching, qlibs = EarlyStopping(patience=9), EarlyStopping(patience=9, compat="qlib")
    vessel = Scripted([5.0, 7.0, 6.0, 1.0])
    rewards: list[float] = []

    class Noting(Callback):
        def on_validate_end(self, loop: TrainLoop, vessel: Any) -> None:
            rewards.append(float(loop.metrics["reward"]))

    TrainLoop(max_iters=4, val_every_n_iters=2, callbacks=[watching, qlibs, Noting()]).run(vessel)
    assert (watching.best, watching.best_iter) == (7.0, 2)
    assert len(rewards) == 2 and qlibs.best == max(rewards)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("patience", [1, 50])
def test_the_best_weights_are_restored_when_the_fit_ends_stopped_or_not(
    tmp_path: Path, patience: int, asynchronous: bool
) -> None:
    rewards = [1.0, 2.0, 5.0, 3.0, 4.0]
    checkpoint = Checkpoint(tmp_path, keep=None, monitor="val/reward")
    stopping = EarlyStopping(patience=patience, restore_best_weights=True)
    loop = TrainLoop(max_iters=5, val_every_n_iters=1, callbacks=[stopping, checkpoint])
    if asynchronous:
        vessel = AsyncToyVessel()
        scripted = vessel.toy = Scripted(rewards)
        asyncio.run(loop.arun(vessel))
    else:
        scripted = Scripted(rewards)
        loop.run(scripted)
    assert loop.current_iter == (4 if patience == 1 else 5)
    best, newest = checkpoint.best(), checkpoint.latest()
    assert best is not None and newest is not None
    assert best.iteration == stopping.best_iter == 3, "the same number"
    assert json.loads((best.vessel_path / "toy.json").read_text())["weight"] == scripted.weight
    assert newest.iteration == loop.current_iter, "what a resumed run goes on from is the last state, not the best"
    assert len(json.loads((newest.vessel_path / "toy.json").read_text())["steps"]) == loop.current_iter


def test_the_best_weights_survive_a_resume(tmp_path: Path) -> None:
    rewards = [1.0, 5.0, 2.0, 3.0, 4.0, 4.0]
    weights: list[float] = []
    for name, parts in (("whole", [6]), ("parts", [3, 4, 6])):
        for max_iters in parts:
            checkpoint, vessel = Checkpoint(tmp_path / name), Scripted(rewards)
            random.seed(7)
            stopping = EarlyStopping(patience=50, restore_best_weights=True)
            loop = TrainLoop(max_iters=max_iters, val_every_n_iters=1, callbacks=[checkpoint, stopping])
            loop.run(vessel, resume=checkpoint.latest())
        assert vessel.steps == [0, 1]
        weights.append(vessel.weight)
    assert weights[0] == weights[1]


def test_two_loops_do_not_share_the_lists_that_they_were_given(tmp_path: Path) -> None:
    callbacks: list[Callback] = [Checkpoint(tmp_path), StopAt(None)]
    writers: list[LogWriter] = [JsonlWriter(tmp_path / "a.jsonl")]
    loop = TrainLoop(max_iters=1, callbacks=callbacks, writers=writers)
    loop.writers.append(JsonlWriter(tmp_path / "b.jsonl"))
    loop.run(ToyVessel())
    assert len(writers) == 1 and [type(each) for each in callbacks] == [Checkpoint, StopAt]


def test_early_stopping_goes_on_counting_after_a_resume_and_stays_stopped(tmp_path: Path) -> None:
    rewards = [3.0, 2.0, 1.0, 0.0, 0.0, 0.0]

    def part(max_iters: int, patience: int) -> int:
        checkpoint = Checkpoint(tmp_path)
        stopping = EarlyStopping(patience=patience)
        loop = TrainLoop(max_iters=max_iters, val_every_n_iters=1, callbacks=[checkpoint, stopping])
        loop.run(Scripted(rewards), resume=checkpoint.latest())
        return loop.current_iter

    assert part(max_iters=3, patience=3) == 3  # two looks without improvement
    assert part(max_iters=6, patience=3) == 4  # the third
    assert part(max_iters=6, patience=3) == 4
    assert part(max_iters=6, patience=9) == 6


def test_wrong_options_of_early_stopping_are_refused_with_their_value() -> None:
    for options in ({"patience": -1}, {"min_delta": -0.5}, {"mode": "best"}, {"compat": "keras"}):
        with pytest.raises(ConfigError, match=str(next(iter(options.values())))):
            EarlyStopping(**options)  # type: ignore[arg-type]


def test_early_stopping_names_the_metrics_that_exist() -> None:
    loop = TrainLoop(max_iters=9, val_every_n_iters=5, callbacks=[EarlyStopping("val/score", patience=1)])
    with pytest.raises(
        ConfigError, match=r"EarlyStopping needs the metric 'val/score', which is not there.* There are: late, note"
    ):
        loop.run(ToyVessel())
    with pytest.raises(ConfigError, match="no interval of validations; set val_every_n_iters"):
        TrainLoop(max_iters=1, callbacks=[EarlyStopping(patience=1)]).run(ToyVessel())


class Spoiled(LogWriter):
    def write(self, row: MetricsRow) -> None:
        raise OSError("disk full")


def test_a_row_that_cannot_be_written_ends_the_run_and_what_was_saved_stays(tmp_path: Path) -> None:
    uninterrupted(tmp_path, max_iters=2)
    checkpoint = Checkpoint(tmp_path / "checkpoints")
    loop = TrainLoop(max_iters=4, callbacks=[checkpoint], writers=[Spoiled()])
    with pytest.raises(OSError, match="disk full"):
        loop.run(ToyVessel(), resume=checkpoint.latest())
    saved = checkpoint.latest()
    assert saved is not None and saved.iteration == 2
