"""How soon a rollout starts in agentlightning 0.3.0, and what its idle runner costs; the peer's half of `benchmarks/runners.py`.

Runs in the environment `bench-agentlightning`. `starts` prints `{"ms": [...], "cpu_s": ...}`, `idle` prints `{"MB": [...], "%": [...]}`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import time
from pathlib import Path

# Without it each start asks the network for a table of prices, three times: nothing that `fit` needs.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import agentlightning as agl
import psutil
from agentlightning.algorithm import algo


@agl.rollout
async def clock(task: int, prompt_template: agl.PromptTemplate) -> float:
    return time.time()


@agl.rollout
async def whose(task: int, prompt_template: agl.PromptTemplate) -> float:
    return float(os.getpid())


async def reward_of(store: agl.LightningStore, task: int) -> float:
    made = await store.enqueue_rollout(input=task)
    while True:
        done = await store.wait_for_rollouts(rollout_ids=[made.rollout_id], timeout=0.01)
        if done:
            break
        await asyncio.sleep(0.005)
    reward = agl.find_final_reward(await store.query_spans(made.rollout_id))
    if reward is None:
        raise SystemExit(f"{done[0].status} without a reward")
    return reward


def starts(settings: str, tasks: int) -> dict[str, object]:
    taken: list[float] = []

    @algo
    async def ask(*, store: agl.LightningStore, train_dataset: list[int]) -> None:
        await store.update_resources("r", {"prompt": agl.PromptTemplate(template="{x}", engine="f-string")})
        for task in [-1, *train_dataset]:
            enqueued_at = time.time()
            began_at = await reward_of(store, task)
            if task >= 0:
                taken.append((began_at - enqueued_at) * 1000)

    cpu = cpu_seconds()
    fit(clock, ask, settings, list(range(tasks)))
    return {"ms": taken, "cpu_s": cpu_seconds() - cpu}


def idle(seconds: float, windows: int) -> dict[str, object]:
    megabytes: list[float] = []
    percent: list[float] = []

    @algo
    async def ask(*, store: agl.LightningStore, train_dataset: list[int]) -> None:
        await store.update_resources("r", {"prompt": agl.PromptTemplate(template="{x}", engine="f-string")})
        runner = psutil.Process(int(await reward_of(store, 0)))
        for _ in range(windows):
            before = cpu_of(runner.pid)
            await asyncio.sleep(seconds)
            percent.append(100 * (cpu_of(runner.pid) - before) / seconds)
            megabytes.append(runner.memory_full_info().pss / 1e6)

    fit(whose, ask, "default", [0])
    return {"MB": megabytes, "%": percent}


def fit(agent: object, algorithm: object, settings: str, tasks: list[int]) -> None:
    tracer = agl.OtelTracer()
    options = {"poll_interval": 0.02} if settings == "tuned" else {}
    runner = agl.LitAgentRunner(tracer=tracer, **options)
    trainer = agl.Trainer(
        algorithm=algorithm, n_runners=1, strategy="cs", port=free_port(), tracer=tracer, runner=runner
    )
    trainer.fit(agent, train_dataset=tasks)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def cpu_of(pid: int) -> float:
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def cpu_seconds() -> float:
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["starts", "idle"])
    parser.add_argument("--settings", choices=["default", "tuned"], default="default")
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--windows", type=int, default=5)
    options = parser.parse_args()
    if options.what == "starts":
        answer = starts(options.settings, options.tasks)
    else:
        answer = idle(options.seconds, options.windows)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
