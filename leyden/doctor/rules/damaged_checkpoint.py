"""The state for a resume cannot be used: its files are damaged, or it could not be written."""

from __future__ import annotations

from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule
from leyden.training.checkpoint import CheckpointStore

_MAX_BYTES = 2_000_000_000
"""Larger checkpoints are not read, because that takes too long."""


def _find(run: Evidence) -> Finding | None:
    said = run.said(
        r"damaged checkpoint|checkpoints in .* is intact|CheckpointError|checkpoint of iteration \d+ could not"
    )
    evidence: list[str] = [] if said is None else list(said.evidence)
    steps: list[int] = []
    if run.run.directory is not None and run.run.state != "running":  # a running run replaces them
        store = CheckpointStore(run.run.directory / "checkpoints")
        steps = store.steps()
        for step in steps:
            if store.n_bytes(step) < _MAX_BYTES and (damage := store.damage(step)) is not None:
                evidence.append(damage)
    if not evidence:
        return None
    return Finding(
        cause="checkpoints of the run are damaged or could not be written",
        evidence=tuple(evidence[:3]),
        remedy="A resume takes the newest intact one, if there is one. Look for a full disk, a copy that was cut short, or "
        "a program that changed the files; model/ and best/ have the weights.",
        command=f"ls -l {run.run.directory}/checkpoints",
        severity="critical" if said is not None and said.ended else "warning",
    )


RULE = Rule("damaged-checkpoint", _find, explains=("untrained-model",))
