"""Conversations with the real clients through the gateway, to a model's server that cuts, delays and errs.

`hold_conversations` runs them in one process and returns its figures. Each answer that an agent read to its end has exactly
one span, equal to the server's truth to the token; each call that failed has a span with its reason.
"""

from __future__ import annotations

import asyncio
import random
import re
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

from leyden.gateway import LLMProxy
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream, Misbehaviour, ServedCall, audit_store
from leyden.types import Span, semconv
from tests.gateway.caller import new_caller
from tests.gateway.conversations import (
    AGENTS,
    N_TURNS,
    Agents,
    Answer,
    Conversation,
    assert_exact,
    assert_trainable,
    converse,
    every_case,
    reply,
)

AT_ONCE = 16
REASONS = {
    "429": r"set to fail with status 429",
    "500": r"set to fail with status 500",
    "503": r"set to fail with status 503",
    "garbage": r"a JSON object|the body (is no JSON|must be)|cannot be read|was not requested|before the answer was finished|text/html",
    "cut": r"broke off|before the answer was finished|a JSON object|cannot reach|cannot be read",
    "left": r"disconnected",
}
"""What the span of a failed call says, by what was done to it."""
GARBAGE = (b"", b"<html>bad gateway</html>", b'{"id": "x"', b"[1, 2]", b"\xff", b"data: {oops\n\n", b"null")


class Faults:
    """Decides what goes wrong with each request, and counts it."""

    def __init__(self, chance: random.Random, share: float) -> None:
        """share: of the requests with which something goes wrong."""
        self.done: Counter[str] = Counter()
        self._chance, self._share = chance, share

    def __call__(self, body: dict[str, Any]) -> Misbehaviour | None:
        chance = self._chance
        if chance.random() >= self._share:
            return None
        kind = chance.choice(["429", "500", "503", "garbage", "cut", "cut", "cut", "late", "slow"])
        self.done[kind] += 1
        if kind == "garbage":
            content_type = chance.choice(["application/json", "text/html", "text/event-stream"])
            return Misbehaviour(body=chance.choice(GARBAGE), content_type=content_type)
        if kind == "cut":
            return Misbehaviour(close_after_bytes=int(10 ** chance.uniform(0, 4)))
        if kind == "late":
            return Misbehaviour(delay_seconds=chance.random() * 0.2)
        if kind == "slow":
            return Misbehaviour(chunk_delay_seconds=chance.random() * 0.005)
        return Misbehaviour(status=int(kind), headers={"retry-after-ms": "1"})


CLIENTS = ("openai", "anthropic")


class Persistent:
    """Asks until there is an answer, and counts what went wrong before."""

    def __init__(self, chance: random.Random, *, leaves: float = 0.0, pause_seconds: float = 0.0) -> None:
        """
        leaves: the share of calls that the agent gives up in the middle.
        pause_seconds: between two tries.
        """
        self.failed: Counter[str] = Counter()
        self.stumbled = 0
        """Over garbage, which passes to the client as it came."""
        self.left = 0
        self._chance, self._leaves, self._pause_seconds = chance, leaves, pause_seconds

    async def __call__(self, agent: Any) -> Answer:
        while True:
            patience = self._chance.random() * 0.05 if self._chance.random() < self._leaves else None
            try:
                async with asyncio.timeout(patience):
                    answer = await agent.ask()
                if answer.response_id:
                    return answer
                self.failed["garbage"] += 1
            except TimeoutError:
                self.left += 1
            except Exception as error:
                if not reports_a_failed_call(error):
                    if not stumbles(error):
                        raise
                    self.stumbled += 1
                self.failed[type(error).__name__] += 1
            await asyncio.sleep(self._pause_seconds)


def reports_a_failed_call(error: BaseException) -> bool:
    """Whether a client reports a failed call with this error: one of its own, or one of its HTTP library."""
    return type(error).__module__.partition(".")[0].startswith((*CLIENTS, "httpx", "httpcore"))


def stumbles(error: BaseException) -> bool:
    """Whether a client's own code stumbles with this error over an answer that it cannot read: OpenAI's asserts that a stream
    had a chunk, and one of garbage that ends properly has none, with and without a gateway.
    """
    if isinstance(error, AssertionError):
        return any(f"/{name}/" in traceback.extract_tb(error.__traceback__)[-1].filename for name in CLIENTS)
    return isinstance(error, AttributeError | LookupError | TypeError | ValueError)


async def hold_conversations(
    n: int, seed: int, share: float, *, told: Callable[[], None] = lambda: None
) -> Counter[str]:
    """Hold `n` conversations in every dialect through one gateway, and compare the records with the server's truth.

    share: of the requests with which something goes wrong. told: called after each conversation.
    """
    chance = random.Random(seed)
    faults = Faults(chance, share)
    ask = Persistent(chance, leaves=share / 10)
    limit = asyncio.Semaphore(AT_ONCE)
    async with (
        FakeUpstream(reply=reply, fault=faults) as upstream,
        InMemoryLightningStore() as store,
        LLMProxy(model_list=[upstream.llm()], store=store) as proxy,
        Agents() as agents,
    ):

        async def one(number: int, name: str, stream: bool, kind: str) -> Conversation:
            async with limit:
                caller = await new_caller(proxy, store)
                agent = agents.new(name, caller.llm.endpoint, stream=stream)
                answers = await converse(agent, number, kind, ask=ask)
                told()
                return Conversation(name, stream, kind, answers, await caller.spans())

        cases = every_case(n, AGENTS)
        conversations = await asyncio.gather(*(one(number, *case) for number, case in enumerate(cases)))
        truths = {call.response_id: call for call in upstream.calls}
        assert await audit_store(store) == []
        n_requests = len(upstream.requests)
    assert ask.stumbled <= faults.done["garbage"], f"an answer that was cut passed as a whole one: {ask.failed}"
    n_calls = sum(compare(one, truths) for one in conversations)
    assert n_calls >= n_requests, "the server was asked by a call that has no record"
    reasons = Counter(reason_of(span) for one in conversations for span in one.spans if is_failed(span))
    return Counter(
        conversations=len(conversations),
        answers=n * N_TURNS,
        calls=n_calls,
        given_up=ask.left,
        **{f"recorded_{reason}": number for reason, number in reasons.items()},
        **{f"done_{kind}": number for kind, number in faults.done.items()},
    )


def compare(one: Conversation, truths: dict[str, ServedCall]) -> int:
    """Compare the record of a conversation with what the agent read and the server sampled; return its number of calls."""
    assert len(one.answers) == N_TURNS
    whole = {str(span.attributes[semconv.GEN_AI_RESPONSE_ID]): span for span in one.spans if not is_failed(span)}
    assert len(whole) == sum(not is_failed(span) for span in one.spans), "an answer is recorded twice"
    for answer in one.answers:
        assert_exact(whole[answer.response_id], truths[answer.response_id], answer)
    for response_id, span in whole.items():  # also those that the agent gave up
        if span.tokens is not None:
            assert list(span.tokens.response_ids) == truths[response_id].response_ids
            assert span.tokens.logprobs == truths[response_id].logprobs
    assert_numbered_once(one.spans)
    if one.name != "completions" and len(whole) == N_TURNS:
        assert_trainable(one, [truths[answer.response_id] for answer in one.answers])
    return len(one.spans)


def assert_numbered_once(spans: list[Span]) -> None:
    """No two calls have one number, unless the later one is a retry of the first."""
    numbers = [span.attributes[semconv.CALL_INDEX] for span in spans if semconv.RETRY_OF not in span.attributes]
    assert len(set(numbers)) == len(numbers), sorted(numbers)


def is_failed(span: Span) -> bool:
    return span.status.status_code == "ERROR"


def reason_of(span: Span) -> str:
    """Which of the faults the record of a failed call names."""
    said = str(span.status.description)
    found = next((reason for reason, pattern in REASONS.items() if re.search(pattern, said)), None)
    assert found is not None, f"a failed call whose record names no known reason: {said}"
    return found
