"""`Reflector`: calls the reflection model, records its answers, and asks once more after an answer that cannot be used.

It knows a client or a gateway's model. It does not know the questions, nor how the answers are used.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from leyden._lib.text import error_line
from leyden.adapter.chat_messages import message_text
from leyden.algorithm.collector import RolloutCollector
from leyden.algorithm.prompts.journal import Journal
from leyden.algorithm.prompts.texts import shown_text
from leyden.errors import BudgetExceeded, LeydenError, ReflectionFailed
from leyden.types import LLM

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)

T = TypeVar("T")
Message = dict[str, str]
Recorded = Callable[..., AbstractAsyncContextManager[LLM]]
"""The type of `Algorithm.recorded_calls`."""

_TRIES = 2
"""How often a question is asked at most if its answers cannot be used."""
_WHOLE = frozenset(["", "stop", "eos", "end_turn", "stop_sequence", "tool_calls", "tool_use", "function_call"])
"""The `finish_reason` of an answer that the model has ended itself."""
_SHOWN_CHARACTERS = 300
"""How much of an error's text a message shows."""
_SLOW_SECONDS = 30.0
"""Seconds after which a call without an answer causes a warning."""


@dataclass(slots=True)
class ReflectionCounts:
    """Counts of the reflection calls of one round."""

    calls: int = 0
    """The number of calls that were made, including failed ones."""
    replayed: int = 0
    """The number of answers that were read from the journal."""
    refused: int = 0
    """The number of questions without a usable answer after all tries."""
    last_problem: str = ""
    """Why the newest unusable answer could not be used."""
    errors: Counter[str] = field(default_factory=Counter[str])
    """The number of failed calls, by error."""

    def metrics(self) -> dict[str, float]:
        """Return the counts for the metrics of a round."""
        return {
            "reflection_calls": self.calls + self.replayed,
            "refused_answers": self.refused,
            "failed_calls": self.errors.total(),
        }

    def check(self, what: str) -> None:
        """Raise ReflectionFailed if calls were made and all of them failed.

        what: names the calls in the message, such as "round 1".
        """
        if self.errors and self.errors.total() == self.calls and not self.replayed:
            raise ReflectionFailed(
                f"no reflection call of {what} succeeded: {next(iter(self.errors))}; check the key, the model and its "
                "rate limit, then continue with fit(..., resume=True), which repeats what failed"
            )


class Reflector:
    """Calls the reflection model within the budget, and records its answers in a journal.

    client: any OpenAI-compatible client; None: a model of the gateway.
    recorded: `Algorithm.recorded_calls`, which opens an attempt in which the gateway records calls.
    collector: has the budget from which each call is paid.
    journal: has the answers that earlier processes of this run have received.
    temperature: the sampling temperature of all calls.
    """

    def __init__(
        self,
        client: AsyncOpenAI | None,
        recorded: Recorded,
        collector: RolloutCollector,
        journal: Journal,
        *,
        temperature: float,
    ) -> None:
        self._client, self._recorded, self._collector, self._journal = client, recorded, collector, journal
        self._temperature = temperature
        self.counts = ReflectionCounts()

    async def ask(
        self,
        purpose: str,
        model: str | None,
        question: str,
        check: Callable[[str], tuple[T | None, str]],
        *,
        place: str,
    ) -> T | None:
        """Ask the reflection model, and return the value that `check` makes of its answer; None if no answer can be
        used.

        If an answer cannot be used, the model is asked once more, with the reason. An error of the call is only
        counted.
        purpose: names the call in the gateway's record and in messages.
        model: the model's name; None: the only one.
        check: takes an answer and returns a value and "", or None and why the answer cannot be used.
        place: the key under which the journal keeps the answer for a resumed run; empty: it is not kept.
        Raise BudgetExceeded if the budget has no room for the call, or its time is over.
        """
        messages: list[Message] = [{"role": "user", "content": question}]
        for attempt in range(_TRIES):
            found = await self._answer(purpose, model, messages, f"{place}/{attempt}" if place else "")
            if found is None:
                return None
            answer, fault = found
            value, problem = check(answer) if not fault else (None, fault)
            if value is not None:
                return value
            logger.info("%s %s: an answer cannot be used, because %s", purpose, place, problem)
            messages += [
                {"role": "assistant", "content": (shown_text(answer) if fault else answer) or "(no text)"},
                {"role": "user", "content": f"This answer cannot be used: {problem}. Please answer again."},
            ]
            self.counts.last_problem = problem
        self.counts.refused += 1
        return None

    async def _answer(
        self, purpose: str, model: str | None, messages: list[Message], place: str
    ) -> tuple[str, str] | None:
        """Return the journal's or the model's answer, and its fault; None if the call failed."""
        kept = self._journal.get(place) if place else None
        if kept is not None:
            self.counts.replayed += 1
            return kept, self._journal.fault(place)
        self.counts.calls += 1
        try:
            answer, fault, tokens = await self._call_in_time(purpose, model, messages, place)
        except LeydenError:
            raise
        except Exception as error:  # noqa: BLE001 -- a client of any package; the other branches go on
            self.counts.errors[error_line(error)[:_SHOWN_CHARACTERS]] += 1
            return None
        if place:
            self._journal.add(place, answer, fault=fault, purpose=purpose, tokens=tokens)
        return answer, fault

    async def _call_in_time(
        self, purpose: str, model: str | None, messages: list[Message], place: str
    ) -> tuple[str, str, int]:
        """Warn once of an answer that takes `_SLOW_SECONDS`. Raise BudgetExceeded at the end of the budget's time."""
        budget = self._collector.budget
        slow = asyncio.get_running_loop().call_later(
            _SLOW_SECONDS,
            logger.warning,
            "%s %s: no answer of the reflection model for %.0f s; the run waits for it, unless a Budget(seconds=...) or the "
            "client's timeout ends the call",
            *(purpose, place, _SLOW_SECONDS),
        )
        try:
            if budget.seconds_left != 0:
                async with asyncio.timeout(budget.seconds_left):
                    return await self._call(purpose, model, messages, place)
        except TimeoutError:
            if budget.seconds_left != 0:  # the client's own limit
                raise
        finally:
            slow.cancel()
        raise BudgetExceeded(
            f"the time of Budget(seconds={budget.seconds:g}) is over, and a reflection call has not been answered; "
            "give a larger budget"
        )

    async def _call(self, purpose: str, model: str | None, messages: list[Message], place: str) -> tuple[str, str, int]:
        """Return the answer, its fault, and the tokens of question and answer together."""
        if self._client is None:
            async with self._recorded(purpose, model=model, metadata={"place": place}) as llm:
                return await self._complete(llm.openai(), llm.model, messages)
        async with self._collector.reserve_attempt() as settle:
            answer, fault, tokens = await self._complete(self._client, model, messages)
            settle(self._collector.budget.call_of_own_client(place or purpose, tokens))
            return answer, fault, tokens

    async def _complete(self, client: Any, model: str | None, messages: list[Message]) -> tuple[str, str, int]:
        answer: Any = await client.chat.completions.create(
            model=model, messages=messages, temperature=self._temperature
        )
        choices: list[Any] = answer.choices or []
        tokens: Any = getattr(getattr(answer, "usage", None), "total_tokens", None) or 0
        if not choices:
            return "", "", int(tokens)
        return message_text(choices[0].message.content), _fault_of(choices[0]), int(tokens)


def _fault_of(choice: Any) -> str:
    """Return why a choice of a chat completion is no whole text, as a sentence for the model; empty if it is one."""
    reason = str(getattr(choice, "finish_reason", None) or "").lower()
    if reason in ("length", "max_tokens", "max_output_tokens", "model_length"):
        return f"it was cut off at the limit of its length (finish_reason {reason!r}); write a shorter one"
    if reason not in _WHOLE:
        return f"it is not whole (finish_reason {reason!r})"
    if not choice.message.content:
        if getattr(choice.message, "tool_calls", None) or getattr(choice.message, "function_call", None):
            return "it calls a tool, and has no text"
        if refusal := getattr(choice.message, "refusal", None):
            return f"it is a refusal: {str(refusal)[:_SHOWN_CHARACTERS]}"
    return ""
