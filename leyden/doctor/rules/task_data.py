"""The tasks: empty ones, the same ones many times, and training tasks in the validation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

from leyden._lib.logs import Preview
from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule
from leyden.types import Rollout

_ENOUGH = 8


def _digest(rollout: Rollout) -> str:
    return json.dumps(rollout.input, sort_keys=True, default=str)


def _is_empty(task: Any) -> bool:
    if isinstance(task, dict | list):
        parts = cast("dict[str, Any] | list[Any]", task)
        return all(map(_is_empty, parts.values() if isinstance(parts, dict) else parts))
    return task is None or (isinstance(task, str) and not task.strip())


def _find_empty(run: Evidence) -> Finding | None:
    for mode, rollouts in run.tasks.items():
        empty = [each for each in rollouts if _is_empty(each.input)]
        if empty and (length := run.option(f"data.{mode}.length")) != 1 and length is not None:
            return Finding(
                cause="tasks are empty",
                evidence=(
                    f"{len(empty):,} of {len(rollouts):,} {mode} tasks that were run are empty, such as {empty[0].input!r}",
                ),
                remedy="Remove the empty lines of the data set, or correct the name of its column.",
                command=f"leyden show {run.source} {empty[0].rollout_id}",
                share=len(empty) / len(rollouts),
            )
    return None


def _first_pass(rollouts: Sequence[Rollout], length: int) -> list[str]:
    """Return the tasks of the first pass over the data, or of the first batch that an evaluation has numbered, in which
    each task of the data set comes once.
    """
    if rollouts[0].metadata.get("step"):  # the first ones were pruned
        return []
    places: list[Any] = [each.metadata.get("task") for each in rollouts]
    if None in places:
        return list(map(_digest, rollouts[:length]))
    end = next((n for n, (one, other) in enumerate(pairwise(places), 1) if other <= one), len(places))
    return list(map(_digest, rollouts[:end]))


def _find_repeated(run: Evidence) -> Finding | None:
    for mode, rollouts in run.tasks.items():
        length = run.option(f"data.{mode}.length")
        drawn = _first_pass(rollouts, length) if isinstance(length, int) and rollouts else []
        counts = Counter(drawn)
        if len(drawn) >= _ENOUGH and len(counts) <= 0.8 * len(drawn):
            task, n = counts.most_common(1)[0]
            return Finding(
                cause="the data has the same tasks many times",
                evidence=(
                    f"the first {len(drawn):,} {mode} tasks are {len(counts):,} different ones; {Preview(task)} came {n:,} times",
                ),
                remedy="Remove the repeated tasks. If they are meant, raise rollouts_per_task, which compares them.",
                command=f"leyden show {run.source} --worst -n 5",
                share=1 - len(counts) / len(drawn),
            )
    return None


def _find_leaked(run: Evidence) -> Finding | None:
    train, val = ({_digest(each) for each in run.tasks.get(mode, [])} for mode in ("train", "val"))
    shared = train & val
    if not shared or run.option("data.train.digest") == run.option("data.val.digest") is None:
        return None
    return Finding(
        cause="the validation has tasks that are trained on",
        evidence=(
            f"{len(shared):,} of {len(val):,} validation tasks are training tasks, such as {Preview(min(shared))}",
        ),
        remedy="Validate on tasks that are never trained on; a rise on these ones does not show what was learned.",
        command=f"leyden show {run.source}",
        share=len(shared) / len(val),
    )


EMPTY = Rule("empty-tasks", _find_empty, explains=("flat-groups", "constant-reward", "repeated-tasks", "leaked-tasks"))
REPEATED = Rule("repeated-tasks", _find_repeated, explains=("leaked-tasks",))
LEAKED = Rule("leaked-tasks", _find_leaked)
