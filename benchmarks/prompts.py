"""Prompt optimisers on worlds whose best prompt is known (`PromptSim`): rollouts to 95 % of the optimum, time, selection gap.

Each run has one optimiser, one family and one seed, and `BUDGET` rollouts. The task model is a function in this process; the
optimisers of Leyden ask the reflection model over HTTP. The truth of a prompt is exact. Time is simulated: a rollout takes what the
family says (1 s in the median), a reflection 5 s, and 16 rollouts run at a time. What an optimiser does at once is scheduled at once,
and what waits for something starts after it.

Finished runs are kept in `results/prompts_runs.jsonl` and not repeated; delete the file to start afresh. `PROMPTS_SEEDS=5` takes
more seeds than two. Two families, `HELD_OUT`, were not looked at while the optimisers were written.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import openai

import leyden as ly
from benchmarks.harness import Peer, Row
from benchmarks.peers import prompts_gepa
from benchmarks.report import RESULTS, Table
from leyden.algorithm.evaluator import Score
from leyden.algorithm.prompts import Candidate
from leyden.testing import FakeUpstream, PromptSim
from leyden.testing.promptsim import FAMILIES, Kind, Setting, World
from leyden.testing.promptsim.vocabulary import RULES, SEED_PROMPT

PEER = None
HEADLINES = ("Leyden GEPA: rollouts to 95 % of the optimum",)
RUNS = RESULTS / "prompts_runs.jsonl"
N_TRAIN, N_VAL = 60, 40
BUDGET = 800
SEEDS = int(os.environ.get("PROMPTS_SEEDS", "2"))
SLOTS, ROLLOUT_SECONDS, REFLECTION_SECONDS, TIMEOUT_SECONDS = 16, 1.0, 5.0, 60.0
SHARE = 0.95
RESAMPLES = 2000


# ---- worlds --------------------------------------------------------------------------------------------------------------


def _rare(seed: int) -> Setting:
    """One task in ten needs three rules that no other task needs."""
    names = [rule.name for rule in RULES]
    random.Random(f"rare/{seed}").shuffle(names)
    kinds = (Kind("many", frozenset(names[:3]), 9.0), Kind("few", frozenset(names[3:6]), 1.0))
    return Setting(World(rules=RULES, kinds=kinds, components={"prompt": tuple(names)}), {"prompt": SEED_PROMPT})


def _terse(seed: int) -> Setting:
    """Each word beyond forty costs, so that useless clauses hurt."""
    names = [rule.name for rule in RULES]
    random.Random(f"terse/{seed}").shuffle(names)
    kinds = tuple(Kind("shop", frozenset(names[place : place + 3])) for place in range(0, 6, 3))
    world = World(rules=RULES, kinds=kinds, components={"prompt": tuple(names)}, free_words=40, word_cost=0.06)
    return Setting(world, {"prompt": SEED_PROMPT})


HELD_OUT: dict[str, Callable[[int], Setting]] = {"rare": _rare, "terse": _terse}


def world(family: str, seed: int) -> PromptSim:
    """Return the world of a run."""
    return PromptSim(HELD_OUT[family](seed) if family in HELD_OUT else family, seed=seed)


# ---- one run -------------------------------------------------------------------------------------------------------------


class Clock:
    """Simulated time: rollouts take slots in the order in which they are requested."""

    def __init__(self) -> None:
        self._free = [0.0] * SLOTS
        self._now: contextvars.ContextVar[float] = contextvars.ContextVar("now")
        self.end = 0.0
        """When the last of all ends."""

    @property
    def now(self) -> float:
        """The time of the task that asks; after a barrier, the end of all before it."""
        return self._now.get(self._barrier)

    _barrier = 0.0

    def barrier(self) -> None:
        """Whatever starts next waits for all before it."""
        self._barrier = self.end

    def run(self, seconds: Iterable[float]) -> None:
        """Run rollouts at once, and go on when the last has ended."""
        start, last = self.now, self.now
        for duration in seconds:
            ends = max(start, heapq.heappop(self._free)) + duration
            heapq.heappush(self._free, ends)
            last = max(last, ends)
        self._set(last)

    def reflect(self) -> None:
        """Wait for one answer of the reflection model."""
        self._set(self.now + REFLECTION_SECONDS)

    def _set(self, now: float) -> None:
        self._now.set(now)
        self.end = max(self.end, now)


@dataclass
class Trace:
    """What a run did."""

    sim: PromptSim
    clock: Clock = field(default_factory=Clock)
    rollouts: int = 0
    reflections: int = 0
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """Rollouts, seconds and normalised truth each time that the best prompts changed."""

    def seconds(self, prompts: dict[str, str], task: Any) -> float:
        """Return the simulated duration of a rollout."""
        seconds, median = self.sim.attempt(prompts, task).seconds, self.sim.behaviour.median_seconds
        return TIMEOUT_SECONDS if math.isinf(seconds) else ROLLOUT_SECONDS * (seconds / median if median else 1.0)

    def best(self, prompts: dict[str, str]) -> None:
        """Note new best prompts."""
        self.curve.append((self.rollouts, round(self.clock.end, 2), self.sim.normalised_score(prompts)))


@dataclass(frozen=True)
class Run:
    """The outcome of one run, a line of `results/prompts_runs.jsonl`."""

    side: str
    family: str
    seed: int
    budget: int
    rollouts: int
    reflections: int
    seconds: float
    """Simulated."""
    truth: float
    """Of the final prompts: 0 for the first ones, 1 for the best possible ones."""
    gap: float
    """What the optimiser believes of its prompts, minus the truth."""
    curve: list[tuple[int, float, float]]
    wall_s: float

    def reached(self, share: float = SHARE) -> tuple[float, float] | None:
        """Return rollouts and seconds until the truth was first at this share of the optimum; None if never."""
        return next(((rollouts, seconds) for rollouts, seconds, truth in self.curve if truth >= share), None)


def _texts(candidate: Candidate) -> dict[str, str]:
    return {name: prompt.template for name, prompt in candidate.prompts.items()}


class _Timed:
    """Counts what an optimiser of Leyden does. A mix-in for `PromptOptimiser`."""

    trace: Trace

    def note(self, candidate: Candidate, tasks: Sequence[Any], scores: Sequence[Score]) -> None:
        new = [each.result.rollout_id for each in scores if each.result is not None]
        fresh = [place for place, rollout_id in enumerate(new) if rollout_id not in self._seen]
        self._seen.update(new)
        self.trace.rollouts += len(fresh)
        self.trace.clock.run(self.trace.seconds(_texts(candidate), tasks[place]) for place in fresh)

    async def accept(self, candidate: Candidate) -> None:
        await super().accept(candidate)  # pyright: ignore[reportAttributeAccessIssue] -- PromptOptimiser has it
        self.trace.best(_texts(candidate))

    def __init__(self, *args: Any, trace: Trace, **options: Any) -> None:
        self.trace, self._seen = trace, set[str]()
        super().__init__(*args, **options)


class _APO(_Timed, ly.APO):
    async def evaluate_prompt_on_batch(
        self, prompt: Candidate, tasks: Sequence[Any], *args: Any, **options: Any
    ) -> Any:
        scores = await super().evaluate_prompt_on_batch(prompt, tasks, *args, **options)
        self.note(prompt, tasks, scores.scores)
        return scores

    async def step(self, iteration: int) -> Any:
        self.trace.clock.barrier()
        return await super().step(iteration)


class _GEPA(_Timed, ly.GEPA):
    async def _scores(self, candidate: Candidate, items: Any) -> list[Score]:
        scores = await super()._scores(candidate, items)
        data = {"train": self._train, "val": self._val}
        self.note(candidate, [data[item.mode][item.index] for item in items], scores)
        return scores

    async def evaluate(self, items: Any) -> Any:
        self.trace.clock.barrier()
        return await super().evaluate(items)

    async def reflect(self, jobs: Any) -> Any:
        self.trace.clock.barrier()
        return await super().reflect(jobs)

    async def race(self, proposals: Any) -> Any:
        self.trace.clock.barrier()
        return await super().race(proposals)


class _Client:
    """A client of the reflection model that takes simulated time."""

    def __init__(self, client: openai.AsyncOpenAI, trace: Trace) -> None:
        self.chat = self.completions = self
        self._client, self._trace = client, trace

    async def create(self, **request: Any) -> Any:
        self._trace.reflections += 1
        self._trace.clock.reflect()
        return await self._client.chat.completions.create(**request, seed=self._trace.reflections)


async def _leyden(trace: Trace, make: Callable[[Any, Trace, int], Any], seed: int) -> tuple[dict[str, str], float]:
    sim = trace.sim

    @ly.rollout
    async def agent(task: dict[str, Any], resources: ly.NamedResources) -> float:
        prompts = {name: each.template for name, each in resources.items() if isinstance(each, ly.PromptTemplate)}
        attempt = sim.attempt(prompts, task)
        if math.isinf(attempt.seconds):
            raise TimeoutError("unfinished at the deadline")
        for name, answer in zip(prompts, attempt.answers, strict=True):
            ly.emit_message(f"{name}: {answer}")
        return attempt.reward

    async with (
        FakeUpstream(reply=sim.reply) as upstream,
        openai.AsyncOpenAI(base_url=upstream.endpoint, api_key="none") as client,
    ):
        trainer = ly.Trainer(
            algorithm=make(_Client(client, trace), trace, seed),
            initial_resources=sim.initial_resources,
            store="memory",
            concurrency=SLOTS,
            progress=False,
        )
        summary = await trainer.afit(agent, sim.tasks(N_TRAIN), sim.tasks(N_VAL, start=100))
    prompts = {name: prompt.template for name, prompt in summary.result.prompts.items()}
    return prompts, summary.result.reward or 0.0


def _apo(client: Any, trace: Trace, seed: int) -> ly.APO:
    budget = ly.Budget(rollouts=BUDGET)
    models = {"gradient_model": "fake", "apply_edit_model": "fake"}
    return _APO(client, trace=trace, **models, beam_width=2, branch_factor=2, beam_rounds=30, budget=budget, seed=seed)


def _gepa(client: Any, trace: Trace, seed: int) -> ly.GEPA:
    budget = ly.Budget(rollouts=BUDGET)
    return _GEPA(client, trace=trace, reflection_model="fake", max_steps=200, budget=budget, seed=seed)


def _random(trace: Trace, seed: int) -> tuple[dict[str, str], float]:
    """Rewrite without looking at a run, and keep what scores best: the floor."""
    sim, chance, val = trace.sim, random.Random(seed), trace.sim.tasks(N_VAL, start=100)

    def reward(prompts: dict[str, str]) -> float:
        trace.rollouts += len(val)
        trace.clock.run(trace.seconds(prompts, task) for task in val)
        return statistics.fmean(sim.attempt(prompts, task).reward for task in val)

    best = dict(sim.initial_prompts)
    best_reward = reward(best)
    trace.best(best)
    while trace.rollouts + len(val) <= BUDGET:
        name = chance.choice(list(best))
        trace.reflections += 1
        trace.clock.reflect()
        request = f"<prompt>\n{best[name]}\n</prompt>\nWrite a better prompt."
        candidate = {**best, name: sim.reflect(request, replica=trace.reflections)}
        if (found := reward(candidate)) > best_reward:
            best, best_reward = candidate, found
            trace.best(best)
    return best, best_reward


SIDES: dict[str, Callable[[Trace, int], tuple[dict[str, str], float]]] = {
    "Leyden GEPA": lambda trace, seed: asyncio.run(_leyden(trace, _gepa, seed)),
    "Leyden APO": lambda trace, seed: asyncio.run(_leyden(trace, _apo, seed)),
    "gepa 0.1.4": lambda trace, seed: prompts_gepa.optimise(trace, seed, n_train=N_TRAIN, n_val=N_VAL, budget=BUDGET),
    "random rewriting": _random,
}


def measure(side: str, family: str, seed: int) -> Run:
    """Run one optimiser on one world."""
    trace, began = Trace(world(family, seed)), time.perf_counter()
    prompts, believed = SIDES[side](trace, seed)
    sim = trace.sim
    return Run(
        side=side,
        family=family,
        seed=seed,
        budget=BUDGET,
        rollouts=trace.rollouts,
        reflections=trace.reflections,
        seconds=trace.clock.end,
        truth=sim.normalised_score(prompts),
        gap=believed - sim.expected_reward(prompts),
        curve=trace.curve,
        wall_s=round(time.perf_counter() - began, 2),
    )


def runs(families: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    """Return all runs, those that are kept and those that are missing; each is kept as soon as it has ended."""
    lines = RUNS.read_text().splitlines() if RUNS.exists() else []
    kept = {(run.side, run.family, run.seed): run for run in (Run(**json.loads(line)) for line in lines)}
    wanted = [(side, family, seed) for seed in seeds for family in families for side in SIDES]
    found: list[Run] = []
    for number, key in enumerate(wanted, 1):
        run = kept.get(key)
        if run is None or run.budget != BUDGET:
            run = measure(*key)
            with RUNS.open("a") as file:
                file.write(json.dumps(asdict(run)) + "\n")
            reached = run.reached()
            print(
                f"{number}/{len(wanted)} {run.side}, {run.family}, seed {run.seed}: truth {run.truth:.2f}, "
                f"95 % after {reached[0] if reached else 'never'} of {run.rollouts} rollouts ({run.wall_s:.0f} s)",
                flush=True,
            )
        found.append(replace(run, curve=[tuple(each) for each in run.curve]))  # pyright: ignore[reportArgumentType]
    return found


# ---- statistics ----------------------------------------------------------------------------------------------------------


def interquartile_mean(values: Sequence[float]) -> float:
    """Return the mean of the middle half (Agarwal et al., arXiv:2108.13264)."""
    ordered, cut = sorted(values), len(values) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the interquartile mean."""
    chance = random.Random(0)
    means = sorted(interquartile_mean(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return means[RESAMPLES // 40], means[-RESAMPLES // 40]


def rollouts_needed(run: Run) -> float:
    """Return rollouts to 95 % of the optimum; the whole budget if it was never reached."""
    return (run.reached() or (run.budget, 0.0))[0]


def seconds_needed(run: Run) -> float:
    """Return simulated seconds to 95 % of the optimum; the whole run if it was never reached."""
    return (run.reached() or (0, run.seconds))[1]


def _row(name: str, unit: str, ours: list[Run], theirs: list[Run], value: Callable[[Run], float]) -> Row:
    mine, others = [value(run) for run in ours], [value(run) for run in theirs]
    peer = interquartile_mean(others)
    low, high = interval([other / own for own, other in zip(mine, others, strict=True) if own > 0])
    own = interquartile_mean(mine)
    cpu = statistics.median(run.wall_s for run in ours)
    return Row(name, unit, own, peer, theirs[0].side, peer / own if own else None, len(ours), low, high, cpu)


def _cell(values: Sequence[float], digits: int) -> str:
    low, high = interval(values)
    return f"{interquartile_mean(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main(peer: Peer | None) -> list[Row | Table]:
    families, seeds = [*FAMILIES, *HELD_OUT], range(SEEDS)
    found = runs(families, seeds)
    by_side = {side: [run for run in found if run.side == side] for side in SIDES}
    overspent = [run for run in found if run.side.startswith("Leyden") and run.rollouts > run.budget]
    if overspent:
        raise RuntimeError(f"{overspent[0].side} exceeded its budget: {overspent[0].rollouts} rollouts")
    rows: list[Row | Table] = []
    for ours in ("Leyden GEPA", "Leyden APO"):
        for theirs in ("gepa 0.1.4", "random rewriting"):
            mine, others = by_side[ours], by_side[theirs]
            rows.append(_row(f"{ours}: rollouts to 95 % of the optimum", "rollouts", mine, others, rollouts_needed))
            if theirs != "random rewriting":  # it hardly ever comes so far
                name = f"{ours}: simulated time to it or to the end of the budget, 16 slots"
                rows.append(_row(name, "s", mine, others, seconds_needed))
    columns = ["optimiser", "95 % reached", "rollouts to 95 %", "final truth", "selection gap", "most rollouts"]
    overall = [
        [
            side,
            f"{sum(run.reached() is not None for run in each)} of {len(each)}",
            _cell([rollouts_needed(run) for run in each], 0),
            _cell([run.truth for run in each], 2),
            _cell([run.gap for run in each], 2),
            f"{max(run.rollouts for run in each)} of {BUDGET}",
        ]
        for side, each in by_side.items()
    ]
    title = f"Prompt optimisers, {len(families)} families, {SEEDS} seeds: interquartile means, 95 % bootstrap intervals"
    rows.append(Table(title, columns, overall))
    per_family = [
        [f"{family} (held out)" if family in HELD_OUT else family]
        + [
            f"{statistics.median(rollouts_needed(run) for run in each if run.family == family):.0f} / "
            f"{statistics.fmean(run.truth for run in each if run.family == family):.2f}"
            for each in by_side.values()
        ]
        for family in families
    ]
    rows.append(Table("Median rollouts to 95 % / mean final truth, by family", ["family", *by_side], per_family))
    return rows
