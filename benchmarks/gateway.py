"""The gateway against LiteLLM's proxy: time added to a call, calls a CPU second, many streams at once, start.

Every part is a process of its own: one server with canned answers and a fixed latency (`peers/gateway_upstream.py`), one program of callers
(`peers/gateway_load.py`), and the gateways, each run by its own command. Short slices of all of them take turns, and of the server asked
directly where what a gateway adds is measured. Beside them runs the floor (`peers/gateway_floor.py`): what uvicorn and aiohttp add when
they pass on bytes and do nothing else.

Both sides record. Leyden keeps calls with verified tokens in a SQLite file. The agents ask for no tokens, so its server's answers carry ids
and log-probabilities that it takes out again, which makes them many times as long as the peer's. "durable": a call is in the file before
the last byte of its answer. The peer appends prompt, answer and usage to a file, by the lightest callback there is
(`peers/gateway_litellm.py`). It runs as its documentation says to run it in production: one worker of uvicorn with uvloop and httptools, no
debug logs, no database. When all is measured, every call must be in each side's record, Leyden's with the exact tokens: otherwise
there is no result.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.harness import MINIMUM_RUNS, ROOT, Peer, PeerFailed, Row, Sample
from benchmarks.peers.gateway_upstream import PROMPT_IDS, RESPONSE_IDS
from benchmarks.sides import Side, alternate, cpu_seconds_of, row
from benchmarks.store import percentile
from leyden.store import open_store
from leyden.types import EnqueueRolloutRequest
from leyden.types.semconv import MODEL_CALL

PEER = "bench-litellm"
PEERS = Path(__file__).parent / "peers"
PAIRS = MINIMUM_RUNS
LATENCY_MS = 20
"""Of the server, where what a gateway adds is measured; it is measured at 0 too."""
CALLERS = 8
CALLS_ALONE, CALLS = 60, 240
"""In a slice: of one caller who waits for that server, of all others."""
STREAMED_CALLS = 48
CHUNKS = 16
BUSY_CALLERS = 32
BUSY_SECONDS = 1.5
STREAMS = 512
STREAM_CHUNKS, STREAM_MS = 10, 500
"""Of each of the many streams: five seconds."""
ATTEMPTS = 64
"""Among which Leyden's callers are spread."""
BEHAVIOURS = {
    "fixed": f"{LATENCY_MS}/2/{CHUNKS}",
    "quick": f"0/0/{CHUNKS}",
    "slow": f"{STREAM_MS}/{STREAM_MS}/{STREAM_CHUNKS}",
}
"""Models, and how their server behaves; see `peers/gateway_upstream.py`."""
START_SECONDS = 120.0
KEY = "sk-benchmark"
FLOOR = "uvicorn and aiohttp alone"
HEADLINES = ("gateway, durable: added to a 0 ms call, 1 caller, p50", "gateway, durable: calls a CPU second")


def main(peer: Peer | None) -> list[Row]:
    """Latency and throughput, then many streams, then starts."""
    with ExitStack() as stack:
        upstream = stack.enter_context(Side("upstream", Path(sys.executable), PEERS / "gateway_upstream.py"))
        load = stack.enter_context(Side("load", Path(sys.executable), PEERS / "gateway_load.py"))
        bench = Benchmark(load, f"http://127.0.0.1:{upstream.ask('open')['port']}", peer)
        return [*bench.at_work(), *bench.many_streams(), *bench.starts()]


@dataclass(frozen=True)
class Slice:
    """Times and CPU of one slice of calls."""

    ms: list[float]
    cpu_s: float
    """Of the gateway."""

    def above(self, direct: Slice, percent: int) -> Sample:
        """Return how far a percentile lies above the median of the calls without a gateway.

        Their median and not their percentile, because their tail is the machine's.
        """
        return Sample(percentile(self.ms, percent) - percentile(direct.ms, 50), self.cpu_s)


class Benchmark:
    """The parts that every measurement shares."""

    def __init__(self, load: Side, upstream: str, peer: Peer | None) -> None:
        self._load = load
        self._upstream = upstream
        self._peer = peer

    # ---- measurements ------------------------------------------------------------------------------------------------

    def at_work(self) -> list[Row]:
        """Measure what is added to calls and to first chunks, and how many calls a CPU second passes."""
        with ExitStack() as stack:
            plain = stack.enter_context(Leyden(self._upstream))
            durable = stack.enter_context(Leyden(self._upstream, "--durable"))
            theirs = self._started(stack)
            floor = stack.enter_context(Floor(self._upstream))
            gateways: dict[str, Gateway] = {"": plain, ", durable": durable}
            for gateway in (*gateways.values(), *([theirs] if theirs else [])):
                for do in ("calls", "streams"):  # connections, code that is loaded when first used
                    self.ask(gateway, do, "quick", callers=CALLERS, calls=2 * CALLERS)
            self.ask(floor, "calls", "quick", callers=CALLERS, calls=2 * CALLERS)
            rows: list[Row] = []
            floors: list[Row] = []
            for model, latency_ms, callers, calls in (
                ("quick", 0, 1, CALLS),  # one call behind the other: nothing has gone cold meanwhile
                ("fixed", LATENCY_MS, 1, CALLS_ALONE),
                ("fixed", LATENCY_MS, CALLERS, CALLS),
            ):
                said = f"added to a {latency_ms} ms call, {callers} caller{'s' if callers > 1 else ''}"
                sides = [*gateways.values(), *([theirs] if theirs else []), floor]
                *added, least = self._added("calls", model, sides, callers=callers, calls=calls)
                rows += self._against_peer(said, gateways, added)
                floors += [
                    self._lower(f"gateway{how}: {said}, p50, of a bare pass-through", "ms", [mine, least[50]], FLOOR)
                    for how, mine in zip(gateways, (side[50] for side in added), strict=False)
                ]
            said = f"added to the first chunk of a stream, {CALLERS} callers"
            sides = [plain, *([theirs] if theirs else [])]
            added = self._added("streams", "fixed", sides, callers=CALLERS, calls=STREAMED_CALLS)
            rows += self._against_peer(said, {"": plain}, added)
            return rows + self._rates(gateways, theirs) + floors

    def _added(
        self, do: str, model: str, gateways: Sequence[Gateway], *, callers: int, calls: int
    ) -> list[dict[int, list[Sample]]]:
        """Of each, milliseconds above the same slice of the server itself: medians above its median, and so the 99th percentiles."""
        taken: list[list[Slice]] = []
        sides: list[Callable[[], Sample]] = []
        for gateway in (None, *gateways):
            slices: list[Slice] = []
            taken.append(slices)
            sides.append(self._slice(gateway, do, model, slices, callers=callers, calls=calls))
        alternate(sides, pairs=PAIRS)
        direct, *others = taken
        return [
            {
                percent: [mine.above(bare, percent) for mine, bare in zip(slices, direct, strict=True)]
                for percent in (50, 99)
            }
            for slices in others
        ]

    def _against_peer(self, said: str, names: Iterable[str], added: Sequence[dict[int, list[Sample]]]) -> list[Row]:
        """Rows of Leyden's gateways, which come first, against the peer's, which is last if it is there."""
        names = list(names)
        return [
            self._lower(
                f"gateway{name}: {said}, p{percent}",
                "ms",
                [mine[percent], *(side[percent] for side in added[len(names) :])],
            )
            for percent in (50, 99)
            for name, mine in zip(names, added, strict=False)
        ]

    def _slice(
        self, gateway: Gateway | None, do: str, model: str, taken: list[Slice], *, callers: int, calls: int
    ) -> Callable[[], Sample]:
        """Runs a slice, which goes to `taken`."""

        def run() -> Sample:
            before = gateway.cpu_seconds() if gateway else 0.0
            ms = self.ask(gateway, do, model, callers=callers, calls=calls)["ms"]
            taken.append(Slice(ms, gateway.settled() - before if gateway else 0.0))
            return Sample(percentile(ms, 50), taken[-1].cpu_s)

        return run

    def _rates(self, gateways: dict[str, Gateway], theirs: Gateway | None) -> list[Row]:
        """Calls a CPU second of the gateway, and a second, when it has as much to do as it can."""
        a_second: list[list[Sample]] = []

        def busy(gateway: Gateway, rates: list[Sample]) -> Callable[[], Sample]:
            def run() -> Sample:
                before = gateway.cpu_seconds()
                done = self.ask(gateway, "calls", "quick", callers=BUSY_CALLERS, seconds=BUSY_SECONDS)
                cpu_s = gateway.settled() - before
                rates.append(Sample(len(done["ms"]) / done["seconds"], cpu_s))
                return Sample(len(done["ms"]) / cpu_s, cpu_s)

            return run

        sides: list[Callable[[], Sample]] = []
        for gateway in (*gateways.values(), *([theirs] if theirs else [])):
            rates: list[Sample] = []
            a_second.append(rates)
            sides.append(busy(gateway, rates))
        a_cpu_second = alternate(sides, pairs=PAIRS)
        rows: list[Row] = []
        for said, unit, samples in (
            ("calls a CPU second", "calls/CPU s", a_cpu_second),
            (f"calls a second, {BUSY_CALLERS} callers", "calls/s", a_second),
        ):
            for number, how in enumerate(gateways):
                against = samples[-1] if theirs else []
                rows.append(row(f"gateway{how}: {said}", unit, samples[number], against, self._peer_name))
        return rows

    def many_streams(self) -> list[Row]:
        """Streams that all go on at the same time: the most memory that the process ever had, and how long they took."""
        with ExitStack() as stack:
            gateways: list[Gateway] = [stack.enter_context(Leyden(self._upstream))]
            if theirs := self._started(stack):
                gateways.append(theirs)
            memory: list[list[Sample]] = [[] for _ in gateways]

            def streams(gateway: Gateway, peaks: list[Sample]) -> Callable[[], Sample]:
                def run() -> Sample:
                    before = gateway.cpu_seconds()
                    done = self.ask(gateway, "streams", "slow", streams=STREAMS)
                    cpu_s = gateway.settled() - before
                    peaks.append(Sample(gateway.memory_mb("VmHWM"), cpu_s))
                    return Sample(done["seconds"], cpu_s)

                return run

            sides = [streams(gateway, peaks) for gateway, peaks in zip(gateways, memory, strict=True)]
            seconds = alternate(sides, pairs=MINIMUM_RUNS)
        said = f"gateway: {STREAMS} streams at once"
        upstream_s = STREAM_CHUNKS * STREAM_MS / 1000
        return [
            self._lower(f"{said}, peak memory", "MB", memory),
            self._lower(f"{said}, until all are whole (the server takes {upstream_s:g} s)", "s", seconds),
        ]

    def starts(self) -> list[Row]:
        """From the command to the first answer, and the memory of the process then."""
        makers: list[Callable[[], Gateway]] = [lambda: Leyden(self._upstream)]
        if (peer := self._peer) is not None:
            makers.append(lambda: Litellm(self._upstream, peer))
        memory: list[list[Sample]] = [[] for _ in makers]

        def start(make: Callable[[], Gateway], resident: list[Sample]) -> Callable[[], Sample]:
            def run() -> Sample:
                with make() as gateway:
                    cpu_s = gateway.settled()
                    resident.append(Sample(gateway.memory_mb("VmRSS"), cpu_s))
                    return Sample(gateway.start_seconds, cpu_s)

            return run

        sides = [start(make, resident) for make, resident in zip(makers, memory, strict=True)]
        seconds = alternate(sides, pairs=MINIMUM_RUNS)
        return [
            self._lower("gateway: start to the first answer", "s", seconds),
            self._lower("gateway: memory at rest", "MB", memory),
        ]

    # ---- how they are asked ------------------------------------------------------------------------------------------

    def ask(self, gateway: Gateway | None, do: str, model: str, **how: Any) -> dict[str, Any]:
        """Let the callers call, and return what they measured. gateway: None for the server itself."""
        urls = gateway.urls if gateway else [f"{self._upstream}/{BEHAVIOURS[model]}/v1"]
        done = self._load.ask(do, urls=urls, model=model, key=KEY, again=gateway.again if gateway else 0, **how)
        if gateway:
            gateway.calls += len(done["ms"])
            gateway.failed += done["failed"]
        return done

    @property
    def _peer_name(self) -> str | None:
        return None if self._peer is None else f"{self._peer.name} proxy"

    def _lower(self, name: str, unit: str, sides: Sequence[list[Sample]], other: str | None = None) -> Row:
        """A row of the first against the second, which is the peer if `other` does not name it."""
        theirs = sides[1] if len(sides) > 1 else []
        return row(name, unit, sides[0], theirs, other or self._peer_name, higher_is_better=False)

    def _started(self, stack: ExitStack) -> Gateway | None:
        """The peer's proxy. None where it cannot be had, and from then on Leyden is measured alone."""
        if self._peer is None:
            return None
        try:
            return stack.enter_context(Litellm(self._upstream, self._peer))
        except PeerFailed as failure:
            print(f"Measuring Leyden alone: {failure}", flush=True)
            self._peer = None
            return None


# ---- the gateways ----------------------------------------------------------------------------------------------------


class Gateway:
    """A gateway at work, as its own command runs it. To be used in `with`, which ends it and then checks its record."""

    urls: list[str]
    """Base URLs, among which callers are spread."""
    calls = 0
    """Answered calls, which all must be in the record."""
    start_seconds = 0.0
    """From the command to the first answer."""
    again = 0
    """How many calls of one slice may fail and be made once more."""
    failed = 0
    """Calls that did."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._folder = tempfile.TemporaryDirectory(prefix="leyden-bench-")
        self.folder = Path(self._folder.name)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]

    def command(self) -> tuple[list[str], dict[str, str]]:
        """The command, and what it needs of the environment."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise PeerFailed unless every call is in the record. The gateway has ended."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        command, environ = self.command()
        inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self._log = (self.folder / "log").open("w+")
        began = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**inherited, **environ},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        try:
            while not self._answers():
                if self._process.poll() is not None or time.perf_counter() - began > START_SECONDS:
                    raise PeerFailed(f"{self._name} did not start\n{self._said()}")
                time.sleep(0.01)
        except BaseException:
            self._end()
            self._log.close()
            self._folder.cleanup()
            raise
        self.start_seconds = time.perf_counter() - began
        self.calls = 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.settled()
            self._end()
            if kind is None:
                self.check()
        finally:
            self._log.close()
            self._folder.cleanup()

    def _answers(self) -> bool:
        """Whether it answers a call."""
        path = self.urls[0].removeprefix(f"http://127.0.0.1:{self.port}")
        body = json.dumps({"model": "quick", "messages": [{"role": "user", "content": "Are you there?"}]})
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("POST", f"{path}/chat/completions", body, headers)
            answer = connection.getresponse()
            said = answer.read()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        if answer.status != 200:
            raise PeerFailed(f"{self._name} answers {answer.status}: {said[:500]!r}\n{self._said()}")
        return True

    def cpu_seconds(self) -> float:
        """CPU seconds that it has used, its children included."""
        return cpu_seconds_of(self._process.pid)

    def settled(self) -> float:
        """`cpu_seconds` once it has written down what it does after its answers."""
        deadline, last = time.perf_counter() + 10, self.cpu_seconds()
        while time.perf_counter() < deadline:
            time.sleep(0.15)
            before, last = last, self.cpu_seconds()
            if last - before <= 0.02:
                break
        return last

    def memory_mb(self, field: str) -> float:
        """Return the memory of the process. field: VmRSS, resident now, or VmHWM, the peak."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        (kb,) = [line.split()[1] for line in status.splitlines() if line.startswith(f"{field}:")]
        return int(kb) * 1024 / 1e6

    def _end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _said(self) -> str:
        self._log.flush()
        return (self.folder / "log").read_text()[-2000:]


class Leyden(Gateway):
    """`leyden gateway`, recording in a SQLite file that holds running attempts."""

    def __init__(self, upstream: str, *options: str) -> None:
        super().__init__("leyden gateway")
        self._upstream = upstream
        self._options = options
        self._rollout_ids, self.urls = asyncio.run(self._begin_attempts())

    async def _begin_attempts(self) -> tuple[list[str], list[str]]:
        async with open_store(str(self.folder / "store.db")) as store:
            await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=number) for number in range(ATTEMPTS)])
            claimed = await store.dequeue_many_rollouts(limit=ATTEMPTS)
        root = f"http://127.0.0.1:{self.port}"
        urls = [f"{root}/rollout/{one.rollout_id}/attempt/{one.attempt.attempt_id}/v1" for one in claimed]
        return [one.rollout_id for one in claimed], urls

    def command(self) -> tuple[list[str], dict[str, str]]:
        models = [
            option
            for model, behaviour in BEHAVIOURS.items()
            for option in ("--model", f"{model}={self._upstream}/{behaviour}/v1")
        ]
        program = [sys.executable, "-c", "from leyden.cli import main; main()", "gateway"]
        options = ["--store", str(self.folder / "store.db"), "--port", str(self.port), *models, *self._options]
        return [*program, *options], {"PYTHONPATH": str(ROOT)}

    def check(self) -> None:
        """See Gateway.check. Each call must have the server's own tokens."""
        proven = asyncio.run(self._proven())
        if proven != self.calls:
            raise RuntimeError(f"leyden: {self.calls} calls were answered, {proven} are recorded with their tokens")

    async def _proven(self) -> int:
        async with open_store(str(self.folder / "store.db")) as store:
            found = 0
            for rollout_id in self._rollout_ids:
                spans = await store.query_spans(rollout_id, name=MODEL_CALL, limit=100_000)
                found += sum(
                    span.tokens is not None
                    and list(span.tokens.prompt_ids) == PROMPT_IDS
                    and list(span.tokens.response_ids) == RESPONSE_IDS
                    and len(span.tokens.logprobs or ()) == len(RESPONSE_IDS)
                    for span in spans
                )
            return found


class Floor(Gateway):
    """Nothing but the two libraries."""

    def __init__(self, upstream: str) -> None:
        super().__init__(FLOOR)
        self._upstream = upstream
        self.urls = [f"http://127.0.0.1:{self.port}/v1"]

    def command(self) -> tuple[list[str], dict[str, str]]:
        servers = {model: f"{self._upstream}/{behaviour}/v1" for model, behaviour in BEHAVIOURS.items()}
        return [sys.executable, str(PEERS / "gateway_floor.py"), str(self.port), json.dumps(servers)], {}

    def check(self) -> None:
        """It records nothing."""


class Litellm(Gateway):
    """LiteLLM's proxy, recording in a file of lines."""

    again = 5

    def __init__(self, upstream: str, peer: Peer) -> None:
        super().__init__(peer.name)
        self._upstream = upstream
        self._peer = peer
        self.urls = [f"http://127.0.0.1:{self.port}/v1"]

    def command(self) -> tuple[list[str], dict[str, str]]:
        (self.folder / "gateway_litellm.py").write_bytes((PEERS / "gateway_litellm.py").read_bytes())
        config = {
            "model_list": [
                {
                    "model_name": model,
                    "litellm_params": {
                        "model": f"openai/{model}",
                        "api_base": f"{self._upstream}/{behaviour}/v1",
                        "api_key": KEY,
                    },
                }
                for model, behaviour in BEHAVIOURS.items()
            ],
            "litellm_settings": {"callbacks": ["gateway_litellm.recorder"], "set_verbose": False, "num_retries": 0},
            "general_settings": {"master_key": KEY},
        }
        (self.folder / "config.yaml").write_text(json.dumps(config))
        program = [str(self._peer.python.with_name("litellm")), "--config", str(self.folder / "config.yaml")]
        environ = {
            "RECORD_TO": str(self.folder / "calls.jsonl"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # without it each start asks the network for prices
            "LITELLM_LOG": "ERROR",
            "LITELLM_MODE": "PRODUCTION",
        }
        return [*program, "--host", "127.0.0.1", "--port", str(self.port), "--num_workers", "1"], environ

    def check(self) -> None:
        """See Gateway.check."""
        with (self.folder / "calls.jsonl").open() as lines:
            written = sum(1 for line in lines if json.loads(line)["content"])
        if not self.calls <= written <= self.calls + self.failed:
            raise PeerFailed(f"{self._name}: {self.calls} calls were answered, {written} are in its file")
        if self.failed:
            print(
                f"{self._name}: {self.failed} of {self.calls + self.failed} calls failed and were made again",
                flush=True,
            )
