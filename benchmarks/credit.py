"""Rollouts that a policy needs to learn a game in which luck hides skill: credit for each call by forks, and a shared reward.

The game is `leyden.testing.LuckGame`: its first answer is worth ten times each later one, and cannot be learnt. The policy is the
demo's, 117,000 weights, on the embedded engine. `VinePPO` forks each rollout once at each call; `RLOO` credits all calls of a
rollout alike. Forks count as rollouts. Both have the same groups and optimizer, and that learning rate of 1e-3 and 3e-3 with which
they learn faster on seed 0. Curves: `results/curves/credit.json`.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from typing import Any

import leyden as ly
from benchmarks.harness import Peer, Row
from benchmarks.report import RESULTS, Table
from leyden.cli.demo import WEIGHTS
from leyden.objectives.advantages import VinePPOAdvantages
from leyden.objectives.losses import ReinforceLoss
from leyden.testing import LuckGame
from leyden.types import AttemptedRollout, read_replay_from

HEADLINES = ()
SEEDS = range(3)
RATES = {"vineppo": 3e-3, "rloo": 1e-3}
MOST = 2560
"""Rollouts of one run, forks included."""
GAME = LuckGame(lucky=True)
SKILLS = (0.8, 0.9)
"""Mean points of the later answers, of at most 1, that count as learnt; the untrained policy has about 0.5."""
TASKS, GROUP = 4, 8
CURVES = RESULTS / "curves" / "credit.json"
NAMES = {"vineppo": "VinePPO, credit by forks", "rloo": "RLOO, a shared reward"}


@ly.llm_rollout
async def player(task: int, llm: ly.LLM) -> float:
    messages: list[Any] = [{"role": "user", "content": "lower 0..9"}]
    answers: list[str] = []
    for _ in range(GAME.n_moves):
        said = await llm.openai().chat.completions.create(model=llm.model, messages=messages, **llm.sampling_parameters)
        answers.append(said.choices[0].message.content or "")
        messages += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": "guess 0..9"}]
    return LuckGame(lucky=task % 2 == 0).reward(answers)


def algorithm_of(name: str, rate: float, seed: int) -> ly.PolicyGradient:
    options: dict[str, Any] = {
        "tasks_per_step": TASKS,
        "rollouts_per_task": GROUP,
        "minibatch_size": TASKS * GROUP,
        "loss": ReinforceLoss(),
        "optim": ly.OptimParams(learning_rate=rate),
        "warmup_steps": 1,
        "max_tokens": 2,
        "seed": seed,
    }
    backend = ly.EmbeddedBackend(WEIGHTS, device="cpu", max_length=128, seed=seed)
    if name == "rloo":
        return ly.RLOO(backend, n_steps=MOST // (TASKS * GROUP), **options)
    rollouts_in_step = TASKS * GROUP * GAME.n_moves
    return ly.VinePPO(backend, n_steps=MOST // rollouts_in_step, advantages=VinePPOAdvantages(n_forks=1), **options)


async def learn(name: str, rate: float, seed: int) -> list[tuple[int, float]]:
    """Return, after each step, the rollouts so far and the mean points of the step's rollouts that are no forks."""
    async with ly.open_store("memory://") as store:
        trainer = ly.Trainer(algorithm=algorithm_of(name, rate, seed), store=store, concurrency=64)
        await trainer.afit(player, list(range(64)))
        rollouts = [each for each in await store.query_rollouts() if isinstance(each, AttemptedRollout)]
    curve: list[tuple[int, float]] = []
    for step in range(max(int(each.metadata["step"]) for each in rollouts) + 1):
        own = [each for each in rollouts if each.metadata["step"] == step and read_replay_from(each.metadata) is None]
        before = sum(int(each.metadata["step"]) <= step for each in rollouts)
        points = [(each.attempt.reward or 0.0) % GAME.luck / (GAME.n_moves - 1) for each in own]
        curve.append((before, statistics.fmean(points)))
    return curve


def needed(curve: list[tuple[int, float]], skill: float) -> int:
    """Return after how many rollouts the mean of three steps reaches a skill; the whole run if it does not."""
    for place in range(2, len(curve)):
        if statistics.fmean(each for _, each in curve[place - 2 : place + 1]) >= skill:
            return curve[place][0]
    return MOST


def main(peer: Peer | None) -> list[Row | Table]:
    found: list[dict[str, Any]] = []
    for name, rate in RATES.items():
        for seed in SEEDS:
            started = time.process_time()
            curve = asyncio.run(learn(name, rate, seed))
            found.append({"name": name, "rate": rate, "seed": seed, "curve": curve})
            seconds = time.process_time() - started
            print(f"{name}, seed {seed}: {needed(curve, SKILLS[0])} rollouts, {seconds:.0f} s CPU", flush=True)
    CURVES.parent.mkdir(parents=True, exist_ok=True)
    CURVES.write_text(json.dumps(found) + "\n")
    return [table(found)]


def table(found: list[dict[str, Any]]) -> Table:
    """Return the rollouts that each run needed."""
    rows: list[list[str]] = []
    for name, label in NAMES.items():
        curves = [each["curve"] for each in found if each["name"] == name]
        counts = [", ".join(shown(needed(curve, skill)) for curve in curves) for skill in SKILLS]
        ends = ", ".join(f"{statistics.fmean(skill for _, skill in curve[-3:]):.2f}" for curve in curves)
        rows.append([label, f"{RATES[name]:g}", *counts, ends])
    title = f"LuckGame: rollouts, forks included, until the answers after the first have a share of their points; seeds 0 to {SEEDS[-1]}"
    return Table(
        title, ["algorithm", "learning rate", *(f"to {skill:g}" for skill in SKILLS), f"share after {MOST:,}"], rows
    )


def shown(count: int) -> str:
    return f"{count:,}" if count < MOST else f"more than {MOST:,}"
