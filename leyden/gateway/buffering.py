"""Which servers lose token ids when they stream, and are asked for whole answers instead.

Learned from the answers themselves, for each server of each model, until the gateway stops. It knows answers in chat, and no
HTTP.
"""

from __future__ import annotations

import logging
from typing import Any, cast

from leyden.dialects import Json
from leyden.gateway.upstream import UpstreamModel

__all__ = ["Buffering", "lost_ids"]

logger = logging.getLogger(__name__)


class Buffering:
    """Whether to ask a server for a stream or for a whole answer, which the agent gets as a stream all the same."""

    def __init__(self) -> None:
        self._helps: dict[tuple[str, str], bool] = {}
        """Of each server that lost ids in a stream: whether its whole answers have them."""

    def wanted(self, model: UpstreamModel) -> bool:
        """Whether streams of this server should be put together from whole answers."""
        return self._helps.get((model.model_name, model.address), False)

    def learn(self, model: UpstreamModel, answer: Json, *, streamed: bool) -> None:
        """See what a finished answer, in chat, has kept of its ids."""
        key = (model.model_name, model.address)
        known = self._helps.get(key)
        news = known is not False and streamed == (known is None)  # a stream at first, then a whole answer
        if not news or (loss := lost_ids(answer)) is None:
            return
        if known:
            self._helps[key] = False  # no ids in one piece either: better to stream as it comes
            return
        self._helps[key] = True
        logger.warning(
            "%s loses token ids of model %r in streams (%s): from now on it is asked for whole answers, and agents get them as "
            "streams. Newer versions of its server may keep them.",
            model.address,
            model.model_name,
            loss,
        )


def lost_ids(answer: Json) -> str | None:
    """How the ids of an answer disagree with its usage; None if they agree, or if it has not one choice and a usage."""
    choices, usage = answer.get("choices"), answer.get("usage")
    if not isinstance(choices, list) or len(cast(list[Any], choices)) != 1 or not isinstance(usage, dict):
        return None
    choice = cast(Json, choices[0])
    found = {
        "prompt_tokens": choice.get("prompt_token_ids") or answer.get("prompt_token_ids"),
        "completion_tokens": choice.get("token_ids"),
    }
    counted = cast(Json, usage)
    for name, ids in found.items():
        n_ids = len(cast(list[Any], ids)) if isinstance(ids, list) else 0
        if counted.get(name) != n_ids:
            return f"usage counts {counted.get(name)} {name}, there are {n_ids} ids"
    return None
