"""Run a harness once while something goes wrong, and print what was recorded as JSON. Run without a network, by
test_faults.py.

Arguments: the harness, the path of its command, what goes wrong, in which call of the model, and for a process that is
killed, how many seconds after that call came: the answer's tokens are sent from 0.3 s on.
"""

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import psutil

import leyden as ly
from leyden import semconv
from leyden.adapter import TraceToTriplet
from leyden.execution.harness import harness_program
from leyden.execution.harness.check import TASK, scripted_model
from leyden.store import LightningStoreServer
from leyden.testing import FakeUpstream, Misbehaviour
from leyden.types import ProxyLLM, RolloutConfig

ANSWERS = {
    "refused": Misbehaviour(status=503),
    "cut": Misbehaviour(close_after_chunks=2),
    "garbled": Misbehaviour(body=b"<html>bad gateway</html>", content_type="text/html"),
}
LINES = {
    "stays": "setsid nohup sleep 4711 > /dev/null 2>&1 & ",
    "prints": "head -c 1000000000 /dev/zero | tr '\\0' x; ",
    "deletes": 'rm -rf "$PWD"; ',
}
"""What the model has the harness do."""


@asynccontextmanager
async def gateway(store: str, model: str, port: str = "0") -> AsyncGenerator[tuple[Any, str]]:
    """Start a gateway as a process of its own. Yield it and its port."""
    options = ["--store", store, "--model", f"fake={model}", "--port", port, "--durable"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "leyden", "gateway", *options, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", line)
        assert found, line
        yield process, found[1]
    finally:
        if process.returncode is None:
            process.terminate()  # and all is recorded
        await process.wait()


async def run(store: Any, name: str, program: str, work: str) -> None:
    """Run one attempt, whose reward needs the folder in which the harness worked."""

    def reward(output: ly.ProcessOutput) -> float:
        assert output.folder is not None
        return float(output.folder.stat().st_size >= 0)

    agent = ly.Harness(name, program=program, folder=work, reward=reward)
    async with ly.LitAgentRunner[Any](max_rollouts=1).run_context(agent=agent, store=store) as runner:
        await runner.iter()


async def run_alone(store_url: str, name: str, program: str, work: str) -> None:
    async with ly.open_store(store_url) as store:
        await run(store, name, program, work)


async def main(name: str, program: str, fault: str, call: int, seconds: float) -> dict[str, Any]:
    reached, served = asyncio.Event(), 0

    def faulty(_: dict[str, Any]) -> Misbehaviour | None:
        nonlocal served
        served += 1
        if served != call:
            return None
        reached.set()
        if fault in LINES:
            return None
        return ANSWERS.get(fault) or Misbehaviour(delay_seconds=0.3, chunk_delay_seconds=0.05)

    async with AsyncExitStack() as opened:
        answer = scripted_model(harness_program(name), LINES.get(fault, ""))
        model = await opened.enter_async_context(FakeUpstream(reply=answer, fault=faulty))
        store = await opened.enter_async_context(ly.open_store("memory://"))
        server = await opened.enter_async_context(LightningStoreServer(store))
        first_gateway, port = None, ""
        if fault == "gateway":
            first_gateway, port = await opened.enter_async_context(gateway(server.endpoint, model.endpoint))
            llm = ProxyLLM(endpoint=f"http://127.0.0.1:{port}/v1", model="fake")
        else:
            proxy = await opened.enter_async_context(ly.LLMProxy(model_list=[model.llm()], store=store))
            llm = proxy.as_resource()
        with tempfile.TemporaryDirectory(prefix="leyden-") as scratch:
            os.environ["TMPDIR"] = tempfile.tempdir = scratch
            work = tempfile.mkdtemp(dir=scratch)
            await store.add_resources({"llm": llm})
            config = RolloutConfig(
                timeout_seconds=120,
                max_attempts=1 if fault in LINES else 2,
                retry_condition=["failed", "unresponsive"],
            )
            rollout = await store.enqueue_rollout(TASK, config=config)
            runner = None
            if fault == "runner":
                command = [sys.executable, __file__, "run", server.endpoint, name, program, work]
                runner = await asyncio.create_subprocess_exec(*command)
            ended = asyncio.ensure_future(run(store, name, program, work) if runner is None else runner.wait())
            waiting = asyncio.ensure_future(reached.wait())
            await asyncio.wait([waiting, ended], timeout=60, return_when=asyncio.FIRST_COMPLETED)
            assert reached.is_set(), "the harness made too few calls"
            await asyncio.sleep(seconds)
            started = psutil.Process(None if runner is None else runner.pid).children(recursive=True)
            left = [each for each in started if first_gateway is None or each.pid != first_gateway.pid]
            if runner is not None:
                runner.kill()
                await ended
                while len(await store.query_spans(rollout.rollout_id, name=semconv.MODEL_CALL)) < len(model.requests):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)  # the call in flight is recorded as failed, which is a sign of life
                (attempt,) = await store.query_attempts(rollout.rollout_id)  # as a sweep of the store says later
                await store.update_attempt(rollout.rollout_id, attempt.attempt_id, status="unresponsive")
            elif fault == "harness":  # the children of the supervisors
                for each in [child for supervisor in psutil.Process().children() for child in supervisor.children()]:
                    each.send_signal(signal.SIGKILL)
            elif first_gateway is not None:
                first_gateway.kill()
                await first_gateway.wait()
                async with gateway(server.endpoint, model.endpoint, port):
                    await ended
            await ended
            _, left = await asyncio.to_thread(psutil.wait_procs, left, 20)
            left += [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", "4711"]]
            if (await store.get_rollout_by_id(rollout.rollout_id)).status not in ("succeeded", "failed"):
                await run(store, name, program, work)
            files = [each for each in os.listdir(scratch) if each not in work]  # noqa: PTH208
        spans = await store.query_spans(rollout.rollout_id)
        attempts = await store.query_attempts(rollout.rollout_id)
        final = await store.get_rollout_by_id(rollout.rollout_id)
    truth = {each.response_id: list(each.response_ids) for each in model.calls}
    calls = [span for span in spans if span.name == semconv.MODEL_CALL]
    ids = [str(span.attributes.get(semconv.GEN_AI_RESPONSE_ID)) for span in calls]
    exact = [
        list(span.tokens.response_ids) == truth.get(id_)
        for span, id_ in zip(calls, ids, strict=True)
        if span.tokens is not None
    ]
    last = [span for span in spans if span.attempt_id == attempts[-1].attempt_id]
    rows = TraceToTriplet().adapt(last)
    return {
        "status": final.status,
        "attempts": [attempt.status for attempt in attempts],
        "reason": [str(attempt.metadata.get("reason")) for attempt in attempts],
        "requests": len(model.requests),
        "recorded": len(calls),
        "lost": [id_ for id_ in truth if id_ not in ids],
        "failed": sum(span.status.status_code == "ERROR" for span in calls),
        "exact": sum(exact),
        "wrong": len(exact) - sum(exact),
        "rows": len(rows),
        "trained_twice": len(rows) - len({(*row.prompt.token_ids, *row.response.token_ids) for row in rows}),
        "files": files,
        "left": [" ".join(process.cmdline())[:200] for process in left if process.is_running()],
    }


if __name__ == "__main__":
    os.environ.pop("LEYDEN_HARNESSES", None)
    if sys.argv[1] == "run":
        asyncio.run(run_alone(*sys.argv[2:]))
    else:
        print(json.dumps(asyncio.run(main(*sys.argv[1:4], int(sys.argv[4]), float(sys.argv[5])))))
