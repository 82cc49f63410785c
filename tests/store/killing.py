"""Processes that are killed in the middle of their work, and what must be true of the store afterwards.

Run as a program, it forks processes that need no import of their own: a program that writes to a file, a store server, a client.
Whoever writes says each fact in a ledger: before it asks for it, and again once it was acknowledged; a line in the ledger
survives the death of its writer. `Ledger.check` compares the store with what was acknowledged.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from leyden.errors import IllegalTransition, StoreError
from leyden.store import LightningStore, LightningStoreClient, SqliteLightningStore
from leyden.testing import audit_store
from leyden.types import PromptTemplate, RolloutConfig, Span, reward_attributes
from tests.store.ports import free_port

TASKS = 8
"""Clients that work at once."""
CONFIG = RolloutConfig(max_attempts=3, retry_condition=["failed"])


# ---- those that are killed -------------------------------------------------------------------------------------------


class Pen:
    """Writes lines in the ledger, each in one call."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, *fact: Any) -> None:
        os.write(self._file, (json.dumps(fact) + "\n").encode())


async def work(store: LightningStore, name: str, pen: Pen, rounds: int = 1_000_000) -> None:
    """Enqueue, claim, report, again and again; every call under ids of its own, so that it may be sent twice."""
    chance = random.Random(name)
    for i in range(rounds):
        made = f"{name}-{i}"
        pen.write("enqueueing", made)
        await store.enqueue_rollout({"n": i}, rollout_id=made, priority=chance.randint(-1, 1), config=CONFIG)
        pen.write("enqueued", made)
        rollout = await store.dequeue_rollout(name, claim_id=f"claim-{made}", timeout_seconds=1.0)
        if rollout is None:
            continue
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        pen.write("claimed", *ids.values(), name)
        for k in range(2):
            attributes: Any = reward_attributes({"primary": i}) if k else {"k": "v" * 500}
            span = Span(**ids, sequence_id=0, trace_id="t", span_id=f"s{k}", name="n", attributes=attributes)
            added = await store.add_span(span)
            pen.write("span", *ids.values(), f"s{k}", added and added.sequence_id)
        pen.write("drawn", *ids.values(), await store.get_next_span_sequence_id(*ids.values()))
        status = chance.choice(["succeeded", "succeeded", "failed"])
        pen.write("ending", *ids.values())
        with suppress(IllegalTransition):  # its claim was released between two kills
            await store.update_attempt(**ids, status=status)  # type: ignore[arg-type]
            pen.write("ended", *ids.values(), status)
        if i % 5 == 0:
            with suppress(IllegalTransition):  # somebody else has finished it
                pen.write("cancelled", (await store.update_rollout(made, status="cancelled")).rollout_id)
            written = await store.add_resources({"p": PromptTemplate(template=made)}, resources_id=f"rs-{made}")
            pen.write("resources", written.resources_id)


async def embedded(path: str, round: str, ledger: str) -> None:
    """Eight tasks in the process that owns the file."""
    pen = Pen(ledger)
    store = SqliteLightningStore(path)
    await asyncio.gather(*(work(store, f"{round}-{k}", pen) for k in range(TASKS)))


async def client(url: str, name: str, ledger: str) -> None:
    """One task of many in processes of their own."""
    async with LightningStoreClient(url) as store:
        await work(store, name, Pen(ledger))


def leyden(*arguments: str) -> None:
    """The command `leyden`, such as `leyden store`."""
    from leyden.cli import main

    sys.argv = ["leyden", *arguments]
    main()


def serve_forks() -> None:
    """For each line of stdin (a role and its arguments), fork a process and say its number.

    A role is `leyden`, one of those below, or a coroutine function of an imported module as `module:name`.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the dead
    for module in (
        "leyden.cli.store",
        "leyden.store.server",
        "leyden.store.client",
        "uvicorn",
        "aiohttp",
        *sys.argv[1:],
    ):
        importlib.import_module(module)  # so that no fork has to
    roles = {"embedded": embedded, "client": client}
    for line in sys.stdin:
        role, *arguments = json.loads(line)
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        if role == "leyden":
            leyden(*arguments)
        else:
            module, _, name = role.rpartition(":")
            asyncio.run((getattr(sys.modules[module], name) if module else roles[role])(*arguments))
        os._exit(0)


# ---- those that kill -------------------------------------------------------------------------------------------------


class Forker:
    """Starts the processes above, a few milliseconds each."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self.log = log
        self.root = Path(f"/proc/{process.pid}/root")
        """The file systems as the processes see them."""
        self.alive: set[int] = set()

    @classmethod
    @contextmanager
    def opened(cls, directory: Path, *modules: str, within: Sequence[str] = ()) -> Iterator[Forker]:
        """Start the program above, which imports `modules` once for all. The processes that it forked are dead at the end.

        within: a command that starts the program, such as one that gives it mounts of its own.
        """
        command = [*within, sys.executable, "-m", "tests.store.killing", *modules]
        log = directory / "log.txt"
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as process,
        ):
            forker = cls(process, log)
            try:
                yield forker
            finally:
                for pid in list(forker.alive):
                    forker.kill(pid)
                process.kill()

    def start(self, role: str, *arguments: object) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([role, *map(str, arguments)]) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        self.alive.add(pid)
        return pid

    def kill(self, pid: int) -> None:
        """`kill -9`, and wait until it is dead."""
        self._end(pid, signal.SIGKILL)

    def stop(self, pid: int) -> None:
        """Ask it to end, and wait until it has."""
        self._end(pid, signal.SIGTERM)

    def _end(self, pid: int, number: signal.Signals) -> None:
        assert not dead(pid), self.log.read_text()
        os.kill(pid, number)
        deadline = time.monotonic() + 20
        while not dead(pid):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        self.alive.discard(pid)


def dead(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


class Ledger:
    """What was said to be true, and whether it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()
        self._read = 0
        self.holder: dict[str, str] = {}
        """Which attempt holds a rollout, by what was acknowledged."""
        self.numbers: dict[tuple[str, str], list[int]] = {}
        self.intended: set[str] = set()
        self.count: Counter[str] = Counter()
        self.claims: set[tuple[str, str]] = set()

    def news(self) -> list[list[Any]]:
        """Whole lines that were written since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self._read += len(text)
        facts = [json.loads(line) for line in text.splitlines()]
        for fact in facts:
            self._replay(fact)
        return facts

    def released(self, rollout_ids: Sequence[str]) -> None:
        """The owner put them back in the queue."""
        for rollout_id in rollout_ids:
            self.holder.pop(rollout_id, None)

    def _replay(self, fact: list[Any]) -> None:
        """What can be seen from the order of the lines alone."""
        self.count[fact[0]] += 1
        match fact:
            case ["enqueueing", rollout_id]:
                self.intended.add(rollout_id)
            case ["claimed", rollout_id, attempt_id, _]:
                assert self.holder.get(rollout_id, attempt_id) == attempt_id, f"claimed twice at once: {fact}"
                assert (rollout_id, attempt_id) not in self.claims, f"one attempt was given to two: {fact}"
                self.holder[rollout_id] = attempt_id
                self.claims.add((rollout_id, attempt_id))
            case ["ending", rollout_id, _]:
                self.holder.pop(rollout_id, None)
            case ["span", rollout_id, attempt_id, _, int(number)] | ["drawn", rollout_id, attempt_id, int(number)]:
                drawn = self.numbers.setdefault((rollout_id, attempt_id), [])
                assert number > max(drawn, default=0), f"a number that is not above those before, {drawn}: {fact}"
                drawn.append(number)
            case _:
                pass

    def wait_for_more(self) -> None:
        """Until somebody has written something."""
        size, deadline = self.path.stat().st_size, time.monotonic() + 30
        while self.path.stat().st_size == size:
            assert time.monotonic() < deadline, "nobody works"
            time.sleep(0.002)

    async def check(self, store: LightningStore) -> None:
        """Everything that was acknowledged since the last check is true of the store."""
        facts = self.news()
        for at in range(0, len(facts), 64):
            await asyncio.gather(*(holds(store, fact) for fact in facts[at : at + 64]))

    async def check_all(self, store: LightningStore, *, unknown: int) -> None:
        """Nothing is there that nobody asked for, and no rollout was ever worked on by two at once.

        unknown: how many claims may have been committed without being acknowledged: one for each client and kill.
        """
        everything = {rollout.rollout_id for rollout in await store.query_rollouts()}
        assert everything <= self.intended
        unheard = 0
        for rollout_id in everything:
            attempts = await store.query_attempts(rollout_id)
            unheard += sum((rollout_id, attempt.attempt_id) not in self.claims for attempt in attempts)
            for attempt, following in pairwise(attempts):
                assert attempt.end_time is not None
                assert attempt.end_time <= following.start_time
        assert unheard <= unknown


async def holds(store: LightningStore, fact: list[Any]) -> None:
    """One fact is true of the store."""
    match fact:
        case ["enqueued", rollout_id]:
            assert (await store.get_rollout_by_id(rollout_id)).config == CONFIG
        case ["claimed", rollout_id, attempt_id, worker]:
            assert (await store.get_attempt_by_id(rollout_id, attempt_id)).worker_id == worker
        case ["span", rollout_id, attempt_id, span_id, number]:
            [span] = await store.query_spans(rollout_id, attempt_id, span_id=span_id)
            assert number in (None, span.sequence_id)
        case ["ended", rollout_id, attempt_id, status]:
            assert (await store.get_attempt_by_id(rollout_id, attempt_id)).status == status
        case ["cancelled", rollout_id]:
            assert (await store.get_rollout_by_id(rollout_id)).status == "cancelled"
        case ["resources", resources_id]:
            assert (await store.get_resources_by_id(resources_id)).version == 1
        case _:
            pass


# ---- the loops -------------------------------------------------------------------------------------------------------


def wait_for_a_moment(ledger: Ledger, chance: random.Random) -> None:
    """Wait for some moment: in four of five cases one in the middle of the work, otherwise any."""
    if chance.random() < 0.8:
        ledger.wait_for_more()
    time.sleep(chance.random() * 0.2)


def integrity(path: Path) -> None:
    """SQLite finds nothing wrong with its file."""
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def kill_the_writer(
    directory: Path, kills: int, chance: random.Random, *, killed: Callable[[], None] = lambda: None
) -> Ledger:
    """Kill the process that owns a file and writes to it with eight tasks, at random, also while it opens the file.

    killed: called after each kill.
    """
    path, ledger = directory / "store.db", Ledger(directory / "ledger.txt")

    async def after_kill(number: int) -> None:
        async with SqliteLightningStore(path) as store:
            await ledger.check(store)
            if number % 3 == 0:
                ledger.released(await store.release_claims())
            if number in (kills // 2, kills - 1):
                await ledger.check_all(store, unknown=TASKS * (number + 1))
                assert await audit_store(store) == []
        integrity(path)

    with Forker.opened(directory) as forker:
        for number in range(kills):
            writer = forker.start("embedded", path, number, ledger.path)
            wait_for_a_moment(ledger, chance)
            forker.kill(writer)
            asyncio.run(after_kill(number))
            killed()
    return ledger


def kill_server_and_clients(
    directory: Path, kills: int, chance: random.Random, *, killed: Callable[[], None] = lambda: None
) -> Ledger:
    """Kill a server or one of its eight clients at random, and start it again while the others go on.

    Each of the nine is a process. killed: called after each kill.
    """
    path, ledger = directory / "store.db", Ledger(directory / "ledger.txt")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    serving = ("leyden", "store", "--url", f"sqlite://{path}", "--port", port)

    async def after_kill() -> None:
        async with LightningStoreClient(url) as store:
            await ledger.check(store)

    async def in_the_end() -> None:
        async with SqliteLightningStore(path) as store:
            await ledger.check(store)
            await ledger.check_all(store, unknown=TASKS * (kills + 1))
            assert await audit_store(store) == []
            await store.release_claims()
            while rollouts := await store.dequeue_many_rollouts(limit=100):
                for rollout in rollouts:
                    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")
            assert all(rollout.finished for rollout in await store.query_rollouts())
            assert await audit_store(store) == []
        integrity(path)

    with Forker.opened(directory) as forker:
        server = forker.start(*serving)
        clients = [forker.start("client", url, f"c{k}", ledger.path) for k in range(TASKS)]
        for number in range(kills):
            wait_for_a_moment(ledger, chance)
            if number % 4 == 0:
                victim = chance.randrange(TASKS)
                forker.kill(clients[victim])
                clients[victim] = forker.start("client", url, f"d{number}", ledger.path)
            else:
                forker.kill(server)
                server = forker.start(*serving)
            asyncio.run(after_kill())
            integrity(path)
            killed()
        for pid in [*clients, server]:
            forker.kill(pid)
        asyncio.run(in_the_end())
    return ledger


if __name__ == "__main__":
    with suppress(KeyboardInterrupt, StoreError):
        serve_forks()
