"""The demo's agent: an ordinary program that plays the game through the official `openai` client.

It knows nothing of training. All that Leyden asks of it is the decorator, and to return how the game went.
"""

from __future__ import annotations

from openai.resources.chat.completions import AsyncCompletions
from openai.types.chat import ChatCompletionMessageParam

from leyden.demo.game import Game
from leyden.litagent import llm_rollout
from leyden.types import LLM


@llm_rollout
async def play(task: dict[str, int], llm: LLM) -> float:
    """Play one game for the secret in `task`; 1.0 when it was found, 0.0 when not."""
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
