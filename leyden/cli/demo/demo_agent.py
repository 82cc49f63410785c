"""The demo's agent: an ordinary program that plays the game through the official `openai` client.

It knows nothing of training. Leyden asks only for the decorator, and for the reward of the game.
"""

from __future__ import annotations

from openai.resources.chat.completions import AsyncCompletions
from openai.types.chat import ChatCompletionMessageParam

from leyden.agent import llm_rollout
from leyden.cli.demo.game import Game
from leyden.types import LLM


@llm_rollout
async def play(task: dict[str, int], llm: LLM) -> float:
    """Play one game for the secret in `task`. Return 1.0 if the secret was found, else 0.0."""
    completions: AsyncCompletions = llm.openai().chat.completions
    game = Game(task["secret"])
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": game.prompt()}]
    while not game.done:
        answer = await completions.create(
            model=llm.model,
            messages=messages,
            temperature=llm.sampling_parameters["temperature"],
            max_tokens=llm.sampling_parameters["max_tokens"],
        )
        reply = answer.choices[0].message.content or ""
        feedback = game.guess(reply)
        messages.append({"role": "assistant", "content": reply})
        messages.append({"role": "user", "content": feedback.text})
    return float(game.won)
