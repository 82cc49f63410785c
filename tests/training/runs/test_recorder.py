"""A recorder with a store that is slow, fails, or refuses a metric: the store ends up with what the folder has."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.algorithm import Run
from leyden.errors import ConfigError, InvalidMetrics, StoreError
from leyden.store import SqliteLightningStore
from leyden.training import MetricsRow
from leyden.training.runs import open_run
from leyden.training.runs.opening import begin_run
from leyden.training.runs.recording import FolderRecorder
from leyden.types.run_record import MetricPoint, RunRecord


@ly.rollout
async def agent(task: int) -> float:
    if task < 0:
        raise ValueError("negative")
    return float(task)


class Troubled(SqliteLightningStore):
    """A store whose first writes of metrics take a while or fail."""

    def __init__(self, path: Path, *, seconds: float = 0.0, failures: int = 0) -> None:
        super().__init__(path)
        self.seconds, self.failures = seconds, failures

    async def add_metrics(self, run_id: str, points: Sequence[MetricPoint]) -> None:
        await asyncio.sleep(self.seconds)
        if self.failures:
            self.failures -= 1
            raise StoreError("the server restarts")
        await super().add_metrics(run_id, points)


async def rewards_after(store: SqliteLightningStore, directory: Path, rows: Sequence[dict[str, Any]]) -> list[Any]:
    """The rewards that the store has after a run that reported these rows."""

    @ly.algo
    async def search(*, run: Run) -> None:
        for row in rows:
            run.report(row)
            await asyncio.sleep(0.02)

    async with store:
        summary = await ly.Trainer(algorithm=search, run_dir=directory, store=store, progress=False).afit(agent)
        assert summary.run_id is not None
        return [point.value for point in await store.query_metrics(summary.run_id, names=["reward"])]


@pytest.mark.parametrize("trouble", [{"seconds": 0.1}, {"failures": 1}], ids=["slow", "failing"])
async def test_a_store_that_is_slow_or_fails_for_a_while_gets_every_metric(
    tmp_path: Path, trouble: dict[str, Any]
) -> None:
    store = Troubled(tmp_path / "store.sqlite", **trouble)
    assert await rewards_after(store, tmp_path, [{"reward": float(n)} for n in range(3)]) == [0.0, 1.0, 2.0]


async def test_a_metric_that_no_store_takes_costs_no_other_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"reward": 1.0}, {"reward": 2.0, "bad\nname": 1.0, "": 1.0}, {"reward": 3.0, "bad\nname": 1.0}]
    assert await rewards_after(SqliteLightningStore(tmp_path / "store.sqlite"), tmp_path, rows) == [1.0, 2.0, 3.0]
    warnings = [record.getMessage() for record in caplog.records if "does not take" in record.getMessage()]
    assert len(warnings) == 2, warnings
    assert any("'bad\\nname'" in warning for warning in warnings)
    assert "bad\nname" in open_run(tmp_path).metrics()[1].metrics


@pytest.mark.parametrize("iteration", [-3, 1.5, "2"])
def test_an_iteration_that_is_no_count_is_refused_and_not_recorded(tmp_path: Path, iteration: Any) -> None:
    @ly.algo
    async def search(*, run: Run) -> None:
        with pytest.raises(ConfigError, match="iteration is"):
            run.report({"reward": 1.0}, iteration=iteration)
        with pytest.raises(InvalidMetrics, match="more than a float can hold"):
            run.report({"reward": 10**400})
        run.report({"reward": 2.0})

    ly.Trainer(algorithm=search, run_dir=tmp_path, progress=False).fit(agent)
    assert [(row.iteration, row.metrics) for row in open_run(tmp_path).metrics()] == [(1, {"reward": 2.0})]


class Busy(SqliteLightningStore):
    """A store in which another rollout fails between two pages of failed rollouts."""

    asked = 0

    async def query_rollouts(self, **options: Any) -> Any:
        if options.get("status_in") == ["failed"] and options.get("offset"):
            self.asked += 1
            rollout = await self.start_rollout(input=0, run_id=options.get("run_id"))
            await self.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed")
        return await super().query_rollouts(**options)


async def test_a_failure_while_failures_are_read_doubles_none(tmp_path: Path) -> None:
    @ly.algo
    async def careless(*, run: Run, store: ly.LightningStore) -> None:
        for _ in range(150):
            rollout = await store.start_rollout(input=0)
            await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="failed")

    async with Busy(tmp_path / "store.sqlite") as store:
        await ly.Trainer(algorithm=careless, run_dir=tmp_path, store=store, progress=False).afit(agent)
        assert store.asked
    recorded = [failure.rollout_id for failure in open_run(tmp_path).failures()]
    assert len(recorded) == len(set(recorded)) == 150


def test_an_end_that_cannot_be_written_is_a_warning_and_leaves_no_log_handler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, manifest = begin_run(tmp_path / "run", config={})
    before = logging.getLogger("leyden").handlers[:]
    recorder = FolderRecorder(directory, manifest)
    recorder.open()
    shutil.rmtree(directory)
    directory.write_text("a file where the folder was")
    recorder.close("succeeded")
    assert logging.getLogger("leyden").handlers == before
    assert "the end of the run (succeeded) is not recorded: cannot keep a run in" in caplog.text


def test_a_row_that_does_not_fit_on_the_disk_names_the_file(tmp_path: Path) -> None:
    directory, manifest = begin_run(tmp_path / "run", config={})
    (directory / "metrics.jsonl").symlink_to("/dev/full")
    recorder = FolderRecorder(directory, manifest)
    recorder.open()
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics\.jsonl'"):
        recorder.add_row(MetricsRow(1, "train", 1.0, {"reward": 1.0}))
    recorder.close("failed", "disk full")
    assert open_run(directory).state == "failed"


@pytest.mark.parametrize("name", ["x" * 240, "two\nlines", "zero\u200bwidth", "\u00a0"])
def test_a_run_may_be_in_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    ly.Trainer(algorithm="baseline", run_dir=tmp_path / name, progress=False).fit(agent, [1])
    run = open_run(tmp_path / name)
    assert run.state == "succeeded"
    assert 0 < len(run.record.name) <= 200 and run.record.name.isprintable()
    (tmp_path / name / "run.json").write_text('{"format": 1, "run_id": "abcd", "started": 1.0}')
    ly.Trainer(algorithm="baseline", run_dir=tmp_path / name, progress=False).fit(agent, [1], resume=True)


class Closed(SqliteLightningStore):
    """A store that takes no run."""

    async def start_run(self, run: RunRecord) -> RunRecord:
        raise ConfigError("no run is taken here")


async def test_a_store_that_does_not_take_the_run_ends_it_with_its_own_error(tmp_path: Path) -> None:
    async with Closed(tmp_path / "store.sqlite") as store:
        with pytest.raises(ConfigError, match="no run is taken here"):
            await ly.Trainer(algorithm="baseline", run_dir=tmp_path / "run", store=store).afit(agent, [1])
    assert not (tmp_path / "run").exists()
