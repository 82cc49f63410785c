"""The store's contract for token records: exact, whatever is shared and whatever part of them is read."""

from __future__ import annotations

import random
from typing import Any

import pytest

from leyden.errors import ConfigError
from leyden.store import LightningStore
from leyden.types import AttemptedRollout, Span, TokenRecord, semconv
from tests.contracts.store.support import claimed, span_of

__all__ = [
    "test_a_call_with_many_spans_adds_each_once_and_numbers_those_that_are_new",
    "test_a_wrong_claim_about_a_prompts_beginning_changes_nothing_that_is_read_back",
    "test_an_attempt_of_many_conversations_keeps_all_their_tokens",
    "test_any_part_of_a_conversation_has_its_tokens",
    "test_tokens_that_cannot_be_kept_are_refused_and_nothing_is_added",
    "test_tokens_that_were_refused_are_no_beginning_of_others",
]


def turn(rollout: AttemptedRollout, number: int, prompt: list[int], response: list[int], **fields: Any) -> Span:
    """A model call of a rollout. The log-probabilities are numbers that 32 bits hold."""
    n_tokens = len(response)
    tokens = TokenRecord(
        prompt_ids=prompt,
        response_ids=response,
        logprobs=[-0.25 * i for i in range(n_tokens)] if number % 3 else None,
        policy_versions=[number] * n_tokens if number % 2 else None,
        loss_mask=[i % 2 for i in range(n_tokens)] if number % 4 == 0 else None,
    )
    given: dict[str, Any] = {"name": f"call {number}", "tokens": tokens, "sequence_id": number + 1} | fields
    return span_of(rollout, f"{number:016x}", **given)


def goes_on_from(number: int, n_ids: int) -> dict[str, Any]:
    """The attributes of a call whose prompt claims to begin with `n_ids` ids of another."""
    return {semconv.GOES_ON_FROM: f"{number:016x}", semconv.KNOWN_PREFIX: n_ids}


def conversation(rollout: AttemptedRollout, n_turns: int, seed: int = 0) -> list[Span]:
    """Turns each of whose prompts is everything before it and something new."""
    rng = random.Random(seed)
    context: list[int] = []
    spans: list[Span] = []
    for number in range(n_turns):
        attributes = goes_on_from(number - 1, len(context)) if number else {}
        context = context + [rng.randrange(150_000) for _ in range(40)]
        response = [rng.randrange(150_000) for _ in range(25)]
        spans.append(turn(rollout, number, context, response, attributes=attributes))
        context = context + response
    return spans


async def test_a_call_with_many_spans_adds_each_once_and_numbers_those_that_are_new(store: LightningStore) -> None:
    rollout = await claimed(store)
    turns = conversation(rollout, 3)
    await store.add_many_spans(turns[:1])
    steps = [span_of(rollout, f"step {number}") for number in range(600)]
    new = [*steps[:100], *(turn.model_copy(update={"sequence_id": 0}) for turn in turns[1:]), *steps[100:]]
    added = await store.add_many_spans([turns[0], *new[:110], *new[90:], turns[0]])
    assert [span.span_id for span in added] == [span.span_id for span in new]
    assert [span.sequence_id for span in added] == list(range(2, 604))
    assert list(await store.query_spans(rollout.rollout_id)) == [turns[0], *added]
    assert await store.query_spans_of([rollout.rollout_id]) == {rollout.rollout_id: [turns[0], *added]}
    assert await store.add_many_spans([turns[0], *new]) == []


async def test_any_part_of_a_conversation_has_its_tokens(store: LightningStore) -> None:
    rollout = await claimed(store)
    spans = conversation(rollout, 7)
    for span in spans[:3]:
        await store.add_span(span)
    await store.add_many_spans([*spans[3:], *spans])  # the second of each is left out
    key = rollout.rollout_id
    assert list(await store.query_spans(key)) == spans
    assert list(await store.query_spans(key, sort_order="desc")) == spans[::-1]
    assert (await store.query_spans_of([key]))[key] == spans
    for number, span in enumerate(spans):
        assert list(await store.query_spans(key, "latest", limit=1, offset=number)) == [span]
        assert list(await store.query_spans(key, name=f"call {number}")) == [span]
        assert list(await store.query_spans(name=f"call {number}")) == [span]
    assert list(await store.query_spans(key, name_contains="call", limit=3, offset=2)) == spans[2:5]
    page = await store.poll_new_spans(limit=4)
    rest = await store.poll_new_spans(after=page.after)
    assert [*page.spans, *rest.spans] == spans


@pytest.mark.parametrize("seed", range(6))
async def test_an_attempt_of_many_conversations_keeps_all_their_tokens(store: LightningStore, seed: int) -> None:
    rng = random.Random(seed)
    first = await claimed(store)
    second = await store.start_attempt(first.rollout_id)
    expected: dict[str, list[Span]] = {}
    for rollout in (first, second):
        sequences: list[list[int]] = [[rng.randrange(9) for _ in range(rng.choice([0, 20, 60]))]]
        spans: list[Span] = []
        for number in range(30):
            named = rng.choice(range(len(sequences))[-rng.choice([1, 3, 12]) :])
            start = sequences[named]
            prompt = start[: rng.randint(0, len(start))] if rng.random() < 0.3 else start
            attributes = goes_on_from(named - 1 + rng.choice([0, 0, 0, 1]), len(prompt) + rng.choice([0, 0, 0, 1, 9]))
            prompt = prompt + [rng.randrange(9) for _ in range(rng.choice([0, 1, 30]))]
            response = [rng.randrange(9) for _ in range(rng.choice([0, 1, 20]))]
            sequences.append(prompt + response)
            spans.append(turn(rollout, number, prompt, response, attributes=attributes))
        expected[rollout.attempt.attempt_id] = spans
        arrival = [*spans, *rng.sample(spans, 5)]
        rng.shuffle(arrival)
        while arrival:
            n_spans = rng.choice([1, 2, 9])
            await store.add_many_spans(arrival[:n_spans])
            del arrival[:n_spans]
    for attempt_id, spans in expected.items():
        assert list(await store.query_spans(first.rollout_id, attempt_id)) == spans
        for span in rng.sample(spans, 8):
            assert list(await store.query_spans(first.rollout_id, attempt_id, span_id=span.span_id)) == [span]
    both = await store.query_spans(first.rollout_id, name_contains="call 1", sort_by="name")
    for span in both:
        assert span == expected[span.attempt_id][span.sequence_id - 1]
    assert len(both) == 22


WRONG_CLAIMS: dict[str, dict[str, Any]] = {
    "another call": goes_on_from(0, 65 + 40),
    "more than the call has": goes_on_from(1, 131),
    "one id more than is equal": goes_on_from(3, 66),
    "fewer than are equal": goes_on_from(1, 70),
    "more than the prompt has": goes_on_from(1, 2**40),
    "less than nothing": goes_on_from(1, -20),
    "a call of another attempt": goes_on_from(90, 130),
    "a call that comes later": goes_on_from(6, 130),
    "itself": goes_on_from(2, 170),
    "a step": goes_on_from(80, 130),
    "nobody": goes_on_from(99, 130),
    "a call whose id no database takes": goes_on_from(1, 130) | {semconv.GOES_ON_FROM: "\ud800"},
    "a call with NUL in its id": goes_on_from(1, 130) | {semconv.GOES_ON_FROM: "a\0b"},
    "a number as text": goes_on_from(1, 130) | {semconv.KNOWN_PREFIX: "130"},
    "a number with a fraction": goes_on_from(1, 130) | {semconv.KNOWN_PREFIX: 130.0},
    "whether, not how many": goes_on_from(1, 130) | {semconv.KNOWN_PREFIX: True},
    "no number": {semconv.GOES_ON_FROM: f"{1:016x}"},
    "no call": {semconv.KNOWN_PREFIX: 130},
    "a list of calls": goes_on_from(1, 130) | {semconv.GOES_ON_FROM: [f"{1:016x}"]},
}


@pytest.mark.parametrize("claim", WRONG_CLAIMS)
@pytest.mark.parametrize("bulk", [True, False])
async def test_a_wrong_claim_about_a_prompts_beginning_changes_nothing_that_is_read_back(
    store: LightningStore, claim: str, bulk: bool
) -> None:
    rollout = await claimed(store)
    first, second, third = conversation(rollout, 3)
    assert first.tokens is not None
    assert third.tokens is not None
    step = span_of(rollout, f"{80:016x}")
    branch = turn(rollout, 3, [*first.tokens.prompt_ids, *first.tokens.response_ids, *[8] * 90], [1])
    third = third.model_copy(update={"attributes": WRONG_CLAIMS[claim]})
    later = turn(rollout, 6, third.tokens.prompt_ids, [5] * 30, attributes=goes_on_from(2, 170))
    other = await store.start_attempt(rollout.rollout_id)
    await store.add_span(turn(other, 90, third.tokens.prompt_ids, [1]))
    spans = [
        span.model_copy(update={"sequence_id": number})
        for number, span in enumerate([first, second, step, branch, third, later], 1)
    ]
    for part in [spans] if bulk else [[span] for span in spans]:
        assert list(await store.add_many_spans(part)) == part
    key, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
    assert list(await store.query_spans(key, attempt_id)) == spans
    for span in spans:
        assert list(await store.query_spans(key, attempt_id, span_id=span.span_id)) == [span]


async def test_tokens_that_cannot_be_kept_are_refused_and_nothing_is_added(store: LightningStore) -> None:
    rollout = await claimed(store)
    bad = TokenRecord.model_construct(prompt_ids=[2**31] * 20, response_ids=[1])
    with pytest.raises(ConfigError, match="32 bits"):
        await store.add_many_spans([span_of(rollout, "b" * 16), span_of(rollout).model_copy(update={"tokens": bad})])
    assert len(await store.query_spans(rollout.rollout_id)) == 0


async def test_tokens_that_were_refused_are_no_beginning_of_others(store: LightningStore) -> None:
    rollout = await claimed(store)
    kept, lost = conversation(rollout, 2, seed=1), conversation(rollout, 4, seed=2)
    stranger = span_of(rollout).model_copy(update={"attempt_id": "at-no"})
    with pytest.raises(ValueError, match="at-no"):
        await store.add_many_spans([*lost[:3], stranger])
    await store.add_many_spans([kept[0], lost[3], kept[1].model_copy(update={"span_id": "c" * 16})])
    assert [span.tokens for span in await store.query_spans(rollout.rollout_id)] == [
        kept[0].tokens,
        kept[1].tokens,
        lost[3].tokens,
    ]
