"""What a serving session adds to a request: time, CPU, and whether either grows with what the store holds.

The application, the server of the model (`peers/gateway_upstream.py`, canned answers without latency), the gateway and
the store server are processes of their own. A request is `begin`, one model call, `end` and one feedback, one request
behind the other. Slices of the same call take turns: made directly, through the gateway alone, and in a request of a
session (`peers/serving_side.py`). Sessions over a store in memory, in a file and behind HTTP are measured without the
call, so that only the session is left, and two sessions over files that hold 1,000 and 100,000 rollouts. Slices with and
without a training beside them (`peers/serving_training.py`: gradient steps on all cores, in a process that the package's own
isolation starts, and that is halted for the others) take turns, too: with the requests on all cores, of which a training
takes one away, and with the requests on one core in both arms, as on a machine that reserves it for them.

When all is measured, each store must have every request and its feedback, and the store behind the gateway each call:
otherwise there is no result.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from benchmarks.gateway import KEY, PEERS, Gateway
from benchmarks.harness import ROOT, Peer, PeerFailed, Row, Sample
from benchmarks.sides import Side, alternate, cpu_seconds_of, row
from benchmarks.store import percentile
from leyden.store import open_store
from leyden.types.semconv import MODEL_CALL

LIVE_KEY = "live-key"
BEHAVIOUR = "0/0/16"
"""Of the model's server: no latency; see `peers/gateway_upstream.py`."""
PAIRS = 9
CALLS = 50
"""In a slice with model calls."""
REQUESTS = 100
"""In a slice without."""
TAIL_REQUESTS = 500
"""In a slice whose tail is compared with that of another slice."""
PAUSE_MS = 2
"""Between two requests, so that records are delivered beside requests."""
SIZES = (1_000, 100_000)
START_SECONDS = 60.0
HEADLINES = ()


def main(peer: Peer | None) -> list[Row]:
    """Requests with calls, then sessions alone by kind of store, then by what the store holds. No peer."""
    with ExitStack() as stack:
        upstream = stack.enter_context(Side("upstream", Path(sys.executable), PEERS / "gateway_upstream.py"))
        model = f"http://127.0.0.1:{upstream.ask('open')['port']}/{BEHAVIOUR}/v1"
        store = stack.enter_context(StoreServer())
        gateway = stack.enter_context(LiveGateway(model, store))

        def application(url: str | None = None) -> Application:
            return stack.enter_context(Application(url, gateway))

        served = application(store.url)
        alone = {"in memory": application("memory://"), "in a file": application(), "behind HTTP": served}
        histories = [application(), application()]
        for one, size in zip(histories, SIZES, strict=True):
            one.fill(size)
        rows = [*of_calls(served, [gateway, store], model), *of_sessions(alone), *of_histories(histories)]
        rows += of_training(alone["in a file"], served, [gateway, store])
        for one in (*alone.values(), *histories):
            one.check()
        return rows


# ---- measurements ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slice:
    """Times and CPU of one slice of requests."""

    ms: list[float]
    """Of each request."""
    cpu_s: float
    """Of the application and of whoever works for it."""

    def time(self, percent: int) -> Sample:
        return Sample(percentile(self.ms, percent), self.cpu_s)

    def above(self, other: Slice, percent: int) -> Sample:
        """Return how far a percentile lies above the median of another slice.

        Its median and not its percentile, because its tail is the machine's.
        """
        return Sample(percentile(self.ms, percent) - percentile(other.ms, 50), self.cpu_s)

    def cpu_ms(self) -> Sample:
        return Sample(1000 * self.cpu_s / len(self.ms), self.cpu_s)


def in_turn(sides: Sequence[Callable[[], Slice]]) -> list[list[Slice]]:
    """Slices of all sides, which take turns, behind one of each that is not counted."""
    taken: list[list[Slice]] = [[] for _ in sides]

    def counted(run: Callable[[], Slice], slices: list[Slice]) -> Callable[[], Sample]:
        def sample() -> Sample:
            slices.append(run())
            return slices[-1].time(50)

        return sample

    for run in sides:
        run()
    alternate([counted(run, slices) for run, slices in zip(sides, taken, strict=True)], pairs=PAIRS)
    return taken


def of_calls(served: Application, helpers: Sequence[Process], model: str) -> list[Row]:
    """A model call made directly, through the gateway alone, and in a request of a session; helpers: gateway and store."""
    direct, through, whole = in_turn(
        [
            lambda: served.calls(model, helpers),
            lambda: served.calls(None, helpers),
            lambda: served.requests(CALLS, calls=True, helpers=helpers),
        ]
    )
    rows: list[Row] = []
    for percent in (50, 99):
        said = f"serving: added to a 0 ms call by session and gateway, p{percent}"
        mine, theirs = (
            [one.above(bare, percent) for one, bare in zip(each, direct, strict=True)] for each in (whole, through)
        )
        rows.append(row(said, "ms", mine, theirs, "the gateway alone", higher_is_better=False))
    added = [one.above(bare, 50) for one, bare in zip(whole, through, strict=True)]
    rows.append(row("serving: added to a 0 ms call by the session, p50", "ms", added, [], None))
    costs = [[one.cpu_ms() for one in each] for each in (whole, through)]
    said = "serving: CPU of a request, in application, gateway and store"
    rows.append(row(said, "ms", *costs, "the call through the gateway alone", higher_is_better=False))
    return rows


def of_sessions(alone: dict[str, Application]) -> list[Row]:
    """`begin`, `end` and feedback without a call: time that the application waits, and its CPU with the delivery."""
    taken = in_turn([lambda one=one: one.requests(REQUESTS) for one in alone.values()])
    rows: list[Row] = []
    for said, sample in (
        ("p50", lambda one: one.time(50)),
        ("p99", lambda one: one.time(99)),
        ("CPU of a request", Slice.cpu_ms),
    ):
        for where, slices in zip(alone, taken, strict=True):
            rows.append(
                row(f"serving: session, store {where}, {said}", "ms", [sample(one) for one in slices], [], None)
            )
    return rows


def of_histories(histories: Sequence[Application]) -> list[Row]:
    """The session's time and CPU over a file that holds many rollouts, against one that holds few."""
    few, many = in_turn([lambda one=one: one.requests(REQUESTS) for one in histories])
    name, other = f"serving: session, {SIZES[1]:,} rollouts in the file", f"{SIZES[0]:,} rollouts"
    return [
        row(
            f"{name}, p50",
            "ms",
            *([one.time(50) for one in each] for each in (many, few)),
            other,
            higher_is_better=False,
        ),
        row(
            f"{name}, CPU of a request",
            "ms",
            *([one.cpu_ms() for one in each] for each in (many, few)),
            other,
            higher_is_better=False,
        ),
    ]


def of_training(alone: Application, served: Application, helpers: Sequence[Process]) -> list[Row]:
    """Requests with a training beside them, against the same requests without: the session alone, then with the call.

    Before them a loop that needs nobody else shows how much the machine itself slows down: cores share caches, power and,
    as two threads of one core, everything.
    """
    kinds: dict[str, Callable[[], Slice]] = {
        "as long a loop without a session": lambda: alone.loops(TAIL_REQUESTS),
        "session alone": lambda: alone.requests(TAIL_REQUESTS),
        "session and 0 ms call": lambda: served.requests(TAIL_REQUESTS, calls=True, helpers=helpers),
    }
    serving = psutil.Process().children(recursive=True)
    cpus = sorted(os.sched_getaffinity(0))
    with Side("leyden", Path(sys.executable), PEERS / "serving_training.py") as training:
        training.ask("start", name="training", limits={})
        rows = [row for what, run in kinds.items() for row in beside_training(what, run, training)]
        bind(serving, cpus[:1])
        for what, run in kinds.items():
            rows += beside_training(f"on a CPU of its own, {what}", run, training)
        bind(serving, cpus)
    return rows


def beside_training(what: str, run: Callable[[], Slice], training: Side) -> list[Row]:
    """The p50 and p99 of slices with a training beside them, against slices without."""
    steps: list[int] = []

    def beside() -> Slice:
        training.ask("resume", name="training")
        try:
            return run()
        finally:
            steps.append(training.ask("halt", name="training")["steps"])

    without, busy = in_turn([run, beside])
    if sum(steps) < len(steps):
        raise RuntimeError(f"only {sum(steps)} steps were trained beside the requests, in {len(steps)} slices")
    return [
        row(
            f"serving: {what}, training beside it, p{percent}",
            "ms",
            *([one.time(percent) for one in each] for each in (busy, without)),
            "without training",
            higher_is_better=False,
        )
        for percent in (50, 99)
    ]


def bind(processes: Sequence[psutil.Process], cpus: Sequence[int]) -> None:
    """Let processes, with all their threads, run on these CPUs only."""
    for process in processes:
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cpus)


# ---- processes -------------------------------------------------------------------------------------------------------


class Application:
    """`peers/serving_side.py` at work with a session. To be used in `with`."""

    def __init__(self, store: str | None, gateway: LiveGateway) -> None:
        """store: its URL; None for a file of its own."""
        self._folder = tempfile.TemporaryDirectory(prefix="leyden-bench-")
        self._side = Side("leyden", Path(sys.executable), PEERS / "serving_side.py")
        self._gateway = gateway
        self.n_requests = 0
        """Requests that the store must have."""
        folder = Path(self._folder.name)
        self._store = store or str(folder / "store.db")
        self._side.ask(
            "open",
            store=self._store,
            folder=str(folder / "session"),
            gateway=f"http://127.0.0.1:{gateway.port}",
            live_key=LIVE_KEY,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._side.close()
        self._folder.cleanup()

    def calls(self, url: str | None, helpers: Sequence[Process]) -> Slice:
        """Calls of the model at `url`, or through the gateway alone."""
        return self._measured("calls", CALLS, helpers, url=url or self._gateway.urls[0], key=KEY, through=url is None)

    def requests(self, n: int, *, calls: bool = False, helpers: Sequence[Process] = ()) -> Slice:
        """Requests of the session, until all of them are in the store."""
        self.n_requests += n
        return self._measured("requests", n, helpers, calls=calls, through=calls)

    def loops(self, n: int) -> Slice:
        """Loops that take as long as a session, without one."""
        return self._measured("loops", n, (), through=False)

    def fill(self, n: int) -> None:
        """Put finished rollouts with feedback into the store."""
        self.n_requests += n
        self._side.ask("fill", rollouts=n)

    def check(self) -> None:
        """Raise RuntimeError unless each request and its feedback is in the store."""
        found = self._side.ask("settle")
        if (found["rollouts"], found["feedback"]) != (self.n_requests, self.n_requests):
            raise RuntimeError(f"{self.n_requests} requests were served, {self._store} has {found}")

    def _measured(self, do: str, n: int, helpers: Sequence[Process], *, through: bool, **how: object) -> Slice:
        everybody = [self._side, *helpers]
        before = sum(one.cpu_seconds() for one in everybody)
        ms = self._side.ask(do, n=n, pause_ms=PAUSE_MS, **how)["ms"]
        self._side.ask("settle")
        if helpers:
            self._gateway.settled()
        if through:
            self._gateway.calls += n
        return Slice(ms, sum(one.cpu_seconds() for one in everybody) - before)


class StoreServer:
    """`leyden store` on a file of its own. To be used in `with`."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="leyden-bench-")
        self.path = str(Path(self._folder.name) / "store.db")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        program = [sys.executable, "-c", "from leyden.cli import main; main()", "store"]
        command = [*program, "--url", f"sqlite://{self.path}", "--port", str(self._port)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
            except OSError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise PeerFailed("leyden store did not start") from None
                time.sleep(0.01)
            else:
                return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
        self._folder.cleanup()

    def cpu_seconds(self) -> float:
        """CPU seconds that it has used."""
        return cpu_seconds_of(self._process.pid)


class LiveGateway(Gateway):
    """`leyden gateway`, which admits sessions and records in a store server."""

    def __init__(self, model: str, store: StoreServer) -> None:
        super().__init__("leyden gateway")
        self._model = model
        self._store = store
        self.urls = [f"http://127.0.0.1:{self.port}{asyncio.run(self._begin_attempt())}"]

    async def _begin_attempt(self) -> str:
        async with open_store(self._store.url) as store:
            rollout = await store.start_rollout("the gateway alone")
        return f"/rollout/{rollout.rollout_id}/attempt/{rollout.attempt.attempt_id}/v1"

    def command(self) -> tuple[list[str], dict[str, str]]:
        program = [sys.executable, "-c", "from leyden.cli import main; main()", "gateway"]
        options = ["--store", self._store.url, "--port", str(self.port), "--live-key", LIVE_KEY]
        return [*program, *options, "--model", f"quick={self._model}"], {"PYTHONPATH": str(ROOT)}

    def check(self) -> None:
        """Raise RuntimeError unless every call is in the record."""
        n_recorded = asyncio.run(self._n_recorded())
        if n_recorded != self.calls:
            raise RuntimeError(f"{self.calls} calls were answered, {n_recorded} are recorded")

    async def _n_recorded(self) -> int:
        async with open_store(self._store.url) as store:
            ids = [one.rollout_id for one in await store.query_rollouts()]
            spans = [await store.query_spans_of(ids[at : at + 200]) for at in range(0, len(ids), 200)]
        return sum(span.name == MODEL_CALL for batch in spans for of_rollout in batch.values() for span in of_rollout)


Process = Side | StoreServer | LiveGateway
"""What has `cpu_seconds`."""
