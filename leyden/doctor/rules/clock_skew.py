"""The clocks of two machines differ, or one was stepped: times, time limits and orders are wrong."""

from __future__ import annotations

from statistics import median

from leyden._lib.formatting import duration
from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule

_TOLERANCE_SECONDS = 2.0


def _find(run: Evidence) -> Finding | None:
    apart: dict[str, list[float]] = {}
    for each in (*run.succeeded, *run.failed):
        attempt = each.rollout.attempt
        begun = [span.start_time for span in each.spans if span.start_time is not None]
        ended = [span.end_time for span in each.spans if span.end_time is not None]
        if begun and ended and attempt.end_time is not None:
            # the store sets the times of an attempt, and its worker those of the spans within
            slow, fast = attempt.start_time - min(begun), max(ended) - attempt.end_time
            apart.setdefault(attempt.worker_id or "?", []).append(-slow if slow > fast else fast)
    skewed = {name: median(values) for name, values in apart.items() if abs(median(values)) > _TOLERANCE_SECONDS}
    wrong = {name: value for name, value in skewed.items() if value < 0 or min(apart[name]) > _TOLERANCE_SECONDS}
    evidence = [
        f"the clock of {name} is at least {duration(abs(value))} {'behind' if value < 0 else 'ahead of'} the store's"
        for name, value in wrong.items()
    ]
    said = run.said(r"clock was stepped by|see that the clocks agree")
    if not evidence and said is None:
        return None
    return Finding(
        cause="the clocks of the run's machines differ, or one was set while it worked",
        evidence=(*evidence[:3], *(() if said is None else said.evidence)),
        remedy="Let NTP keep the clocks of all machines together (`timedatectl`), and restart the processes on those "
        "that were wrong. Time limits and ages are off by as much.",
        share=len(wrong) / max(len(apart), 1),
    )


RULE = Rule("clock-skew", _find)
