"""How much of each prompt is known, against the plain definition and against what a tree of the record says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from leyden.adapter import TokenGraph
from leyden.gateway.prefixes import Prefixes
from leyden.types import Triplet, TripletPrompt, TripletResponse, semconv
from tests.gateway.caller import Caller, say, until

KEY = ("ro", "at")


def test_what_is_known_is_the_longest_common_beginning_with_any_earlier_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyden.gateway.prefixes._MAX_CONVERSATIONS", 1000)
    draw, prefixes, graph = random.Random(3), Prefixes(), TokenGraph()
    earlier: dict[str, list[int]] = {}
    for number in range(400):
        base = draw.choice([[], *list(earlier.values())[-20:]])
        prompt = [
            *base[: draw.choice([len(base), draw.randrange(len(base) + 1)])],
            *(draw.randrange(3) for _ in range(4)),
        ]
        response = [draw.randrange(3) for _ in range(draw.randrange(1, 5))]
        known, name = prefixes.add(KEY, str(number), prompt, response)
        assert known == graph.known(
            prompt
        )  # a response that was gone on from may be left by a branch, and is known there
        if name is not None:
            assert common(earlier[name], prompt) == known
        graph.add(triplet(prompt, response))
        earlier[str(number)] = prompt + response


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def triplet(prompt: list[int], response: list[int]) -> Triplet:
    return Triplet(
        prompt=TripletPrompt(token_ids=prompt),
        response=TripletResponse(token_ids=response, logprobs=[0.0] * len(response)),
    )


def test_memory_is_bounded_and_given_back() -> None:
    prefixes = Prefixes(limit_bytes=4000)
    for number in range(100):
        prefixes.add(("ro", str(number)), "s", list(range(90)), [1] * 10)
    assert len(prefixes) == 10
    for number in range(100):
        prefixes.end(("ro", str(number)))
    assert not prefixes
    assert prefixes.add(KEY, "s", [1, 2], [3]) == (0, None)
    assert prefixes.add(KEY, "t", [1, 2, 3, 4], [5]) == (3, "s")
    assert prefixes._n_bytes == 20


async def test_each_turn_says_what_of_its_prompt_was_there(caller: Caller) -> None:
    turns: list[Any] = say("first")
    for _ in range(3):
        answer = await caller.client.chat.completions.create(model="fake", messages=turns)
        turns = [*turns, {"role": "assistant", "content": answer.choices[0].message.content}, *say("and then?")]
    await caller.client.chat.completions.create(model="fake", messages=say("something else"))
    first, second, third, other = await caller.spans()
    assert first.tokens is not None
    assert second.tokens is not None
    assert first.attributes[semconv.KNOWN_PREFIX] == 0
    assert semconv.GOES_ON_FROM not in first.attributes
    for one, before in ((second, first), (third, second)):
        assert before.tokens is not None
        whole = [*before.tokens.prompt_ids, *before.tokens.response_ids]
        assert one.tokens is not None
        n_common = common(whole, one.tokens.prompt_ids)
        assert one.attributes[semconv.KNOWN_PREFIX] == n_common >= len(before.tokens.prompt_ids)
        assert one.attributes[semconv.GOES_ON_FROM] == before.span_id
    assert 0 < int(str(other.attributes[semconv.KNOWN_PREFIX])) < len(first.tokens.prompt_ids)
    recorder = caller.proxy._running.recorder
    assert recorder.remembers
    caller.proxy.end_attempt(caller.rollout_id, caller.attempt_id)
    await caller.proxy.flush(caller.rollout_id, caller.attempt_id)
    await until(lambda: not recorder.remembers)
