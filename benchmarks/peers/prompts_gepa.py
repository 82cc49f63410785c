"""The package `gepa` alone on a world of `PromptSim`: the peer's half of `benchmarks/prompts.py`.

It runs with the package's defaults. Its rollouts of one call count as run at the same time.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import gepa


class _Adapter:
    propose_new_texts = None

    def __init__(self, trace: Any) -> None:
        self._trace = trace

    def evaluate(self, batch: list[Any], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        trace = self._trace
        trace.rollouts += len(batch)
        trace.clock.run(trace.seconds(candidate, task) for task in batch)
        attempts = [trace.sim.attempt(candidate, task) for task in batch]
        return gepa.EvaluationBatch(
            outputs=[None] * len(batch),
            scores=[attempt.reward for attempt in attempts],
            trajectories=list(zip(batch, attempts, strict=True)) if capture_traces else None,
        )

    def make_reflective_dataset(self, candidate: dict[str, str], eval_batch: Any, components: list[str]) -> Any:
        names = list(candidate)

        def record(name: str, task: Any, attempt: Any) -> dict[str, Any]:
            answer = attempt.answers[names.index(name)] if attempt.answers else "(no answer)"
            said = "\n".join(f"{each}: {text}" for each, text in zip(names, attempt.answers, strict=False))
            feedback = f"The reward is {attempt.reward:g}.\n{said}"
            return {"Inputs": {"task": task["text"]}, "Generated Outputs": answer, "Feedback": feedback}

        return {name: [record(name, *each) for each in eval_batch.trajectories] for name in components}


class _Notes:
    def __init__(self, trace: Any) -> None:
        self._trace = trace

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        if event["is_best_program"]:
            self._trace.best(dict(event["candidate"]))


def optimise(trace: Any, seed: int, *, n_train: int, n_val: int, budget: int) -> tuple[dict[str, str], float]:
    """Run the package, and return its best prompts and their mean reward on the validation set."""

    def reflect(request: Any) -> str:
        trace.reflections += 1
        trace.clock.reflect()
        return trace.sim.reflect(request, replica=trace.reflections)

    result = gepa.optimize(
        seed_candidate=dict(trace.sim.initial_prompts),
        trainset=trace.sim.tasks(n_train),
        valset=trace.sim.tasks(n_val, start=100),
        adapter=_Adapter(trace),
        reflection_lm=reflect,
        max_metric_calls=budget,
        callbacks=[_Notes(trace)],
        logger=SimpleNamespace(log=lambda message: None),
        seed=seed,
    )
    best = result.val_subscores[result.best_idx]
    return dict(result.best_candidate), statistics.fmean(best.values() if isinstance(best, dict) else best)
