"""The address that a program reports to: a receiver of its attempt's spans
(`leyden.tracer.receiver`), with one path more.

| request | does |
|---|---|
| `POST /<secret>/reward` | records a reward of the attempt; the body is described in `reward.py` |

A path is served while its attempt runs. To offer another path, add a handler where
`AttemptReports` opens its receiver.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
from collections.abc import Generator, Mapping

from leyden.emitter import emit_reward
from leyden.errors import InvalidEmission
from leyden.host.http import JSON, HttpReply, Refusal, RequestHeaders
from leyden.runner.process.reward import FORMS, read_reward
from leyden.semconv import PRIMARY_REWARD
from leyden.tracer import active_trace
from leyden.tracer.receiver import Receiver
from leyden.types import get_rewards_from_span

_REWARD = "/reward"


class AttemptReports:
    """The address of the current attempt, and the rewards that came in there. Raise NoActiveTrace
    outside of a trace.
    """

    def __init__(self) -> None:
        self.rewards = 0
        self._context = contextvars.copy_context()
        """The attempt's, in which a reward is emitted; entered by the server's thread alone."""
        self._receiver = Receiver(active_trace("reports"), {_REWARD: self._take_reward})
        self.url = self._receiver.url
        self.reward_url = self.url + _REWARD
        """The URL to post a reward to."""

    def close(self) -> None:
        """Refuse further rewards and spans."""
        self._receiver.close()

    async def _take_reward(self, body: bytes, headers: RequestHeaders) -> HttpReply:
        try:
            reward = read_reward(body)
            primary = PRIMARY_REWARD if isinstance(reward, Mapping) and PRIMARY_REWARD in reward else None
            span = self._context.run(functools.partial(emit_reward, reward, primary_key=primary))
        except InvalidEmission as error:
            raise Refusal(400, "bad_reward", str(error)) from None
        except (ValueError, RecursionError) as error:
            raise Refusal(400, "bad_reward", f"the body is no reward: {error!s:.200}; possible: {FORMS}") from None
        self.rewards += 1
        return HttpReply(200, json.dumps({"recorded": get_rewards_from_span(span)}).encode() + b"\n", JSON)


@contextlib.contextmanager
def reports() -> Generator[AttemptReports]:
    """Serve an address for reports of the current trace's program during the block. Raise
    NoActiveTrace outside of a trace.
    """
    opened = AttemptReports()
    try:
        yield opened
    finally:
        opened.close()
