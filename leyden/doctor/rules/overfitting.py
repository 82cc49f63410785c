"""The training reward rises while the validation falls, after several passes over the same tasks."""

from __future__ import annotations

from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule
from leyden.doctor.trends import Level, best_of, levels, rose

_PASSES = 3.0
_ERRORS = 3.0


def _find(run: Evidence) -> Finding | None:
    passes, fall = passes_over(run), validation_fall(run)
    if fall is None or (passes is not None and passes < _PASSES):
        return None
    best, last = fall
    seen = [] if passes is None else [f"each training task was seen about {passes:.0f} times"]
    return Finding(
        cause="the policy learns its training tasks and gets worse on others",
        evidence=(f"the validation reward was {best} after step {best.at} and is {last} after step {last.at}", *seen),
        remedy="Stop at the best validation (hand_back='best' keeps its weights), take more tasks or fewer steps.",
        command=f"leyden plot {run.source} --metric reward --stage val",
        share=1 - best.at / max(last.at, 1),
    )


def passes_over(run: Evidence) -> float | None:
    """Return how often each training task was seen; None if that is not recorded."""
    n_tasks, groups = run.option("data.train.length"), run.total("groups")
    return groups / n_tasks if n_tasks and groups else None


def validation_fall(run: Evidence) -> tuple[Level, Level] | None:
    """Return the best and the last validation, if the reward fell between them while training did not get worse."""
    found = levels(run, stage="val", window=1)
    if len(found) < 3:
        return None
    best, last = best_of(found), found[-1]
    train, loss = levels(run), levels(run, "loss")
    learned = rose(train) if train else bool(loss) and loss[0].above(loss[-1]) > _ERRORS
    fell_too = bool(train) and best_of(train).above(train[-1]) > _ERRORS
    return (best, last) if best.above(last) > _ERRORS and learned and not fell_too else None


RULE = Rule("overfitting", _find, during_fit=True)
