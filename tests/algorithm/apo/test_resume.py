"""A search that is killed in the middle continues to the same prompt, and requests not one rollout more."""

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

import leyden as ly
from leyden.algorithm.collector import rollout_id_at
from leyden.algorithm.prompts import read_history
from leyden.testing import FakeUpstream
from tests.algorithm.apo import rules

pytest.importorskip("openai")

ROOT = Path(__file__).parents[3]


async def start(directory: Path, upstream: FakeUpstream, *arguments: str) -> asyncio.subprocess.Process:
    port = upstream.endpoint.rpartition(":")[2].removesuffix("/v1")
    return await asyncio.create_subprocess_exec(
        *(sys.executable, str(Path(rules.__file__)), str(directory), port, *arguments),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def finish(process: asyncio.subprocess.Process) -> str:
    printed, errors = await asyncio.wait_for(process.communicate(), 90)
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


def metrics(directory: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if "seconds" not in name} for row in rows]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("budget", "kills"), [(2000, 3), (230, 1)])
async def test_a_killed_search_ends_with_the_same_prompt_and_requests_no_rollout_more(
    tmp_path: Path, budget: int, kills: int
) -> None:
    async with FakeUpstream(reply=rules.reply, delay_seconds=0.02) as upstream:
        whole, killed = tmp_path / "whole", tmp_path / "killed"
        wanted = await finish(await start(whole, upstream, str(budget)))
        n_wanted = len(rollouts(whole))
        chance = random.Random(7)
        for kill in range(kills):
            process = await start(killed, upstream, str(budget), *(["resume"] if kill else []))
            until = n_wanted * (kill + 1) // (kills + 1) + chance.randrange(10)
            async with asyncio.timeout(60):
                while len(rollouts(killed)) < until:  # noqa: ASYNC110 -- another process writes them
                    await asyncio.sleep(0.02)
            assert process.returncode is None
            os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()
        found = await finish(await start(killed, upstream, str(budget), "resume"))
    assert found == wanted
    assert all(rule in found for rule in rules.RULES.values()) == (budget == 2000)
    assert len(rollouts(killed)) == n_wanted <= budget
    done = read(killed, "SELECT rollout FROM attempts WHERE status = 'succeeded'")
    assert max(Counter(done).values()) == 1
    of_the_algorithm = "SELECT 1 FROM attempts JOIN rollouts ON rollout = seq WHERE run IS NULL AND sequence_id > 1"
    assert read(killed, of_the_algorithm) == [], "the agent was given a call of the algorithm"
    assert metrics(killed) == metrics(whole)
    assert len(read(killed, "SELECT label FROM labels")) == 1


async def test_a_record_that_a_crash_left_open_stays_in_the_history_of_the_resumed_run(tmp_path: Path) -> None:
    directory = tmp_path / "run"

    async def fit(rounds: int, upstream: FakeUpstream, *, resume: bool) -> str:
        trainer = ly.Trainer(
            algorithm=ly.APO(**{**rules.OPTIONS, "beam_rounds": rounds}),
            llm_proxy=ly.LLMProxy(model_list=[{"model_name": "fake", "endpoint": upstream.endpoint}]),
            initial_resources={"prompt": ly.PromptTemplate(template=rules.SEED)},
            run_dir=directory,
            progress=False,
        )
        return (await trainer.afit(rules.quick, rules.TRAIN, rules.VAL, resume=resume)).run_id

    async with FakeUpstream(reply=rules.reply) as upstream:
        run_id = await fit(1, upstream, resume=False)
        async with ly.open_store(directory / "store.sqlite") as store:
            [first, *_] = await read_history(store, run_id)
            open_record = first.model_copy(update={"round": 2, "branch": 77})
            await store.start_rollout(  # the first of the two writes of the second round's record
                {"algorithm": "APO", "purpose": "selection", "round": 2},
                metadata={"run_id": run_id, "candidates": [open_record.model_dump(mode="json")]},
                rollout_id=rollout_id_at(run_id, "selection", 2),
                attempt_id="at-decided",
                run_id=None,
                group_id=f"{run_id}/algorithm",
            )
        assert await fit(2, upstream, resume=True) == run_id
    async with ly.open_store(directory / "store.sqlite", read_only=True) as store:
        history = await read_history(store, run_id)
    assert [each for each in history if each.round == 2] == [open_record]
