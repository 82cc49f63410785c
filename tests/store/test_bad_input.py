"""What callers must not give: refused with a reason, nothing is changed, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from leyden.errors import ConfigError, LeydenError, UnknownRollout
from leyden.store import LightningStore
from leyden.types import LLM, AttemptedRollout, EnqueueRolloutRequest, Feedback, LiveRollout, Retention, Span
from leyden.types.checks import MAX_JSON_DEPTH, MAX_JSON_DIGITS, json_text, json_value

NASTY_IDS = ['it\'s "quoted"; DROP TABLE rollouts;--', "a/b?c#d%2F e", "é漢🙂", "..", "x" * 200, "%00", "null", "-1"]
BAD_IDS = ["", "a\0b", "a\nb", "\x7f", "\ud800", "x" * 201, "x" * 10_000]


def span_of(rollout: AttemptedRollout, span_id: str = "s", **fields: Any) -> Span:
    given = {"sequence_id": 0, "trace_id": "t", "span_id": span_id, "name": "step"} | fields
    return Span(rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id, **given)


async def everything(store: LightningStore) -> dict[str, Any]:
    """What a store holds, as counts."""
    return {key: value for key, value in (await store.statistics()).items() if key not in ("uptime_seconds", "time")}


@pytest.mark.parametrize("nasty", NASTY_IDS)
async def test_any_printable_id_names_what_it_was_given_to(store: LightningStore, nasty: str):
    await store.add_resources({"llm": LLM(endpoint="http://x", model="m")}, resources_id=nasty)
    await store.enqueue_rollout("task", resources_id=nasty, rollout_id=nasty)
    (claimed,) = await store.dequeue_many_rollouts(worker_id=nasty, claim_id=nasty)
    attempt = await store.start_attempt(nasty, nasty, attempt_id=nasty)
    await store.add_span(span_of(attempt, nasty, trace_id=nasty, parent_id=nasty, name=nasty))
    assert claimed.rollout_id == claimed.resources_id == nasty
    assert (await store.get_attempt_by_id(nasty, nasty)).worker_id == nasty
    assert (await store.get_worker_by_id(nasty)).current_attempt_id == nasty
    assert (await store.get_resources_by_id(nasty)).resources_id == nasty
    (span,) = await store.query_spans(nasty, nasty, name_contains=nasty)
    assert (span.span_id, span.trace_id, span.parent_id, span.name) == (nasty, nasty, nasty, nasty)
    assert [rollout.rollout_id for rollout in await store.query_rollouts(rollout_id_contains=nasty)] == [nasty]


@pytest.mark.parametrize("bad", BAD_IDS, ids=lambda bad: ascii(bad)[:12])
async def test_an_id_that_no_store_takes_is_refused_and_changes_nothing(store: LightningStore, bad: str):
    rollout = await store.start_rollout("task")
    await store.enqueue_rollout("another")
    before = await everything(store)
    good = EnqueueRolloutRequest(input="good")
    for call in (
        lambda: store.start_rollout("task", rollout_id=bad),
        lambda: store.start_rollout("task", attempt_id=bad),
        lambda: store.start_rollout("task", worker_id=bad),
        lambda: store.enqueue_many_rollouts([good, EnqueueRolloutRequest(input="bad", rollout_id=bad)]),
        lambda: store.dequeue_rollout(bad),
        lambda: store.dequeue_rollout(claim_id=bad),
        lambda: store.start_attempt(rollout.rollout_id, bad),
        lambda: store.start_attempt(rollout.rollout_id, attempt_id=bad),
        lambda: store.update_attempt(rollout.rollout_id, "latest", worker_id=bad),
        lambda: store.add_resources({}, resources_id=bad),
        lambda: store.update_resources(bad, {}),
        lambda: store.update_worker(bad),
        lambda: store.pin(bad, [rollout.rollout_id]),
        lambda: store.add_many_spans([span_of(rollout), span_of(rollout, bad)]),
        lambda: store.add_many_spans([span_of(rollout), span_of(rollout, trace_id=bad)]),
        lambda: store.add_many_spans([span_of(rollout), span_of(rollout, parent_id=bad or "x" * 201)]),  # "" is none
    ):
        with pytest.raises(ConfigError):
            await call()
    with pytest.raises((ConfigError, UnknownRollout)):
        await store.get_rollout_by_id(bad)
    assert await everything(store) == before
    (claimed,) = await store.dequeue_many_rollouts(limit=5)
    assert claimed.input == "another"


async def test_the_word_for_the_newest_attempt_names_no_attempt(store: LightningStore):
    with pytest.raises(ConfigError, match="'latest' stands for"):
        await store.start_rollout("task", attempt_id="latest")


async def test_a_sequence_id_cannot_bring_the_counter_to_its_end(store: LightningStore):
    rollout = await store.start_rollout("task")
    for sequence_id in (2**53 + 1, 2**63 - 1):
        with pytest.raises(ConfigError, match="is above 9007199254740992"):
            await store.add_span(span_of(rollout, sequence_id=sequence_id))
    await store.add_span(span_of(rollout, sequence_id=2**53))
    added = await store.add_span(span_of(rollout, "after"))
    assert added is not None
    assert added.sequence_id == 2**53 + 1


async def test_a_page_beyond_every_number_is_the_whole_or_empty(store: LightningStore):
    rollout = await store.start_rollout("task")
    await store.add_span(span_of(rollout))
    await store.enqueue_rollout("another")
    assert len(await store.query_rollouts(limit=2**63 - 1)) == 2
    assert len(await store.query_rollouts(limit=2**63 - 1, offset=2**63 - 1)) == 0
    assert len((await store.poll_new_spans(limit=2**63 - 1)).spans) == 1
    assert len(await store.dequeue_many_rollouts(limit=2**63 - 1)) == 1
    assert await store.prune(Retention(max_rollouts=2**63 - 1), limit=2**63 - 1) == 0


class Colour(Enum):
    RED = "red"


class Visit(BaseModel):
    day: date


@dataclass
class Point:
    x: int


def nested(levels: int, *, of: str = "list") -> Any:
    value: Any = "innermost"
    for _ in range(levels):
        value = [value] if of == "list" else {"a": value}
    return value


READ_AS_OTHERS = {
    "a date": date(2026, 1, 2),
    "a moment": [datetime(2026, 1, 2, tzinfo=UTC)],
    "a duration": {"took": timedelta(seconds=1)},
    "bytes": b"ab",
    "a bytearray": bytearray(b"ab"),
    "a set": {1},
    "a uuid": UUID(int=1),
    "a path": Path("a"),
    "an enum": Colour.RED,
    "a complex number": 1j,
    "a deque": deque([1]),
    "a key that is a number": {1: "one"},
    "a key that is None": {None: 1},
    "a date within a model": Visit(day=date(2026, 1, 2)),
    "a date beside half an emoji": ["\ud83d", date(2026, 1, 2)],
    "a number that is none": math.nan,
    "a number without end": [math.inf],
}
UNREADABLE = {
    **READ_AS_OTHERS,
    "a list one level too deep": nested(MAX_JSON_DEPTH + 1),
    "a dict one level too deep": nested(MAX_JSON_DEPTH + 1, of="dict"),
    "deeper than pydantic writes": nested(256),
    "deeper than Python recurses": nested(20_000),
    "too deep, with half an emoji": ["\ud83d", nested(MAX_JSON_DEPTH)],
    "one digit too many": 10**MAX_JSON_DIGITS,
    "one digit too many, negative and inside": {"a": [-(10**MAX_JSON_DIGITS)]},
    "one digit too many, beside the name of no number": ["NaN", 10**MAX_JSON_DIGITS],
}


@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE)
async def test_json_that_no_parser_reads_again_is_refused_and_changes_nothing(store: LightningStore, value: Any):
    rollout = await store.start_rollout("task")
    before = await everything(store)
    live = LiveRollout(rollout_id="live", attempt_id="at", resources_id="rs", version=1, start_time=1.0)
    for call in (
        lambda: store.enqueue_rollout(value),
        lambda: store.enqueue_rollout("task", metadata={"m": value}),
        lambda: store.update_rollout(rollout.rollout_id, metadata={"m": value}),
        lambda: store.update_attempt(rollout.rollout_id, "latest", metadata={"m": value}),
        lambda: store.record_live_rollouts([live.model_copy(update={"input": value})]),
        lambda: store.record_live_rollouts([live.model_copy(update={"metadata": {"m": value}})]),
        lambda: store.enqueue_many_rollouts([EnqueueRolloutRequest(input="good"), EnqueueRolloutRequest(input=value)]),
        lambda: store.start_rollout(value),
        lambda: store.update_rollout(rollout.rollout_id, input=value),
        lambda: store.add_resources({"llm": LLM(endpoint="http://x", model="m", sampling_parameters={"m": value})}),
        lambda: store.update_worker("w", heartbeat_stats={"m": value}),
        lambda: store.add_many_feedback([Feedback(rollout_id="live", source="u", kind="correction", value=value)]),
    ):
        with pytest.raises(ConfigError, match=r"deep|digits|JSON|no finite number"):
            await call()
    assert await everything(store) == before


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ((1, [2, (3,)]), [1, [2, [3]]]),
        (Decimal("1.5"), 1.5),
        ({"point": Point(1)}, {"point": {"x": 1}}),
        (MappingProxyType({"a": 1}), {"a": 1}),
        ([True, 1, 1.0, "1", None, "\ud83d"], [True, 1, 1.0, "1", None, "\ud83d"]),
    ],
    ids=str,
)
async def test_a_value_that_json_has_in_another_form_is_read_in_that_form(store: LightningStore, value: Any, read: Any):
    for rollout in (
        await store.enqueue_rollout(value),
        await store.update_rollout((await store.start_rollout("task")).rollout_id, input=value),
    ):
        found = await store.get_rollout_by_id(rollout.rollout_id)
        assert found is not None
        assert json.dumps([rollout.input, found.input]) == json.dumps([read, read])
        assert json_value(value, "the input of a rollout") == read


@given(
    before=st.integers(0, 200),
    after=st.integers(0, 200),
    more=st.sampled_from([-1, 0, 1, 2, 62, 63, 64, 65, 5000]),
    sign=st.sampled_from([1, -1]),
    text=st.sampled_from(["", "9" * 5000, '"' + "9" * 5000, "\\" + "9" * 5000]),
)
def test_a_number_is_too_long_from_one_digit_on_wherever_it_stands(
    before: int, after: int, more: int, sign: int, text: str
):
    value = [*[1] * before, text, sign * 10 ** (MAX_JSON_DIGITS + more - 1), *[2] * after]
    if more > 0:
        with pytest.raises(ConfigError, match="digits"):
            json_text(value, "the value")
    else:
        assert json.loads(json_text(value, "the value")) == value


async def test_the_deepest_json_and_the_longest_numbers_come_back_unchanged(store: LightningStore):
    brackets = "[" * 1000 + "7" * 10_000 + '"' + "\ud83d"  # inside a string they are neither levels nor a number
    given = [nested(MAX_JSON_DEPTH - 1), nested(MAX_JSON_DEPTH - 1, of="dict"), 10**MAX_JSON_DIGITS - 1, brackets]
    rollout = await store.enqueue_rollout(given, metadata={"a": nested(MAX_JSON_DEPTH - 1, of="dict"), "b": brackets})
    (found,) = await store.query_rollouts()
    assert (found.input, found.metadata) == (given, rollout.metadata)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf])
async def test_a_heartbeat_at_no_time_is_refused(store: LightningStore, seconds: float):
    rollout = await store.start_rollout("task")
    with pytest.raises(ConfigError, match="finite"):
        await store.update_attempt(rollout.rollout_id, "latest", last_heartbeat_time=seconds)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
async def test_a_number_that_json_does_not_have_is_refused_and_its_name_is_not(store: LightningStore, number: float):
    rollout = await store.start_rollout("NaN, Infinity", metadata={"NaN": ["-Infinity"]})
    before = await everything(store)
    for call in (
        lambda: store.start_rollout({"x": [number]}),
        lambda: store.enqueue_rollout(number),
        lambda: store.start_rollout("task", metadata={"x": number}),
        lambda: store.update_rollout(rollout.rollout_id, metadata={"x": number}),
        lambda: store.update_attempt(rollout.rollout_id, "latest", metadata={"x": number}),
        lambda: store.update_worker("worker", {"x": number}),
        lambda: store.add_span(span_of(rollout, attributes={"x": [0.5, number]})),
    ):
        with pytest.raises(ConfigError, match=r"-?(NaN|Infinity|nan|inf)"):
            await call()
    assert await everything(store) == before
    again = await store.get_rollout_by_id(rollout.rollout_id)
    assert (again.input, again.metadata) == ("NaN, Infinity", {"NaN": ["-Infinity"]})


@pytest.mark.parametrize(
    "cursor", ["", "1", "1.", ".1", "-1.1", "1.1.1", "1e5.1", "9" * 30 + ".1", "a\0.1", "x" * 10_000]
)
async def test_a_cursor_that_no_store_made_is_refused(store: LightningStore, cursor: str):
    with pytest.raises(LeydenError, match="is no cursor of"):
        await store.poll_new_spans(after=cursor)


async def test_a_wait_that_no_clock_can_measure_is_refused(store: LightningStore):
    rollout = await store.enqueue_rollout("task")
    await store.dequeue_rollout()
    for call in (
        lambda: store.dequeue_rollout(timeout_seconds=math.nan),
        lambda: store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=math.nan),
        lambda: store.poll_new_spans(timeout_seconds=math.nan),
    ):
        with pytest.raises(ConfigError, match=r"(?i)nan"):
            await asyncio.wait_for(call(), 5)


async def test_a_filter_that_can_match_nothing_is_refused(store: LightningStore):
    await store.enqueue_rollout("task")
    anything: Any = store  # a type checker refuses these calls
    for call, wrong in (
        (lambda: anything.query_rollouts(status_in=["queuing", "success"]), "success"),
        (lambda: anything.query_rollouts(mode_in=["eval"]), "eval"),
        (lambda: anything.summarise_rollouts(status_in=["done"]), "done"),
        (lambda: anything.query_workers(status_in=["alive"]), "alive"),
        (lambda: anything.query_runs(status_in=["finished"]), "finished"),
    ):
        with pytest.raises(ConfigError, match=f"'{wrong}'"):
            await call()


async def test_text_in_the_place_of_a_list_is_refused(store: LightningStore):
    await store.enqueue_rollout("task", rollout_id="ro-1")
    anything: Any = store
    for filters in ({"status_in": "queuing"}, {"rollout_id_in": "ro-1"}, {"mode_in": "val"}):
        with pytest.raises(ConfigError):
            await anything.query_rollouts(**filters)
