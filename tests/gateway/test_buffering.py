"""Streaming a server that has lost token ids is tried again, less and less often while it loses more."""

from __future__ import annotations

from typing import Any

import pytest

from leyden.gateway import LLMProxy, UpstreamModel, buffering
from leyden.gateway.buffering import FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS, Buffering
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream, Misbehaviour
from tests.gateway.caller import new_caller, say, until

SERVER = UpstreamModel(model_name="fake", endpoint="http://127.0.0.1:1/v1")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def answer(n_ids: int) -> dict[str, Any]:
    """Return an answer of three tokens with `n_ids` response ids."""
    choice = {"prompt_token_ids": [1], "token_ids": [2] * n_ids}
    return {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 3}}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lossy(clock: Clock) -> Buffering:
    """After one lossy stream."""
    found = Buffering(clock)
    assert not found.wanted(SERVER)
    found.learn(SERVER, answer(0), streamed=True)
    return found


def probes_within(lossy: Buffering, clock: Clock, seconds: float, *, n_ids: int) -> list[float]:
    """Return when streams were requested, one call each second; a stream has `n_ids` of three ids."""
    asked: list[float] = []
    for second in range(int(seconds)):
        clock.now = float(second)
        whole = lossy.wanted(SERVER)
        lossy.learn(SERVER, answer(3 if whole else n_ids), streamed=not whole)
        if not whole:
            asked.append(clock.now)
    return asked


def test_one_lossy_stream_switches_streams_off_for_a_minute_only(lossy: Buffering, clock: Clock) -> None:
    streamed = probes_within(lossy, clock, 2 * FIRST_PAUSE_SECONDS, n_ids=3)
    assert streamed == [float(second) for second in range(int(FIRST_PAUSE_SECONDS), int(2 * FIRST_PAUSE_SECONDS))]


def test_a_server_that_always_loses_ids_is_probed_rarely(lossy: Buffering, clock: Clock) -> None:
    probes = probes_within(lossy, clock, 6 * MAX_PAUSE_SECONDS, n_ids=2)
    pauses = [after - before for before, after in zip([0.0, *probes], probes, strict=False)]
    doubling = [min(FIRST_PAUSE_SECONDS * 2**n, MAX_PAUSE_SECONDS) for n in range(len(pauses))]
    assert pauses == doubling
    assert pauses[-1] == MAX_PAUSE_SECONDS


def test_a_probe_that_comes_to_nothing_is_made_again_after_the_next_pause(lossy: Buffering, clock: Clock) -> None:
    clock.now = FIRST_PAUSE_SECONDS
    assert not lossy.wanted(SERVER)
    assert lossy.wanted(SERVER), "one call alone tries"
    lossy.learn(SERVER, {"choices": []}, streamed=True)
    clock.now += FIRST_PAUSE_SECONDS
    assert not lossy.wanted(SERVER)


def test_streams_that_were_under_way_together_count_once(lossy: Buffering, clock: Clock) -> None:
    for _ in range(50):
        lossy.learn(SERVER, answer(0), streamed=True)
    lossy.learn(SERVER, answer(3), streamed=True)
    assert lossy.wanted(SERVER)
    clock.now = FIRST_PAUSE_SECONDS
    assert not lossy.wanted(SERVER)


def test_a_server_without_ids_in_whole_answers_either_is_streamed(lossy: Buffering, clock: Clock) -> None:
    assert lossy.wanted(SERVER)
    lossy.learn(SERVER, answer(0), streamed=False)
    assert not lossy.wanted(SERVER)


async def test_a_gateway_streams_again_after_one_lossy_stream(
    upstream: FakeUpstream, store: InMemoryLightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffering, "FIRST_PAUSE_SECONDS", 0.05)
    upstream.misbehave(Misbehaviour(lost_response_ids=1))
    async with LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        caller = await new_caller(proxy, store)

        async def streamed() -> bool:
            async for _ in await caller.client.chat.completions.create(model="fake", messages=say("hi"), stream=True):
                pass
            return bool(upstream.requests[-1]["stream"])

        async with caller.client:
            assert await streamed()
            await streamed()  # whole, unless the pause is over already
            await until(streamed)
            assert await streamed()
        first, *others = await caller.spans()
    assert first.tokens is None
    assert all(span.tokens is not None for span in others)
