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

_ENOUGH, _FEW = 8, 20
_MUCH = 0.25
"""The share of one task that is much, even where few tasks are meant to come many times."""


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
        if len(empty) == len(rollouts):  # an agent may need no task, but not a task with empty fields
            empty = [each for each in empty if each.input]
        if empty and run.option(f"data.{mode}.length") is not None:
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


def _first_pass(run: Evidence, mode: str) -> list[str]:
    """Return the tasks of the first pass over the data, or of the first batch that an evaluation has numbered, in which
    each task of the data set comes once.
    """
    rollouts, length = run.tasks.get(mode, []), run.option(f"data.{mode}.length")
    if not rollouts or not isinstance(length, int):
        return []
    first = rollouts[0].metadata.get("step")
    if mode == "val":
        rollouts = [each for each in rollouts if each.metadata.get("step") == first]
    elif first:  # the first ones were pruned
        return []
    places: list[Any] = [each.metadata.get("task") for each in rollouts]
    if None in places:
        return list(map(_digest, rollouts[:length]))
    end = next((n for n, (one, other) in enumerate(pairwise(places), 1) if other <= one), len(places))
    return list(map(_digest, rollouts[:end]))


def _is_game(drawn: Sequence[str]) -> bool:
    """Return whether the tasks are the few beginnings of a game, each played many times, and so are no data."""
    return 0 < len(set(drawn)) < _FEW and 2 * len(set(drawn)) <= len(drawn)


def _find_repeated(run: Evidence) -> Finding | None:
    for mode in run.tasks:
        drawn = _first_pass(run, mode)
        counts = Counter(drawn)
        task, n = counts.most_common(1)[0] if counts else ("", 0)
        if mode == "val" and len(set(counts.values())) == 1:
            continue  # each task is measured as often as the others
        if (
            len(drawn) >= _ENOUGH
            and len(counts) <= 0.8 * len(drawn)
            and (n >= _MUCH * len(drawn) or not _is_game(drawn))
        ):
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
    if any(_is_game(_first_pass(run, mode)) for mode in run.tasks):
        return None
    train, val = ({_digest(each) for each in run.tasks.get(mode, [])} for mode in ("train", "val"))
    shared = train & val
    if not shared:
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
