"""The agent: plays guess-the-number with a model, through the official `openai` client.

It does not know where it runs. `llm` has the address of the model and its key: behind the gateway,
on this machine or another.
"""

from __future__ import annotations

from typing import Any

import leyden as ly
from leyden.cli.demo.game import NUMBERS, Game

__all__ = ["TASKS", "play"]

TASKS = [{"secret": secret} for secret in range(NUMBERS)]


@ly.llm_rollout
async def play(task: dict[str, int], llm: ly.LLM) -> float:
    """Play one game. Return 1.0 if the secret was found in four turns, else 0.0."""
    client = llm.openai()
    game = Game(task["secret"])
    messages: list[Any] = [{"role": "user", "content": game.prompt()}]
    while not game.done:
        answer = await client.chat.completions.create(model=llm.model, messages=messages, **llm.sampling_parameters)
        reply = answer.choices[0].message.content or ""
        messages += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": game.guess(reply).text},
        ]
    return float(game.won)
