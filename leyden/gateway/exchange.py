"""`Exchange`: one call under way, with its request, its record and the state of its response.

It knows how to reply to the waiting agent, and no model.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from leyden.dialects import Dialect
from leyden.gateway.asgi import Headers, Scope, Send
from leyden.gateway.attempts import AttemptKey
from leyden.gateway.call_replay import CallReplay
from leyden.gateway.limits import Spent
from leyden.gateway.prices import Price
from leyden.gateway.record import ModelCall
from leyden.gateway.retries import Try
from leyden.gateway.upstream_metrics import UpstreamFailure


@dataclass(frozen=True, slots=True)
class BrokenOff:
    """A response that passes to the agent as it came, and whose connection broke before its end."""

    status: int
    headers: Headers
    got: bytes = b""
    """The part of a response in one piece that came and needs no change."""


@dataclass(slots=True)
class Exchange:
    call: ModelCall
    dialect: Dialect
    """The agent's dialect."""
    scope: Scope
    """The ASGI scope of the agent's request."""
    send: Send
    raw: bytes
    """The body of the request, with the `sampling_overrides` of the rollout's mode once they are applied."""
    mode: str | None = None
    pins: dict[str, float] = field(default_factory=dict[str, float])
    """The sampling that the attempt's address pins."""
    sampling_key: str = ""
    """The key of the attempt, from which the seeds of its calls are derived."""
    replay: CallReplay | None = None
    """The recorded calls that the attempt repeats; None if it repeats none."""
    spent: Spent = field(default_factory=Spent)
    """The tokens and the cost that the attempt has spent so far."""
    tried: Try | None = None
    """The entry that a retry is compared with; None if the client does not mark retries."""
    request: dict[str, Any] = field(default_factory=dict[str, Any])
    """The parsed request."""
    keep: dict[str, Any] | None = None
    """The whole request, if its response is to be kept because the client may continue it by its id."""
    price: Price | None = None
    """The price of the called server; None if it has none."""
    may_be_billed: bool = False
    """Whether the call was given up while a server may have been working on it."""
    model_name: str | None = None
    """The model whose server was called; None before a server was called."""
    status: int | None = None
    """The HTTP status of the upstream's response."""
    fault: UpstreamFailure | None = None
    """Why a response that passes as it came is faulty; None if it is not."""
    answered: bool = False
    """Whether the response is complete, or an error takes its place."""
    recorded: bool = False
    """Whether the call's record has been handed to the recorder."""
    streaming: bool = False
    """Whether the head of a streamed response has been sent. An error can then only be sent as an event."""
    mid_event: bool = False
    """Whether the agent has a part of an event of its stream, after which neither a comment nor another event may be
    sent."""
    ended: bool = False
    """Whether the agent has the last event of its stream."""
    broken_off: BrokenOff | None = None
    """How the upstream's response ended, if it passes as it came and broke off."""
    disconnected: bool = False
    """Whether the agent has disconnected."""
    attempt_over: bool = False
    """Whether the attempt ended while the call was under way."""
    written_at: float = 0.0
    """The event loop's time at which data was last sent to the agent."""
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a message is sent, because the response and the keep-alive comments share the connection."""

    @property
    def key(self) -> AttemptKey:
        return self.call.rollout_id, self.call.attempt_id

    async def begin_stream(self, headers: Headers) -> None:
        """Send the head of a streamed response, unless it has been sent."""
        async with self._writing:
            if not self.streaming:
                self.streaming = True
                await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, part: bytes, *, more: bool = True, mid_event: bool = False) -> None:
        """Send a part of a streamed response.

        more: False for the last.
        mid_event: whether it ends in the middle of an event.
        """
        async with self._writing:
            self.mid_event = mid_event
            await self._write(part, more=more)

    async def write_between_events(self, part: bytes) -> bool:
        """Send an event or a comment of the gateway, unless the stream is in the middle of another event. Return
        whether it was sent.
        """
        async with self._writing:
            if not self.mid_event:
                await self._write(part, more=True)
            return not self.mid_event

    async def break_off(self) -> None:
        """Send what the agent gets of a response that broke off. The caller must return without ending the response, so
        that the server closes the connection.
        """
        broken = self.broken_off
        if broken is not None and not self.streaming:
            await self.send({"type": "http.response.start", "status": broken.status, "headers": broken.headers})
            await self.send({"type": "http.response.body", "body": broken.got, "more_body": True})

    async def _write(self, part: bytes, *, more: bool) -> None:
        self.written_at = asyncio.get_running_loop().time()
        await self.send({"type": "http.response.body", "body": part, "more_body": more})
