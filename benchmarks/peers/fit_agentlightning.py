"""`Trainer.fit(Baseline)` of agentlightning 0.3.0 on an agent that does nothing; the peer's half of `benchmarks/fit.py`.

Runs in the environment `bench-agentlightning`. Prints `{"value": tasks a second, "cpu_s": ...}`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import time

# Without it each start asks the network for a table of prices, three times: nothing that `fit` needs.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import agentlightning as agl


@agl.rollout
async def agent(task: int, prompt_template: agl.PromptTemplate) -> float:
    return float(task % 2)


def make_trainer(settings: str) -> agl.Trainer:
    resources = {"prompt": agl.PromptTemplate(template="{x}", engine="f-string")}
    if settings == "default":  # strategy cs, polling every 5 s, AgentOpsTracer
        return agl.Trainer(algorithm=agl.Baseline(), n_runners=4, initial_resources=resources, port=free_port())
    tracer = agl.OtelTracer()
    runner = agl.LitAgentRunner(tracer=tracer, poll_interval=0.02)
    common = {
        "algorithm": agl.Baseline(polling_interval=0.01, max_queue_length=64),
        "initial_resources": resources,
        "tracer": tracer,
        "runner": runner,
    }
    if settings == "tuned-cs":
        return agl.Trainer(n_runners=4, strategy="cs", port=free_port(), **common)
    strategy = agl.SharedMemoryExecutionStrategy(n_runners=1, main_thread="algorithm")
    return agl.Trainer(n_runners=1, strategy=strategy, **common)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def cpu_seconds() -> float:
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", choices=["default", "tuned-cs", "tuned-shm-1"], required=True)
    parser.add_argument("--tasks", type=int, required=True)
    options = parser.parse_args()
    trainer = make_trainer(options.settings)
    cpu, began = cpu_seconds(), time.perf_counter()
    trainer.fit(agent, train_dataset=list(range(options.tasks)))
    seconds = time.perf_counter() - began
    cpu = cpu_seconds() - cpu
    succeeded = len(asyncio.run(trainer.store.query_rollouts(status_in=["succeeded"])))
    if succeeded != options.tasks:
        raise SystemExit(f"{succeeded} of {options.tasks} tasks succeeded")
    answer = {"value": options.tasks / seconds, "cpu_s": cpu, "tasks": options.tasks}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
