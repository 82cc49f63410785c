"""Spans that go to another process are written as JSON without making objects: it says what the objects would have said."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.errors import UnknownAttempt, UnknownRollout
from leyden.store import InMemoryLightningStore
from leyden.store.wire import dump
from leyden.types import Span, SpanEvent, SpanStatus, TokenRecord
from tests.contracts.store.support import span_of

KEYS = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=12)
TEXT = KEYS | st.sampled_from(['"', "\\", "\ud800", "é\n", "</script>"])
SECONDS = st.none() | st.floats(allow_nan=False)
ATTRIBUTES = st.dictionaries(
    KEYS, TEXT | st.integers(-(2**40), 2**40) | st.booleans() | st.lists(TEXT, max_size=3), max_size=3
)
IDS = st.lists(st.integers(0, 50), max_size=30)


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    response = draw(IDS)
    tokens = TokenRecord(
        prompt_ids=draw(IDS),
        response_ids=response,
        logprobs=draw(st.none() | st.just([-0.5] * len(response))),
        loss_mask=draw(st.none() | st.just([1] * len(response))),
    )
    return {
        "name": draw(TEXT),
        "kind": draw(st.sampled_from(["INTERNAL", "CLIENT"])),
        "parent_id": draw(st.none() | st.just('p"')),
        "status": SpanStatus(status_code=draw(st.sampled_from(["OK", "ERROR"])), description=draw(st.none() | TEXT)),
        "attributes": draw(ATTRIBUTES),
        "events": [
            SpanEvent(name=draw(TEXT), timestamp=1.5, attributes=draw(ATTRIBUTES))
            for _ in range(draw(st.integers(0, 2)))
        ],
        "start_time": draw(SECONDS),
        "end_time": draw(SECONDS),
        "resource": draw(ATTRIBUTES),
        "tokens": draw(st.none() | st.just(tokens)),
    }


@given(st.lists(fields(), max_size=4))
async def test_spans_in_json_are_what_the_objects_are(many: list[dict[str, Any]]) -> None:
    async with InMemoryLightningStore() as store:
        rollout = await store.start_rollout("task")
        await store.add_many_spans([span_of(rollout, f"{i:016x}", **given) for i, given in enumerate(many)])
        rollout_id = rollout.rollout_id
        asked: list[tuple[str, dict[str, Any]]] = [
            ("query_spans", {"rollout_id": rollout_id}),
            ("query_spans", {"rollout_id": rollout_id, "limit": 2, "offset": 1, "sort_order": "desc"}),
            ("query_spans", {}),
            ("query_spans_of", {"rollout_ids": [rollout_id]}),
        ]
        for method, arguments in asked:
            answer = await getattr(store, method)(**arguments)
            for packed in (True, False):
                written = await store.json_of(method, arguments, packed=packed)
                assert json.loads(written) == json.loads(dump(answer, packed=packed))
        for span in await store.query_spans(rollout_id):
            assert Span.model_validate(span.model_dump()) == span


async def test_what_cannot_be_found_raises_the_same() -> None:
    async with InMemoryLightningStore() as store:
        rollout = await store.start_rollout("task")
        with pytest.raises(UnknownRollout):
            await store.json_of("query_spans", {"rollout_id": "ro-none"}, packed=True)
        with pytest.raises(UnknownAttempt):
            await store.json_of("query_spans", {"rollout_id": rollout.rollout_id, "attempt_id": "at-none"}, packed=True)
        with pytest.raises(UnknownRollout):
            await store.json_of("query_spans_of", {"rollout_ids": ["ro-none"]}, packed=True)
