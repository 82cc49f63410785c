"""Choose whole answers for a while from servers that lose token ids when they stream.

The gateway learns this from the answers, for each server of each model. One lossy stream may be an
accident, so one call tries streaming again after a pause. If the server loses ids again, the pause
doubles, up to an hour.

Everything runs in the gateway's event loop. It knows answers in chat, and no HTTP.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from leyden.dialects import Json
from leyden.gateway.upstream import UpstreamModel

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 60.0
LONGEST_PAUSE_SECONDS = 3600.0


@dataclass(slots=True)
class _Lossy:
    """A server whose last stream lost ids."""

    losses: int = 0
    """Streams in a row that lost ids. Streams that were under way together count once."""
    stream_again_at: float = 0.0
    probing: bool = False
    """Whether a call under way tests if streams keep their ids again."""
    whole_has_ids: bool = True
    """Whether whole answers have ids. If not, streams pass as they come."""


class Buffering:
    """Decide whether a server sends a stream or a whole answer. The agent always gets a stream."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lossy: dict[tuple[str, str], _Lossy] = {}

    def wanted(self, model: UpstreamModel) -> bool:
        """Return whether to make this stream from a whole answer. Call it once for each call."""
        server = self._lossy.get((model.model_name, model.address))
        if server is None:
            return False
        if self._clock() >= server.stream_again_at:
            server.probing = True
            server.stream_again_at = self._clock() + _pause_seconds(server.losses)  # if the probe finds nothing out
            return False
        return server.whole_has_ids

    def learn(self, model: UpstreamModel, answer: Json, *, streamed: bool) -> None:
        """Record whether a finished answer, in chat, has kept its ids."""
        key = (model.model_name, model.address)
        server = self._lossy.get(key)
        if not _can_be_judged(answer):
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
        elif server.probing:  # others were under way before the pause and say nothing new
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


def _can_be_judged(answer: Json) -> bool:
    choices = answer.get("choices")
    return isinstance(choices, list) and len(cast(list[Any], choices)) == 1 and isinstance(answer.get("usage"), dict)


def _pause_seconds(losses: int) -> float:
    return min(FIRST_PAUSE_SECONDS * 2.0 ** min(losses - 1, 20), LONGEST_PAUSE_SECONDS)
