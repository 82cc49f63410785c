"""The store inside one process, against Agent Lightning's: rollouts a second, and memory kept for finished ones.

A rollout is: enqueue, claim, 10 spans of about 1 kB, an attempt update, a span query. The clock stops while the caller
    makes its spans. Both sides run the same program, each in its own interpreter, in turn; the peer has its fastest
    store (in memory), Leyden has its store in memory and its durable one in a file.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PEER = "bench-agentlightning"
PEER_NAME = "agentlightning 0.3.0, in memory"

PAIRS = 5
SLICES = 10
SLICE = 64
"""Rollouts of one side before it is the other's turn."""
KEPT = 10_000
"""Finished rollouts whose memory is measured."""
KEPT_BY_PEER = 2_000
"""The same for the peer, whose memory grows in proportion; its figure is scaled."""

Answer = dict[str, float]
Ask = Callable[[int], Answer]

LEYDEN = """
import os
from leyden.store import open_store
from leyden.types import Span

def make_store(directory):
    return open_store("memory://" if directory is None else os.path.join(directory, "store.db"))

def make_span(**fields):
    return Span(**fields)
"""

AGENT_LIGHTNING = """
import os
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Span

def make_store(directory):
    return InMemoryLightningStore()

def make_span(**fields):
    return Span.from_attributes(**fields)
"""

WORKLOAD = """
import asyncio, gc, json, sys, time

async def one_rollout(store, bulk):
    clock = -time.perf_counter()
    cpu = -time.process_time()
    await store.enqueue_rollout({"question": "what is 2 + 2?"})
    rollout = await store.dequeue_rollout()
    clock += time.perf_counter()
    cpu += time.process_time()
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    spans = [
        make_span(
            **ids, sequence_id=i, trace_id="%032x" % i, span_id="%016x" % i, name="openai.chat.completion",
            start_time=1.0, end_time=2.0,
            attributes={"gen_ai.prompt.%d.content" % k: "x" * 95 for k in range(8)} | {"tokens": 25},
        )
        for i in range(1, 11)
    ]
    clock -= time.perf_counter()
    cpu -= time.process_time()
    if bulk:
        await store.add_many_spans(spans)
    else:
        for span in spans:
            await store.add_span(span)
    await store.update_attempt(**ids, status="succeeded")
    found = await store.query_spans(rollout.rollout_id)
    clock += time.perf_counter()
    cpu += time.process_time()
    assert len(found) == 10
    return clock, cpu

def resident_mb():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096 / 1e6

async def serve(mode, tasks, directory):
    store = make_store(directory)
    bulk = mode != "single"
    for line in sys.stdin:
        gc.collect()
        cpu, began, before = time.process_time(), time.perf_counter(), resident_mb()
        if tasks == 1:
            taken = [await one_rollout(store, bulk) for _ in range(int(line))]
            seconds, cpu_s = (sum(column) for column in zip(*taken))
        else:
            async def work():
                for _ in range(int(line) // tasks):
                    await one_rollout(store, bulk)

            await asyncio.gather(*(work() for _ in range(tasks)))
            seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        gc.collect()
        resident = resident_mb()
        answer = {"seconds": seconds, "cpu_s": cpu_s, "kept_mb": resident - before, "resident_mb": resident}
        print(json.dumps(answer), flush=True)
    if hasattr(store, "close"):
        await store.close()

asyncio.run(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3] or None))
"""

RATES = {
    "store in memory, spans one by one": ("single", 1, False),
    "store in memory, spans in bulk": ("bulk", 1, False),
    "store in a file, spans one by one": ("single", 1, True),
    "store in a file, spans in bulk": ("bulk", 1, True),
    "store in a file, spans in bulk, 16 at a time": ("bulk", 16, True),
}


def main(peer_python: str | None) -> list[dict[str, Any]]:
    """Rows of rollouts a second (medians of paired runs), then rows of memory kept."""
    rows = [rate_row(name, *setting, peer_python) for name, setting in RATES.items()]
    return [*rows, *memory_rows(peer_python)]


def rate_row(name: str, mode: str, tasks: int, in_file: bool, peer_python: str | None) -> dict[str, Any]:
    """Leyden and its peer in turn, slice by slice, so that both meet the same weather."""
    pairs: list[tuple[Run, Run]] = []
    with ExitStack() as stack:
        ours = stack.enter_context(leyden(mode, tasks, in_file=in_file))
        theirs = stack.enter_context(side(peer_python, AGENT_LIGHTNING, mode, tasks)) if peer_python else None
        for ask in filter(None, (ours, theirs)):
            ask(SLICE)
        for _ in range(PAIRS):
            pair = Run(), Run()
            for _ in range(SLICES):
                pair[0].add(ours(SLICE))
                if theirs is not None:
                    pair[1].add(theirs(SLICE))
            pairs.append(pair)
    rates = [SLICE * SLICES / run.seconds for run, _ in pairs]
    peers = [SLICE * SLICES / run.seconds for _, run in pairs if run.seconds]
    return row(
        name,
        "rollouts/s",
        statistics.median(rates),
        statistics.median(peers) if peers else None,
        [a / b for a, b in zip(rates, peers, strict=True)] if peers else rates,
        statistics.median(run.cpu_s for run, _ in pairs),
    )


def memory_rows(peer_python: str | None) -> list[dict[str, Any]]:
    """Megabytes for 10,000 finished rollouts: what memory keeps of them, and a process that has them in a file."""
    peer = None
    if peer_python is not None:
        with side(peer_python, AGENT_LIGHTNING, "bulk", 1) as ask:
            ask(SLICE)
            peer = ask(KEPT_BY_PEER)["kept_mb"] * KEPT / KEPT_BY_PEER
    rows: list[dict[str, Any]] = []
    for name, in_file, figure in (
        ("memory kept by 10,000 rollouts, store in memory", False, "kept_mb"),
        ("whole process with 10,000 rollouts, store in a file", True, "resident_mb"),
    ):
        with leyden("bulk", 1, in_file=in_file) as ask:
            ask(SLICE)
            ours = ask(KEPT)
        spread = [ours[figure]] if peer is None else [peer / ours[figure]]
        rows.append(row(name, "MB", ours[figure], peer, spread, ours["cpu_s"]))
    return rows


def row(name: str, unit: str, leyden: float, peer: float | None, spread: list[float], cpu_s: float) -> dict[str, Any]:
    """A line of the results; `spread` holds the ratios of the pairs, or Leyden's values where no peer ran."""
    return {
        "row": name,
        "unit": unit,
        "leyden": leyden,
        "peer": peer,
        "peer_name": None if peer is None else PEER_NAME,
        "ratio": None if peer is None else statistics.median(spread),
        "n": len(spread),
        "min": min(spread),
        "max": max(spread),
        "cpu_s": cpu_s,
    }


@dataclass
class Run:
    """The slices of one run of one side."""

    seconds: float = 0.0
    cpu_s: float = 0.0

    def add(self, answer: Answer) -> None:
        """One more slice."""
        self.seconds += answer["seconds"]
        self.cpu_s += answer["cpu_s"]


@contextmanager
def leyden(mode: str, tasks: int, *, in_file: bool) -> Iterator[Ask]:
    """This side."""
    with (
        tempfile.TemporaryDirectory() as directory,
        side(sys.executable, LEYDEN, mode, tasks, directory if in_file else "") as ask,
    ):
        yield ask


@contextmanager
def side(python: str, head: str, mode: str, tasks: int, directory: str = "") -> Iterator[Ask]:
    """Either side in an interpreter of its own, asked to do so many rollouts at a time."""
    root = Path(__file__).resolve().parent.parent
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    program = subprocess.Popen(
        [python, "-W", "ignore", "-c", head + WORKLOAD, mode, str(tasks), directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env=environ | {"PYTHONPATH": str(root)},
    )
    assert program.stdin is not None
    assert program.stdout is not None
    stdin, stdout = program.stdin, program.stdout

    def ask(rollouts: int) -> Answer:
        stdin.write(f"{rollouts}\n")
        stdin.flush()
        while (line := stdout.readline()) and not line.startswith("{"):
            pass
        if not line:
            raise RuntimeError(f"{python} {mode} exits {program.wait()}")
        return json.loads(line)

    with program:
        try:
            yield ask
        except BaseException:
            program.kill()
            raise


if __name__ == "__main__":
    for line in main(sys.argv[1] if len(sys.argv) > 1 else None):
        print(json.dumps(line))
