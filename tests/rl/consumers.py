"""Data sets, and what consumers of a data queue do, in processes of their own. A light module: each of these imports it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from leyden.errors import DataQueueClosed


class Slow:
    """Items that take a while to read, and say which process read them."""

    def __init__(self, n: int, seconds: float = 0.0, mark: Path | None = None) -> None:
        self.n, self.seconds, self.mark = n, seconds, mark

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> tuple[int, int]:
        if index >= self.n:
            raise IndexError(index)
        if self.mark is not None and index == 3 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.seconds)
        return index, os.getpid()


class Deadly(Slow):
    def __getitem__(self, index: Any) -> tuple[int, int]:
        if index == 1:
            os._exit(7)
        return super().__getitem__(index)


class Broken(Slow):
    def __getitem__(self, index: Any) -> tuple[int, int]:
        if index == 1:
            raise OSError("the disk is full of holes")
        return super().__getitem__(index)


def take_all(queue: Any, results: Any) -> None:
    """A consumer process: take every item, and report."""
    results.send(list(queue))
    results.close()


def hold_one(queue: Any, results: Any) -> None:
    """A consumer process: take two items and wait to be killed."""
    results.send([queue.get(), queue.get()])
    time.sleep(60)


def hold_one_with_a_helper(queue: Any, results: Any) -> None:
    """A consumer process whose forked helper outlives it."""
    item = queue.get()
    helper = os.fork()
    if helper == 0:
        time.sleep(60)
        os._exit(0)
    results.send((item, helper))
    time.sleep(60)


def take_one_and_end(queue: Any, results: Any) -> None:
    results.send([queue.get()])


def take_late(queue: Any, results: Any) -> None:
    time.sleep(0.3)
    take_one_and_end(queue, results)


def put_and_mark(queue: Any, results: Any) -> None:
    for item in range(3):
        queue.put(item)
    queue.mark_as_done()


def outlive(queue: Any, results: Any) -> None:
    results.send(queue.get())
    try:
        while True:
            queue.get()
            time.sleep(0.02)
    except DataQueueClosed as error:
        results.send(str(error))
