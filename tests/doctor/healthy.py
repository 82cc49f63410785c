"""Healthy runs, in which the doctor finds nothing."""

from __future__ import annotations

from pathlib import Path

import leyden as ly
from tests.doctor.faults import Case
from tests.doctor.policy import says_four, train


def grpo(directory: Path) -> None:
    train(directory, ly.llm_rollout(says_four))


HEALTHY = (Case("GRPO", grpo),)
