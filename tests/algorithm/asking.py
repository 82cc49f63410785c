"""What the tests of policy training share: one client, a toy problem, and a writer that keeps its rows."""

from __future__ import annotations

import functools
from typing import Any

import openai

import leyden as ly
from leyden.cli.demo import WEIGHTS
from leyden.training import LogWriter


class Rows(LogWriter):
    """Keeps what the loop writes."""

    def __init__(self) -> None:
        self.train: list[dict[str, Any]] = []
        self.val: list[dict[str, Any]] = []

    def write(self, row: Any) -> None:
        (self.train if row.stage == "train" else self.val).append(row.metrics)

    def column(self, name: str) -> list[Any]:
        """Return a metric of all training steps."""
        return [row[name] for row in self.train]


@functools.cache
def client() -> Any:
    """Return one client for the whole process, as most programs have it: making one costs more than a call.

    It keeps no connection open, because each test has an event loop of its own.
    """
    return openai.AsyncOpenAI(
        base_url="http://unused", api_key="unused", max_retries=0, default_headers={"Connection": "close"}
    )


async def ask(llm: ly.LLM, said: str | list[dict[str, Any]] = "guess 0..9", **options: Any) -> str:
    """Return the answer to a question or a conversation, sampled as the algorithm suggests unless `options` differ."""
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    answer = await (
        client()
        .with_options(base_url=llm.endpoint)
        .chat.completions.create(**{"model": llm.model, "messages": messages, **llm.sampling_parameters, **options})
    )
    return answer.choices[0].message.content or ""


def backend(**options: Any) -> ly.EmbeddedBackend:
    """Return the demo's policy, in this process."""
    return ly.EmbeddedBackend(WEIGHTS, device="cpu", max_length=128, seed=1, **options)
