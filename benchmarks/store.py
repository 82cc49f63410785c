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
from pathlib import Path
from typing import Any

PEER = "bench-agentlightning"
PEER_NAME = "agentlightning 0.3.0, in memory"

ROLLOUTS = 1000
PAIRS = 5
KEPT = 10_000
"""Finished rollouts whose memory is measured."""
KEPT_BY_PEER = 2_000
"""The same for the peer, whose memory grows in proportion; its figure is scaled."""

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

async def measure(mode, rollouts, tasks, directory):
    store = make_store(directory)
    bulk = mode != "single"
    for _ in range(20):
        await one_rollout(store, bulk)
    gc.collect()
    before, cpu, began = resident_mb(), time.process_time(), time.perf_counter()
    if tasks == 1:
        taken = [await one_rollout(store, bulk) for _ in range(rollouts)]
        seconds, cpu_s = (sum(column) for column in zip(*taken))
    else:
        async def work():
            for _ in range(rollouts // tasks):
                await one_rollout(store, bulk)

        await asyncio.gather(*(work() for _ in range(tasks)))
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    gc.collect()
    kept, resident = resident_mb() - before, resident_mb()
    if hasattr(store, "close"):
        await store.close()
    return {"rate": rollouts / seconds, "cpu_s": cpu_s, "kept_mb": kept, "resident_mb": resident}

mode, rollouts, tasks, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] or None
print(json.dumps(asyncio.run(measure(mode, rollouts, tasks, directory))))
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
    """Leyden and its peer in turn."""
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for _ in range(PAIRS):
        ours.append(run_leyden(mode, ROLLOUTS, tasks, in_file=in_file))
        if peer_python is not None:
            theirs.append(run(peer_python, AGENT_LIGHTNING, mode, ROLLOUTS // 2, tasks))
    ratios = [a["rate"] / b["rate"] for a, b in zip(ours, theirs, strict=False)]
    return row(
        name,
        "rollouts/s",
        statistics.median(run["rate"] for run in ours),
        statistics.median(run["rate"] for run in theirs) if theirs else None,
        ratios or [run["rate"] for run in ours],
        statistics.median(run["cpu_s"] for run in ours),
    )


def memory_rows(peer_python: str | None) -> list[dict[str, Any]]:
    """Megabytes for 10,000 finished rollouts: what memory keeps of them, and a process that has them in a file."""
    peer = None
    if peer_python is not None:
        kept = run(peer_python, AGENT_LIGHTNING, "bulk", KEPT_BY_PEER, 1)["kept_mb"]
        peer = kept * KEPT / KEPT_BY_PEER
    rows: list[dict[str, Any]] = []
    for name, in_file, figure in (
        ("memory kept by 10,000 rollouts, store in memory", False, "kept_mb"),
        ("whole process with 10,000 rollouts, store in a file", True, "resident_mb"),
    ):
        ours = run_leyden("bulk", KEPT, 1, in_file=in_file)
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


def run_leyden(mode: str, rollouts: int, tasks: int, *, in_file: bool) -> dict[str, float]:
    """One run of this side."""
    with tempfile.TemporaryDirectory() as directory:
        return run(sys.executable, LEYDEN, mode, rollouts, tasks, directory if in_file else "")


def run(python: str, side: str, mode: str, rollouts: int, tasks: int, directory: str = "") -> dict[str, float]:
    """One run of either side, in an interpreter of its own."""
    root = Path(__file__).resolve().parent.parent
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [python, "-W", "ignore", "-c", side + WORKLOAD, mode, str(rollouts), str(tasks), directory],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env=environ | {"PYTHONPATH": str(root)},
    )
    if done.returncode:
        raise RuntimeError(f"{python} {mode} exits {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    for line in main(sys.argv[1] if len(sys.argv) > 1 else None):
        print(json.dumps(line))
