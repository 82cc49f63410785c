"""The order of findings: root causes first, and consequences after their causes."""

from pathlib import Path

import pytest

from leyden.doctor import Evidence, Finding, Rule, diagnose
from leyden.errors import StoreError
from leyden.training.runs import open_run
from leyden.training.runs.folder import Manifest
from leyden.types.run_record import RunRecord


def found(severity: str = "warning", share: float = 1.0) -> Finding:
    assert severity in ("warning", "critical")
    return Finding(cause="c", evidence=(), remedy="r", severity=severity, share=share)


def rule(name: str, finding: Finding | None, *, explains: tuple[str, ...] = ()) -> Rule:
    return Rule(name, lambda _: finding, explains=explains)


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    record = RunRecord(run_id="run-1", name="run", kind="fit", status="succeeded", start_time=1.0, end_time=2.0)
    Manifest(record).write(tmp_path / "run")
    return Evidence(open_run(tmp_path / "run"))


@pytest.mark.parametrize(
    ("rules", "order"),
    [
        ([rule("small", found(share=0.1)), rule("large", found(share=0.9))], ["large", "small"]),
        ([rule("warning", found()), rule("critical", found("critical", 0.1))], ["critical", "warning"]),
        (
            [rule("symptom", found("critical")), rule("cause", found(share=0.1), explains=("symptom",))],
            ["cause", "symptom"],
        ),
        (
            [rule("c", found("critical")), rule("b", found(), explains=("c",)), rule("a", found(), explains=("b",))],
            ["a", "c", "b"],
        ),
        (
            [rule("first", found(), explains=("second",)), rule("second", found("critical"), explains=("first",))],
            ["second", "first"],
        ),
        ([rule("silent", None), rule("cause", found(), explains=("silent",))], ["cause"]),
    ],
)
def test_a_cause_stands_before_what_it_explains(evidence: Evidence, rules: list[Rule], order: list[str]) -> None:
    assert list(diagnose(evidence, rules=rules).findings) == order


def test_a_consequence_that_shows_nothing_new_is_left_out(evidence: Evidence) -> None:
    def shows(*texts: str) -> Finding:
        return Finding(cause="c", evidence=texts, remedy="r")

    rules = [
        rule("cause", shows("a", "b"), explains=("repeats", "adds")),
        rule("repeats", shows("b")),
        rule("adds", shows("b", "c")),
        rule("other", shows("a")),
    ]
    assert list(diagnose(evidence, rules=rules).findings) == ["cause", "adds", "other"]


def test_a_rule_that_fails_is_named_and_hides_no_other(evidence: Evidence) -> None:
    def fails(_: Evidence) -> None:
        raise ZeroDivisionError("1/0")

    def cannot_read(_: Evidence) -> None:
        raise StoreError("the store is away")

    rules = [Rule("fails", fails), Rule("reads", cannot_read), rule("finds", found())]
    diagnosis = diagnose(evidence, rules=rules)
    assert list(diagnosis.findings) == ["finds"]
    assert diagnosis.unread == ("the rule fails failed: ZeroDivisionError: 1/0", "the store is away")


def test_rules_that_ask_servers_run_only_if_asked_for(evidence: Evidence) -> None:
    rules = [Rule("live", lambda _: found(), live=True)]
    assert not diagnose(evidence, rules=rules).findings
    assert diagnose(evidence, live=True, rules=rules).findings
