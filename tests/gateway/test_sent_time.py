"""A client may say when it sent a call, by its own clock."""

from __future__ import annotations

import pytest

from leyden.types import semconv
from tests.gateway.caller import Caller, say


@pytest.mark.parametrize(
    ("said", "recorded"), [("1790000000.5", 1_790_000_000.5), ("soon", None), ("nan", None), ("inf", None), ("", None)]
)
async def test_when_a_call_was_sent_is_recorded_if_it_is_a_time(caller: Caller, said: str, recorded: float | None):
    await caller.client.chat.completions.create(model="fake", messages=say("hi"), extra_headers={"x-leyden-sent": said})
    span = await caller.span()
    assert span.attributes.get(semconv.SENT_TIME) == recorded
    assert span.tokens is not None


async def test_a_client_on_the_gateways_machine_need_not_say_when_it_sent_a_call(caller: Caller):
    await caller.client.chat.completions.create(model="fake", messages=say("hi"))
    span = await caller.span()
    assert span.attributes[semconv.SENT_TIME] == span.start_time
