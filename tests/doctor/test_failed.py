"""A failed run is never called healthy: without another critical finding, its recorded cause is one."""

from __future__ import annotations

from pathlib import Path

import pytest

import leyden as ly
from leyden.doctor import Evidence, Finding, Rule, diagnose
from leyden.training.runs import open_run


class Fails(ly.Baseline):
    async def run(self, train_dataset: object = None, val_dataset: object = None) -> None:
        raise ValueError("the moon is full")


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    with pytest.raises(ValueError, match="the moon"):
        ly.Trainer(algorithm=Fails(), run_dir=tmp_path / "run").fit(ly.rollout(lambda task: 1.0), [1])
    return Evidence(open_run(tmp_path / "run"))


def test_the_cause_of_a_failed_run_is_a_finding(evidence: Evidence) -> None:
    (finding,) = diagnose(evidence).findings.values()
    assert finding.severity == "critical" and "the moon is full" in finding.evidence[0]


def test_a_critical_finding_of_another_rule_stands_in_its_place(evidence: Evidence) -> None:
    other = Finding(cause="c", evidence=(), remedy="r", severity="critical")
    rules = [Rule("other", lambda _: other), Rule("run-failed", lambda _: other, fallback=True)]
    assert list(diagnose(evidence, rules=rules).findings) == ["other"]
