"""The roles of calls that a program makes through the gateway, in three dialects, whole or as a stream, beside hand-written truth."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from leyden.adapter import TraceToTrajectory, call_roles
from leyden.adapter.calls import model_calls
from leyden.gateway import LLMProxy
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream, Reply, ToolCall
from leyden.testing.api_answers import Misbehaviour
from leyden.types import semconv
from tests.gateway.caller import Caller, new_caller

DIALECTS = ("chat/completions", "responses", "messages")
Turn = tuple[str, ...]
"""("user", text), ("says", text), ("calls", id, tool, prompt) or ("got", id, text)"""


@dataclass(frozen=True)
class Call:
    role: str
    """What the call is."""
    system: str
    turns: tuple[Turn, ...]
    answer: str | Turn
    tools: bool = True
    is_cut: bool = False


AGENT = "You are a coding agent that works in a terminal."
HELPER = "You are a helper that searches files."
TITLE = "You are a title generator. Give the conversation a title of at most five words."
TOPIC = "Analyze if this message indicates a new conversation topic. Answer with JSON."
SUM_UP = "Your task is to create a detailed summary of the conversation so far."
TASK: Turn = ("user", "Fix the failing test in parser.py")
LOOK: Turn = ("calls", "c1", "bash", "pytest tests/test_parser.py")
SEEN: Turn = ("got", "c1", "1 failed: split() is off by one")
DONE = "The test passes now, line 12 was wrong."


def sends(id: str, prompt: str) -> Turn:
    return ("calls", id, "task", prompt)


def title(answer: str = "Fix parser test") -> Call:
    return Call("auxiliary", TITLE, (TASK,), answer, tools=False)


def agent(turns: tuple[Turn, ...], answer: str | Turn, role: str = "agent", **more: Any) -> Call:
    return Call(role, AGENT, (TASK, *turns), answer, **more)


def helper(asked: str, turns: tuple[Turn, ...], answer: str | Turn, role: str = "subagent", **more: Any) -> Call:
    return Call(role, HELPER, (("user", asked), *turns), answer, **more)


LEFT, RIGHT, DEEP = (
    "Read the left half of parser.py",
    "Read the right half of parser.py",
    "Count the lines of parser.py",
)
FOUND_LEFT, FOUND_RIGHT, FOUND_DEEP = "The left half splits words.", "The right half is fine.", "It has 4711 lines."
SUMMARY = (
    "<summary>The test of parser.py fails in line 12, where split() is off by one; nothing is mended yet.</summary>"
)
SUMMARIZER = "You are the component that summarizes the chat history into a given structure."
SHORT = "The test fails in line 12."
AFTER = ("user", f"This session continues another one. {SUMMARY[9:-10]}")
FOUND_SUM = "<summary>Read two thirds of the left half of parser.py; it splits words and has no fault so far.</summary>"
GREP, HITS = ("calls", "g1", "bash", "grep -n split parser.py"), ("got", "g1", "12: split(1)")
SED, CHANGED = ("calls", "s1", "bash", "sed -i 12s/1/0/ parser.py"), ("got", "s1", "one line changed")

TRANSCRIPTS: dict[str, list[Call]] = {
    "title beside the agent": [title(), agent((), LOOK), agent((LOOK, SEEN), DONE)],
    "title after the first answer": [agent((), LOOK), title(), agent((LOOK, SEEN), DONE)],
    "topic": [
        Call("auxiliary", TOPIC, (TASK,), '{"isNewTopic": true, "title": "Parser test"}', tools=False),
        agent((), LOOK),
        agent((LOOK, SEEN), DONE),
    ],
    "subagent": [
        agent((), sends("t1", LEFT)),
        helper(LEFT, (), GREP),
        helper(LEFT, (GREP, HITS), FOUND_LEFT),
        agent((sends("t1", LEFT), ("got", "t1", FOUND_LEFT)), DONE),
    ],
    "subagents in the background, of which messages tell": [
        agent((), sends("t1", LEFT)),
        helper(LEFT, (), GREP),
        agent((sends("t1", LEFT), ("got", "t1", '{"agent_id": "7"}')), sends("t2", RIGHT)),
        helper(LEFT, (GREP, HITS), FOUND_LEFT),
        helper(RIGHT, (), FOUND_RIGHT),
        agent(
            (
                sends("t1", LEFT),
                ("got", "t1", '{"agent_id": "7"}'),
                sends("t2", RIGHT),
                ("got", "t2", '{"agent_id": "8"}'),
                ("user", f'<notification>{{"7": {{"completed": "{FOUND_LEFT}"}}}}</notification>'),
                ("user", f"Agent 8 is done: {FOUND_RIGHT}"),
            ),
            DONE,
        ),
    ],
    "a helper in doubt, because the user had its answer before": [
        agent((("user", f"Somebody wrote: {FOUND_LEFT}"),), sends("t1", LEFT)),
        helper(LEFT, (), FOUND_LEFT, role="agent"),
        agent((("user", f"Somebody wrote: {FOUND_LEFT}"), sends("t1", LEFT), ("got", "t1", "sent")), DONE),
    ],
    "a subagent that broke off": [
        agent((), sends("t1", LEFT)),
        helper(LEFT, (), GREP),
        helper(LEFT, (GREP, HITS), "The left half of the file splits", role="discarded", is_cut=True),
        agent((sends("t1", LEFT), ("got", "t1", "Subagent execution failed.")), DONE),
    ],
    "a summary that the conversation did not take": [
        agent((), LOOK),
        Call(
            "auxiliary",
            SUMMARIZER,
            (TASK, LOOK, SEEN, ("user", "Now give the summary.")),
            SUMMARY,
            tools=False,
        ),
        agent((LOOK, SEEN), GREP),
        agent((LOOK, SEEN, GREP, HITS), DONE),
    ],
    "nested subagents": [
        agent((), sends("t1", LEFT)),
        helper(LEFT, (), sends("t2", DEEP)),
        helper(DEEP, (), FOUND_DEEP),
        helper(LEFT, (sends("t2", DEEP), ("got", "t2", FOUND_DEEP)), FOUND_LEFT),
        agent((sends("t1", LEFT), ("got", "t1", FOUND_LEFT)), sends("t3", RIGHT)),
        helper(RIGHT, (), FOUND_RIGHT),
        agent(
            (sends("t1", LEFT), ("got", "t1", FOUND_LEFT), sends("t3", RIGHT), ("got", "t3", FOUND_RIGHT)),
            DONE,
        ),
    ],
    "retry after a cut stream": [
        agent((), "I will run the tests first, and then look at the code.", role="discarded", is_cut=True),
        agent((), LOOK),
        agent((LOOK, SEEN), "I look once more.", role="discarded", is_cut=True),
        agent((LOOK, SEEN), DONE),
    ],
    "the client's duplicate": [
        agent((), "I run the tests of the parser now.", role="discarded"),
        agent((), LOOK),
        agent((LOOK, SEEN), DONE),
    ],
    "a subagent's duplicate": [
        agent((), sends("t1", LEFT)),
        helper(LEFT, (), "I search the file for calls of split.", role="discarded"),
        helper(LEFT, (), GREP),
        helper(LEFT, (GREP, HITS), FOUND_LEFT),
        agent((sends("t1", LEFT), ("got", "t1", FOUND_LEFT)), DONE),
    ],
    "compaction": [
        agent((), LOOK),
        agent((LOOK, SEEN, ("user", SUM_UP)), SUMMARY, role="compaction"),
        Call("agent", AGENT, (AFTER,), SED),
        Call("agent", AGENT, (AFTER, SED, CHANGED), DONE),
    ],
    "compaction without tools": [
        agent((), LOOK),
        agent((LOOK, SEEN, ("user", SUM_UP)), SUMMARY, role="compaction", tools=False),
        Call("agent", AGENT, (AFTER,), SED),
        Call("agent", AGENT, (AFTER, SED, CHANGED), DONE),
    ],
    "compaction as text, put into the model's mouth": [
        agent((), LOOK),
        Call(
            "compaction",
            SUMMARIZER,
            (("user", f"[user] {TASK[1]}\n[bash] {LOOK[3]}\n{SEEN[2]}\n{SUM_UP}"),),
            SHORT,
            tools=False,
        ),
        agent((("says", SHORT), ("user", "Go on.")), SED),
        agent((("says", SHORT), ("user", "Go on."), SED, CHANGED), DONE),
    ],
    "compaction of the oldest messages": [
        agent((), LOOK),
        agent((LOOK, SEEN), SED),
        Call("compaction", SUMMARIZER, (TASK, ("user", SUM_UP)), SUMMARY, tools=False),
        Call("agent", AGENT, (AFTER, ("says", "Thanks."), ("user", "Go on."), LOOK, SEEN, SED, CHANGED), DONE),
    ],
    "a compaction that was not used": [
        agent((), LOOK),
        Call("auxiliary", SUMMARIZER, (("user", f"{LOOK[3]}\n{SUM_UP}"),), SHORT, tools=False),
        agent((LOOK, SEEN), DONE),
    ],
    "compaction of a subagent": [
        agent((), sends("t1", LEFT)),
        helper(LEFT, (), GREP),
        helper(LEFT, (GREP, HITS, ("user", SUM_UP)), FOUND_SUM, role="compaction"),
        helper(f"{LEFT}\nSo far: {FOUND_SUM[9:-10]}", (), FOUND_LEFT),
        agent((sends("t1", LEFT), ("got", "t1", FOUND_LEFT)), DONE),
    ],
}


def chat_body(call: Call) -> dict[str, Any]:
    def message(turn: Turn) -> dict[str, Any]:
        kind, *rest = turn
        if kind == "calls":
            function = {"name": rest[1], "arguments": json.dumps({"prompt": rest[2]})}
            return {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": rest[0], "type": "function", "function": function}],
            }
        if kind == "got":
            return {"role": "tool", "tool_call_id": rest[0], "content": rest[1]}
        return {"role": "user" if kind == "user" else "assistant", "content": rest[0]}

    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES]
    return {"messages": [{"role": "system", "content": call.system}, *map(message, call.turns)], "tools": tools}


def responses_body(call: Call) -> dict[str, Any]:
    def item(turn: Turn) -> dict[str, Any]:
        kind, *rest = turn
        if kind == "calls":
            arguments = json.dumps({"prompt": rest[2]})
            return {"type": "function_call", "call_id": rest[0], "name": rest[1], "arguments": arguments}
        if kind == "got":
            return {"type": "function_call_output", "call_id": rest[0], "output": rest[1]}
        return {"role": "user" if kind == "user" else "assistant", "content": rest[0]}

    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in NAMES]
    return {"instructions": call.system, "input": list(map(item, call.turns)), "tools": tools}


def messages_body(call: Call) -> dict[str, Any]:
    def message(turn: Turn) -> dict[str, Any]:
        kind, *rest = turn
        if kind == "calls":
            used = {"type": "tool_use", "id": rest[0], "name": rest[1], "input": {"prompt": rest[2]}}
            return {"role": "assistant", "content": [used]}
        if kind == "got":
            result = {"type": "tool_result", "tool_use_id": rest[0], "content": rest[1]}
            return {"role": "user", "content": [result]}
        return {"role": "user" if kind == "user" else "assistant", "content": [{"type": "text", "text": rest[0]}]}

    tools = [{"name": name, "input_schema": {"type": "object"}} for name in NAMES]
    system = [{"type": "text", "text": call.system}]
    return {"system": system, "messages": list(map(message, call.turns)), "tools": tools, "max_tokens": 500}


NAMES = ("bash", "task")
BODIES = {"chat/completions": chat_body, "responses": responses_body, "messages": messages_body}


class Program:
    """Sends a transcript, each call after the other; the model gives the transcript's answers."""

    def __init__(self, caller: Caller, answers: list[Call]) -> None:
        self.caller, self.answers = caller, answers

    async def run(self, upstream: FakeUpstream, calls: list[Call], dialect: str, *, stream: bool) -> None:
        url = f"{self.caller.llm.endpoint}/{dialect}"
        headers = {"Authorization": f"Bearer {self.caller.llm.api_key}", "anthropic-version": "2023-06-01"}
        async with aiohttp.ClientSession() as session:
            for call in calls:
                self.answers.append(call)
                body = {"model": "fake", **BODIES[dialect](call), "stream": stream or call.is_cut}
                if not call.tools:
                    del body["tools"]
                if call.is_cut:
                    upstream.misbehave(Misbehaviour(close_after_chunks=2))
                try:
                    async with session.post(url, json=body, headers=headers) as response:
                        assert response.status == 200 or call.is_cut, await response.text()
                        await response.read()
                except aiohttp.ClientError:
                    assert call.is_cut


@pytest.fixture
async def program(store: InMemoryLightningStore) -> AsyncIterator[tuple[FakeUpstream, Program]]:
    answers: list[Call] = []

    def reply(body: Any) -> str | Reply:
        answer = answers[-1].answer
        if isinstance(answer, str):
            return answer
        _, id, tool, prompt = answer
        return Reply(calls=(ToolCall(tool, json.dumps({"prompt": prompt}), id),))

    async with FakeUpstream(reply=reply) as upstream, LLMProxy(model_list=[upstream.llm()], store=store) as proxy:
        yield upstream, Program(await new_caller(proxy, store), answers)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", TRANSCRIPTS)
async def test_each_call_has_the_role_that_was_written_down_and_only_the_agents_tokens_are_trained_on(
    program: tuple[FakeUpstream, Program], name: str, dialect: str, stream: bool
) -> None:
    upstream, client = program
    calls = TRANSCRIPTS[name]
    await client.run(upstream, calls, dialect, stream=stream)
    spans = await client.caller.spans()
    views = model_calls(spans)
    roles = call_roles(views, spans)
    assert [each.role for each in roles] == [call.role for call in calls]
    assert [each.doubt is not None for each in roles] == [
        "in doubt" in name and call.role == "agent" and call.system == HELPER for call in calls
    ]
    summed_up = {each.thread for each in roles if each.role == "compaction"}
    assert summed_up <= {"subagent" if name == "compaction of a subagent" else "agent"}

    served = {call.response_id: call.response_ids for call in upstream.calls}
    ids = [served.get(str(view.span.attributes.get(semconv.GEN_AI_RESPONSE_ID)), []) for view in views]

    def is_trained(*chosen: str) -> None:
        """Check that the answers of these roles are trained on, each once."""
        rows = TraceToTrajectory(roles=chosen or None).adapt(spans)
        trained = sorted(id for row in rows for id, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask)
        wanted = [
            each
            for each, call, role in zip(ids, calls, roles, strict=True)
            if call.role in (chosen or ("agent",)) and role.thread in (chosen or ("agent",))
        ]
        assert trained == sorted(id for each in wanted for id in each)

    is_trained()
    is_trained("agent", "subagent")
    is_trained("agent", "subagent", "compaction")
    is_trained("agent", "compaction")
