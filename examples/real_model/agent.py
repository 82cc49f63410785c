"""The agent: asks a model which tool answers a request, and calls that tool.

A base model has no chat template and does not stop by itself. So it is shown three examples, and its answer ends with
the line.
"""

from __future__ import annotations

import re

from tasks import TOOLS, Task

from leyden import LLM, emit_message, llm_rollout

SHOTS = """Request: Is it sunny in Paris?
Call: weather(Paris)
Request: What time is it in Lima?
Call: time(Lima)
Request: How far is it to Madrid?
Call: route(Madrid)
"""


@llm_rollout
async def choose_tool(task: Task, llm: LLM) -> float:
    """Answer `task["request"]` with a tool; the reward is 1 for the right tool with the right argument, otherwise 0."""
    prompt = f"{SHOTS}Request: {task['request']}\nCall:"
    answer = await llm.openai().completions.create(
        model=llm.model, prompt=prompt, stop=["\n"], **llm.sampling_parameters
    )
    call = re.fullmatch(r" ?(\w+)\((.*)\)", answer.choices[0].text)
    if call is None or call[1] not in TOOLS:
        return 0.0
    tool, argument = call.groups()
    emit_message(TOOLS[tool](argument))  # what the user would read
    return float((tool, argument) == (task["tool"], task["argument"]))
