"""A dialect is one `Dialect` in the table: nothing in the gateway knows which ones there are."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import aiohttp
import pytest

from leyden.dialects import CHAT, DIALECTS, Dialect
from leyden.gateway import LLMProxy
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream
from leyden.types import semconv
from tests.gateway.caller import new_caller


def _error(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    return json.dumps({"sorry": message}).encode()


PLAIN: Dialect = dataclasses.replace(
    CHAT,
    name="plain",
    path="plain",
    request_to_chat=lambda asked: {
        "model": asked["model"],
        "messages": [{"role": "user", "content": asked["question"]}],
    },
    answer_from_chat=lambda answer, asked: {"id": answer["id"], "said": answer["choices"][0]["message"]["content"]},
    error=_error,
    models_page=lambda names: {"choose": list(names)},
    field_types={"question": (str,)},
    mark=("x-plain-client", "1"),
)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DIALECTS, "plain", PLAIN)


async def test_a_new_dialect_is_served_recorded_and_refused_in_its_own_form() -> None:
    headers = {"x-plain-client": "1"}
    async with (
        FakeUpstream() as upstream,
        InMemoryLightningStore() as store,
        LLMProxy(model_list=[upstream.llm()], store=store) as proxy,
        aiohttp.ClientSession(headers=headers) as session,
    ):
        caller = await new_caller(proxy, store)

        async def post(body: Any) -> tuple[int, Any]:
            async with session.post(f"{caller.llm.endpoint}/plain", json=body) as response:
                return response.status, await response.json()

        status, answer = await post({"model": caller.llm.model, "question": "How deep is the well?"})
        assert status == 200
        [span] = await caller.spans()
        assert answer["id"] == span.attributes[semconv.GEN_AI_RESPONSE_ID]
        assert answer["said"]
        assert span.tokens is not None
        assert list(span.tokens.response_ids) == upstream.truth(answer["id"]).response_ids
        assert await post({"model": caller.llm.model, "question": 3}) == (
            400,
            {"sorry": "question must be a string, got 3"},
        )
        async with session.get(f"{caller.llm.endpoint}/models") as response:
            assert await response.json() == {"choose": [caller.llm.model]}
        async with session.get(f"{caller.llm.endpoint}/nothing") as response:
            assert list(await response.json()) == ["sorry"]
