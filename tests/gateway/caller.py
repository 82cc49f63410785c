"""One attempt as its agent sees it, and the record of its calls."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import cached_property
from typing import Any

from openai import AsyncOpenAI

from leyden.gateway import LLMProxy
from leyden.store import LightningStore
from leyden.types import LLM, Span


class Caller:
    """One attempt, the client that its agent would use, and the record of its calls."""

    def __init__(self, proxy: LLMProxy, store: LightningStore, rollout_id: str, attempt_id: str) -> None:
        self.proxy = proxy
        self.store = store
        self.rollout_id = rollout_id
        self.attempt_id = attempt_id
        self.llm: LLM = proxy.as_resource(rollout_id, attempt_id)

    @cached_property
    def client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.llm.endpoint, api_key=self.llm.api_key, max_retries=0)

    async def spans(self) -> list[Span]:
        await self.proxy.flush(self.rollout_id, self.attempt_id)
        return list(await self.store.query_spans(self.rollout_id, self.attempt_id))

    async def span(self) -> Span:
        spans = await self.spans()
        assert len(spans) == 1
        return spans[0]


async def new_caller(proxy: LLMProxy, store: LightningStore) -> Caller:
    rollout = await store.start_rollout({"task": 1})
    return Caller(proxy, store, rollout.rollout_id, rollout.attempt.attempt_id)


def say(text: str) -> Any:
    return [{"role": "user", "content": text}]


async def until(condition: Callable[[], Any]) -> None:
    """Wait until `condition`, which may be async, says something true."""
    async with asyncio.timeout(10):
        while True:
            found = condition()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0.005)
