"""What the gateway's tests share: a fake model, a store, a gateway between them, and one attempt to call for."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from leyden.gateway import LLMProxy
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream
from tests.gateway.caller import Caller, new_caller


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream(policy_version=7) as upstream:
        yield upstream


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    async with InMemoryLightningStore() as store:
        yield store


@pytest.fixture
async def proxy(upstream: FakeUpstream, store: InMemoryLightningStore) -> AsyncIterator[LLMProxy]:
    async with LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        yield proxy


@pytest.fixture
async def caller(proxy: LLMProxy, store: InMemoryLightningStore) -> AsyncIterator[Caller]:
    caller = await new_caller(proxy, store)
    async with caller.client:
        yield caller
