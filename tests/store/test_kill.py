"""A killed process loses nothing that was acknowledged, and doubles nothing."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from pathlib import Path

import pytest

from leyden.store import SqliteLightningStore

WRITER = """
    import asyncio, os, sys
    from leyden.store import SqliteLightningStore
    from leyden.types import Span

    round = sys.argv[2]
    acknowledged = os.open(sys.argv[3], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(*words):
        os.write(acknowledged, (" ".join(words) + "\\n").encode())

    async def work(store, worker):
        for i in range(1_000_000):
            await store.enqueue_rollout({"n": i}, rollout_id=f"{round}-{worker}-{i}")
            say("enqueued", f"{round}-{worker}-{i}")
            rollout = await store.dequeue_rollout(worker)
            ids = dict(rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id)
            say("claimed", *ids.values())
            for k in range(3):
                span = Span(**ids, sequence_id=0, trace_id="t", span_id=f"s{k}", name="n", attributes={"k": "v" * 500})
                await store.add_span(span)
                say("span", *ids.values(), f"s{k}")
            await store.update_attempt(**ids, status="succeeded")
            say("done", *ids.values())

    async def main():
        store = SqliteLightningStore(sys.argv[1])
        say("open")
        await asyncio.gather(*(work(store, f"w{k}") for k in range(6)))

    asyncio.run(main())
"""


def killed_again_and_again(directory: Path, kills: int) -> None:
    path, said = directory / "store.db", directory / "said.txt"
    said.write_text("")
    checked = 0
    acknowledged: list[str] = []
    for number in range(kills):
        size = said.stat().st_size
        with subprocess.Popen([sys.executable, "-c", textwrap.dedent(WRITER), path, str(number), said]) as writer:
            try:
                deadline = time.monotonic() + 30
                while said.stat().st_size == size and time.monotonic() < deadline:
                    time.sleep(0.005)
                time.sleep(random.Random(number).random() * 0.25)
                assert writer.poll() is None
            finally:
                writer.kill()
        acknowledged = said.read_text().splitlines()
        asyncio.run(check(path, acknowledged[checked:]))
        checked = len(acknowledged)
    asyncio.run(check(path, acknowledged[:: max(1, kills // 5)]))


async def check(path: Path, acknowledged: list[str]) -> None:
    """Every acknowledged line is true of the store, and the file is whole."""
    async with SqliteLightningStore(path) as store:
        rollouts = {rollout.rollout_id: rollout for rollout in await store.query_rollouts()}
        for words in map(str.split, acknowledged):
            match words:
                case ["enqueued", rollout_id]:
                    assert rollout_id in rollouts
                case ["claimed", rollout_id, attempt_id]:
                    assert (await store.get_latest_attempt(rollout_id)).attempt_id == attempt_id  # type: ignore[union-attr]
                case ["done", rollout_id, _]:
                    assert rollouts[rollout_id].status == "succeeded"
                    assert [span.span_id for span in await store.query_spans(rollout_id)] == ["s0", "s1", "s2"]
                case ["span", rollout_id, attempt_id, span_id]:
                    assert len(await store.query_spans(rollout_id, attempt_id, span_id=span_id)) == 1
                case _:
                    assert words == ["open"]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.timeout(120)
def test_a_killed_writer_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    killed_again_and_again(tmp_path, kills=4)
    assert (tmp_path / "said.txt").read_text().count("done") > 10


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_forty_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    killed_again_and_again(tmp_path, kills=40)
