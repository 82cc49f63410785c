"""Train the weather agent of one framework, exactly as its page has it, and measure it before and after.

    python examples/frameworks/train.py openai         # one of the modules here, by the first word of its name

The agent believes that it calls OpenAI or Anthropic. Its calls go through the gateway to a tiny model, which runs and learns in a
process of its own. That model often asks the tool about the wrong city. The reward is 1 if the agent's answer contains the weather of
the city in the question. The command runs on two CPU cores, and needs no key and no network.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import leyden as ly
from leyden.adapter import model_calls
from leyden.trainer.run_directory import store_path

HERE = Path(__file__).parent
WEIGHTS = HERE / "weights"
CITIES = (
    *("Paris", "Lima", "Oslo", "Cairo", "Tokyo", "Rome", "Delhi", "Quito"),
    *("Accra", "Sofia", "Hanoi", "Perth", "Turin", "Bergen", "Dakar", "Minsk"),
)
"""Cities that the tiny model knows; its tokenizer has short names for them."""
STEPS = 12


@dataclass(frozen=True, slots=True)
class Measured:
    """What the agent did on the validation tasks, as shares of its rollouts."""

    reward: float
    right_calls: float
    """The first model call asked the tool about the city of the question."""


def train(agent: ly.LitAgent, model: str, run_dir: Path, *, steps: int, seed: int, repeats: int) -> ly.RunSummary:
    """Train `agent`, which calls its model `model`, and validate it on each city `repeats` times before and after."""
    backend = ly.IsolatedBackend(WEIGHTS, model_name=model, seed=seed, device="cpu", max_length=512)
    algorithm = ly.PolicyGradient(
        backend,
        n_steps=steps,
        tasks_per_step=8,
        rollouts_per_task=8,
        minibatch_size=16,
        epochs=2,
        optim=ly.OptimParams(learning_rate=1e-3),
        timeout_seconds=120.0,
        val_every_n_steps=steps,
        validate_first=True,
        seed=seed,
    )
    tasks = [{"city": city} for city in CITIES]
    trainer = ly.Trainer(algorithm=algorithm, concurrency=64, run_dir=run_dir)
    return trainer.fit(agent, tasks, val_dataset=tasks * repeats)


async def measured(run_dir: Path) -> list[Measured]:
    """What each validation of the run found, in order."""
    async with ly.SqliteLightningStore(store_path(run_dir)) as store:
        rollouts = await store.query_rollouts(mode_in=["val"])
        spans_of = await store.query_spans_of([rollout.rollout_id for rollout in rollouts])
    steps = sorted({rollout.metadata["step"] for rollout in rollouts})
    found: list[Measured] = []
    for step in steps:
        spans = [
            (rollout.input["city"], spans_of[rollout.rollout_id])
            for rollout in rollouts
            if rollout.metadata["step"] == step
        ]
        rewards = [ly.find_final_reward(each) or 0.0 for _, each in spans]
        right = [first_city(each) == city for city, each in spans]
        found.append(Measured(sum(rewards) / len(spans), sum(right) / len(spans)))
    return found


def first_city(spans: Sequence[ly.Span]) -> str | None:
    """The city that the first model call of a rollout asked the tool about; None if it called nothing."""
    calls = model_calls(spans)
    if not calls:
        return None
    requested = calls[0].output_messages[0].get("tool_calls") or []
    return json.loads(requested[0]["function"]["arguments"]).get("city") if requested else None


def main(argv: Sequence[str] | None = None) -> None:
    """See `--help`."""
    names = sorted(path.stem.removesuffix("_agent") for path in HERE.glob("*_agent.py"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=names)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=8, help="rollouts of each city, before and after (default: 8)")
    parser.add_argument("--run-dir", type=Path, help="where to keep the run; a new folder under .leyden/ by default")
    given = parser.parse_args(argv)

    for variable in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        os.environ.setdefault(variable, "unused")  # the SDKs demand a key; the gateway sends its own
    sys.path.insert(0, str(HERE))
    module = importlib.import_module(f"{given.framework}_agent")
    run_dir = given.run_dir or Path(".leyden") / f"{time.strftime('%Y%m%d-%H%M%S')}-{given.framework}"
    started = time.monotonic()
    train(module.agent, module.MODEL, run_dir, steps=given.steps, seed=given.seed, repeats=given.repeats)
    seconds = time.monotonic() - started
    before, after = asyncio.run(measured(run_dir))
    print(
        f"{given.framework}: reward {before.reward:.2f} before, {after.reward:.2f} after; tool called with the right city "
        f"{before.right_calls:.0%} before, {after.right_calls:.0%} after; {seconds:.0f} s"
    )


if __name__ == "__main__":
    logging.captureWarnings(True)
    main()
