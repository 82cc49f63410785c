"""Run a harness once while something goes wrong, and print what was recorded as JSON. Run without a network, by
test_faults.py.

Arguments: the harness, the path of its command, and what goes wrong.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil

import leyden as ly
from leyden import semconv
from leyden.execution.harness import harness_program
from leyden.execution.harness.check import TASK, scripted_model
from leyden.store import LightningStoreServer
from leyden.testing import FakeUpstream, Misbehaviour
from leyden.types import RolloutConfig

ANSWERS = {
    "refused": Misbehaviour(status=503),
    "cut": Misbehaviour(close_after_chunks=2),
    "garbled": Misbehaviour(body=b"<html>bad gateway</html>", content_type="text/html"),
}
RUNNER = """
import asyncio, sys
import leyden as ly

async def main():
    async with ly.open_store(sys.argv[1]) as store:
        agent = ly.Harness(sys.argv[2], program=sys.argv[3], folder=sys.argv[4], reward=lambda output: 1.0)
        async with ly.LitAgentRunner(max_rollouts=1).run_context(agent=agent, store=store) as runner:
            await runner.iter()

asyncio.run(main())
"""


def programs(runner: psutil.Process) -> list[psutil.Process]:
    """Return the programs that a runner started: the children of its supervisors."""
    return [program for supervisor in runner.children() for program in supervisor.children()]


async def main(name: str, program: str, fault: str) -> dict[str, Any]:
    kind = harness_program(name)
    answer, asked = scripted_model(kind), threading.Event()

    def reply(body: dict[str, Any]) -> Any:
        if fault == "harness" and not asked.is_set():
            for each in programs(psutil.Process()):
                each.send_signal(signal.SIGKILL)
        asked.set()
        return answer(body)

    with tempfile.TemporaryDirectory(prefix="leyden-") as folder:
        async with (
            # With a runner to kill, the first answer comes late, so that the program waits for it.
            FakeUpstream(reply=reply, delay_seconds=1.0 if fault == "runner" else 0.0) as model,
            ly.open_store("memory://") as store,
            LightningStoreServer(store) as server,
            ly.LLMProxy(model_list=[model.llm()], store=store) as proxy,
        ):
            if fault in ANSWERS:
                model.misbehave(ANSWERS[fault])
            work = Path(tempfile.mkdtemp(dir=folder))
            await store.add_resources({"llm": proxy.as_resource()})
            rollout = await store.enqueue_rollout(TASK, config=RolloutConfig(timeout_seconds=120))
            command = [sys.executable, "-c", RUNNER, server.endpoint, name, program, str(work)]
            left: list[psutil.Process] = []
            if fault == "runner":
                runner = await asyncio.create_subprocess_exec(*command)
                assert await asyncio.to_thread(asked.wait, 120), "the runner made no call"
                left = psutil.Process(runner.pid).children(recursive=True)
                runner.kill()
                await runner.wait()
                _, left = await asyncio.to_thread(psutil.wait_procs, left, 20)
            else:
                agent = ly.Harness(name, program=program, folder=work, reward=lambda _: 1.0)
                async with ly.LitAgentRunner[Any](max_rollouts=1).run_context(agent=agent, store=store) as own:
                    await own.iter()
                left = psutil.Process().children(recursive=True)
            await proxy.stop()  # and all is recorded
            spans = await store.query_spans(rollout.rollout_id)
            attempts = await store.query_attempts(rollout.rollout_id)
        truth = {call.response_id: list(call.response_ids) for call in model.calls}
        calls = [span for span in spans if span.name == semconv.MODEL_CALL]
        exact = [
            list(span.tokens.response_ids) == truth.get(str(span.attributes.get(semconv.GEN_AI_RESPONSE_ID)))
            for span in calls
            if span.tokens is not None
        ]
        return {
            "status": [attempt.status for attempt in attempts],
            "reason": [str(attempt.metadata.get("reason")) for attempt in attempts],
            "requests": len(model.requests),
            "recorded": len(calls),
            "failed": sum(span.status.status_code == "ERROR" for span in calls),
            "exact": sum(exact),
            "wrong": len(exact) - sum(exact),
            "left": [" ".join(process.cmdline())[:200] for process in left if process.is_running()],
        }


if __name__ == "__main__":
    os.environ.pop("LEYDEN_HARNESSES", None)
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
