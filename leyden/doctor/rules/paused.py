"""The run, or its workers, wait for somebody: a pause that nobody ended, or a request that was not answered."""

from __future__ import annotations

import time

from leyden._lib.formatting import duration
from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule
from leyden.training.runs.control import in_words
from leyden.training.runs.overview import control_of, paused_of
from leyden.types.worker_health import has_ended

_PATIENCE_SECONDS = 600.0
"""A pause of a few minutes is meant."""


def _find(run: Evidence) -> Finding | None:
    if run.run.state != "running":
        return None
    alive = [worker for worker in run.workers if not has_ended(worker)]
    paused = [worker.worker_id for worker in alive if worker.paused]
    if paused:
        return Finding(
            cause="workers are paused, by an alert or by somebody, and claim no rollouts",
            evidence=(f"{len(paused)} of {len(alive)} workers are paused: {', '.join(paused[:5])}",),
            remedy="Let them claim again with store.set_paused, once the reason of the pause is gone.",
            command=None,
            severity="critical" if len(paused) == len(alive) else "warning",
            share=len(paused) / len(alive),
        )
    pause, _ = paused_of(run.run)
    if pause is not None and (since := time.time() - pause.time) > _PATIENCE_SECONDS:
        return Finding(
            cause="the run is paused, and nobody has let it go on",
            evidence=(f"{pause.by} paused it {duration(since)} ago",),
            remedy="Let it go on, or stop it.",
            command=f"leyden resume {run.source}",
            severity="critical",
        )
    lines = control_of(run.run)
    answered = {line.id for line in lines if line.state != "asked"}
    for line in lines:
        if line.id not in answered and (since := time.time() - line.time) > _PATIENCE_SECONDS:
            return Finding(
                cause="the run does not answer a request",
                evidence=(f"{line.by} asked {duration(since)} ago: {in_words(line)}",),
                remedy="A run answers at the end of its step. See whether the step hangs, and whether run.log says that "
                "control.jsonl cannot be read or written.",
                command=f"leyden show {run.source}",
            )
    return None


RULE = Rule("paused", _find)
