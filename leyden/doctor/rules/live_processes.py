"""Processes of a running run, asked of this machine: suspended, gone, or out of memory."""

from __future__ import annotations

from typing import Any

import psutil

from leyden._lib.formatting import size
from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule
from leyden.types.worker_health import has_ended

_START_TOLERANCE_SECONDS = 2.0
_SPARE_PERCENT = 4.0


def _find(run: Evidence) -> Finding | None:
    manifest = run.manifest
    if run.run.state != "running" or manifest is None or not manifest.is_of_this_host:
        return None
    stats = {worker.worker_id: worker.heartbeat_stats or {} for worker in run.workers if not has_ended(worker)}
    of = {name: (each.get("pid"), each.get("process_start_time")) for name, each in stats.items()}
    of = {
        name: of[name] for name, each in stats.items() if each.get("host") == manifest.host and of[name][0] is not None
    }
    of["the run itself"] = (manifest.pid, manifest.process_start_time)
    states = {name: _state(pid, started) for name, (pid, started) in of.items()}
    wrong = [f"{name}: process {of[name][0]} is {state}" for name, state in states.items() if state is not None]
    if wrong:
        suspended = [of[name][0] for name, state in states.items() if state == "suspended"]
        return Finding(
            cause="processes of the run are suspended or gone",
            evidence=tuple(wrong[:5]),
            remedy="Wake a suspended process with SIGCONT, or end it: its rollouts go to other workers.",
            command=f"kill -CONT {suspended[0]}" if suspended else f"leyden show {run.source}",
            severity="critical" if states["the run itself"] or len(wrong) == len(of) - 1 else "warning",
            share=len(wrong) / len(of),
        )
    memory = psutil.virtual_memory()
    if memory.available * 100 < _SPARE_PERCENT * memory.total:
        return Finding(
            cause="this machine has almost no memory left",
            evidence=(f"{size(memory.available)} of {size(memory.total)} are available",),
            remedy="Lower n_runners or concurrency, or end other programs, before the system kills one.",
            command="ps aux --sort=-rss | head",
        )
    return None


def _state(pid: Any, started: Any) -> str | None:
    """Return what is wrong with a process; None if it works."""
    try:
        process = psutil.Process(pid)
        is_other = started is not None and abs(process.create_time() - started) > _START_TOLERANCE_SECONDS
        if is_other or process.status() == psutil.STATUS_ZOMBIE:
            return "gone"
        return "suspended" if process.status() == psutil.STATUS_STOPPED else None
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.Error:
        return None


RULE = Rule("live-processes", _find, live=True, explains=("worker-silent", "stuck-agent", "stuck-environment"))
