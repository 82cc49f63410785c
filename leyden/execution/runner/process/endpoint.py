"""The address that a program reports to: a receiver of its attempt's spans (`leyden.tracing.receiver`), with one path
more.

| request | does |
|---|---|
| `POST /<secret>/reward` | records a reward of the attempt; the body is described in `reported_reward.py` |

A path is served while its attempt runs. To offer another path, add a handler where `AttemptReports` opens its receiver.
"""

from __future__ import annotations

import contextvars
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from leyden._lib.host.http import JSON, HttpReply, Refusal, RequestHeaders
from leyden.agent.emitter import emit_reward
from leyden.errors import InvalidEmission
from leyden.execution.runner.process.reported_reward import FORMS, read_reward
from leyden.tracing import active_trace
from leyden.tracing.receiver import Receiver
from leyden.types import Span, get_rewards_from_span, is_reward_span
from leyden.types.semconv import PRIMARY_REWARD

_REWARD = "/reward"


class _LimitedReceiver(Receiver):
    """A receiver that keeps rewards and at most `max_spans` other spans, or only those of model calls among them
    (`only_of_models`), and counts the spans that it leaves out.
    """

    left_out = 0

    def __init__(self, *arguments: Any, only_of_models: bool, max_spans: int) -> None:
        super().__init__(*arguments)
        self._only_of_models, self._room = only_of_models, max_spans

    async def add_many_spans(self, spans: Sequence[Span]) -> None:
        wanted: list[Span] = []
        for span in spans:
            if is_reward_span(span):
                wanted.append(span)
            elif self._room > 0 and (not self._only_of_models or _is_of_models(span)):
                self._room -= 1
                wanted.append(span)
        self.left_out += len(spans) - len(wanted)
        await super().add_many_spans(wanted)


def _is_of_models(span: Span) -> bool:
    """Return whether a span follows OpenTelemetry's conventions for generative models, or is Leyden's own."""
    return any(name.startswith(("gen_ai.", "leyden.")) for name in (span.name, *span.attributes))


class AttemptReports:
    """An address for the current attempt's rewards and spans, until `close`. Raise NoActiveTrace outside of a trace."""

    def __init__(self, *, only_of_models: bool = False, max_spans: int = 10_000) -> None:
        """only_of_models, max_spans: as of `ProcessAgent`."""
        self.rewards = 0
        """How many rewards were posted."""
        self._context = contextvars.copy_context()
        """The context of the attempt, in which a reward is emitted. Only the server's thread enters it."""
        self._receiver = _LimitedReceiver(
            active_trace("reports"), {_REWARD: self._take_reward}, only_of_models=only_of_models, max_spans=max_spans
        )
        self.url = self._receiver.url
        """The base URL, to which OpenTelemetry sends its spans."""
        self.reward_url = self.url + _REWARD
        """The URL to post a reward to."""

    @property
    def left_out(self) -> int:
        """The number of spans that were not kept."""
        return self._receiver.left_out

    def close(self) -> None:
        """Refuse further rewards and spans."""
        self._receiver.close()

    async def _take_reward(self, body: bytes, headers: RequestHeaders) -> HttpReply:
        """Emit the posted reward in the attempt's trace, and return the recorded rewards. Raise Refusal (status 400)
        for a body that is no reward.
        """
        try:
            reward = read_reward(body)
            primary = PRIMARY_REWARD if isinstance(reward, Mapping) and PRIMARY_REWARD in reward else None
            span = self._context.run(functools.partial(emit_reward, reward, primary_key=primary))
        except InvalidEmission as error:
            raise Refusal(400, "bad_reward", str(error)) from None
        except (ValueError, RecursionError) as error:
            raise Refusal(400, "bad_reward", f"the body is not a reward: {error!s:.200}; possible: {FORMS}") from None
        self.rewards += 1
        return HttpReply(200, json.dumps({"recorded": get_rewards_from_span(span)}).encode() + b"\n", JSON)
