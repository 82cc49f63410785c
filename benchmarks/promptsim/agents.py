"""The agents of `PromptSim`: ordinary agents with one prompt and with three.

Each prompt is the system message of one call. The agents read the texts of tickets and answers, and
know nothing of the world's rules. They need the package openai.
"""

from __future__ import annotations

from typing import Any

from benchmarks.promptsim.task_model import grade, question
from benchmarks.promptsim.vocabulary import COMPONENT_PROMPTS
from leyden.agent import rollout
from leyden.errors import ConfigError
from leyden.types import LLM, NamedResources, PromptTemplate


@rollout
async def one_prompt_agent(task: dict[str, Any], llm: LLM, prompt_template: PromptTemplate) -> float:
    """Answer a ticket in one call."""
    return grade(task, [await _ask(llm, prompt_template, task["text"])])


@rollout
async def three_prompts_agent(task: dict[str, Any], llm: LLM, resources: NamedResources) -> float:
    """Answer a ticket in three calls, whose prompts are the resources `plan`, `search` and
    `write`.
    """
    answers: list[str] = []
    for name in COMPONENT_PROMPTS:
        prompt = resources.get(name)
        if not isinstance(prompt, PromptTemplate):
            raise ConfigError(f"the resource {name!r} is {type(prompt).__name__}; it must be a PromptTemplate")
        answers.append(await _ask(llm, prompt, question(task["text"], name, answers)))
    return grade(task, answers)


async def _ask(llm: LLM, prompt: PromptTemplate, text: str) -> str:
    messages: list[Any] = [{"role": "system", "content": prompt.template}, {"role": "user", "content": text}]
    client: Any = llm.openai()
    answer = await client.chat.completions.create(model=llm.model, messages=messages, **llm.sampling_parameters)
    return answer.choices[0].message.content or ""
