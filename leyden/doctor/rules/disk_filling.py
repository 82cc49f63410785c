"""The disk is full, or will be before the run has ended."""

from __future__ import annotations

import shutil

from leyden._lib.formatting import size
from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule
from leyden.training.runs.folder import folder_bytes

_SPARE = 0.02
"""The share of the disk that other programs need."""


def _find(run: Evidence) -> Finding | None:
    manifest, directory = run.manifest, run.run.directory
    if (
        manifest is None
        or directory is None
        or not manifest.is_of_this_host
        or run.run.state in ("succeeded", "stopped")
    ):
        return None
    disk = shutil.disk_usage(directory)
    done, steps = run.run.summary_metrics().iterations, run.option("algorithm.n_steps")
    n_bytes = folder_bytes(directory)["records"]  # a run replaces its checkpoints and its model
    will = (steps - done) * n_bytes / done if isinstance(steps, int) and done else 0.0
    said = run.said(r"the run will take up to .* of disk")
    full = disk.free < _SPARE * disk.total
    too_much = run.run.state == "running" and (will > disk.free - _SPARE * disk.total or said is not None)
    if not full and not too_much:
        return None
    evidence = [f"{size(disk.free)} of {size(disk.total)} are free at {directory}"]
    if will:
        evidence.append(
            f"its records took {size(n_bytes)} in {done} of {steps} steps, so they will take {size(will)} more"
        )
    return Finding(
        cause="the disk is almost full" if full else "the disk will be full before the run has ended",
        evidence=(*evidence, *(() if said is None else said.evidence)),
        remedy="Remove old runs, keep fewer rollouts (Trainer(retention=...)) and one checkpoint (keep_last=1), or move the "
        "run to a larger disk: stop it, copy its folder, resume it there.",
        command="leyden runs --prune",
        severity="critical" if full else "warning",
    )


RULE = Rule("disk-filling", _find, explains=("resource-exhausted", "run-killed", "store-away", "damaged-checkpoint"))
