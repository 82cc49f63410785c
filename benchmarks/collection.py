"""Steps of reinforcement learning whose rollouts take unequally long: rollouts a second, and the pause between two steps.

The policy is the demo's, 117,000 weights, in an engine process of its own. Each rollout sleeps for a log-normal time, then makes
one model call; a step is 8 groups of 16 and as many rollouts run at once. The first row compares `max_staleness=1`, where the next
step's rollouts run while slow ones end and the policy is trained, with `max_staleness=0`, where each step waits for its slowest.

The pause is measured without sleeping: from the last gradient of a step to the first rollout on the new weights, with a checkpoint
after every step. A table has its parts.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import leyden as ly
from benchmarks.harness import Peer, Row, Sample, compare, cpu_seconds, summary
from benchmarks.report import Table
from leyden.cli.demo import WEIGHTS

HEADLINES = ()
GROUPS, GROUP_SIZE = 8, 16
MEDIAN_SECONDS = 0.2
SIGMA = 1.0
"""Deviation of the logarithm of a rollout's duration: the slowest of 128 takes about twelve times the median."""
STEPS = 6
PAUSES = 12
"""Steps whose pauses are measured, after the first."""


def main(peer: Peer | None) -> list[Row | Table]:
    name = f"rollouts of a log-normal duration (sigma {SIGMA:g}), max_staleness=1"
    sides = (lambda: rollouts_per_second(1)), (lambda: rollouts_per_second(0))
    return [compare(name, "rollouts/s", *sides, peer_name="Leyden, max_staleness=0"), *pauses()]


class Marks(ly.PolicyGradient):
    """Notes when each step begins and ends; its backend may note more."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.times: list[dict[str, float]] = []

    async def step(self, iteration: int) -> ly.Metrics:
        self.times.append({"begins": time.perf_counter()})
        metrics = await super().step(iteration)
        self.times[-1]["ends"] = time.perf_counter()
        return metrics


def algorithm(backend: ly.IsolatedBackend, **options: Any) -> Marks:
    return Marks(
        backend,
        tasks_per_step=GROUPS,
        rollouts_per_task=GROUP_SIZE,
        minibatch_size=32,
        optim=ly.OptimParams(learning_rate=1e-5),
        max_tokens=2,
        **options,
    )


async def say(llm: ly.LLM) -> float:
    """Make one call; a digit below 5 is a success, so that nearly every group has both."""
    said = await llm.openai().chat.completions.create(
        model=llm.model, messages=[{"role": "user", "content": "guess 0..9"}], **llm.sampling_parameters
    )
    return float((said.choices[0].message.content or "9") < "5")


def rollouts_per_second(staleness: int) -> Sample:
    """Train for `STEPS` steps, and measure from the beginning of the first to the end of the last."""
    chance = random.Random(0)

    @ly.llm_rollout
    async def slow(task: int, llm: ly.LLM) -> float:
        await asyncio.sleep(chance.lognormvariate(math.log(MEDIAN_SECONDS), SIGMA))
        return await say(llm)

    policy_gradient = algorithm(
        ly.IsolatedBackend(WEIGHTS, device="cpu", max_length=128), n_steps=STEPS, max_staleness=staleness
    )
    cpu = cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        trainer = ly.Trainer(
            algorithm=policy_gradient, run_dir=Path(folder) / "run", concurrency=GROUPS * GROUP_SIZE, progress=False
        )
        trainer.fit(slow, list(range(64)))
    seconds = policy_gradient.times[-1]["ends"] - policy_gradient.times[0]["begins"]
    return Sample(STEPS * GROUPS * GROUP_SIZE / seconds, cpu_seconds() - cpu)


# ---- the pause between two steps -------------------------------------------------------------------------------------------

PARTS = ("optimizer step", "weights published, metrics", "loop, writers, checkpoint", "first rollout begins")


class MarkingBackend(ly.IsolatedBackend):
    """Notes when it returned a gradient and an optimizer step; the last of a step counts."""

    times: list[dict[str, float]]

    async def forward_backward(self, *arguments: Any, **options: Any) -> Any:
        result = await super().forward_backward(*arguments, **options)
        self.times[-1]["gradient"] = time.perf_counter()
        return result

    async def optim_step(self, params: ly.OptimParams) -> Any:
        result = await super().optim_step(params)
        self.times[-1]["optimizer"] = time.perf_counter()
        return result


def pauses() -> list[Row | Table]:
    starts: list[float] = []

    @ly.llm_rollout
    async def quick(task: int, llm: ly.LLM) -> float:
        starts.append(time.perf_counter())
        return await say(llm)

    backend = MarkingBackend(WEIGHTS, device="cpu", max_length=128)
    marks = algorithm(backend, n_steps=PAUSES + 1, checkpoint_every=1)
    backend.times = marks.times
    cpu = cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        trainer = ly.Trainer(
            algorithm=marks, run_dir=Path(folder) / "run", concurrency=GROUPS * GROUP_SIZE, progress=False
        )
        trainer.fit(quick, list(range(64)))
    cpu = cpu_seconds() - cpu
    found: list[list[float]] = []
    for before, after in itertools.pairwise(marks.times):
        first = min(start for start in starts if start > before["gradient"])
        moments = [before["gradient"], before["optimizer"], before["ends"], after["begins"], first]
        found.append([1000 * (end - start) for start, end in itertools.pairwise(moments)])
    samples = [Sample(sum(parts), cpu) for parts in found]
    row = summary(
        "pause from a step's last gradient to the next rollout", "ms", samples, [], None, higher_is_better=False
    )
    lines = [
        [
            name,
            f"{statistics.median(parts[place] for parts in found):.1f}",
            f"{max(parts[place] for parts in found):.1f}",
        ]
        for place, name in enumerate(PARTS)
    ]
    return [row, Table("The pause's parts", ["part", "milliseconds, median", "most"], lines)]
