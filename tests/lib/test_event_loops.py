"""A loop that ends whatever its tasks and threads do."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from leyden._lib.event_loops import run_on_own_loop


def test_a_task_that_swallows_its_cancellation_and_a_thread_that_blocks_are_left_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    released = threading.Event()
    tasks: list[asyncio.Task[None]] = []

    async def swallow() -> None:
        while not released.is_set():
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass

    async def main() -> str:
        tasks.append(asyncio.create_task(swallow()))
        asyncio.get_running_loop().run_in_executor(None, released.wait)
        await asyncio.sleep(0)
        return "done"

    began = time.monotonic()
    try:
        assert run_on_own_loop(main()) == "done"
        assert time.monotonic() - began < 10
        assert "1 tasks ignored their cancellation" in caplog.text
    finally:
        released.set()
        tasks[0].get_coro().close()  # pyright: ignore[reportAttributeAccessIssue,reportOptionalMemberAccess] -- a coroutine


def test_tasks_that_are_left_over_leave_their_blocks() -> None:
    left: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            left.append("block")

    async def main() -> None:
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        assert not task.done()

    run_on_own_loop(main())
    assert left == ["block"]
