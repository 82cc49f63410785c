"""Run an agent of this folder, written as its framework's page shows it, and print its record.

    python examples/frameworks/run.py langgraph    # a module here, by the first word of its name

It needs no key and no model. The calls go through a real gateway to a fake server, which calls the
agent's tool and repeats the tool's result.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import leyden as ly
from leyden.adapter.transcript import step_lines, token_lines
from leyden.testing import FakeUpstream, Reply, ToolCall

HERE = Path(__file__).parent


def pretend(request: dict[str, Any]) -> Reply:
    """Reply as the model: call the weather tool, or repeat its result."""
    said = json.dumps(request)
    if known := re.search(r"It is always sunny in ([\w-]+)", said):
        return Reply(f"It is always sunny in {known[1]}!")
    if asked := re.search(r"weather in ([\w-]+)\?", said):
        return Reply(calls=(ToolCall("get_weather", json.dumps({"city": asked[1]})),))
    return Reply("I can only tell the weather.")


async def record(
    agent: ly.LitAgent[Any],
    tasks: Sequence[dict[str, str]],
    upstream: FakeUpstream,
    store: ly.LightningStore,
    **options: Any,
) -> None:
    """Run the agent on all tasks at once, through a gateway. `options` are the trainer's."""
    async with ly.LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        trainer = ly.Trainer(
            algorithm=ly.Baseline(max_queue_length=None),
            store=store,
            llm_proxy=proxy,
            initial_resources={"model": proxy.as_resource()},
            **{"concurrency": len(tasks), **options},
        )
        await trainer.afit(agent, tasks)


async def show(name: str, cities: Iterable[str]) -> None:
    """Print the trace of each rollout: what was below what."""
    module = importlib.import_module(name)
    async with FakeUpstream(model=module.MODEL, reply=pretend) as upstream, ly.InMemoryLightningStore() as store:
        await record(module.agent, [{"city": city} for city in cities], upstream, store)
        for rollout in await store.query_rollouts():
            spans = list(await store.query_spans(rollout.rollout_id))
            print(f"\n{rollout.input}: {rollout.status}, reward {ly.find_final_reward(spans)}")
            for line in [*step_lines(spans), *token_lines(spans)]:
                print(f"  {line}")


def main() -> None:
    """See the module."""
    names = sorted(path.stem.removesuffix("_agent") for path in HERE.glob("*_agent.py"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=names)
    for variable in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        os.environ.setdefault(variable, "sk-none")  # their clients insist on one
    sys.path.insert(0, str(HERE))
    asyncio.run(show(f"{parser.parse_args().framework}_agent", ["Paris", "Lima"]))


if __name__ == "__main__":
    main()
