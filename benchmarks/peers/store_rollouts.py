"""One side of the store benchmark: the same program against Leyden's store or the peer's, in the interpreter that has it.

    python store_rollouts.py SIDE MODE ROLLOUTS TASKS [DIRECTORY]

SIDE: `leyden` or `agentlightning`. MODE: `single` (spans one by one) or `bulk`. TASKS: rollouts under way at a time. DIRECTORY: keep the
store in a file there, where the side has such a store. The clock stops while the caller makes its spans.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from pathlib import Path


def parts_of(side):
    """How this side makes a store and a span."""
    if side == "leyden":
        from leyden.store import open_store
        from leyden.types import Span

        return lambda folder: open_store(str(Path(folder) / "store.db") if folder else "memory://"), Span
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    from agentlightning.store import InMemoryLightningStore
    from agentlightning.types import Span

    return lambda folder: InMemoryLightningStore(), Span.from_attributes


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
            **ids,
            sequence_id=i,
            trace_id=f"{i:032x}",
            span_id=f"{i:016x}",
            name="openai.chat.completion",
            start_time=1.0,
            end_time=2.0,
            attributes={f"gen_ai.prompt.{k}.content": "x" * 95 for k in range(8)} | {"tokens": 25},
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
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


async def measure(mode, rollouts, tasks, directory):
    store = make_store(directory)
    bulk = mode != "single"
    for _ in range(20):
        await one_rollout(store, bulk)
    gc.collect()
    before, cpu, began = resident_mb(), time.process_time(), time.perf_counter()
    if tasks == 1:
        taken = [await one_rollout(store, bulk) for _ in range(rollouts)]
        seconds, cpu_s = (sum(column) for column in zip(*taken, strict=True))
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
    return {"value": rollouts / seconds, "cpu_s": cpu_s, "kept_mb": kept, "resident_mb": resident}


if __name__ == "__main__":
    side, mode, rollouts, tasks, directory = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]
    make_store, make_span = parts_of(side)
    print(json.dumps(asyncio.run(measure(mode, rollouts, tasks, directory[0] if directory else None))))
