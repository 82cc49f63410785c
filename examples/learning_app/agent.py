"""A help desk: one call of a model, by a prompt that is improved while it serves."""

from __future__ import annotations

from typing import Any

import leyden as ly
from leyden.types import PromptTemplate


async def answer(ticket: str, llm: ly.LLM, prompt: PromptTemplate) -> str:
    """Answer a visitor's ticket."""
    reply = await llm.openai().chat.completions.create(
        model=llm.model,
        messages=[{"role": "system", "content": prompt.template}, {"role": "user", "content": ticket}],
    )
    return reply.choices[0].message.content or ""


def is_solved(reply: str) -> bool:
    """Return whether an answer solves its ticket. Visitors see it, and so does training."""
    return reply.startswith("Solved.")


@ly.rollout
async def help_desk(task: dict[str, Any], llm: ly.LLM, prompt_template: PromptTemplate) -> float:
    """Answer a recorded ticket again, and grade the answer, because no visitor is there."""
    return float(is_solved(await answer(task["ticket"], llm, prompt_template)))
