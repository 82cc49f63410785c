"""The agent: asks the model one question of `reasoning-gym`, and returns what the package's verifier says of the answer.

An ordinary program written with the official `openai` client; that it can be trained takes the decorator and the returned score.
"""

from __future__ import annotations

import functools

from openai import AsyncOpenAI
from tasks import Task, score

from leyden import LLM, llm_rollout


@functools.cache
def client() -> AsyncOpenAI:
    """One connection pool for all rollouts: a client takes 25 ms to make."""
    return AsyncOpenAI(base_url="http://unused", api_key="unused")


@llm_rollout
async def solve(task: Task, llm: LLM) -> float:
    """Answer `task["question"]`; the reward is the verifier's score, 0.0 to 1.0."""
    answer = (
        await client()
        .with_options(base_url=llm.endpoint, api_key=llm.api_key)
        .chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": task["question"]}], **llm.sampling_parameters
        )
    )
    return score(task, answer.choices[0].message.content or "")
