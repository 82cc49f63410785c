"""Workers of a running run have not been heard of for too long: they are dead, suspended, or cut off."""

from __future__ import annotations

import time

from leyden._lib.formatting import duration
from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule
from leyden.types.worker_health import MISSED_HEARTBEATS, has_ended, heartbeat_seconds

_SILENT_SECONDS = 35.0
"""The run's process touches run.json every ten seconds."""


def _find(run: Evidence) -> Finding | None:
    if run.run.state != "running":
        return None
    evidence: list[str] = []
    alive = [worker for worker in run.workers if not has_ended(worker)]
    for worker in alive:
        silent = run.now - (worker.last_heartbeat_time or 0.0)
        if silent > MISSED_HEARTBEATS * heartbeat_seconds(worker):
            stats = worker.heartbeat_stats or {}
            where = f"process {stats.get('pid')} on {stats.get('host')}"
            held = f", holds {worker.current_rollout_id}" if worker.current_rollout_id else ""
            evidence.append(f"{worker.worker_id} ({where}) was last heard of {duration(silent)} ago{held}")
    share = len(evidence) / max(len(alive), 1)
    beat = run.run.record.last_heartbeat_time
    if beat is not None and time.time() - beat > _SILENT_SECONDS:
        evidence.insert(0, f"the run's own process has given no sign for {duration(time.time() - beat)}")
        share = 1.0
    if not evidence:
        return None
    return Finding(
        cause="workers give no sign of life: they are dead, suspended, or cut off from the store",
        evidence=tuple(evidence[:5]),
        remedy="Look at the processes (`ps -o pid,stat,cmd -p PID`; T is suspended). Wake one with `kill -CONT PID`, or end "
        "it: its rollouts go to other workers after their time limit.",
        command=f"leyden doctor {run.source} --live",
        severity="critical" if share > 0.5 else "warning",
        share=share,
    )


RULE = Rule("worker-silent", _find)
