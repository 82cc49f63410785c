"""One side of the store benchmarks: the same program against Leyden's store, the peer's, or the floor.

    python store_side.py SIDE

SIDE: `leyden`, `agentlightning`, or a floor: `sqlite3` (raw SQL, and aiohttp where there is a server; nothing else), `libpq`
(Leyden's statements on PostgreSQL).
Commands come as lines of JSON on the standard input, each is answered by one line on the standard output; the process stays, so that short
slices of both sides can take turns:

    {"do": "open", "where": "memory" | "file" | "power" | "postgres" | "http://..."}     a new store, and a few rollouts to warm it up
    {"do": "run", "mode": "one" | "spans" | "bulk", "rollouts": N, ...}     N rollouts; seconds, CPU seconds, microseconds of each call
    {"do": "fill", "rollouts": N, "queued": M}                              N finished rollouts in bulk, M that stay in the queue
    {"do": "serve", "where": ...}                                           a store behind this side's HTTP server; answers its URL
    {"do": "prune", "max_rollouts": N}                                      finished rollouts above N are forgotten
    {"do": "memory"}                                                        megabytes resident

A rollout is: enqueue, claim, 10 spans of about 1 kB, an attempt update, a span query. Clocks stop while the caller makes its spans.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

SPANS = 10
SIZE = 1000
"""Bytes of a span's attributes, about."""
WARM_UP = 30
FILL = 500
"""Rollouts in one round of `fill`."""


# ---- the sides -------------------------------------------------------------------------------------------------------


class Leyden:
    """Leyden's stores and its server."""

    server_pid = None

    def __init__(self):
        from leyden.store import open_store
        from leyden.types import EnqueueRolloutRequest, Span, UpdateAttemptRequest

        self._open = open_store
        self.make_span = Span
        self.make_request = EnqueueRolloutRequest
        self.make_update = UpdateAttemptRequest

    async def open(self, where, folder):
        if where == "memory":
            return self._open("memory://")
        if where in ("file", "power"):
            from leyden.store import SqliteLightningStore

            return SqliteLightningStore(folder / "store.db", durability="power" if where == "power" else "process")
        return self._open(self._database() if where == "postgres" else where)

    def _database(self):
        """A PostgreSQL of its own, which ends with this process."""
        from tests.store.postgres_server import SETTINGS, PostgresServer

        SETTINGS["fsync"] = "on"
        server = PostgresServer()
        atexit.register(server.delete)
        server.start()
        self.server_pid = int((server.directory / "data" / "postmaster.pid").read_text().split()[0])
        return server.url

    async def serve(self, store):
        from leyden.store import LightningStoreServer

        server = LightningStoreServer(store, host="127.0.0.1", port=0)
        await server.start()
        return server.endpoint

    async def finish_many(self, store, claimed):
        await store.update_many_attempts([self.make_update(**ids_of(one), status="succeeded") for one in claimed])

    async def query_many(self, store, rollout_ids):
        return await store.query_spans_of(rollout_ids)


class AgentLightning:
    """The peer, with the store that is its fastest. In memory is all it has on one machine."""

    def __init__(self):
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # without it each start asks the network for prices
        from agentlightning.store import InMemoryLightningStore, LightningStoreClient, LightningStoreServer
        from agentlightning.types import EnqueueRolloutRequest, Span

        self._memory, self._client, self._server = InMemoryLightningStore, LightningStoreClient, LightningStoreServer
        self.make_span = Span.from_attributes
        self.make_request = EnqueueRolloutRequest

    async def open(self, where, folder):
        return self._memory() if where == "memory" else self._client(where)

    async def serve(self, store):
        import socket

        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        await self._server(store, host="127.0.0.1", port=port, launch_mode="asyncio").start()
        return f"http://127.0.0.1:{port}"

    async def finish_many(self, store, claimed):  # it has no call for several, as for the next
        await self._each([store.update_attempt(**ids_of(one), status="succeeded") for one in claimed])

    async def query_many(self, store, rollout_ids):
        found = await self._each([store.query_spans(one) for one in rollout_ids])
        return dict(zip(rollout_ids, found, strict=True))

    async def _each(self, calls):
        return await asyncio.gather(*calls) if self.remote else [await call for call in calls]


class Floor:
    """The store's rows, written and read by raw SQL on one connection: no store can be faster on SQLite.

    Over HTTP, the raw SQL is behind aiohttp's server and client, and nothing else.
    """

    def __init__(self):
        self.make_span = dict
        self.make_request = dict

    async def open(self, where, folder):
        if where.startswith("http"):
            return FloorClient(where)
        return FloorStore(":memory:" if where == "memory" else str(folder / "floor.db"), full=where == "power")

    async def serve(self, store):
        from aiohttp import web

        async def call(request):
            arguments = loads(await request.read())
            answer = await getattr(store, request.match_info["method"])(*arguments)
            return web.Response(body=dumps(answer), content_type="application/json")

        app = web.Application(client_max_size=2**30)
        app.router.add_post("/{method}", call)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def finish_many(self, store, claimed):
        await store.finish_many(claimed)

    async def query_many(self, store, rollout_ids):
        return await store.query_many(rollout_ids)


FLOOR_SCHEMA = """
CREATE TABLE rollouts (seq INTEGER PRIMARY KEY, rollout_id TEXT UNIQUE, status TEXT, input TEXT, start_time REAL, end_time REAL);
CREATE INDEX queue ON rollouts (seq) WHERE status = 'queuing';
CREATE TABLE attempts (rollout INTEGER, sequence_id INTEGER, attempt_id TEXT, status TEXT, start_time REAL, end_time REAL, heartbeat REAL,
                       PRIMARY KEY (rollout, sequence_id)) WITHOUT ROWID;
CREATE TABLE spans (key INTEGER PRIMARY KEY, rollout INTEGER, attempt INTEGER, sequence_id INTEGER, span_id TEXT, trace_id TEXT, name TEXT,
                    start_time REAL, end_time REAL, attributes TEXT);
CREATE UNIQUE INDEX spans_of_attempt ON spans (rollout, attempt, span_id);
"""


try:
    from pydantic_core import from_json as loads
    from pydantic_core import to_json as dumps  # the fastest at hand
except ImportError:
    from json import dumps, loads


class FloorStore:
    """The least code that keeps rows, queue and commits; it checks nothing and returns bare dicts."""

    def __init__(self, target, *, full):
        import sqlite3

        self._db = sqlite3.connect(target, isolation_level=None, cached_statements=64)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
        self._db.executescript(FLOOR_SCHEMA)
        self._ids = 0

    def _id(self):
        self._ids += 1
        return f"{os.getpid():x}-{self._ids:x}"

    async def enqueue_rollout(self, task):
        return (await self.enqueue_many_rollouts([{"input": task}]))[0]

    async def enqueue_many_rollouts(self, requests):
        run = self._db.execute
        now = time.time()
        run("BEGIN IMMEDIATE")
        rollouts = []
        for request in requests:
            rollout_id = self._id()
            run(
                "INSERT INTO rollouts (rollout_id, status, input, start_time) VALUES (?, 'queuing', ?, ?)",
                (rollout_id, dumps(request["input"]), now),
            )
            rollouts.append({"rollout_id": rollout_id})
        run("COMMIT")
        return rollouts

    async def dequeue_rollout(self):
        return (await self.dequeue_many_rollouts(limit=1))[0]

    async def dequeue_many_rollouts(self, limit):
        run = self._db.execute
        now = time.time()
        run("BEGIN IMMEDIATE")
        rows = run(
            "SELECT seq, rollout_id FROM rollouts WHERE status = 'queuing' ORDER BY seq LIMIT ?", (limit,)
        ).fetchall()
        claimed = []
        for seq, rollout_id in rows:
            attempt_id = self._id()
            run("UPDATE rollouts SET status = 'preparing' WHERE seq = ?", (seq,))
            run("INSERT INTO attempts VALUES (?, 1, ?, 'preparing', ?, NULL, NULL)", (seq, attempt_id, now))
            claimed.append({"rollout_id": rollout_id, "attempt_id": attempt_id})
        run("COMMIT")
        return claimed

    async def add_span(self, span):
        await self.add_many_spans([span])

    async def add_many_spans(self, spans):
        run = self._db.execute
        now = time.time()
        run("BEGIN IMMEDIATE")
        owner = seq = None
        rows = []
        for span in spans:
            if span["rollout_id"] != owner:
                owner = span["rollout_id"]
                seq = run("SELECT seq FROM rollouts WHERE rollout_id = ?", (owner,)).fetchone()[0]
                run(
                    "UPDATE attempts SET status = 'running', heartbeat = ? WHERE rollout = ? AND sequence_id = 1",
                    (now, seq),
                )
            ids = (seq, span["sequence_id"], span["span_id"], span["trace_id"], span["name"])
            rows.append((*ids, span["start_time"], span["end_time"], dumps(span["attributes"])))
        self._db.executemany(
            "INSERT INTO spans (rollout, attempt, sequence_id, span_id, trace_id, name, start_time, end_time, attributes)"
            " VALUES (?, 1, ?, ?, ?, ?, ?, ?, ?)",
            rows,
        )
        run("COMMIT")

    async def update_attempt(self, rollout_id, attempt_id, status):
        await self.finish_many([{"rollout_id": rollout_id}], status)

    async def finish_many(self, claimed, status="succeeded"):
        run = self._db.execute
        now = time.time()
        run("BEGIN IMMEDIATE")
        for one in claimed:
            seq = run("SELECT seq FROM rollouts WHERE rollout_id = ?", (one["rollout_id"],)).fetchone()[0]
            run(
                "UPDATE attempts SET status = ?, end_time = ? WHERE rollout = ? AND sequence_id = 1", (status, now, seq)
            )
            run("UPDATE rollouts SET status = ?, end_time = ? WHERE seq = ?", (status, now, seq))
        run("COMMIT")

    async def query_many(self, rollout_ids):
        return {rollout_id: await self.query_spans(rollout_id) for rollout_id in rollout_ids}

    async def query_spans(self, rollout_id):
        rows = self._db.execute(
            "SELECT s.* FROM spans s JOIN rollouts r ON r.seq = s.rollout WHERE r.rollout_id = ? ORDER BY s.sequence_id",
            (rollout_id,),
        ).fetchall()
        return [(*row[:-1], loads(row[-1])) for row in rows]

    async def close(self):
        self._db.close()


class FloorClient:
    """Sends the calls of `FloorStore` to `Floor.serve`."""

    def __init__(self, url):
        import aiohttp

        self._session = aiohttp.ClientSession()
        self._url = url

    def __getattr__(self, method):
        async def call(*arguments, **more):
            body = dumps([*arguments, *more.values()])
            async with self._session.post(f"{self._url}/{method}", data=body) as response:
                return loads(await response.read())

        return call

    async def close(self):
        await self._session.close()


class PostgresFloor(Leyden):
    """Leyden's statements through bare libpq: no store that sends them can be faster on PostgreSQL."""

    def __init__(self):
        self.make_span = dict
        self.make_request = dict

    async def open(self, where, folder):
        from benchmarks.peers.postgres_floor import PostgresFloorStore

        return PostgresFloorStore(self._database())

    async def finish_many(self, store, claimed):
        await store.finish_many(claimed)

    async def query_many(self, store, rollout_ids):
        return await store.query_many(rollout_ids)


SIDES = {"leyden": Leyden, "agentlightning": AgentLightning, "sqlite3": Floor, "libpq": PostgresFloor}


# ---- the program -----------------------------------------------------------------------------------------------------


class Program:
    """Rollouts on one store, with the time that each call took."""

    def __init__(self, side, store):
        self.side = side
        self.store = store
        self.micros = defaultdict(list)
        self.seconds = 0.0
        self.cpu_s = 0.0

    async def timed(self, name, call):
        began = time.perf_counter()
        answer = await call
        self.micros[name].append((time.perf_counter() - began) * 1e6)
        return answer

    def start(self):
        self.cpu_s -= time.process_time()
        self.seconds -= time.perf_counter()

    def stop(self):
        self.seconds += time.perf_counter()
        self.cpu_s += time.process_time()

    def spans_of(self, claimed, count, size):
        """The caller's own work, outside the clocks: `count` spans of `size` bytes for each."""
        self.stop()
        spans = [self.span(ids_of(rollout), i, size) for rollout in claimed for i in range(1, count + 1)]
        self.start()
        return spans

    def span(self, ids, i, size):
        return self.side.make_span(
            **ids,
            sequence_id=i,
            trace_id=f"{i:032x}",
            span_id=f"{i:016x}",
            name="openai.chat.completion",
            start_time=1.0,
            end_time=2.0,
            attributes={f"gen_ai.prompt.{k}.content": "x" * (size // 8 - 30) for k in range(8)} | {"tokens": 25},
        )

    async def one(self, *, spans_in_bulk):
        """One rollout, call by call."""
        store, timed = self.store, self.timed
        self.start()
        await timed("enqueue", store.enqueue_rollout({"question": "what is 2 + 2?"}))
        rollout = await timed("claim", store.dequeue_rollout())
        spans = self.spans_of([rollout], SPANS, SIZE)
        if spans_in_bulk:
            await timed("add_many_spans", store.add_many_spans(spans))
        else:
            for span in spans:
                await timed("add_span", store.add_span(span))
        await timed("update_attempt", store.update_attempt(**ids_of(rollout), status="succeeded"))
        found = await timed("query_spans", store.query_spans(ids_of(rollout)["rollout_id"]))
        self.stop()
        assert len(found) == SPANS

    async def batch(self, rollouts, *, spans=SPANS, size=SIZE, read=True):
        """Many rollouts, with every call in the most that it can carry."""
        store, timed = self.store, self.timed
        requests = [self.side.make_request(input={"question": "what is 2 + 2?"}) for _ in range(rollouts)]
        self.start()
        await timed("enqueue_many", store.enqueue_many_rollouts(requests))
        claimed = await timed("claim_many", store.dequeue_many_rollouts(limit=rollouts))
        await timed("add_all_spans", store.add_many_spans(self.spans_of(claimed, spans, size)))
        await timed("finish_many", self.side.finish_many(store, claimed))
        if not read:
            self.stop()
            return
        found = await timed("query_many", self.side.query_many(store, [ids_of(one)["rollout_id"] for one in claimed]))
        self.stop()
        assert sum(map(len, found.values())) == SPANS * len(claimed) == SPANS * rollouts

    async def run(self, mode, rollouts, *, tasks=1, batch=50):
        """`tasks` at a time; with several, spans are made while others work, so the clock runs on. Mode `bulk`: `batch` in each call."""
        if mode == "bulk":
            for _ in range(rollouts // batch):
                await self.batch(batch)
        elif tasks == 1:
            for _ in range(rollouts):
                await self.one(spans_in_bulk=mode == "spans")
        else:
            began, cpu = time.perf_counter(), time.process_time()

            async def work():
                for _ in range(rollouts // tasks):
                    await self.one(spans_in_bulk=mode == "spans")

            await asyncio.gather(*(work() for _ in range(tasks)))
            self.seconds, self.cpu_s = time.perf_counter() - began, time.process_time() - cpu


class ScoredProgram(Program):
    """Leyden's rollouts whose two spans are a recorded model call and a reward, with random tokens and rewards."""

    def __init__(self, side, store):
        super().__init__(side, store)
        self.random = random.Random(0)

    def span(self, ids, i, size):
        from leyden import semconv
        from leyden.types import reward_attributes

        span = super().span(ids, i, size)
        if i == 1:
            tokens = {semconv.GEN_AI_INPUT_TOKENS: self.random.randrange(50, 3000), semconv.GEN_AI_OUTPUT_TOKENS: 25}
            return span.model_copy(update={"name": semconv.MODEL_CALL, "attributes": tokens | {"text": "x" * size}})
        attributes = reward_attributes({"reward": self.random.random()})
        return span.model_copy(update={"name": semconv.REWARD, "attributes": attributes})


def ids_of(rollout):
    """The ids of a claimed rollout, on any side."""
    if isinstance(rollout, dict):
        return rollout
    return {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}


def resident_mb():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


# ---- commands --------------------------------------------------------------------------------------------------------


class Commands:
    def __init__(self, side):
        self.side = side
        self.store = None
        self.folder = None

    async def open(self, where, warm_up=True):
        await self.close()
        self.folder = Path(tempfile.mkdtemp(prefix="leyden-bench-"))
        self.side.remote = where.startswith("http")
        self.store = await self.side.open(where, self.folder)
        if warm_up:
            for mode in ("one", "spans"):
                await Program(self.side, self.store).run(mode, WARM_UP)
        return {"server_pid": getattr(self.side, "server_pid", None)}

    async def run(self, mode, rollouts, **how):
        program = Program(self.side, self.store)
        await program.run(mode, rollouts, **how)
        return {"seconds": program.seconds, "cpu_s": program.cpu_s, "micros": program.micros}

    async def fill(self, rollouts, queued):
        """`rollouts` finished ones with two small spans each, then `queued` that wait."""
        program = ScoredProgram(self.side, self.store)
        for done in range(0, rollouts, FILL):
            await program.batch(min(FILL, rollouts - done), spans=2, size=200, read=False)
        for done in range(0, queued, FILL):
            requests = [self.side.make_request(input={"question": "wait"}) for _ in range(min(FILL, queued - done))]
            await self.store.enqueue_many_rollouts(requests)
        return {}

    async def prune(self, max_rollouts):
        from leyden.types import Retention

        while await self.store.prune(Retention(max_rollouts=max_rollouts)):
            pass
        return {}

    async def memory(self):
        on_disk = sum(file.stat().st_size for file in self.folder.iterdir()) / 1e6
        return {"mb": resident_mb(), "disk_mb": on_disk}

    async def questions(self, times):
        """CPU microseconds of each question that a dashboard asks, so many times."""
        ask = self.store.query_rollouts
        asked = {
            "newest": lambda: ask(sort_by="start_time", sort_order="desc", limit=100),
            "ended_last": lambda: ask(sort_by="end_time", sort_order="desc", limit=100),
            "of_status": lambda: ask(status_in=["succeeded"], limit=100),
            "of_status_newest": lambda: ask(
                status_in=["succeeded"], sort_by="start_time", sort_order="desc", limit=100
            ),
            "waiting": lambda: ask(status_in=["queuing", "requeuing"], limit=100),
            "statistics": self.store.statistics,
            "best": lambda: ask(sort_by="reward", sort_order="desc", limit=100),
            "rewards": lambda: self.store.summarise_rollouts(measures=("reward",)),
            "tokens": lambda: self.store.summarise_rollouts(measures=("tokens",)),
        }
        taken = defaultdict(list)
        for _ in range(times):
            for name, question in asked.items():
                began = time.process_time()
                await question()
                taken[name].append((time.process_time() - began) * 1e6)
        return taken

    async def serve(self, where):
        await self.open(where, warm_up=False)
        return {"url": await self.side.serve(self.store)}

    async def close(self):
        if self.store is not None and hasattr(self.store, "close"):
            await self.store.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        return {}


async def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    commands = Commands(SIDES[sys.argv[1]]())
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        answer = await getattr(commands, command.pop("do"))(**command)
        print(json.dumps(answer), file=answers, flush=True)
    await commands.close()
    atexit._run_exitfuncs()
    os._exit(0)  # a server may still hold threads


if __name__ == "__main__":
    try:
        import uvloop  # both sides have it
    except ImportError:
        asyncio.run(main())
    else:
        uvloop.run(main())
