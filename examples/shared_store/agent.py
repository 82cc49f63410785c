"""The agent of every machine: it reads a sum aloud in the words of a prompt.

Its reward is the share of three numbers (both summands and the sum) that the text has. It stands
for a program that thinks for a while, and knows nothing of the store.
"""

from __future__ import annotations

import asyncio
from typing import Any

import leyden as ly

__all__ = ["read_aloud"]

SECONDS = 0.05
"""How long it thinks."""


@ly.prompt_rollout
async def read_aloud(task: dict[str, Any], prompt_template: ly.PromptTemplate) -> float:
    text = prompt_template.format(a=task["a"], b=task["b"])
    await asyncio.sleep(SECONDS)
    ly.emit_message(text)
    return sum(str(part) in text for part in (task["a"], task["b"], task["a"] + task["b"])) / 3
