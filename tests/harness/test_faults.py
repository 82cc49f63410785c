"""A harness, unchanged, whose calls go wrong or whose process, or runner, is killed: what is recorded is exact."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.test_programs import ready, run_alone

pytestmark = [pytest.mark.harness, pytest.mark.timeout(300)]


def run(name: str, fault: str) -> dict[str, Any]:
    found = run_alone("faults.py", name, str(ready(name)), fault)
    assert found["recorded"] == found["requests"] >= 1, found
    assert found["wrong"] == 0 and found["exact"] + found["failed"] == found["recorded"], found
    assert not found["left"]
    return found


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(name, fault, marks=[pytest.mark.merge] * (name == "pi" and fault == "cut"))
        for name in ("pi", "claude-code", "opencode", "codex")
        for fault in ("refused", "cut")
    ],
)
def test_a_call_that_is_refused_or_cut_is_a_failed_call_beside_its_retry(name: str, fault: str) -> None:
    found = run(name, fault)
    assert found["failed"] >= 1 and found["exact"] >= 1, found


def test_an_answer_that_is_no_answer_is_a_failed_call() -> None:
    assert run("pi", "garbled")["failed"] == 1


def test_a_harness_that_is_killed_is_a_failed_attempt_with_its_calls() -> None:
    found = run("pi", "harness")
    assert found["status"] == ["failed"] and "was killed by SIGKILL" in found["reason"][0], found


def test_a_runner_that_is_killed_leaves_no_program_and_the_calls_are_recorded() -> None:
    assert run("pi", "runner")["status"] == ["running"]
