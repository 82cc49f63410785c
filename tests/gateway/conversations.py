"""Conversations through the gateway with the real clients, and what their record must be.

One agent in each dialect: it asks, reads the answer (whole or as a stream), runs the tools that the model calls, and goes on,
telling the model its own answers as the client gave them. What the model says follows from the turn, so every record can be
compared with what the fake model knows.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

from leyden.adapter import TraceToTrajectory
from leyden.testing import Reply, ServedCall, ToolCall, request_prompt_ids
from leyden.types import Span, semconv

TOOL_NAMES = ("weather", "größe")
SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
N_TURNS = 3
KINDS = ("tools", "parallel tools", "reasoning", "rewritten context")
HAS_ANTHROPIC = importlib.util.find_spec("anthropic") is not None
AGENTS = ("chat", "completions", "responses", "responses by id", *(("messages",) if HAS_ANTHROPIC else ()))
STREAMS = (False, True)


def reply(body: dict[str, Any]) -> Reply:
    """What the model says: it calls tools in every turn but the last ones, as the kind that is in the question wants it."""
    said = json.dumps(body, ensure_ascii=False)
    kind = next(kind for kind in KINDS if f"({kind})" in said)
    turn = said.count("result of") // (2 if kind == "parallel tools" else 1)
    reasoning = f"hm 雷 {turn}" if kind == "reasoning" else ""
    if turn >= N_TURNS - 1 or kind == "rewritten context":
        return Reply(f"It is 🌩 {len(said)}.", reasoning)
    n_calls = 2 if kind == "parallel tools" else 1
    calls = tuple(
        ToolCall(TOOL_NAMES[n], json.dumps({"place": f"Zü {turn}{n}"}, ensure_ascii=False), f"call_{turn}_{n}")
        for n in range(n_calls)
    )
    return Reply("" if kind == "parallel tools" else "Wait. ", reasoning, calls)


@dataclass
class Answer:
    """What an agent saw of one answer."""

    response_id: str
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, Any]] = field(default_factory=list)
    """(id, name, arguments as an object)"""
    prompt_ids: list[int] = field(default_factory=list)
    """What the agent's own request says, read as a server of its API reads it."""
    n_response: int | None = None
    """What the usage counted; None where the client was not told."""


def result_of(name: str, arguments: Any) -> str:
    return f"result of {name}: {arguments['place']} is 20°"


class ChatAgent:
    """OpenAI's client, chat completions."""

    path = "chat/completions"

    def __init__(self, client: AsyncOpenAI, *, stream: bool) -> None:
        self.client, self.stream = client, stream
        self.messages: list[Any] = [{"role": "system", "content": "Be brief. Größe zählt."}]

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def rewrite(self) -> None:
        """Forget all turns but the first, as agents do that summarise."""
        self.messages = [*self.messages[:1], {"role": "user", "content": "Summary (rewritten context): all is well."}]

    async def ask(self) -> Answer:
        functions = [{"name": name, "description": f"The {name}.", "parameters": SCHEMA} for name in TOOL_NAMES]
        options: Any = {"model": "fake", "messages": self.messages}
        options["tools"] = [{"type": "function", "function": function} for function in functions]
        prompt_ids = request_prompt_ids(self.path, options)
        if self.stream:
            chunks = []
            async with self.client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
                async for event in stream:
                    chunks.append(event)
                completion = await stream.get_final_completion()
        else:
            completion = await self.client.chat.completions.create(**options)
        message = completion.choices[0].message
        found = message.model_dump(exclude_none=True, exclude={"parsed"})
        for call in found.get("tool_calls") or ():
            call["function"].pop("parsed_arguments", None)
            call.pop("index", None)
        self.messages.append(found)
        calls = [(c.id, c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or ()]
        reasoning = found.get("reasoning") or found.get("reasoning_content") or ""
        assert completion.usage is not None
        return Answer(
            completion.id, message.content or "", reasoning, calls, prompt_ids, completion.usage.completion_tokens
        )

    def tell(self, results: list[tuple[str, str]]) -> None:
        for call_id, result in results:
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": result})


class CompletionsAgent:
    """OpenAI's client, completions: text alone, and the agent is its own chat template."""

    path = "completions"

    def __init__(self, client: AsyncOpenAI, *, stream: bool) -> None:
        self.client, self.stream = client, stream
        self.prompt = "Be brief. Größe zählt.\n"

    def say(self, text: str) -> None:
        self.prompt += f"user: {text}\n"

    def rewrite(self) -> None:
        self.prompt = "Summary (rewritten context): all is well.\n"

    async def ask(self) -> Answer:
        if not self.stream:
            whole = await self.client.completions.create(model="fake", prompt=self.prompt)
            text, response_id = whole.choices[0].text, whole.id
        else:
            text, response_id = "", ""
            async for chunk in await self.client.completions.create(model="fake", prompt=self.prompt, stream=True):
                text, response_id = text + chunk.choices[0].text, chunk.id
        prompt_ids = request_prompt_ids(self.path, {"prompt": self.prompt})
        self.prompt += text
        return Answer(response_id, text, prompt_ids=prompt_ids)

    def tell(self, results: list[tuple[str, str]]) -> None:
        assert not results


class ResponsesAgent:
    """OpenAI's client, responses: with the whole conversation each time, or by `previous_response_id`."""

    path = "responses"

    def __init__(self, client: AsyncOpenAI, *, stream: bool, stateful: bool = False) -> None:
        self.client, self.stream, self.stateful = client, stream, stateful
        self.items: list[Any] = []
        self.n_told = 0
        self.before: str | None = None

    def say(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def rewrite(self) -> None:
        self.items, self.n_told = [{"role": "user", "content": "Summary (rewritten context): all is well."}], 0
        self.before = None

    async def ask(self) -> Answer:
        tools = [
            {"type": "function", "name": name, "description": f"The {name}.", "parameters": SCHEMA, "strict": False}
            for name in TOOL_NAMES
        ]
        options: Any = {"model": "fake", "input": self.items, "instructions": "Be brief. Größe zählt.", "tools": tools}
        prompt_ids = request_prompt_ids(self.path, options)
        if self.stateful:
            options |= {"previous_response_id": self.before, "input": self.items[self.n_told :]}
        if self.stream:
            async with self.client.responses.stream(**options) as stream:
                numbers = [event.sequence_number async for event in stream]
                response = await stream.get_final_response()
            assert numbers == list(range(len(numbers)))
        else:
            response = await self.client.responses.create(**options)
        assert response.status == "completed"
        self.before = response.id
        output = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
        for item in output:
            for part in item.get("content") or ():
                part.pop("parsed", None)
        self.items += output
        self.n_told = len(self.items)
        reasoning = "".join(
            part.text for item in response.output if item.type == "reasoning" for part in item.content or ()
        )
        calls = [(c.call_id, c.name, json.loads(c.arguments)) for c in response.output if c.type == "function_call"]
        assert response.usage is not None
        return Answer(response.id, response.output_text, reasoning, calls, prompt_ids, response.usage.output_tokens)

    def tell(self, results: list[tuple[str, str]]) -> None:
        for call_id, result in results:
            self.items.append({"type": "function_call_output", "call_id": call_id, "output": result})


class MessagesAgent:
    """Anthropic's client."""

    path = "messages"

    def __init__(self, client: Any, *, stream: bool) -> None:
        self.client, self.stream = client, stream
        self.messages: list[Any] = []

    def say(self, text: str) -> None:
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages[-1]["content"].append({"type": "text", "text": text})
        else:
            self.messages.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def rewrite(self) -> None:
        self.messages = [{"role": "user", "content": "Summary (rewritten context): all is well."}]

    async def ask(self) -> Answer:
        tools = [{"name": name, "description": f"The {name}.", "input_schema": SCHEMA} for name in TOOL_NAMES]
        options: Any = {"model": "fake", "max_tokens": 4096, "system": "Be brief. Größe zählt."}
        options |= {"messages": self.messages, "tools": tools}
        prompt_ids = request_prompt_ids(self.path, options)
        if self.stream:
            async with self.client.messages.stream(**options) as stream:
                message = await stream.get_final_message()
        else:
            message = await self.client.messages.create(**options)
        content = [block.model_dump(exclude_none=True, exclude={"parsed_output"}) for block in message.content]
        self.messages.append({"role": "assistant", "content": content})
        return Answer(
            message.id,
            "".join(block["text"] for block in content if block["type"] == "text"),
            "".join(block["thinking"] for block in content if block["type"] == "thinking"),
            [(block["id"], block["name"], block["input"]) for block in content if block["type"] == "tool_use"],
            prompt_ids,
            message.usage.output_tokens,
        )

    def tell(self, results: list[tuple[str, str]]) -> None:
        blocks = [{"type": "tool_result", "tool_use_id": call_id, "content": result} for call_id, result in results]
        if blocks:
            self.messages.append({"role": "user", "content": blocks})


async def ask_once(agent: Any) -> Answer:
    """Ask, and let an error end the conversation."""
    return await agent.ask()


async def converse(
    agent: Any, number: int, kind: str, *, ask: Callable[[Any], Awaitable[Answer]] = ask_once
) -> list[Answer]:
    """One conversation; the answers that the agent saw.

    ask: how a turn is asked. An agent whose `ask` raised has not changed, and may ask again.
    """
    agent.say(f"Question {number} ({kind})?")
    answers: list[Answer] = []
    for turn in range(N_TURNS):
        answer = await ask(agent)
        answers.append(answer)
        agent.tell([(call_id, result_of(name, arguments)) for call_id, name, arguments in answer.calls])
        if not answer.calls:
            if kind == "rewritten context" and turn == 0:
                agent.rewrite()
            else:
                agent.say(f"And then, {turn}?")
    return answers


class Agents:
    """Agents in every dialect. The clients are shared, as programs do; each agent has its own base URL."""

    def __init__(self) -> None:
        options: Any = {"base_url": "http://nowhere", "api_key": "EMPTY", "max_retries": 0, "timeout": 120}
        self.openai = AsyncOpenAI(**options)
        self.anthropic: Any = None
        if HAS_ANTHROPIC:
            from anthropic import AsyncAnthropic

            self.anthropic = AsyncAnthropic(**options)

    async def __aenter__(self) -> Agents:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.openai.close()
        if HAS_ANTHROPIC:
            await self.anthropic.close()

    def new(self, name: str, url: str, *, stream: bool) -> Any:
        """An agent that speaks `name`. url: the base URL of its attempt, for OpenAI's clients."""
        if name == "messages":
            return MessagesAgent(self.anthropic.with_options(base_url=url.removesuffix("/v1")), stream=stream)
        client = self.openai.with_options(base_url=url)
        if name.startswith("responses"):
            return ResponsesAgent(client, stream=stream, stateful=name == "responses by id")
        return (ChatAgent if name == "chat" else CompletionsAgent)(client, stream=stream)


@dataclass(frozen=True)
class Conversation:
    """One conversation, as its agent saw it and as it was recorded."""

    name: str
    stream: bool
    kind: str
    answers: list[Answer]
    spans: list[Span]


def every_case(n: int, names: Sequence[str]) -> list[tuple[str, bool, str]]:
    """`n` cases, each agent with and without a stream and with every kind in turn."""
    cases = itertools.cycle(itertools.product(names, STREAMS, KINDS))
    return [
        (name, stream, "rewritten context" if name == "completions" else kind)
        for name, stream, kind in itertools.islice(cases, n)
    ]


def assert_exact(span: Span, truth: ServedCall, answer: Answer) -> None:
    assert span.status.status_code == "OK"
    assert span.tokens is not None, span.attributes.get(semconv.TOKENS_REFUSED)
    assert list(span.tokens.prompt_ids) == truth.prompt_ids
    assert list(span.tokens.response_ids) == truth.response_ids
    assert span.tokens.logprobs == truth.logprobs
    assert_same_answer(truth, answer)


def assert_same_answer(truth: ServedCall, answer: Answer) -> None:
    assert truth.response_id == answer.response_id
    assert truth.prompt_ids == answer.prompt_ids
    assert (truth.text, truth.reasoning) == (answer.text, answer.reasoning)
    arguments = [(call.call_id, call.name, json.loads(call.arguments)) for call in truth.calls]
    assert arguments == answer.calls
    assert answer.n_response in (len(truth.response_ids), None)


def assert_trainable(conversation: Conversation, truths: list[ServedCall]) -> None:
    """Each turn goes on from the one before it, to the id, but where the agent rewrote its context; and what is trained is what
    was sampled."""
    trajectories = TraceToTrajectory().adapt(conversation.spans)
    assert len(trajectories) == (2 if conversation.kind == "rewritten context" else 1)
    trained = [
        (id_, logprob)
        for one in trajectories
        for id_, mask, logprob in zip(one.token_ids, one.loss_mask, one.logprobs, strict=True)
        if mask
    ]
    assert trained == [pair for call in truths for pair in zip(call.response_ids, call.logprobs, strict=True)]
