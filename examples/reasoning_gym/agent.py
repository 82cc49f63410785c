"""The agent: asks the model one question of `reasoning-gym`, and returns the verifier's score.

It is an ordinary program with the official `openai` client. The decorator and the returned score
are all that training needs.
"""

from __future__ import annotations

from tasks import Task, score

from leyden import LLM, llm_rollout


@llm_rollout
async def solve(task: Task, llm: LLM) -> float:
    """Answer `task["question"]`; the reward is the verifier's score, 0.0 to 1.0."""
    messages = [{"role": "user", "content": task["question"]}]
    answer = await llm.openai().chat.completions.create(model=llm.model, messages=messages, **llm.sampling_parameters)
    return score(task, answer.choices[0].message.content or "")
