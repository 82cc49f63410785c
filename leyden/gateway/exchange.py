"""One call under way: what came in, what is recorded of it, and how far its answer is.

It knows how to speak to the agent that waits, and nothing of models.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from leyden.dialects import Dialect
from leyden.gateway.asgi import Headers, Scope, Send
from leyden.gateway.attempts import AttemptKey
from leyden.gateway.limits import Spent
from leyden.gateway.record import ModelCall
from leyden.gateway.replay import Replay
from leyden.gateway.retries import Try


@dataclass(slots=True)
class Exchange:
    """One call between an agent and a model."""

    call: ModelCall
    dialect: Dialect
    """The agent's."""
    scope: Scope
    """Of the agent's request."""
    send: Send
    raw: bytes
    """The body of the request, with the overrides of its mode once they are known."""
    mode: str | None = None
    """Of the rollout."""
    sampling_key: str = ""
    """The key of the attempt, from which the seeds of its calls are derived."""
    replay: Replay | None = None
    """The recorded calls that the attempt repeats; None: it repeats none."""
    spent: Spent = field(default_factory=Spent)
    """By the attempt."""
    tried: Try | None = None
    """For the time that the client sends the call again."""
    request: dict[str, Any] = field(default_factory=dict[str, Any])
    """`raw`, parsed."""
    keep: dict[str, Any] | None = None
    """The request of a response that its client may refer to later."""
    price_per_million: tuple[float, float] | None = None
    model_name: str | None = None
    """The model whose server was asked; None: none was."""
    status: int | None = None
    """Of the upstream's answer."""
    answered: bool = False
    """The upstream's answer is whole, or an error stands in its place."""
    recorded: bool = False
    streaming: bool = False
    """The head of a streamed answer has been sent: an error can only be one more event."""
    disconnected: bool = False
    """The agent has gone."""
    attempt_over: bool = False
    said_at: float = 0.0
    """When something was last sent to the agent, in the event loop's time."""
    _saying: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def key(self) -> AttemptKey:
        """The attempt that the call belongs to."""
        return self.call.rollout_id, self.call.attempt_id

    async def begin_stream(self, headers: Headers) -> None:
        """Send the head of a streamed answer, unless it has been."""
        async with self._saying:
            if not self.streaming:
                self.streaming = True
                await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def say(self, part: bytes, *, more: bool = True) -> None:
        """Send a part of a streamed answer: whole events, or a comment."""
        async with self._saying:
            self.said_at = asyncio.get_running_loop().time()
            await self.send({"type": "http.response.body", "body": part, "more_body": more})
