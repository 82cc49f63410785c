"""One call under way: its request, its record, and how far its response has come.

It knows how to reply to the agent that waits, and no model.
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
from leyden.gateway.replay import CallReplay
from leyden.gateway.retries import Try


@dataclass(slots=True)
class Exchange:
    """One call between an agent and a model."""

    call: ModelCall
    dialect: Dialect
    """The agent's dialect."""
    scope: Scope
    """The ASGI scope of the agent's request."""
    send: Send
    raw: bytes
    """The body of the request.

    Overrides of the rollout's mode are part of it once they are known.
    """
    mode: str | None = None
    """The mode of the rollout."""
    sampling_key: str = ""
    """The key of the attempt, from which the seeds of its calls are derived."""
    replay: CallReplay | None = None
    """The recorded calls that the attempt repeats; None if it repeats none."""
    spent: Spent = field(default_factory=Spent)
    """The tokens and the cost that the attempt has spent so far."""
    tried: Try | None = None
    """The entry by which a retry is recognised; None if the client does not mark retries."""
    request: dict[str, Any] = field(default_factory=dict[str, Any])
    """The parsed request."""
    keep: dict[str, Any] | None = None
    """The request whose response is to be kept, because its client may refer to it later."""
    price_per_million: tuple[float, float] | None = None
    model_name: str | None = None
    """The model whose server was called; None if none was."""
    status: int | None = None
    """The HTTP status of the upstream's response."""
    answered: bool = False
    """Whether the response is complete, or an error takes its place."""
    recorded: bool = False
    streaming: bool = False
    """Whether the head of a streamed response has been sent.

    An error can then only be one more event.
    """
    disconnected: bool = False
    """Whether the agent has disconnected."""
    attempt_over: bool = False
    said_at: float = 0.0
    """The time at which something was last sent to the agent, in the event loop's time."""
    _saying: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def key(self) -> AttemptKey:
        """The attempt that the call belongs to."""
        return self.call.rollout_id, self.call.attempt_id

    async def begin_stream(self, headers: Headers) -> None:
        """Send the head of a streamed response, unless it has been sent."""
        async with self._saying:
            if not self.streaming:
                self.streaming = True
                await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def say(self, part: bytes, *, more: bool = True) -> None:
        """Send a part of a streamed response: whole events, or a comment."""
        async with self._saying:
            self.said_at = asyncio.get_running_loop().time()
            await self.send({"type": "http.response.body", "body": part, "more_body": more})
