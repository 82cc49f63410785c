"""Request whole answers from servers that lose token ids when they stream.

The gateway learns from the answers which server of which model does. A loss may be an accident, so one call tries
streaming again after a pause. If the server loses ids again, the pause doubles, up to an hour.

Everything runs in the gateway's event loop. The module knows answers in chat form, and no HTTP.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from leyden._lib.json import Json
from leyden.gateway.upstream import UpstreamModel

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 60.0
MAX_PAUSE_SECONDS = 3600.0


@dataclass(slots=True)
class _Lossy:
    """A server whose last stream lost ids."""

    losses: int = 0
    """The number of streams in a row that lost ids. Streams that were under way together count once."""
    stream_again_at: float = 0.0
    """The time from which one call tries streaming again, by the clock of `Buffering`."""
    probing: bool = False
    """Whether a call under way tests if streams keep their ids again."""
    whole_has_ids: bool = True
    """Whether whole answers have ids. If not, buffering gains nothing, and streams pass as they come."""


class Buffering:
    """Decides whether a server is asked for a stream or for a whole answer. The agent gets a stream in either case."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lossy: dict[tuple[str, str], _Lossy] = {}

    def wanted(self, model: UpstreamModel) -> bool:
        """Return whether to request a whole answer for a call whose agent wants a stream.

        Ask once for each call, because it may turn the call into the probe of a server.
        """
        server = self._lossy.get((model.model_name, model.address))
        if server is None:
            return False
        if self._clock() >= server.stream_again_at:
            server.probing = True
            # If the probe has no result, as when its client leaves, another one follows later.
            server.stream_again_at = self._clock() + _pause_seconds(server.losses)
            return False
        return server.whole_has_ids

    def learn(self, model: UpstreamModel, answer: Json, *, streamed: bool) -> None:
        """Learn from a finished answer, in chat form, whether its server keeps token ids.

        streamed: whether the server sent it as a stream.
        """
        key = (model.model_name, model.address)
        server = self._lossy.get(key)
        choices = answer.get("choices")
        has_one = isinstance(choices, list) and len(cast(list[Any], choices)) == 1
        if not has_one or not isinstance(answer.get("usage"), dict):
            return
        loss = lost_ids(answer)
        if not streamed:
            if server is not None and loss is not None:
                server.whole_has_ids = False
        elif server is None:
            if loss is not None:
                server = self._lossy[key] = _Lossy()
                self._pause(server)
                logger.warning(
                    "%s loses token ids of model %r in streams (%s): the gateway requests whole answers for now, and agents get them "
                    "as streams. Newer versions of its server may keep them.",
                    model.address,
                    model.model_name,
                    loss,
                )
        elif server.probing:  # a stream that began before the pause says nothing about the server now
            server.probing = False
            if loss is not None:
                self._pause(server)
            else:
                del self._lossy[key]
                logger.info("%s keeps token ids of model %r in streams again", model.address, model.model_name)

    def _pause(self, server: _Lossy) -> None:
        server.losses += 1
        server.whole_has_ids = True
        server.stream_again_at = self._clock() + _pause_seconds(server.losses)


def lost_ids(answer: Json) -> str | None:
    """Return how the ids of an answer disagree with its usage; None if they agree.

    The answer must have one choice and a usage.
    """
    choice, usage = cast(Json, answer["choices"][0]), cast(Json, answer["usage"])
    found = {
        "prompt_tokens": choice.get("prompt_token_ids") or answer.get("prompt_token_ids"),
        "completion_tokens": choice.get("token_ids"),
    }
    for name, ids in found.items():
        n_ids = len(cast(list[Any], ids)) if isinstance(ids, list) else 0
        if usage.get(name) != n_ids:
            return f"usage counts {usage.get(name)} {name}, there are {n_ids} ids"
    return None


def _pause_seconds(losses: int) -> float:
    """Return the seconds for which answers are requested whole after this many losses: twice as long after each."""
    return min(FIRST_PAUSE_SECONDS * 2.0 ** min(losses - 1, 20), MAX_PAUSE_SECONDS)
