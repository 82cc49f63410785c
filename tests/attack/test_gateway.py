"""A gateway whose processes are killed while agents of every dialect talk through it."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from leyden.store import LightningStoreServer, SqliteLightningStore
from leyden.testing import FakeUpstream, ServedCall, audit_store
from leyden.types import semconv
from tests.attack.conversing import Persistent, assert_numbered_once, is_failed
from tests.attack.harness import Attack, sizes
from tests.gateway.conversations import (
    AGENTS,
    KINDS,
    Agents,
    Answer,
    assert_exact,
    converse,
    reply,
)
from tests.store.killing import Forker
from tests.store.ports import free_port

N_AGENTS = 8
READ_LATE_SECONDS = 1.0
"""A client on a busy machine reads from its socket what a gateway sent that is dead by then."""
WRITTEN_WITHIN_SECONDS = 5.0
"""A gateway that is not durable may lose the last few hundredths of a second; on a machine with much other work, more."""


@dataclass
class Heard:
    """Each answer that an agent has read to its end."""

    answers: list[tuple[str, Answer, float]] = field(default_factory=list[tuple[str, Answer, float]])
    """(rollout id, answer, the time when it was complete)"""
    _more: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def add(self, rollout_id: str, answer: Answer) -> None:
        async with self._more:
            self.answers.append((rollout_id, answer, time.monotonic()))
            self._more.notify_all()

    async def more(self, count: int) -> None:
        """Wait for `count` more answers."""
        goal = len(self.answers) + count
        async with self._more, asyncio.timeout(60):
            await self._more.wait_for(lambda: len(self.answers) >= goal)


@dataclass
class Place:
    """A store with its server, and a model's server, both of which stay alive."""

    store: SqliteLightningStore
    server: LightningStoreServer
    upstream: FakeUpstream
    port: int = field(default_factory=free_port)

    @property
    def command(self) -> list[str]:
        """The arguments of `leyden` for a gateway between the two."""
        model = f"fake={self.upstream.endpoint}"
        return ["gateway", "--store", self.server.endpoint, "--model", model, "--port", str(self.port)]


@asynccontextmanager
async def place(directory: Path) -> AsyncIterator[Place]:
    async with (
        FakeUpstream(reply=reply) as upstream,
        SqliteLightningStore(directory / "store.db") as store,
        LightningStoreServer(store) as server,
    ):
        yield Place(store, server, upstream)


@asynccontextmanager
async def talking(at: Place, chance: random.Random) -> AsyncIterator[Heard]:
    """Agents that hold one conversation after another, each in an attempt of its own, until the block ends."""
    heard, over = Heard(), asyncio.Event()
    persistent = Persistent(chance, pause_seconds=0.02)
    names = [name for name in AGENTS if name != "responses by id"]  # what was said is in the gateway's memory alone
    async with Agents() as agents, asyncio.TaskGroup() as group:

        async def talk(number: int) -> None:
            while not over.is_set():
                name = chance.choice(names)
                kind = "rewritten context" if name == "completions" else chance.choice(KINDS)
                rollout = await at.store.start_rollout({"kind": kind})
                ids = rollout.rollout_id, rollout.attempt.attempt_id
                url = f"http://127.0.0.1:{at.port}/rollout/{ids[0]}/attempt/{ids[1]}/v1"
                agent = agents.new(name, url, stream=chance.random() < 0.5)
                await converse(agent, number, kind, ask=partial(ask, rollout.rollout_id))
                await at.store.update_attempt(*ids, status="succeeded")

        async def ask(rollout_id: str, agent: Any) -> Answer:
            answer = await persistent(agent)
            await heard.add(rollout_id, answer)
            return answer

        for number in range(N_AGENTS):
            group.create_task(talk(number))
        try:
            yield heard
        finally:
            over.set()
    assert persistent.stumbled == 0, f"an answer that a kill cut passed as a whole one: {persistent.failed}"


async def judge(at: Place, heard: Heard, kills: list[float], *, durable: bool) -> Counter[str]:
    """Compare what the agents heard with what is in the store; a gateway that is not durable may lose a kill's last answers."""
    truths: dict[str, ServedCall] = {call.response_id: call for call in at.upstream.calls}
    found: Counter[str] = Counter(answers=len(heard.answers))
    answers: dict[str, list[tuple[Answer, float]]] = {}
    for rollout_id, answer, when in heard.answers:
        answers.setdefault(rollout_id, []).append((answer, when))
    for rollout_id, of_rollout in answers.items():
        spans = await at.store.query_spans(rollout_id)
        ids = [str(span.attributes[semconv.GEN_AI_RESPONSE_ID]) for span in spans if not is_failed(span)]
        assert len(set(ids)) == len(ids), "an answer is recorded twice"
        if durable:
            assert_numbered_once(list(spans))
        whole = {str(span.attributes[semconv.GEN_AI_RESPONSE_ID]): span for span in spans if not is_failed(span)}
        for answer, when in of_rollout:
            if span := whole.get(answer.response_id):
                assert_exact(span, truths[answer.response_id], answer)
                found["recorded"] += 1
            else:
                assert not durable, f"an answer is lost: {answer}"
                late = when - READ_LATE_SECONDS
                before = min((max(killed - when, 0.0) for killed in kills if killed >= late), default=float("inf"))
                assert before < WRITTEN_WITHIN_SECONDS, f"an answer is lost that was read {before} s before a kill"
                found["lost"] += 1
                oldest = "ms_from_the_oldest_lost_to_its_kill"
                found[oldest] = max(found[oldest], round(before * 1000))
    assert await audit_store(at.store) == []
    return found


async def attacked(directory: Path, attack: Attack, kills: int, run: Callable[[Place], Any], *, durable: bool) -> None:
    """run: a context manager around a running gateway, which gives a function that kills it."""
    chance, times = attack.chance, list[float]()
    async with place(directory) as at:
        async with run(at) as kill, talking(at, chance) as heard:
            for _ in range(kills):
                await heard.more(N_AGENTS)
                await asyncio.sleep(chance.random() * 0.2)
                times.append(await kill())
                attack.count(kills=1)
            await heard.more(N_AGENTS)
        attack.count(**await judge(at, heard, times, durable=durable))


@sizes(("kills", "durable"), faults=(8, True), long=(120, True))
async def test_a_durable_gateway_is_killed_at_random(tmp_path: Path, attack: Attack, kills: int, durable: bool) -> None:
    await attacked(tmp_path, attack, kills, lambda at: one_process(at, tmp_path, durable=durable), durable=durable)


@sizes(("kills", "durable"), faults=(8, False), long=(80, False))
async def test_a_gateway_is_killed_at_random(tmp_path: Path, attack: Attack, kills: int, durable: bool) -> None:
    await attacked(tmp_path, attack, kills, lambda at: one_process(at, tmp_path, durable=durable), durable=durable)


@asynccontextmanager
async def one_process(at: Place, directory: Path, *, durable: bool) -> AsyncIterator[Callable[[], Awaitable[float]]]:
    """A gateway of one process, which is started again at once."""
    command = ("leyden", *at.command, *(["--durable"] if durable else []))
    with Forker.opened(directory, "leyden.cli.gateway", "leyden.gateway") as forker:
        gateway = forker.start(*command)

        async def kill() -> float:
            nonlocal gateway
            await asyncio.to_thread(forker.kill, gateway)
            killed = time.monotonic()  # after it, so that an answer of the last moment is before it
            gateway = forker.start(*command)
            return killed

        yield kill
        await asyncio.to_thread(forker.stop, gateway)  # it writes what it has not written yet


@sizes("kills", faults=(4,), long=(60,))
async def test_workers_of_a_durable_gateway_are_killed_at_random(tmp_path: Path, attack: Attack, kills: int) -> None:
    await attacked(tmp_path, attack, kills, lambda at: three_workers(at, attack.chance), durable=True)


@asynccontextmanager
async def three_workers(at: Place, chance: random.Random) -> AsyncIterator[Callable[[], Awaitable[float]]]:
    """A gateway of three workers, one of which is killed each time."""
    program = [sys.executable, "-c", "from leyden.cli import main; main()"]
    process = await asyncio.create_subprocess_exec(
        *program, *at.command, "--durable", "--num-workers", "3", stdout=asyncio.subprocess.PIPE
    )
    parent = psutil.Process(process.pid)

    def workers() -> list[psutil.Process]:
        return [child for child in parent.children(recursive=True) if "spawn_main" in " ".join(child.cmdline())]

    async def kill() -> float:
        victim = chance.choice(await asyncio.to_thread(workers))
        killed = time.monotonic()
        victim.kill()
        return killed

    try:
        assert process.stdout is not None
        assert b"by 3 processes" in await process.stdout.readline()
        yield kill
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()
