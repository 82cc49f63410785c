"""A harness, unchanged, whose model answers garbage, whose process, runner or gateway is killed, or that misbehaves: what is
recorded is exact, a killed attempt is retried, and nothing is trained twice. Refusals and cut streams: test_roles.py.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from tests.harness.test_programs import ready, run_alone

pytestmark = [pytest.mark.harness, pytest.mark.timeout(1800)]
KILLS = int(os.environ.get("LEYDEN_HARNESS_KILLS", "1"))
"""How often each process of each harness is killed, each time at another moment."""

ALL = ("harness", "runner", "gateway")
KILLED = {"pi": ALL, "claude-code": ALL, "codex": ALL, "opencode": ("gateway",), "mini-swe-agent": ("runner",)}


def run(name: str, fault: str, call: int = 1, seconds: float = 0.0) -> dict[str, Any]:
    found = run_alone("faults.py", name, str(ready(name)), fault, str(call), str(seconds))
    assert found["wrong"] == 0 and found["exact"] + found["failed"] == found["recorded"], found
    assert found["trained_twice"] == 0 and not found["left"] and not found["files"], found
    return found


def test_an_answer_that_is_no_answer_is_a_failed_call() -> None:
    found = run("pi", "garbled")
    assert found["recorded"] == found["requests"] and found["failed"] >= 1, found


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(name, fault, marks=[pytest.mark.merge] * (name == "pi" and fault == "gateway"))
        for name, faults in KILLED.items()
        for fault in faults
    ],
)
def test_a_rollout_goes_on_after_a_kill_and_no_call_is_wrong_or_trained_twice(name: str, fault: str) -> None:
    draw = random.Random(f"{name} {fault}")
    for _ in range(KILLS):
        call, seconds = draw.randint(1, 2), draw.uniform(0.0, 0.8)
        found = run(name, fault, call, seconds)
        print(name, fault, call, f"{seconds:.2f}", found)
        assert found["status"] == "succeeded" and found["rows"] >= 1, found
        if fault == "gateway":  # the call in flight is lost, of which the harness has no whole answer either
            assert found["attempts"] == ["succeeded"] and found["requests"] - 1 <= found["recorded"], found
            assert len(found["lost"]) <= 1
        else:
            first = "failed" if fault == "harness" else "unresponsive"
            assert found["attempts"] == [first, "succeeded"] and found["recorded"] == found["requests"], found
            assert fault == "runner" or "was killed by SIGKILL" in found["reason"][0]


@pytest.mark.parametrize(
    ("name", "fault"),
    [(name, fault) for name in ("pi", "codex") for fault in ("stays", "prints")]
    + [("pi", "deletes"), ("claude-code", "deletes")],
)
def test_a_harness_that_misbehaves_ends_and_its_calls_are_exact(name: str, fault: str) -> None:
    found = run(name, fault)
    assert found["recorded"] >= found["requests"] >= 2, found
    assert found["status"] == ("failed" if fault == "deletes" else "succeeded"), found
    if fault == "deletes":
        assert "No such file or directory" in found["reason"][-1], found
