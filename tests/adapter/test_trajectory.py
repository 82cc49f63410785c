"""Merging is exact: only true prefixes merge, every sampled token appears once, nothing else is trained on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from leyden.adapter import LlmProxyTraceToTriplet, TraceToTrajectory, merge_triplets
from leyden.adapter.trajectory import refusal
from leyden.types import (
    Span,
    SpanStatus,
    TokenRecord,
    Triplet,
    TripletPrompt,
    TripletResponse,
    reward_attributes,
    semconv,
)


def call(prompt: list[int], response: list[int], **metadata: object) -> Triplet:
    return Triplet(
        prompt=TripletPrompt(token_ids=prompt),
        response=TripletResponse(
            token_ids=response, logprobs=[-float(token) for token in response], policy_versions=[3] * len(response)
        ),
        metadata=dict(metadata),
    )


def span(name: str, start: float, end: float, sequence: int, *, error: bool = False, **fields: object) -> Span:
    return Span.model_validate(
        dict(
            rollout_id="ro-1", attempt_id="at-1", sequence_id=sequence, trace_id="0" * 32, span_id=f"{sequence:016x}", name=name,
            start_time=start, end_time=end, status=SpanStatus(status_code="ERROR" if error else "OK"), **fields,
        )
    )  # fmt: skip


def model_call(
    start: float, end: float, sequence: int, prompt: list[int], response: list[int], response_id: str, **fields: object
) -> Span:
    tokens = TokenRecord(prompt_ids=prompt, response_ids=response, logprobs=[-1.0] * len(response))
    attributes = {semconv.GEN_AI_RESPONSE_ID: response_id, semconv.GEN_AI_INPUT_MESSAGES: '[{"role": "user"}]'}
    return span(semconv.MODEL_CALL, start, end, sequence, attributes=attributes, tokens=tokens, **fields)


def test_tokens_that_the_policy_did_not_sample_are_not_trained_on() -> None:
    first, second = call([1, 2], [3, 4, 5]), call([1, 2, 3, 4, 5, 6], [7])
    first.response.loss_mask = [1, 0, 1]
    (trajectory,) = merge_triplets([first, second])
    assert trajectory.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert trajectory.loss_mask == [0, 0, 1, 0, 1, 0, 1]
    assert trajectory.logprobs == [0.0, 0.0, -3.0, 0.0, -5.0, 0.0, -7.0]
    first.response.loss_mask = [1]
    assert "loss mask of 1" in str(refusal(first))


def test_the_loss_mask_of_a_recorded_call_reaches_the_trajectory() -> None:
    recorded = model_call(1, 2, 1, [1], [2, 3], "r")
    assert recorded.tokens is not None
    recorded.tokens.loss_mask = [0, 1]
    (trajectory,) = TraceToTrajectory().adapt([recorded])
    assert trajectory.loss_mask == [0, 0, 1]


conversation = st.lists(
    st.tuples(
        st.lists(st.integers(0, 50), min_size=1, max_size=6), st.lists(st.integers(0, 50), min_size=1, max_size=4)
    ),
    min_size=1,
    max_size=6,
)


@given(conversation)
def test_a_conversation_whose_prompts_extend_each_other_is_one_trajectory(
    turns: list[tuple[list[int], list[int]]],
) -> None:
    context: list[int] = []
    triplets: list[Triplet] = []
    for observed, response in turns:
        triplets.append(call(context + observed, response))
        context = context + observed + response
    (trajectory,) = merge_triplets(triplets, reward=0.5)
    assert trajectory.token_ids == context
    assert [trajectory.token_ids[start:end] for start, end in trajectory.call_spans] == [
        response for _, response in turns
    ]
    sampled = [token for token, mask in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if mask]
    assert sampled == [token for _, response in turns for token in response]
    assert [lp for lp, mask in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if mask] == [
        -float(t) for t in sampled
    ]
    assert all(lp == 0.0 for lp, mask in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if not mask)
    assert trajectory.policy_versions == (3, 3)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=1, max_size=5), st.lists(st.integers(0, 3), min_size=1, max_size=3)
        ),
        max_size=8,
    )
)
def test_any_calls_keep_each_sampled_token_once_with_its_exact_context(
    calls: list[tuple[list[int], list[int]]],
) -> None:
    merged = merge_triplets([call(prompt, response) for prompt, response in calls])
    seen = sorted(
        (tuple(trajectory.token_ids[:start]), tuple(trajectory.token_ids[start:end]))
        for trajectory in merged
        for start, end in trajectory.call_spans
    )
    assert seen == sorted((tuple(prompt), tuple(response)) for prompt, response in calls)
    assert sum(trajectory.n_trained for trajectory in merged) == sum(len(response) for _, response in calls)


def test_a_rewritten_prompt_starts_a_new_trajectory() -> None:
    assert len(merge_triplets([call([1, 2], [3]), call([1, 9, 3, 4], [5])])) == 2


def test_refused_calls_are_not_trained_on() -> None:
    assert merge_triplets([call([1], [2], refused="ids disagree with usage"), call([1], [])]) == []


def test_a_reward_belongs_to_the_last_call_that_had_ended() -> None:
    spans = [
        model_call(1.0, 2.0, 1, [1], [2], "a"),
        span(semconv.REWARD, 2.5, 2.5, 2, attributes=reward_attributes({"primary": 0.25})),
        model_call(3.0, 4.0, 4, [1, 2, 3], [4], "b"),
        span(semconv.REWARD, 4.5, 4.5, 3, attributes=reward_attributes({"primary": 1.0})),
    ]
    triplets = LlmProxyTraceToTriplet().adapt(spans)
    assert [triplet.reward for triplet in triplets] == [0.25, 1.0]
    assert triplets[0].prompt.raw_content == [{"role": "user"}]


def test_the_same_response_twice_is_one_call_and_failed_calls_are_none() -> None:
    spans = [
        model_call(1.0, 2.0, 1, [1], [2], "a"),
        model_call(1.0, 2.0, 2, [1], [2], "a"),
        span(semconv.MODEL_CALL, 3.0, 4.0, 3, error=True),
    ]
    assert len(LlmProxyTraceToTriplet().adapt(spans)) == 1


def test_trajectories_carry_the_final_reward_and_their_ids() -> None:
    spans = [
        model_call(1.0, 2.0, 1, [1], [2], "a"),
        span(semconv.REWARD, 3.0, 3.0, 2, attributes=reward_attributes({"primary": 1.0})),
    ]
    (trajectory,) = TraceToTrajectory().adapt(spans)
    assert (trajectory.reward, trajectory.rollout_id, trajectory.attempt_id) == (1.0, "ro-1", "at-1")
    assert TraceToTrajectory().adapt([]) == []
