"""What a sandbox costs: its start beside a plain `subprocess`, alone and 64 at a time, and a rollout of twenty model calls through
gateway and sandbox beside the bare program. All variants run in turn; CPU seconds include all processes that ended.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.harness import Peer, Row, cpu_seconds
from benchmarks.report import Table
from leyden.execution.runner import LitAgentRunner
from leyden.execution.runner.process import ProcessAgent
from leyden.execution.runner.process.program import Program, RunningProgram
from leyden.execution.sandbox import Sandbox
from leyden.gateway import LLMProxy, UpstreamModel
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream

HEADLINES = ()
N_STARTS = 40
AT_A_TIME = 64
RUNS = 5
CALLS = 20
ANSWER_SECONDS = 0.3
PROGRAM = f"""
import json, os, urllib.request
for i in range({CALLS}):
    body = json.dumps({{"model": "fake", "messages": [{{"role": "user", "content": str(i)}}]}}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    request.add_header("content-type", "application/json")
    request.add_header("authorization", "Bearer " + os.environ.get("OPENAI_API_KEY", "none"))
    json.load(urllib.request.urlopen(request))
"""


def main(peer: Peer | None) -> list[Row | Table]:
    return [asyncio.run(starts()), asyncio.run(rollouts())]


async def plain() -> None:
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()


async def supervised() -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = Program(
            command=["true"], env={"PATH": "/usr/bin:/bin"}, cwd="/", directory=folder, stdin=None, memory_bytes=None,
            output_bytes=2**20, grace_seconds=0.5,
        )  # fmt: skip
        await RunningProgram(program).output()


async def boxed() -> None:
    await Sandbox().run(["true"])


VARIANTS = {"plain subprocess": plain, "supervised": supervised, "supervised, in a sandbox": boxed}


async def measured(work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    began, cpu = time.perf_counter(), cpu_seconds()
    await work()
    return time.perf_counter() - began, cpu_seconds() - cpu


async def starts() -> Table:
    await boxed()  # asks the kernel once
    alone: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    crowd: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    for _ in range(N_STARTS):
        for name, each in VARIANTS.items():
            alone[name].append(await measured(each))
    for _ in range(RUNS):
        for name, each in VARIANTS.items():
            crowd[name].append(await measured(lambda each=each: asyncio.gather(*(each() for _ in range(AT_A_TIME)))))
    rows = [
        [
            name,
            *(f"{1000 * pick(wall for wall, _ in alone[name]):.1f}" for pick in (statistics.median, min)),
            f"{1000 * statistics.median(cpu for _, cpu in alone[name]):.1f}",
            *(f"{1000 * pick(wall for wall, _ in crowd[name]):.0f}" for pick in (statistics.median, min)),
        ]
        for name in VARIANTS
    ]
    columns = ["`true`", "ms, alone", "least", "CPU ms", f"ms, {AT_A_TIME} at once", "least"]
    return Table("From the start of a program to its end", columns, rows)


async def rollouts() -> Table:
    bare: list[tuple[float, float]] = []
    through: list[tuple[float, float]] = []
    command = [sys.executable, "-I", "-S", "-c", PROGRAM]
    async with FakeUpstream(delay_seconds=ANSWER_SECONDS) as upstream, InMemoryLightningStore() as store:
        proxy = LLMProxy(model_list=[UpstreamModel("fake", upstream.endpoint)], store=store)
        await proxy.start()
        try:
            await store.add_resources({"main_llm": proxy.as_resource()})
            agent = ProcessAgent(command, sandbox="namespace")

            async def alone() -> None:
                env = {"OPENAI_BASE_URL": upstream.endpoint, "PATH": "/usr/bin:/bin"}
                await asyncio.to_thread(subprocess.run, command, env=env, check=True)

            async def rollout() -> None:
                runner = LitAgentRunner[Any](max_rollouts=1)
                queued = await store.enqueue_rollout("a task")
                async with runner.run_context(agent=agent, store=store, recorders=[proxy]):
                    await runner.iter()
                attempt = await store.get_latest_attempt(queued.rollout_id)
                assert attempt is not None and attempt.status == "succeeded", attempt
                assert len([s for s in await store.query_spans(queued.rollout_id) if s.tokens is not None]) == CALLS

            for _ in range(RUNS):
                bare.append(await measured(alone))
                through.append(await measured(rollout))
        finally:
            await proxy.stop()
    ratios = [mine / other for (mine, _), (other, _) in zip(through, bare, strict=True)]
    rows = [
        [name, f"{statistics.median(wall for wall, _ in each):.2f}", f"{min(wall for wall, _ in each):.2f}"]
        for name, each in (("the bare program", bare), ("gateway and sandbox", through))
    ]
    rows.append(["times longer, of the pairs", f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f}"])
    title = f"A rollout of {CALLS} model calls that take {ANSWER_SECONDS:g} s each, one at a time; {RUNS} pairs"
    return Table(title, ["", "s, median", "least"], rows)
