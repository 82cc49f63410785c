"""Checkpoints that are completed while training goes on, and when a checkpoint is due by its size."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from leyden.errors import ConfigError
from leyden.training import Checkpoint, TrainLoop


class Slow:
    """A vessel that copies its number when it is saved, and writes it when `release` is set."""

    def __init__(self, *, n_bytes: int = 0) -> None:
        self.number = 0
        self.release = asyncio.Event()
        self.fails_at: set[int] = set()
        self.n_bytes = n_bytes
        self.begun: list[int] = []
        self._reached: dict[int, asyncio.Event] = {}

    async def reached(self, number: int) -> None:
        """Wait until step `number` has been made."""
        await self._reached.setdefault(number, asyncio.Event()).wait()

    async def step(self, iteration: int) -> dict[str, float]:
        self.number += 1
        self._reached.setdefault(self.number, asyncio.Event()).set()
        await asyncio.sleep(0)
        return {"reward": float(-abs(self.number - 3))}

    async def validate(self, iteration: int) -> dict[str, float]:
        return {}

    async def save(self, path: Path) -> Callable[[], Awaitable[None]] | None:
        copied = self.number
        self.begun.append(copied)

        async def write() -> None:
            await self.release.wait()
            if copied in self.fails_at:
                raise OSError(28, "No space left on device")
            (path / "number.json").write_text(json.dumps(copied))
            (path / "padding").write_bytes(bytes(self.n_bytes))

        return write

    async def load(self, path: Path) -> None:
        self.number = json.loads((path / "number.json").read_text())


async def test_training_goes_on_while_a_checkpoint_is_written_and_it_holds_the_state_of_its_iteration(tmp_path: Path):
    vessel, checkpoint = Slow(), Checkpoint(tmp_path, every_n_iters=2, keep=None)
    loop = TrainLoop(max_iters=3, callbacks=[checkpoint])
    running = asyncio.create_task(loop.arun(vessel))
    await vessel.reached(3)
    assert vessel.begun[0] == 2  # a third step was made while the second one's state was not written
    assert checkpoint.store.steps() == []
    assert checkpoint.last_saved == 0
    vessel.release.set()
    await running
    assert checkpoint.store.steps() == [2, 3]
    for step in (2, 3):
        saved = checkpoint.store.load(step)
        assert saved.state["current_iter"] == step
        assert json.loads((saved.vessel_path / "number.json").read_text()) == step


async def test_a_checkpoint_waits_for_the_one_before_it(tmp_path: Path):
    vessel, checkpoint = Slow(), Checkpoint(tmp_path, keep=None)
    running = asyncio.create_task(TrainLoop(max_iters=4, callbacks=[checkpoint]).arun(vessel))
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert vessel.begun == [1]
    vessel.release.set()
    await running
    assert checkpoint.store.steps() == [1, 2, 3, 4]


async def test_a_write_that_fails_is_reported_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    vessel, checkpoint = Slow(), Checkpoint(tmp_path, keep=None)
    vessel.release.set()
    vessel.fails_at = {2}
    with caplog.at_level(logging.ERROR, logger="leyden.training"):
        await TrainLoop(max_iters=4, callbacks=[checkpoint]).arun(vessel)
    assert checkpoint.store.steps() == [1, 3, 4]
    assert "iteration 2 could not be written" in caplog.text
    assert "No space left" in caplog.text


async def test_a_best_checkpoint_that_could_not_be_written_leaves_the_best_before(tmp_path: Path):
    """The reward is highest after step 3, which is never on disk; step 2 is the next best."""
    vessel, checkpoint = Slow(), Checkpoint(tmp_path, every_n_iters=1, keep=1, monitor="reward")
    vessel.fails_at = {3}
    vessel.release.set()
    await TrainLoop(max_iters=6, callbacks=[checkpoint]).arun(vessel)
    best = checkpoint.best()
    assert best is not None
    assert best.iteration in (2, 4), "both have the reward -1"
    assert (best.path / "vessel" / "number.json").exists()


async def test_a_failure_of_the_last_write_is_raised_and_the_last_whole_checkpoint_stays(tmp_path: Path):
    vessel, checkpoint = Slow(), Checkpoint(tmp_path)
    vessel.release.set()
    vessel.fails_at = {3}
    with pytest.raises(OSError, match="No space left"):
        await TrainLoop(max_iters=3, callbacks=[checkpoint]).arun(vessel)
    assert checkpoint.store.steps() == [1, 2]
    fresh = Checkpoint(tmp_path)
    saved = fresh.latest()
    assert saved is not None
    resumed = Slow()
    resumed.release.set()
    await TrainLoop(max_iters=3, callbacks=[fresh]).arun(resumed, resume=saved)
    assert (resumed.number, fresh.store.steps()) == (3, [2, 3])


async def test_a_failing_step_and_a_cancellation_wait_for_the_checkpoint_that_is_being_written(tmp_path: Path):
    class Fails(Slow):
        async def step(self, iteration: int) -> dict[str, float]:
            if iteration == 1:
                asyncio.get_running_loop().call_later(0.02, self.release.set)
                raise RuntimeError("no")
            return await super().step(iteration)

    checkpoint = Checkpoint(tmp_path / "fails")
    with pytest.raises(RuntimeError, match="no"):
        await TrainLoop(max_iters=3, callbacks=[checkpoint]).arun(Fails())
    assert checkpoint.store.steps() == [1]

    vessel, checkpoint = Slow(), Checkpoint(tmp_path / "cancelled", every_n_iters=5)
    running = asyncio.create_task(TrainLoop(callbacks=[checkpoint], max_iters=10**6).arun(vessel))
    await vessel.reached(7)
    running.cancel()
    asyncio.get_running_loop().call_later(0.02, vessel.release.set)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert checkpoint.store.steps() == [5]


@pytest.mark.parametrize(("n_bytes", "wanted"), [(10, [1, 2, 3, 4, 5, 6]), (100_000, [1, 4, 6])])
async def test_a_large_checkpoint_is_saved_by_time_and_a_small_one_every_iteration(
    tmp_path: Path, n_bytes: int, wanted: list[int]
):
    now = 0.0

    class Ticks(Slow):
        async def step(self, iteration: int) -> dict[str, float]:
            nonlocal now
            now += 10
            return await super().step(iteration)

    vessel = Ticks(n_bytes=n_bytes)
    vessel.release.set()
    checkpoint = Checkpoint(
        tmp_path, every_n_iters=1, time_interval=30, small_bytes=50_000, keep=None, clock=lambda: now
    )
    await TrainLoop(max_iters=6, callbacks=[checkpoint]).arun(vessel)
    assert vessel.begun == wanted
    assert checkpoint.store.steps() == wanted


def test_a_size_without_a_time_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="time_interval"):
        Checkpoint(tmp_path, small_bytes=1)
