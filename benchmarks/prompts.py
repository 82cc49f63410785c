"""Prompt optimisers on worlds whose best prompt is known (`PromptSim`): rollouts to 95 % of the optimum, time, selection gap.

Each run has one optimiser, one family and one seed, and `BUDGET` rollouts. The task model is a function in this process; the
optimisers of Leyden ask the reflection model over HTTP. The truth of a prompt is exact. Time is simulated: a rollout takes what the
family says (1 s in the median), a reflection 5 s, and 16 rollouts run at a time. What an optimiser does at once is scheduled at once,
and what waits for something starts after it.

Finished runs are kept in `results/prompts_runs.jsonl` and not repeated, so an interrupted benchmark continues. Delete the lines of a
side to run it anew, or the file to start afresh. A run of Leyden depends on its seed alone, not on how busy the machine is.
`PROMPTS_SEEDS=2` takes fewer seeds than twenty, `PROMPTS_JOBS=1` fewer processes than the machine has CPUs. Four families,
`HELD_OUT`, are the benchmark's own, and no optimiser of Leyden ran on two of them, `UNSEEN`, before its code was final.
Without peers of environments of their own, each family and seed takes 5 s of CPU: 20 seeds take ten minutes on two idle cores. A run
of Agent Lightning's APO goes on after its budget, see `LIMIT`, and takes 1 to 5 s.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import json
import math
import os
import random
import statistics
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import openai

import leyden as ly
from benchmarks.harness import Peer, Row
from benchmarks.peers import prompts_gepa
from benchmarks.peers.prompts_world import (
    BUDGET,
    HELD_OUT,
    LIMIT,
    N_TRAIN,
    N_VAL,
    SHARE,
    SLOTS,
    UNSEEN,
    Run,
    Trace,
    follow,
    measure,
)
from benchmarks.promptsim import FAMILIES
from benchmarks.report import RESULTS, Table
from benchmarks.sides import Side
from leyden.algorithm.evaluator import Score
from leyden.algorithm.prompts import Candidate
from leyden.algorithm.prompts.candidate import Branch
from leyden.testing import FakeUpstream

PEER = "bench-prompts"
HEADLINES = ("Leyden GEPA: rollouts to 95 % of the optimum",)
RUNS = RESULTS / "prompts_runs.jsonl"
SEEDS = int(os.environ.get("PROMPTS_SEEDS", "20"))
THREADED_SEEDS = 5
"""Seeds of the peer that uses threads."""
JOBS = int(os.environ.get("PROMPTS_JOBS", str(os.cpu_count() or 1)))
RESAMPLES = 2000

T = TypeVar("T")


# ---- optimisers ----


def _texts(candidate: Candidate) -> dict[str, str]:
    return {name: prompt.template for name, prompt in candidate.prompts.items()}


class _Timed:
    """Counts what an optimiser of Leyden does. A mix-in for `PromptOptimiser`."""

    trace: Trace

    async def in_turn(self, evaluation: Awaitable[T]) -> T:
        """Return the result of an evaluation, after those of all that were requested before it.

        So the order in which simultaneous evaluations are noted does not depend on which of them ends first.
        """
        before, self._noted = self._noted, (done := asyncio.Event())
        try:
            found = await evaluation
            await before.wait()
            return found
        finally:
            done.set()

    def note(self, candidate: Candidate, tasks: Sequence[Any], scores: Sequence[Score]) -> None:
        new = [each.result.rollout_id for each in scores if each.result is not None]
        fresh = [place for place, rollout_id in enumerate(new) if rollout_id not in self._seen]
        self._seen.update(new)
        self.trace.rollouts += len(fresh)
        self.trace.clock.run(self.trace.seconds(_texts(candidate), tasks[place]) for place in fresh)

    async def accept(self, candidate: Candidate) -> None:
        await super().accept(candidate)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType] -- PromptOptimiser has it
        self.trace.best(_texts(candidate))
        if self.trace.ends_at_share and self.trace.curve[-1][2] >= SHARE:
            self._loop.stop()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType] -- IterativeAlgorithm has it

    def __init__(self, *args: Any, trace: Trace, **options: Any) -> None:
        self.trace, self._seen, self._noted = trace, set[str](), asyncio.Event()
        self._noted.set()
        super().__init__(*args, **options)


class _APO(_Timed, ly.APO):
    async def evaluate_prompt_on_batch(
        self, prompt: Candidate, tasks: Sequence[Any], *args: Any, **options: Any
    ) -> Any:
        scores = await self.in_turn(super().evaluate_prompt_on_batch(prompt, tasks, *args, **options))
        self.note(prompt, tasks, scores.scores)
        return scores

    async def _rewrite(self, iteration: int, n_branches: int) -> int:
        self.trace.clock.barrier()
        return await super()._rewrite(iteration, n_branches)

    async def _branch(self, place: Branch, parent: int, tasks: Sequence[int]) -> Candidate | None:
        _draws.set(itertools.count(1000 * (place.round * self.beam_width + place.branch + 1)))
        return await super()._branch(place, parent, tasks)

    async def _draw(self, iteration: int, stage: int, count: int) -> list[int]:
        self.trace.clock.barrier()
        return await super()._draw(iteration, stage, count)

    async def _choose(self, iteration: int, drawn: Sequence[int]) -> None:
        self.trace.clock.barrier()
        return await super()._choose(iteration, drawn)


class _GEPA(_Timed, ly.GEPA):
    async def _scores(self, candidate: Candidate, items: Any) -> list[Score]:
        self.trace.clock.barrier()
        scores = await self.in_turn(super()._scores(candidate, items))
        data = {"train": self._train, "val": self._val}
        self.note(candidate, [data[item.mode][item.index] for item in items], scores)
        return scores

    async def evaluate(self, items: Any) -> list[list[Score]]:
        self.trace.clock.barrier()
        return await super().evaluate(items)

    async def reflect(self, jobs: Any) -> Any:
        self.trace.clock.barrier()
        return await super().reflect(jobs)

    async def race(self, proposals: Any) -> Any:
        self.trace.clock.barrier()
        return await super().race(proposals)


_draws: contextvars.ContextVar[Iterator[int]] = contextvars.ContextVar("draws")
"""Seeds for the calls of one branch, which do not depend on the order in which calls of other branches arrive."""


class _Client:
    """A client of the reflection model that takes simulated time."""

    def __init__(self, client: openai.AsyncOpenAI, trace: Trace) -> None:
        self.chat = self.completions = self
        self._client, self._trace, self._own_draws = client, trace, itertools.count(1)

    async def create(self, **request: Any) -> Any:
        self._trace.reflections += 1
        self._trace.clock.reflect()
        ask: Any = self._client.chat.completions.create
        return await ask(**request, seed=next(_draws.get(self._own_draws)))


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
    trace.expected = summary.result.expected_reward
    return prompts, summary.result.reward or 0.0


def _apo(client: Any, trace: Trace, seed: int) -> ly.APO:
    budget = ly.Budget(rollouts=LIMIT if trace.ends_at_share else BUDGET)
    models = {"gradient_model": "fake", "apply_edit_model": "fake"}
    sizes = {"beam_width": 4, "branch_factor": 1, "beam_rounds": 1000, "gradient_batch_size": 3, "val_batch_size": 3}
    stages = {"critic_runs": 1, "candidates_per_stage": 3, "stages_per_round": 2}
    return _APO(
        client, trace=trace, **models, **sizes, **stages, run_initial_validation=False, budget=budget, seed=seed
    )


def _gepa(client: Any, trace: Trace, seed: int) -> ly.GEPA:
    options = {"candidate_selection": "leader", "reflection_model": "fake", "max_steps": 200}
    return _GEPA(client, trace=trace, **options, budget=ly.Budget(rollouts=BUDGET), seed=seed)


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
APO, GEPA, AGENT_LIGHTNING, MIPRO = "Leyden APO", "Leyden GEPA", "agentlightning 0.3.0 APO", "DSPy 3.4.1 MIPROv2"
PEER_SCRIPTS = {AGENT_LIGHTNING: "prompts_agentlightning.py", MIPRO: "prompts_dspy.py"}
"""Sides that run in the environment `PEER`."""

Key = tuple[str, str, int]
"""Side, family and seed of a run."""


def run_here(key: Key) -> Run:
    """Run one optimiser on one world, in this process."""
    side, family, seed = key
    run = measure(side, SIDES[side], family, seed)
    return follow(run, SIDES[side]) if side == APO and run.reached() is None else run


def new_runs(peer: Peer | None, wanted: Sequence[Key]) -> Iterator[Run]:
    """Yield each run as soon as it has ended. Runs of peers are left out without their environment."""
    with ProcessPoolExecutor(JOBS) as pool:
        pending = [pool.submit(run_here, key) for key in wanted if key[0] in SIDES]
        for name, script in PEER_SCRIPTS.items() if peer is not None else ():
            keys = [key for key in wanted if key[0] == name]
            if peer is not None and keys:
                with Side(name, peer.python, Path(__file__).parent / "peers" / script) as side:
                    for _, family, seed in keys:
                        yield Run(**side.ask("run", family=family, seed=seed))
        for done in as_completed(pending):
            yield done.result()


def _is_complete(run: Run) -> bool:
    """Return whether a run had the budget of today, and was followed beyond it if it has to be."""
    is_followed = run.side not in (AGENT_LIGHTNING, APO) or run.followed is not None
    return run.budget == BUDGET and (is_followed or run.reached() is not None)


def runs(peer: Peer | None, families: Sequence[str], seeds: Sequence[int]) -> dict[str, list[Run]]:
    """Return the runs of each side, those that are kept and those that were missing; each is kept as soon as it has ended."""
    lines = RUNS.read_text().splitlines() if RUNS.exists() else []
    found = {(run.side, run.family, run.seed): run for run in (Run(**json.loads(line)) for line in lines)}
    wanted = [
        (side, family, seed)
        for side in (*SIDES, *PEER_SCRIPTS)
        for seed in seeds
        for family in families
        if side != MIPRO or seed < THREADED_SEEDS
    ]
    missing = [key for key in wanted if key not in found or not _is_complete(found[key])]
    for number, run in enumerate(new_runs(peer, missing), 1):
        found[run.side, run.family, run.seed] = run
        with RUNS.open("a") as file:
            file.write(json.dumps(asdict(run)) + "\n")
        reached = run.reached()
        print(
            f"{number}/{len(missing)} {run.side}, {run.family}, seed {run.seed}: truth {run.truth:.2f}, "
            f"95 % after {reached[0] if reached else 'never'} of {run.rollouts} rollouts ({run.wall_s:.0f} s)",
            flush=True,
        )
    by_side = {
        side: [found[key] for key in wanted if key[0] == side and key in found] for side in (*SIDES, *PEER_SCRIPTS)
    }
    return {side: each for side, each in by_side.items() if each}


# ---- statistics ----------------------------------------------------------------------------------------------------------


def interquartile_mean(values: Sequence[float]) -> float:
    """Return the mean of the middle half (Agarwal et al., arXiv:2108.13264)."""
    ordered, cut = sorted(values), len(values) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


Statistic = Callable[[Sequence[float]], float]


def interval(values: Sequence[float], statistic: Statistic) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a statistic."""
    chance = random.Random(0)
    found = sorted(statistic(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return found[RESAMPLES // 40], found[-RESAMPLES // 40]


def rollouts_needed(run: Run, share: float = SHARE) -> float:
    """Return rollouts to a share of the optimum; the whole budget if it was not reached with them."""
    return (run.reached(share) or (run.budget, 0.0))[0]


def seconds_needed(run: Run) -> float:
    """Return simulated seconds to 95 % of the optimum; the whole run if it was not reached within the budget."""
    return (run.reached() or (0, run.seconds))[1]


def followed_to_share(run: Run) -> tuple[float, float]:
    """Return rollouts and seconds to 95 % of the optimum, of a run that may go on to `LIMIT` rollouts.

    A run that was not followed beyond its budget counts as if it were given up at `LIMIT`.
    """
    given_up = run.followed or (LIMIT, run.seconds * LIMIT / run.budget)
    return run.reached(within=LIMIT) or given_up


def expected_gap(run: Run) -> float:
    """Return what the optimiser expects on new tasks, minus the truth; without it, its reward on validation tasks."""
    return run.gap if run.expected_gap is None else run.expected_gap


def mean_truth(run: Run) -> float:
    """Return the truth of the best prompts, averaged over the budget's rollouts: 1 if the optimum were known at once."""
    points = [(rollouts, truth) for rollouts, _, truth in run.curve if rollouts <= run.budget]
    ends = [*(rollouts for rollouts, _ in points[1:]), run.budget]
    return sum(truth * (end - start) for (start, truth), end in zip(points, ends, strict=True)) / run.budget


def paired_row(name: str, unit: str, ours: list[Run], theirs: list[Run], value: Callable[[Run], float]) -> Row:
    """Return the ratio of the means, with its bootstrap interval over the common families and seeds."""
    others = {(run.family, run.seed): value(run) for run in theirs}
    pairs = [(value(run), others[run.family, run.seed]) for run in ours if (run.family, run.seed) in others]

    def ratio(sample: Sequence[tuple[float, float]]) -> float:
        return statistics.fmean(other for _, other in sample) / statistics.fmean(own for own, _ in sample)

    chance = random.Random(0)
    ratios = sorted(ratio(chance.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return Row(
        row=name,
        unit=unit,
        leyden=statistics.fmean(own for own, _ in pairs),
        peer=statistics.fmean(other for _, other in pairs),
        peer_name=theirs[0].side,
        ratio=ratio(pairs),
        n=len(pairs),
        min=ratios[RESAMPLES // 40],
        max=ratios[-RESAMPLES // 40],
        cpu_s=statistics.median(run.wall_s for run in ours),
    )


def _cell(values: Sequence[float], digits: int, statistic: Statistic = interquartile_mean) -> str:
    low, high = interval(values, statistic)
    return f"{statistic(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _overall(side: str, each: list[Run]) -> list[str]:
    return [
        side,
        f"{len(each)}",
        f"{sum(run.reached() is not None for run in each)}",
        _cell([rollouts_needed(run) for run in each], 0, statistics.fmean),
        _cell([rollouts_needed(run, 0.8) for run in each], 0, statistics.fmean),
        _cell([mean_truth(run) for run in each], 2),
        _cell([run.truth for run in each], 2),
        _cell([run.gap for run in each], 3),
        _cell([expected_gap(run) for run in each], 3) if side in (GEPA, APO) else "",
        f"{max(run.rollouts for run in each)} of {BUDGET}",
    ]


def _family_cell(each: list[Run]) -> str:
    if not each:
        return "not run"
    return f"{statistics.fmean(map(rollouts_needed, each)):.0f} / {statistics.fmean(run.truth for run in each):.2f}"


def main(peer: Peer | None) -> list[Row | Table]:
    families = [*FAMILIES, *HELD_OUT]
    by_side = runs(peer, families, range(SEEDS))
    overspent = [run for side in by_side if side.startswith("Leyden") for run in by_side[side] if run.rollouts > BUDGET]
    if overspent:
        raise RuntimeError(f"{overspent[0].side} exceeded its budget: {overspent[0].rollouts} rollouts")
    rows: list[Row | Table] = []
    pairs = (("Leyden GEPA", "gepa 0.1.4"), ("Leyden APO", AGENT_LIGHTNING), ("Leyden APO", "gepa 0.1.4"))
    for ours, theirs in pairs:
        if theirs not in by_side:
            continue
        mine, others = by_side[ours], by_side[theirs]
        name = f"{ours} beside gepa" if (ours, theirs) == pairs[2] else ours
        rows += [
            paired_row(f"{name}: rollouts to 95 % of the optimum", "rollouts", mine, others, rollouts_needed),
            paired_row(
                f"{name}: rollouts to 80 % of the optimum",
                "rollouts",
                mine,
                others,
                lambda run: rollouts_needed(run, 0.8),
            ),
            paired_row(f"{name}: simulated time to 95 %, 16 slots", "s", mine, others, seconds_needed),
            paired_row(f"{name}: selection gap, absolute", "reward", mine, others, lambda run: abs(run.gap)),
        ]
        if ours == GEPA or theirs == AGENT_LIGHTNING:
            gap = f"{name}: selection gap of the expected reward, absolute"
            rows.append(paired_row(gap, "reward", mine, others, lambda run: abs(expected_gap(run))))
        if theirs == AGENT_LIGHTNING:
            further = f"to 95 %, up to {LIMIT:,} rollouts"
            rows += [
                paired_row(
                    f"{name}: rollouts {further}", "rollouts", mine, others, lambda run: followed_to_share(run)[0]
                ),
                paired_row(
                    f"{name}: simulated time {further}", "s", mine, others, lambda run: followed_to_share(run)[1]
                ),
            ]
    title = (
        f"Prompt optimisers on {len(families)} families with {BUDGET} rollouts. Rollouts are means, a run that never came so far "
        "counts with its whole budget; the others are interquartile means; 95 % bootstrap intervals"
    )
    columns = [
        "optimiser",
        "runs",
        "reached 95 %",
        "rollouts to 95 %",
        "rollouts to 80 %",
        "mean truth over the budget",
    ]
    columns += ["final truth", "selection gap", "of the expected reward", "most rollouts"]
    rows.append(Table(title, columns, [_overall(side, each) for side, each in by_side.items()]))
    per_family = [
        [f"{family} (unseen)" if family in UNSEEN else family]
        + [_family_cell([run for run in each if run.family == family]) for each in by_side.values()]
        for family in families
    ]
    rows.append(Table("Mean rollouts to 95 % / mean final truth, by family", ["family", *by_side], per_family))
    return rows
