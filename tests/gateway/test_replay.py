"""A fork: the first calls are answered from the record, while they ask what was asked then, and the rest by the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import openai
import pytest

from leyden.adapter import TraceToMessages, TraceToTrajectory
from leyden.gateway import LLMProxy, UpstreamModel
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream, Misbehaviour, Reply, ToolCall
from leyden.types import ReplayFrom, Span, semconv
from tests.gateway.caller import Caller, new_caller, say

QUESTIONS = ("first", "second", "third", "fourth")
Agent = Callable[[Caller, bool], Awaitable[list[str]]]


async def by_chat(caller: Caller, stream: bool) -> list[str]:
    messages, answers = list[Any](), list[str]()
    for question in QUESTIONS:
        messages += say(question)
        asked: dict[str, Any] = {"model": "fake", "messages": messages, "temperature": 0.5}
        if stream:
            async with caller.client.chat.completions.stream(**asked) as events:
                answer = await events.get_final_completion()
        else:
            answer = await caller.client.chat.completions.create(**asked)
        answers.append(answer.choices[0].message.content or "")
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


async def by_responses(caller: Caller, stream: bool) -> list[str]:
    """Sends its new turn only, with the id of the response before it."""
    previous, answers = None, list[str]()
    for question in QUESTIONS:
        asked: dict[str, Any] = {"model": "fake", "input": question, "instructions": "Be brief."}
        if previous is not None:
            asked["previous_response_id"] = previous
        if stream:
            async with caller.client.responses.stream(**asked) as events:
                answer = await events.get_final_response()
        else:
            answer = await caller.client.responses.create(**asked)
        previous = answer.id
        answers.append(answer.output_text)
    return answers


async def by_messages(caller: Caller, stream: bool) -> list[str]:
    anthropic = pytest.importorskip("anthropic")
    messages, answers = list[Any](), list[str]()
    url = caller.llm.endpoint.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=caller.llm.api_key, max_retries=0) as client:
        for question in QUESTIONS:
            messages += say(question)
            asked: dict[str, Any] = {"model": "fake", "messages": messages, "max_tokens": 300, "system": "Be brief."}
            if stream:
                async with client.messages.stream(**asked) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            answers.append(answer.content[0].text)
            messages.append({"role": "assistant", "content": answers[-1]})
    return answers


async def by_completions(caller: Caller, stream: bool) -> list[str]:
    text, answers = "", list[str]()
    for question in QUESTIONS:
        text += f"{question}? "
        answer: Any = await caller.client.completions.create(model="fake", prompt=text, max_tokens=50, stream=stream)
        if stream:
            answers.append("".join([chunk.choices[0].text async for chunk in answer if chunk.choices]))
        else:
            answers.append(answer.choices[0].text)
        text += f"{answers[-1]}\n"
    return answers


opened: list[Caller] = []


@pytest.fixture(autouse=True)
async def close_clients() -> AsyncIterator[None]:
    yield
    while opened:
        await opened.pop().client.close()


async def attempt_of(proxy: LLMProxy, store: InMemoryLightningStore) -> Caller:
    opened.append(await new_caller(proxy, store))
    return opened[-1]


async def fork(caller: Caller, n_calls: int) -> Caller:
    source = ReplayFrom(rollout_id=caller.rollout_id, attempt_id=caller.attempt_id, n_calls=n_calls)
    rollout = await caller.store.start_rollout({"task": 1}, metadata=source.as_metadata())
    opened.append(Caller(caller.proxy, caller.store, rollout.rollout_id, rollout.attempt.attempt_id))
    return opened[-1]


@pytest.fixture
async def seeded(upstream: FakeUpstream, store: InMemoryLightningStore) -> AsyncIterator[Caller]:
    """An attempt behind a gateway that seeds each call, so that answers differ between attempts."""
    async with LLMProxy(model_list=[upstream.llm()], store=store, deterministic_seed=3) as proxy:
        yield await attempt_of(proxy, store)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("replayed_stream", [False, True], ids=["replayed-whole", "replayed-stream"])
@pytest.mark.parametrize("agent", [by_chat, by_responses, by_messages, by_completions])
async def test_a_fork_at_call_2_of_4_asks_the_model_twice_and_has_the_recorded_answers_before(
    seeded: Caller, upstream: FakeUpstream, agent: Agent, stream: bool, replayed_stream: bool
) -> None:
    said = await agent(seeded, stream)
    original = await seeded.spans()
    asked_before = len(upstream.requests)
    forked = await fork(seeded, 2)
    said_again = await agent(forked, replayed_stream)
    assert len(upstream.requests) - asked_before == 2
    assert said_again[:2] == said[:2]
    assert said_again[2:] != said[2:]  # another sampling key
    spans = await forked.spans()
    assert [span.attributes.get(semconv.REPLAYED) for span in spans] == [True, True, None, None]
    assert not any(semconv.REPLAY_DIVERGED in span.attributes for span in spans)
    for mine, recorded in zip(spans[:2], original[:2], strict=True):
        assert mine.tokens == recorded.tokens
        assert mine.attributes[semconv.REPLAY_OF] == recorded.span_id
        for name in (semconv.GEN_AI_OUTPUT_MESSAGES, semconv.GEN_AI_RESPONSE_ID, semconv.GEN_AI_INPUT_TOKENS):
            assert mine.attributes[name] == recorded.attributes[name]


async def test_a_server_that_keeps_responses_itself_is_replayed_too(store: InMemoryLightningStore) -> None:
    async with FakeUpstream() as upstream:
        model = UpstreamModel("fake", upstream.endpoint, dialects=("responses",), record_tokens=False)
        async with LLMProxy(model_list=[model], store=store) as proxy:
            caller = await attempt_of(proxy, store)
            said = await by_responses(caller, False)
            await caller.spans()
            asked_before = len(upstream.requests)
            forked = await fork(caller, 3)
            said_again = await by_responses(forked, True)
            spans = await forked.spans()
    assert said_again[:3] == said[:3]
    assert [span.attributes.get(semconv.REPLAYED) for span in spans] == [True, True, True, None]
    assert [request["input"] for request in list(upstream.requests)[asked_before:]] == ["fourth"]
    assert upstream.requests[-1]["previous_response_id"] == spans[2].attributes[semconv.GEN_AI_RESPONSE_ID]


async def test_recorded_calls_are_context_and_cost_nothing(
    upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    model = UpstreamModel("fake", upstream.endpoint, price_per_million=(1e6, 1e6))
    async with LLMProxy(model_list=[model], store=store, deterministic_seed=3) as proxy:
        caller = await attempt_of(proxy, store)
        await by_chat(caller, False)
        forked = await fork(caller, 2)
        await by_chat(forked, False)
        spans = await forked.spans()
        whole = TraceToTrajectory().adapt(await caller.spans())
    sampled = [span.tokens.response_ids for span in spans if span.tokens is not None]
    trained = [trained_ids(each) for each in TraceToTrajectory().adapt(spans)]
    assert [token for ids in trained for token in ids] == [token for ids in sampled[2:] for token in ids]
    assert sum(map(len, sampled)) > sum(map(len, trained))
    assert sum(len(trained_ids(each)) for each in whole) == sum(
        len(span.tokens.response_ids) for span in await caller.spans() if span.tokens
    )
    assert len(TraceToMessages().every_answer(spans)) == 2
    attempt = await store.get_attempt_by_id(forked.rollout_id, forked.attempt_id)
    live = [span.tokens for span in spans[2:] if span.tokens is not None]
    taken = sum(len(tokens.prompt_ids) + len(tokens.response_ids) for tokens in live)
    assert attempt.prompt_tokens + attempt.response_tokens == taken
    assert attempt.cost == pytest.approx(taken)


def trained_ids(trajectory: Any) -> list[int]:
    return [token for token, mine in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if mine]


async def test_an_attempt_of_replayed_calls_alone_trains_nothing(seeded: Caller) -> None:
    await by_chat(seeded, False)
    forked = await fork(seeded, 4)
    await by_chat(forked, False)
    assert TraceToTrajectory().adapt(await forked.spans()) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"messages": "another question"}, 'messages[0].content is "another question", the record has "first"'),
        ({"temperature": 0.7}, "temperature is 0.7, the record has 0.5"),
        ({"stop": ["."]}, 'stop is ["."], the record has null'),
        ({"response_format": {"type": "text"}}, "response_format is"),
        ({"tools": [{"type": "function", "function": {"name": "look"}}]}, "tools is"),
        ({"logprobs": True}, "logprobs are requested"),
    ],
)
async def test_a_request_that_differs_is_live_and_says_what_differs(
    seeded: Caller, upstream: FakeUpstream, change: dict[str, Any], what: str
) -> None:
    async def two_calls(caller: Caller, **changed: Any) -> None:
        for text in ("first", "second"):
            asked: dict[str, Any] = {"temperature": 0.5, **changed, "messages": say(changed.get("messages", text))}
            await caller.client.chat.completions.create(model="fake", **asked)

    await two_calls(seeded)
    asked_before = len(upstream.requests)
    forked = await fork(seeded, 2)
    await two_calls(forked, **change)
    first, second = await forked.spans()
    assert len(upstream.requests) - asked_before == 2
    assert what in str(first.attributes[semconv.REPLAY_DIVERGED])
    assert "\n" not in str(first.attributes[semconv.REPLAY_DIVERGED])
    assert semconv.REPLAYED not in first.attributes
    assert semconv.REPLAYED not in second.attributes
    assert semconv.REPLAY_DIVERGED not in second.attributes


async def test_what_does_not_change_the_answer_is_not_compared(seeded: Caller) -> None:
    await by_chat(seeded, False)
    forked = await fork(seeded, 4)
    answer = await forked.client.chat.completions.create(
        model="a model that nobody serves", messages=say("first"), temperature=0.5, user="someone"
    )
    (span,) = await forked.spans()
    assert span.attributes[semconv.REPLAYED] is True
    assert answer.model == "fake"


async def test_a_changed_agent_diverges_at_the_call_that_it_changed(seeded: Caller, monkeypatch: Any) -> None:
    await by_chat(seeded, False)
    forked = await fork(seeded, 4)
    monkeypatch.setattr("tests.gateway.test_replay.QUESTIONS", ("first", "second", "3rd", "fourth"))
    await by_chat(forked, False)
    spans = await forked.spans()
    assert [span.attributes.get(semconv.REPLAYED) for span in spans] == [True, True, None, None]
    told = spans[2].attributes[semconv.REPLAY_DIVERGED]
    assert told == 'messages[4].content is "3rd", the record has "third"'


async def test_calls_that_were_under_way_together_are_answered_in_any_order(
    store: InMemoryLightningStore,
) -> None:
    async with (
        FakeUpstream(delay_seconds=0.05) as upstream,
        LLMProxy(model_list=[upstream.llm()], store=store, deterministic_seed=1) as proxy,
    ):
        caller = await attempt_of(proxy, store)

        async def ask(of: Caller, texts: list[str]) -> dict[str, str | None]:
            calls = [of.client.chat.completions.create(model="fake", messages=say(text)) for text in texts]
            answers = await asyncio.gather(*calls)
            return {t: answer.choices[0].message.content for t, answer in zip(texts, answers, strict=True)}

        said = await ask(caller, ["a", "b", "c"])
        await ask(caller, ["d"])
        await caller.spans()
        asked_before = len(upstream.requests)
        forked = await fork(caller, 4)
        assert await ask(forked, ["c", "a", "b"]) == said
        assert len(upstream.requests) == asked_before
        other = await fork(caller, 4)
        await ask(other, ["d"])
        (span,) = await other.spans()
        assert semconv.REPLAY_DIVERGED in span.attributes  # "d" was asked after the others had ended


async def test_a_fork_between_calls_that_were_under_way_together_does_not_depend_on_their_order(
    store: InMemoryLightningStore,
) -> None:
    async with FakeUpstream(delay_seconds=0.1) as upstream, LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        original = await attempt_of(proxy, store)

        async def ask(of: Caller, text: str) -> None:
            await of.client.chat.completions.create(model="fake", messages=say(text))

        await asyncio.gather(ask(original, "a"), ask(original, "b"))
        recorded = {str(span.attributes[semconv.GEN_AI_INPUT_MESSAGES]): span for span in await original.spans()}
        kept = next(text for text in ("a", "b") if recorded_first(recorded, text))
        live = "b" if kept == "a" else "a"
        for order in ((kept, live), (live, kept)):
            before, forked = len(upstream.requests), await fork(original, 1)
            for text in order:
                await ask(forked, text)
            assert [body["messages"][-1]["content"] for body in list(upstream.requests)[before:]] == [live]
            assert not [span for span in await forked.spans() if semconv.REPLAY_DIVERGED in span.attributes]


def recorded_first(recorded: dict[str, Span], text: str) -> bool:
    (span,) = [span for messages, span in recorded.items() if f'"{text}"' in messages]
    return span.attributes[semconv.CALL_INDEX] == 0


async def test_equal_questions_to_two_models_at_once_get_the_answers_of_those_models(
    store: InMemoryLightningStore,
) -> None:
    async with (
        FakeUpstream(delay_seconds=0.1, reply=lambda _: "from one") as one,
        FakeUpstream(delay_seconds=0.1, reply=lambda _: "from two") as two,
    ):
        models = [
            UpstreamModel(name, each.endpoint, upstream_model=each.model) for name, each in (("one", one), ("two", two))
        ]
        async with LLMProxy(model_list=models, store=store) as proxy:

            async def ask(ids: tuple[str, str], model: str) -> str | None:
                llm = proxy.as_resource(*ids, model=model)
                async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key="unused", max_retries=0) as client:
                    answer = await client.chat.completions.create(model=model, messages=say("who?"))
                return answer.choices[0].message.content

            rollout = await store.start_rollout({"task": 1})
            original = rollout.rollout_id, rollout.attempt.attempt_id
            assert await asyncio.gather(ask(original, "one"), ask(original, "two")) == ["from one", "from two"]
            await proxy.flush(*original)
            source = ReplayFrom(rollout_id=original[0], attempt_id=original[1], n_calls=2)
            repeated = await store.start_rollout({"task": 1}, metadata=source.as_metadata())
            forked = repeated.rollout_id, repeated.attempt.attempt_id
            assert [await ask(forked, "two"), await ask(forked, "one")] == ["from two", "from one"]
            assert (len(one.requests), len(two.requests)) == (1, 1)


async def test_tool_calls_come_back_with_their_ids(store: InMemoryLightningStore) -> None:
    calls = (ToolCall("look", '{"where": "here"}'), ToolCall("look", '{"where": "there"}'))
    async with (
        FakeUpstream(reply=lambda _: Reply("I look.", calls=calls)) as upstream,
        LLMProxy(model_list=[upstream.llm()], store=store) as proxy,
    ):
        caller = await attempt_of(proxy, store)
        asked: dict[str, Any] = {"model": "fake", "messages": say("?")}
        answer = await caller.client.chat.completions.create(**asked)
        await caller.spans()
        forked = await fork(caller, 1)
        async with forked.client.chat.completions.stream(**asked) as events:
            again = await events.get_final_completion()
    wanted = [call.model_dump(exclude_none=True) for call in answer.choices[0].message.tool_calls or []]
    got = [
        call.model_dump(exclude={"index": True, "function": {"parsed_arguments"}}, exclude_none=True)
        for call in again.choices[0].message.tool_calls or []
    ]
    assert got == wanted
    assert len(wanted) == 2
    assert again.choices[0].finish_reason == answer.choices[0].finish_reason == "tool_calls"
    assert len(upstream.requests) == 1


async def test_failed_calls_and_embeddings_are_no_part_of_a_replay(seeded: Caller, upstream: FakeUpstream) -> None:
    async def agent(caller: Caller) -> None:
        await caller.client.embeddings.create(model="fake", input="a text")
        for text in ("first", "second"):
            for _ in range(2):
                try:
                    await caller.client.chat.completions.create(model="fake", messages=say(text))
                    break
                except openai.APIStatusError:
                    continue

    upstream.misbehave(Misbehaviour(status=400))
    await agent(seeded)
    assert [span.status.status_code for span in await seeded.spans()] == ["OK", "ERROR", "OK", "OK"]
    asked_before = len(upstream.requests)
    forked = await fork(seeded, 4)
    await agent(forked)
    spans = await forked.spans()
    assert [span.attributes.get(semconv.REPLAYED) for span in spans] == [None, True, True]
    assert len(upstream.requests) - asked_before == 1
    assert upstream.requests[-1]["input"] == "a text"


async def test_a_fork_of_a_fork_goes_on_from_what_both_have(seeded: Caller, upstream: FakeUpstream) -> None:
    said = await by_chat(seeded, False)
    await seeded.spans()
    one = await fork(seeded, 2)
    said_there = await by_chat(one, False)
    await one.spans()
    two = await fork(one, 3)
    asked_before = len(upstream.requests)
    last = await by_chat(two, False)
    assert last[:3] == [*said[:2], said_there[2]]
    assert len(upstream.requests) - asked_before == 1


async def test_a_gateway_that_was_started_again_goes_on_with_a_replay(seeded: Caller, upstream: FakeUpstream) -> None:
    said = await by_chat(seeded, False)
    await seeded.spans()
    forked = await fork(seeded, 3)
    messages: list[Any] = say("first")
    asked_before = len(upstream.requests)
    for number, question in enumerate(["second", "third", "fourth"]):
        answer = await forked.client.chat.completions.create(model="fake", messages=messages, temperature=0.5)
        messages = [*messages, {"role": "assistant", "content": answer.choices[0].message.content}, *say(question)]
        if number == 1:
            await forked.proxy.restart()
    spans = await forked.spans()
    assert [span.attributes.get(semconv.REPLAYED) for span in spans] == [True, True, True]
    assert [message["content"] for message in messages if message["role"] == "assistant"] == said[:3]
    assert len(upstream.requests) == asked_before


async def test_a_record_that_is_gone_is_named(seeded: Caller) -> None:
    source = ReplayFrom(rollout_id="ro-gone", attempt_id="at-gone", n_calls=1)
    rollout = await seeded.store.start_rollout({}, metadata=source.as_metadata())
    forked = Caller(seeded.proxy, seeded.store, rollout.rollout_id, rollout.attempt.attempt_id)
    opened.append(forked)
    with pytest.raises(openai.NotFoundError, match=r"no answered model call of rollout 'ro-gone'.*pin a rollout"):
        await forked.client.chat.completions.create(model="fake", messages=say("?"))


@pytest.mark.parametrize(
    "wrong", ["ro-1", {"rollout_id": "ro-1"}, {"rollout_id": "a", "attempt_id": "b", "n_calls": -1}]
)
async def test_metadata_that_names_no_attempt_is_refused(seeded: Caller, wrong: Any) -> None:
    rollout = await seeded.store.start_rollout({}, metadata={semconv.REPLAY_FROM: wrong})
    forked = Caller(seeded.proxy, seeded.store, rollout.rollout_id, rollout.attempt.attempt_id)
    opened.append(forked)
    with pytest.raises(openai.BadRequestError, match=semconv.REPLAY_FROM):
        await forked.client.chat.completions.create(model="fake", messages=say("?"))


async def test_versions_of_the_policy_are_those_of_the_record(store: InMemoryLightningStore) -> None:
    async with FakeUpstream() as upstream, LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        proxy.set_policy_version("fake", 3)
        caller = await attempt_of(proxy, store)
        await by_chat(caller, False)
        await caller.spans()
        proxy.set_policy_version("fake", 9)
        forked = await fork(caller, 2)
        await by_chat(forked, False)
        spans: list[Span] = await forked.spans()
    assert [span.attributes[semconv.POLICY_VERSION] for span in spans] == [3, 3, 9, 9]
    assert [set(span.tokens.policy_versions or ()) for span in spans if span.tokens] == [{3}, {3}, {9}, {9}]
    for trajectory in TraceToTrajectory().adapt(spans):
        assert trajectory.policy_versions == (9, 9)  # of what is trained on
