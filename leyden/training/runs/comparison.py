"""Compare recorded runs: what they were started with, what they measured, and which tasks were won and lost.

Everything is JSON that says by itself what holds: a part that cannot be compared has the reason. The first run is the
one with which each other run is compared. To compare something more, add it to `compare_runs`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from leyden._lib.json import object_or_empty
from leyden._lib.logs import Preview
from leyden._lib.numbers import mean_of
from leyden.adapter.transcript import answer_of
from leyden.errors import ConfigError, LeydenError
from leyden.statistics import Sample, paired_difference, unpaired_difference
from leyden.store.base import LightningStore
from leyden.training.runs.control import in_words, read_control
from leyden.training.runs.recorded_runs import RecordedRun, iteration_of
from leyden.training.runs.rollouts import has_the_store_for_itself
from leyden.training.runs.run_metrics import RewardMetrics
from leyden.training.runs.run_options import UNKNOWN, differing
from leyden.types import AttemptedRollout, Rollout
from leyden.types.run_record import best_label

_EVIDENCE = 50
"""Tasks whose last answers are read, in each direction."""

T = TypeVar("T")
Tasks = Mapping[str, Sequence[Rollout]]
"""The rollouts of each task of a validation, by a digest of the task."""


def compare_runs(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Return the comparison of the first run with each of the others, as JSON. Lists have a value for each run."""
    records, metrics = [run.record for run in runs], [run.summary_metrics() for run in runs]
    found = [query_store(run, lambda store, run=run: _totals(run, store)) for run in runs]
    tasks = [query_store(run, lambda store, run=run: _last_validation(run, store)) for run in runs]
    git = [object_or_empty(record.config.get("git")) for record in records]
    code = [
        {"commit": at.get("commit"), **object_or_empty(of.config.get("versions"))}
        for at, of in zip(git, records, strict=True)
    ]
    versions = {
        name: [each.get(name) or UNKNOWN for each in code] for name in dict.fromkeys(n for each in code for n in each)
    }
    return {
        "configuration": differing(records),
        "versions": {name: values for name, values in versions.items() if len(set(values)) > 1},
        "uncommitted_changes": [each.get("dirty") for each in git],
        "code": _code([object_or_empty(record.config.get("code")) for record in records]),
        "control": [None if run.directory is None else _control(run.directory) for run in runs],
        "reward": [_rewards(each.reward) for each in metrics],
        "val_reward": [_rewards(each.val_reward) for each in metrics],
        "totals": [total if reason is None else {"reason": reason} for total, reason in found],
        "against_first": [_against(runs[0], run, tasks[0], tasks[n]) for n, run in enumerate(runs) if n],
    }


def _code(codes: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]] | None:
    """Return the digests of each file that differs, None where a run does not use it; None if a run did not record its
    code, so that it is unknown whether files differ.
    """
    if not all(isinstance(each.get("files"), dict) for each in codes):
        return None
    digests = {
        name: [each["files"].get(name) for each in codes] for name in sorted({n for c in codes for n in c["files"]})
    }
    return {name: of for name, of in digests.items() if len(set(of)) > 1}


def _control(directory: Path) -> list[str]:
    """Return what people changed in a run while it worked, in words."""
    return [in_words(line) for line in read_control(directory) if line.state == "done"]


def query_store(run: RecordedRun, query: Callable[[LightningStore], Awaitable[T]]) -> tuple[T | None, str | None]:
    """Return what a query of a run's store finds, or why the store cannot be read."""
    if run.directory is not None and not run.record.config.get("store") and not has_the_store_for_itself(run):
        return None, "it has no store of rollouts"
    try:
        return run.read_store(query), None
    except LeydenError as error:
        return None, str(error)


def _rewards(reward: RewardMetrics | None) -> dict[str, Any] | None:
    if reward is None:
        return None
    return {"first": reward.first, "last": reward.last, "best": reward.best, "best_iteration": reward.best_iteration}


async def _totals(run: RecordedRun, store: LightningStore) -> dict[str, Any]:
    """Return how many rollouts the store still has of a run, and the tokens and the cost of all its attempts."""
    run_id = None if has_the_store_for_itself(run) else run.record.run_id
    found = await store.summarise_rollouts(run_id=run_id, measures=())
    spent = await store.sum_spending(run.record.run_id)
    rollouts = {"rollouts": found.finished, "failed": found.by_status.get("failed", 0)}
    tokens = spent.prompt_tokens + spent.response_tokens
    return {**rollouts, "tokens": tokens or None, "cost": spent.cost, "unpriced_calls": spent.unpriced_calls}


# ---- the same tasks ------------------------------------------------------------------------------


async def _last_validation(run: RecordedRun, store: LightningStore) -> Tasks:
    """Return the finished rollouts of a run's last validation by task. Raise ConfigError, with the reason, if there is
    none that can be compared.
    """
    run_id = None if has_the_store_for_itself(run) else run.record.run_id
    found = [each for each in await store.query_rollouts(mode_in=["val"], run_id=run_id) if each.end_time is not None]
    if any(iteration_of(each) is not None for each in found):
        ended = {row.iteration for row in run.metrics("val")}  # one that is under way, or was cut off, has no row
        last = max((n for each in found if (n := iteration_of(each)) in ended and n is not None), default=None)
        found = [each for each in found if last is not None and iteration_of(each) == last]
    if len({(each.resources_id, each.resources_version) for each in found}) > 1:  # several prompts were measured
        best = await store.get_labelled_resources(best_label(run.record.run_id))
        found = [each for each in found if best is not None and each.resources_id == best.resources_id]
        if not found:
            raise ConfigError("its validations measured several versions of resources, and none is labelled the best")
    if not found:
        raise ConfigError("its store has no rollout of a validation that has ended")
    tasks: dict[str, list[Rollout]] = {}
    for each in found:
        text = json.dumps(each.input, sort_keys=True, default=str)
        tasks.setdefault(hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16], []).append(each)
    return tasks


def _against(
    first: RecordedRun,
    second: RecordedRun,
    before: tuple[Tasks | None, str | None],
    after: tuple[Tasks | None, str | None],
) -> dict[str, Any]:
    """Return the difference of two last validations, and the tasks that flipped, or why there is none."""
    (old, no_old), (new, no_new) = before, after
    if old is None or new is None:
        reasons = ((first, no_old), (second, no_new))
        return {"reason": "; ".join(f"{run.record.name}: {reason}" for run, reason in reasons if reason)}
    same = [task for task in old if task in new]
    means = {task: (_mean(old[task]), _mean(new[task])) for task in same}
    pairs = [(one, other) for one, other in means.values() if one is not None and other is not None]
    sides = [[mean for each in of.values() if (mean := _mean(each)) is not None] for of in (old, new)]
    difference = None
    if pairs:
        difference = paired_difference(*zip(*pairs, strict=True))
    elif all(sides):
        difference = unpaired_difference(*map(Sample, sides))
    rollouts = (rollout for of in (old, new) for task in same for rollout in of[task])
    line = solved_from(reward for each in rollouts if (reward := _reward(each)) is not None)
    is_solved = {task: tuple(_is_solved(mean, line) for mean in pair) for task, pair in means.items()}
    flipped = {
        name: [(old[task], new[task]) for task in same if is_solved[task] == flip]
        for name, flip in (("solved", (False, True)), ("lost", (True, False)))
    }
    return {
        "reason": None,
        "tasks": {"same": len(same), "only_first": len(old) - len(same), "only_second": len(new) - len(same)},
        "difference": None if difference is None else dataclasses.asdict(difference),
        "paired": bool(pairs),
        "left_out": len(same) - len(pairs),
        "better": sum(other > one for one, other in pairs),
        "worse": sum(other < one for one, other in pairs),
        "solved_from": line,
        **{name: _evidence(first, second, tasks) for name, tasks in flipped.items()},
    }


def _reward(rollout: Rollout) -> float | None:
    return rollout.attempt.reward if isinstance(rollout, AttemptedRollout) and rollout.status == "succeeded" else None


def _mean(rollouts: Sequence[Rollout]) -> float | None:
    """Return the mean reward of a task's rollouts; None if all of them failed."""
    found = [reward for each in rollouts if (reward := _reward(each)) is not None]
    return mean_of(found) if found else None


def solved_from(rewards: Iterable[float]) -> float | None:
    """Return the least mean reward of a solved task: half of the way between 0 and 1, or between the only two rewards.
    None if other rewards were given, which have no line between solved and failed.
    """
    found = set(rewards)
    if all(0 <= reward <= 1 for reward in found):
        return 0.5
    return mean_of(found) if len(found) == 2 else None


def _is_solved(mean: float | None, line: float | None) -> bool:
    """Return whether a task is solved. Without a line, every task with a reward is."""
    return mean is not None and (line is None or mean >= line)


def _evidence(
    first: RecordedRun, second: RecordedRun, flipped: Sequence[tuple[Sequence[Rollout], Sequence[Rollout]]]
) -> list[dict[str, Any]]:
    """Return for each flipped task its input, and in both runs the ids, rewards and the answer of the last rollout."""
    found: list[dict[str, Any]] = [{"task": pair[0][0].input} for pair in flipped]
    for side, (name, run) in enumerate((("before", first), ("after", second))):
        last = [pair[side][-1].rollout_id for pair in flipped[:_EVIDENCE]]
        spans = query_store(run, lambda store, ids=last: store.query_spans_of(ids))[0] or {} if last else {}
        for each, pair in zip(found, flipped, strict=True):
            answer = answer_of(spans.get(pair[side][-1].rollout_id, []))
            each[name] = {
                "rollouts": [
                    {"rollout_id": of.rollout_id, "status": of.status, "reward": _reward(of)} for of in pair[side]
                ],
                "answer": None if answer is None else str(Preview(answer)),
            }
    return found
