"""Whose calls, which calls, whose rewards."""

from __future__ import annotations

import itertools

import pytest

from leyden.adapter import (
    LlmProxyTraceToTriplet,
    RewardMatchPolicy,
    TracerTraceToTriplet,
    TraceToMessages,
    TraceToTrajectory,
    TraceToTriplet,
    model_calls,
)
from leyden.errors import ConfigError
from leyden.types import Span
from tests.adapter.traces import agent, gateway_call, reward, sdk_call, span


def two_agents() -> list[Span]:
    """A planner and a writer who share a conversation; the gateway has its parents from the SDK's
    traceparent.
    """
    return [
        span("run", 0, 20, id=1),
        agent("planner", 1, 6, id=2, parent=1),
        sdk_call(2, 5, id=3, parent=2, response_id="a"),
        gateway_call(2.5, 4.5, id=4, parent=3, prompt=[1], response=[2], response_id="a", index=0),
        agent("writer", 7, 18, id=5, parent=1),
        gateway_call(8, 9, id=6, parent=5, prompt=[1, 2, 3], response=[4], response_id="b", index=1),
        agent("planner", 10, 13, id=7, parent=5),
        gateway_call(11, 12, id=8, parent=7, prompt=[1, 2, 3, 4, 5], response=[6], response_id="c", index=2),
        gateway_call(14, 15, id=9, parent=5, prompt=[1, 2, 3, 4, 5, 6, 7], response=[8], response_id="d", index=3),
        reward(1.0, 19, id=10, parent=1),
    ]


def ids_of(adapter: TracerTraceToTriplet | LlmProxyTraceToTriplet, spans: list[Span]) -> list[str]:
    return [triplet.metadata["response_id"] for triplet in adapter.adapt(spans)]


def test_the_nearest_agent_decides_and_the_others_stay_as_they_are():
    spans = two_agents()
    assert ids_of(TracerTraceToTriplet(), spans) == ["a", "b", "c", "d"]
    assert ids_of(TracerTraceToTriplet(agent_match="planner"), spans) == ["a", "c"]
    assert ids_of(TracerTraceToTriplet(agent_match="^write"), spans) == ["b", "d"]
    assert ids_of(TracerTraceToTriplet(agent_match="plan|write"), spans) == ["a", "b", "c", "d"]
    assert ids_of(TracerTraceToTriplet(agent_match="nobody"), spans) == []
    names = [triplet.metadata["agent_name"] for triplet in TracerTraceToTriplet().adapt(spans)]
    assert names == ["planner", "writer", "planner", "writer"]


@pytest.mark.parametrize("chosen", [{"planner"}, {"writer"}, {"planner", "writer"}])
def test_only_the_chosen_agents_tokens_are_trained_on_and_the_others_are_context(chosen: set[str]):
    (trajectory,) = TraceToTrajectory(agent_match="|".join(sorted(chosen))).adapt(two_agents())
    sampled = {"planner": [2, 6], "writer": [4, 8]}
    expected = {token for name in chosen for token in sampled[name]}
    trained = {token for token, mask in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if mask}
    assert trained == expected
    assert trajectory.token_ids == list(range(1, max(expected) + 1)), "the context is whole"
    assert trajectory.reward == 1.0


def test_agents_are_chosen_for_conversations_too():
    assert len(TraceToMessages().adapt(two_agents())) == 4
    assert len(TraceToMessages(agent_match="writer").adapt(two_agents())) == 2


def test_an_agent_and_an_adapter_cannot_both_choose():
    with pytest.raises(
        ConfigError, match=r"agent_match='a' has no effect; use TraceToTrajectory\(TracerTraceToTriplet"
    ):
        TraceToTrajectory(LlmProxyTraceToTriplet(), agent_match="a")


def test_a_call_is_chosen_by_any_name_that_it_was_seen_under():
    assert ids_of(TracerTraceToTriplet(llm_call_match="^chat"), two_agents()) == ["a"]
    assert ids_of(TracerTraceToTriplet(llm_call_match=r"openai\.chat\.completion"), two_agents()) == []


def test_without_repair_a_floating_call_has_no_agent():
    spans = [agent("a", 1, 9, id=1), gateway_call(2, 3, id=2, prompt=[1], response=[2], response_id="r")]
    assert ids_of(TracerTraceToTriplet(agent_match="a"), spans) == ["r"]
    assert ids_of(TracerTraceToTriplet(agent_match="a", repair_hierarchy=False), spans) == []


def test_what_was_recorded_counts_more_than_a_repair():
    """The gateway's clock is wrong: its record seems to lie in another agent's time."""
    spans = [
        agent("a", 1, 4, id=1),
        sdk_call(2, 3, id=2, parent=1, response_id="r"),
        agent("b", 5, 9, id=3),
        gateway_call(6, 7, id=4, prompt=[1], response=[2], response_id="r"),
    ]
    assert [triplet.metadata["agent_name"] for triplet in TracerTraceToTriplet().adapt(spans)] == ["a"]


def test_a_judge_below_a_reward_is_left_out_unless_asked_for():
    spans = [
        sdk_call(1, 2, id=1, response_id="work"),
        span("leyden.operation", 3, 6, id=2, leyden__operation__name="leyden.reward"),
        sdk_call(4, 5, id=3, parent=2, response_id="judge"),
    ]
    assert ids_of(TracerTraceToTriplet(), spans) == ["work"]
    assert ids_of(TracerTraceToTriplet(exclude_llm_call_in_reward=False), spans) == ["work", "judge"]


def test_calls_without_tokens_say_so_or_are_skipped():
    spans = [
        sdk_call(1, 2, id=1, response_id="hosted"),
        gateway_call(3, 4, id=2, prompt=[1], response=[2], response_id="ours"),
    ]
    refused = [triplet.metadata.get("refused") for triplet in TracerTraceToTriplet().adapt(spans)]
    assert refused == ["the call was recorded without token ids", None]
    assert ids_of(TracerTraceToTriplet(_skip_empty_token_spans=True), spans) == ["ours"]
    assert ids_of(LlmProxyTraceToTriplet(), spans) == ["ours"]


def test_a_failed_call_is_no_triplet_but_can_be_looked_at():
    spans = [gateway_call(1, 2, id=1, prompt=[1], response=[2], error=True)]
    assert TracerTraceToTriplet().adapt(spans) == LlmProxyTraceToTriplet().adapt(spans) == []
    assert [call.failed for call in model_calls(spans)] == [True]


def test_the_default_reads_the_gateways_record_where_there_is_one_and_the_tracers_spans_otherwise():
    hosted = sdk_call(1, 2, id=1, response_id="hosted", asked="1")
    both = [
        sdk_call(3, 5, id=2, response_id="both", asked="2"),
        gateway_call(3.5, 4.5, id=3, parent=2, prompt=[1], response=[2], response_id="both"),
    ]
    assert ids_of(TraceToTriplet(), [hosted]) == ["hosted"]
    assert ids_of(TraceToTriplet(), both) == ["both"], "one call, however many recorded it"
    assert ids_of(TraceToTriplet(), [hosted, *both]) == ["both"]
    assert ids_of(TracerTraceToTriplet(), [hosted, *both]) == ["hosted", "both"]
    failed = gateway_call(6, 7, id=4, prompt=[1], response=[2], error=True)
    assert ids_of(TraceToTriplet(), [hosted, failed]) == [], "the attempt has a gateway"
    assert TraceToTriplet().adapt([]) == []


def test_the_default_chooses_agents_and_rewards_as_the_tracers_adapter_does():
    assert ids_of(TraceToTriplet(agent_match="planner"), two_agents()) == ["a", "c"]
    for options in ({}, {"agent_match": "writer"}, {"reward_match": RewardMatchPolicy.FIRST_SIBLING}):
        assert TraceToTriplet(**options).adapt(two_agents()) == TracerTraceToTriplet(**options).adapt(two_agents())


def test_agent_lightnings_proxy_is_a_gateway_too():
    attributes = {
        "llm.hosted_vllm.id": "r",
        "llm.hosted_vllm.prompt_token_ids": "[1, 2]",
        "llm.hosted_vllm.choices": "[{'token_ids': [3, 4], 'message': {'role': 'assistant', 'content': 'hi'}}]",
    }
    spans = [
        span(
            "litellm_request",
            1,
            3,
            id=1,
            gen_ai__response__id="r",
            gen_ai__prompt__0__role="user",
            gen_ai__prompt__0__content="?",
        ),
        span("raw_gen_ai_request", 1, 2, id=2, parent=1, **attributes),
    ]
    (triplet,) = LlmProxyTraceToTriplet().adapt(spans)
    assert (triplet.prompt.token_ids, triplet.response.token_ids) == ([1, 2], [3, 4])
    assert triplet.prompt.raw_content == [{"role": "user", "content": "?"}]
    assert triplet.response.raw_content == [{"role": "assistant", "content": "hi"}]


# ---- rewards -------------------------------------------------------------------------------------------------------------------


def calls(*moments: float, parents: tuple[int | None, ...] = ()) -> list[Span]:
    return [
        sdk_call(moment, moment + 1, id=number, parent=parent, response_id=str(number), asked=str(number))
        for number, (moment, parent) in enumerate(itertools.zip_longest(moments, parents), start=1)
    ]


def rewards_of(spans: list[Span], policy: RewardMatchPolicy = RewardMatchPolicy.FIRST_OCCURRENCE) -> list[float | None]:
    return [triplet.reward for triplet in TracerTraceToTriplet(reward_match=policy).adapt(spans)]


def test_a_reward_belongs_to_the_latest_call_without_one_that_had_ended():
    spans = calls(1, 3, 5)
    assert rewards_of([*spans, reward(0.5, 4.5, id=11)]) == [None, 0.5, None]
    assert rewards_of([*spans, reward(0.5, 5.5, id=11)]) == [None, 0.5, None], "the third call was still under way"
    assert rewards_of([*spans, reward(0.5, 9, id=11), reward(0.25, 10, id=12)]) == [None, 0.25, 0.5]
    assert rewards_of([*spans, reward(0.5, 0, id=11)]) == [None, None, None]
    assert rewards_of([*calls(1), reward(0.5, 9, id=11), reward(0.25, 10, id=12)]) == [0.5]


def test_a_reward_among_siblings_belongs_to_one_of_them():
    spans = [span("turn", 0, 4, id=21), span("turn", 4, 9, id=22), *calls(1, 5, 7, parents=(21, 22, 22))]
    spans += [reward(0.5, 10, id=11, parent=21), reward(0.25, 11, id=12, parent=22), reward(0.1, 12, id=13)]
    assert rewards_of(spans, RewardMatchPolicy.FIRST_SIBLING) == [0.5, None, 0.25]
    assert rewards_of(spans) == [0.1, 0.25, 0.5]


@pytest.mark.parametrize("prefix", ["leyden.link", "agentlightning.link"])
@pytest.mark.parametrize(("key", "value"), [("gen_ai.response.id", "1"), ("span_id", f"{1:016x}")])
def test_a_reward_that_names_its_call_belongs_to_it(prefix: str, key: str, value: str):
    named = {f"{prefix}.0.key_match": key, f"{prefix}.0.value_match": value}
    assert rewards_of([*calls(1, 3), reward(0.5, 9, id=11, **named)]) == [0.5, None]


def test_rewards_are_matched_by_the_agents_clock_and_not_by_the_gateways():
    """The gateway's clock is an hour ahead; the agent emits a reward after each of its two
    calls.
    """
    spans = [*calls(1, 3), reward(0.5, 2.5, id=11), reward(0.25, 4.5, id=12)]
    spans += [
        gateway_call(3600 + n, 3600.5 + n, id=20 + n, prompt=[n], response=[n], response_id=str(n)) for n in (1, 2)
    ]
    assert rewards_of(spans) == [0.5, 0.25]


def test_a_policy_may_be_given_by_name():
    assert TracerTraceToTriplet(reward_match="first_sibling").reward_match is RewardMatchPolicy.FIRST_SIBLING  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="latest"):
        TracerTraceToTriplet(reward_match="latest")  # type: ignore[arg-type]
