"""The run's process is gone without having recorded an end: it was killed, or its machine stopped."""

from __future__ import annotations

import time

import psutil

from leyden._lib.formatting import duration
from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule


def _find(run: Evidence) -> Finding | None:
    if run.run.state != "crashed":
        return None
    record, manifest = run.run.record, run.manifest
    beat = record.last_heartbeat_time
    evidence = ["it is recorded as running, and its process is gone"]
    if manifest is not None:
        evidence[0] = f"it is recorded as running, and its process {manifest.pid} on {manifest.host} is gone"
    if beat is not None:
        evidence.append(f"its last sign of life is {duration(max(0.0, time.time() - beat))} old")
        if manifest is not None and manifest.is_of_this_host and psutil.boot_time() > beat:
            evidence.append(
                f"this machine was started again after it, {duration(time.time() - psutil.boot_time())} ago"
            )
    if run.rows:
        evidence.append(f"its last row is of {run.rows[-1].stage} {run.rows[-1].iteration}")
    return Finding(
        cause="the run was killed: by the system when memory ran out, by a scheduler or a person, or its machine stopped",
        evidence=tuple(evidence),
        remedy="Resume it: it goes on from its last finished step. If it is killed again, let `dmesg` or the scheduler's log "
        "say by what, and give it more memory or time.",
        command=run.resume_command,
        severity="critical",
    )


RULE = Rule("run-killed", _find, explains=("untrained-model", "missing-metrics", "worker-silent"))
