"""A search that is killed starts again from its seed, and ends with the same prompt for not one rollout more."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from leyden.testing import FakeUpstream
from tests.algorithm.gepa import evolving

pytest.importorskip("openai")
pytest.importorskip("gepa")

ROOT = Path(__file__).parents[3]


async def start(directory: Path, upstream: FakeUpstream, *arguments: str) -> asyncio.subprocess.Process:
    port = upstream.endpoint.rpartition(":")[2].removesuffix("/v1")
    return await asyncio.create_subprocess_exec(
        *(sys.executable, str(Path(evolving.__file__)), str(directory), port, *arguments),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def finish(process: asyncio.subprocess.Process) -> str:
    printed, errors = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, errors.decode()
    return json.loads(printed)["template"]


def read(directory: Path, query: str) -> list[tuple[Any, ...]]:
    try:
        with sqlite3.connect(directory / "store.sqlite") as database:
            return database.execute(query).fetchall()
    except sqlite3.OperationalError:  # it has no tables yet
        return []


def rollouts(directory: Path) -> set[str]:
    """The rollouts that the run has requested."""
    return {rollout for (rollout,) in read(directory, "SELECT rollout_id FROM rollouts WHERE run IS NOT NULL")}


def reflections(directory: Path) -> list[str]:
    """The places of the answers that were kept."""
    path = directory / "reflections.jsonl"
    return [json.loads(line)["place"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("budget", "kills"), [(2000, 4), (70, 2)])
async def test_a_killed_search_ends_with_the_same_prompt_and_requests_no_rollout_more(
    tmp_path: Path, budget: int, kills: int
) -> None:
    async with FakeUpstream(reply=evolving.reply, delay_seconds=0.02) as upstream:
        whole, killed = tmp_path / "whole", tmp_path / "killed"
        wanted = await finish(await start(whole, upstream, str(budget)))
        n_wanted, n_reflections = len(rollouts(whole)), len(reflections(whole))
        chance = random.Random(7)
        for kill in range(kills):
            process = await start(killed, upstream, str(budget), *(["resume"] if kill else []))
            until = n_wanted * (kill + 1) // (kills + 1) + chance.randrange(5)
            async with asyncio.timeout(120):
                while len(rollouts(killed)) < until:  # noqa: ASYNC110 -- another process writes them
                    await asyncio.sleep(0.02)
            assert process.returncode is None
            os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()
        found = await finish(await start(killed, upstream, str(budget), "resume"))
    assert found == wanted
    assert rollouts(killed) == rollouts(whole) or len(rollouts(killed)) == n_wanted
    assert len(rollouts(killed)) == n_wanted <= budget
    done = read(killed, "SELECT rollout FROM attempts WHERE status = 'succeeded'")
    assert max(Counter(done).values()) == 1
    assert max(Counter(reflections(killed)).values()) == 1
    assert len(reflections(killed)) == n_reflections
    assert not list(killed.rglob("*.bin")), "the package has written a pickle"
