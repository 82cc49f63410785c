"""Faults of learning and data."""

from __future__ import annotations

from pathlib import Path

import leyden as ly
from tests.algorithm.asking import ask
from tests.doctor.faults import Case
from tests.doctor.policy import train


def ignores_the_answer(directory: Path) -> None:
    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        await ask(llm)
        return 0.0

    train(directory, agent)


FAULTS = (Case("a reward that ignores the answer", ignores_the_answer, "flat-groups"),)
