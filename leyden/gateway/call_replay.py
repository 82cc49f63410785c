"""Recorded calls that answer an attempt in the model's place while its requests are the same.

A fork names an attempt and a number of calls (`ReplayFrom`). A request equals a recorded one if both have the same

- operation (`chat`, `text_completion`),
- messages and tools, in chat form,
- other fields, such as `temperature`, `stop` or `response_format`, except `_NOT_COMPARED`.

If several recorded calls equal a request, the one with its model's name is preferred. Otherwise the model's name is not
compared, nor whether the response is streamed, nor the fields that the gateway adds (seeds, overrides). The first
request that differs ends the replay. Failed calls are left out, because they have no answer. Embeddings always go to
the model.

The module knows spans and requests; `relay` sends the answers. All functions but `load` are pure.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import chain, repeat
from typing import Any, Final, cast

from leyden._lib.host.http import Refusal
from leyden._lib.json import Json
from leyden.dialects import DIALECTS, Dialect, Translation, dump
from leyden.errors import UnknownAttempt, UnknownRollout
from leyden.gateway.asgi import Headers
from leyden.gateway.record import input_messages
from leyden.store.base import LightningStore
from leyden.types import ReplayFrom, Span, semconv

_NOT_COMPARED: Final = frozenset(
    {
        *("model", "stream", "stream_options", "return_token_ids"),
        # as messages and tools
        *("messages", "system", "prompt", "input", "instructions", "previous_response_id", "tools"),
        *("user", "safety_identifier", "metadata", "store", "service_tier"),
        *("prompt_cache_key", "prompt_cache_retention", "cache_salt"),
    }
)
"""Fields that do not change the model's answer, and fields that are compared in chat form."""
_SHOWN = 60
"""The number of a value's characters that the message about a difference shows."""


class Diverged(ValueError):
    """Raised when a request differs from the recorded one. The message says how, in one line."""


@dataclass(frozen=True, slots=True)
class ComparedRequest:
    """The part of a request that is compared: the operation, such as `chat`, and messages and tools in chat form."""

    operation: str
    messages: Any
    tools: Any
    fields: Json
    """`compared_fields` of the agent's own request."""


def compared_fields(request: Json) -> Json:
    """Return the fields of an agent's request that are compared without conversion."""
    return {name: value for name, value in request.items() if name not in _NOT_COMPARED}


def compared_request(operation: str, chat: Json, fields: Json) -> ComparedRequest:
    """Return the part of a call that is compared.

    chat: the request in chat form.
    fields: `compared_fields` of the agent's own request.
    """
    return ComparedRequest(operation, input_messages(chat), chat.get("tools"), fields)


class CallReplay:
    """The recorded calls that one attempt has yet to repeat. Use it in the gateway's event loop."""

    def __init__(self, calls: Sequence[Span], *, later: Sequence[Span] = ()) -> None:
        """Begin a replay.

        calls: the answered model calls to repeat, in order.
        later: recorded calls after those, which the model answers again. Some may have been under way together with the
            last of `calls`.
        """
        self._left = list(calls)
        self._later = list(later)

    @property
    def over(self) -> bool:
        """Whether the model answers all further calls."""
        return not self._left

    def take(self, *requests: ComparedRequest, model: str | None = None) -> Span | None:
        """Return the recorded call that a request repeats, and remove it; None for one of the `later` calls.

        A request may repeat the next recorded call, or any call that was under way together with that one, because an
        agent does not decide the order of simultaneous calls.
        requests: the forms in which the request may have been recorded.
        model: the model that the request names.
        Raise Diverged if no such call equals the request.
        """
        first = self._left[0]
        end = first.end_time or 0.0
        together = [span for span in (*self._left, *self._later) if span is first or (span.start_time or 0.0) < end]
        equal = [span for span in together if any(difference(span, request) is None for request in requests)]
        if not equal:
            raise Diverged(difference(first, requests[0]))
        chosen = next((span for span in equal if span.attributes.get(semconv.GEN_AI_REQUEST_MODEL) == model), equal[0])
        if chosen in self._later:
            self._later.remove(chosen)
            return None
        self._left.remove(chosen)
        return chosen

    def end(self) -> None:
        """Let the model answer all further calls."""
        self._left.clear()


async def load(store: LightningStore, source: ReplayFrom, own: Sequence[Span] = ()) -> CallReplay:
    """Return the recorded calls that an attempt has yet to repeat.

    own: the calls that the new attempt has made already. If one of them was answered by the model, the replay is over.
    Raise Refusal (404) if the store has no record to repeat.
    """
    spans: Sequence[Span] = ()
    with contextlib.suppress(UnknownRollout, UnknownAttempt):
        spans = await store.query_spans(source.rollout_id, source.attempt_id, name=semconv.MODEL_CALL)
    calls = sorted(
        (
            span
            for span in spans
            if span.status.status_code != "ERROR"
            and semconv.GEN_AI_OUTPUT_MESSAGES in span.attributes
            and isinstance(span.attributes.get(semconv.CALL_INDEX), int)
        ),
        key=_call_index,
    )
    if not calls and source.n_calls:
        raise Refusal(
            HTTPStatus.NOT_FOUND,
            "replay_record_missing",
            f"{store.url} holds no answered model call of rollout {source.rollout_id!r}, attempt {source.attempt_id!r}, which "
            "this rollout repeats; pin a rollout as long as its forks run, and use the store that holds it",
        )
    served = {str(span.attributes.get(semconv.REPLAY_OF)) for span in own}
    if any(semconv.REPLAYED not in span.attributes for span in own):
        return CallReplay([])
    left = [span for span in calls if _call_index(span) < source.n_calls and span.span_id not in served]
    return CallReplay(left, later=[span for span in calls if _call_index(span) >= source.n_calls])


def _call_index(span: Span) -> int:
    return cast(int, span.attributes[semconv.CALL_INDEX])


# ---- what differs --------------------------------------------------------------------------------


def difference(recorded: Span, request: ComparedRequest) -> str | None:
    """Return in one line how a request differs from a recorded one; None if they are equal."""
    if request.fields.get("logprobs") not in (None, False):
        return "logprobs are requested, and the record does not keep the tokens' texts"
    operation = recorded.attributes.get(semconv.GEN_AI_OPERATION)
    if operation != request.operation:
        return f"the operation is {request.operation!r}, the record has {operation!r}"
    messages, tools = (
        _recorded(recorded, name) for name in (semconv.GEN_AI_INPUT_MESSAGES, semconv.GEN_AI_TOOL_DEFINITIONS)
    )
    return (
        _first_difference("messages", request.messages, messages)
        or _first_difference("tools", request.tools, tools)
        or _first_difference("", request.fields, _recorded(recorded, semconv.REQUEST_FIELDS) or {})
    )


def _recorded(span: Span, name: str) -> Any:
    """Return the value that a span's attribute holds as JSON; None if it has no such attribute."""
    text = span.attributes.get(name)
    return json.loads(text) if isinstance(text, str) else None


def _first_difference(where: str, mine: Any, theirs: Any) -> str | None:
    """Return the innermost place where two JSON values first differ, and both values there."""
    if _canonical(mine) == _canonical(theirs):
        return None
    if isinstance(mine, dict) and isinstance(theirs, dict):
        one, other = cast(Json, mine), cast(Json, theirs)
        for name in sorted({*one, *other}):
            found = _first_difference(f"{where}.{name}".lstrip("."), one.get(name), other.get(name))
            if found is not None:
                return found
        return f"{where or 'the request'}: a field is null in one of them"
    if isinstance(mine, list) and isinstance(theirs, list):
        one, other = cast("list[Any]", mine), cast("list[Any]", theirs)
        pairs = enumerate(zip(one, other, strict=False))  # a difference in length comes last
        found = next((each for n, (a, b) in pairs if (each := _first_difference(f"{where}[{n}]", a, b))), None)
        return found or f"{where} has {len(one)} items, the record has {len(other)}"
    start = 0
    if isinstance(mine, str) and isinstance(theirs, str):
        pairs = enumerate(zip(mine, theirs, strict=False))
        unequal = next((n for n, (a, b) in pairs if a != b), min(len(mine), len(theirs)))
        start = max(0, unequal - _SHOWN // 3) if unequal > _SHOWN // 2 else 0  # shortly before the difference
    return f"{where} is {_excerpt(mine, start)}, the record has {_excerpt(theirs, start)}"


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _excerpt(value: Any, start: int) -> str:
    text = json.dumps(value[start:] if start else value, ensure_ascii=False)
    return "..." * bool(start) + (text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


# ---- the recorded answer -------------------------------------------------------------------------


class RecordedAnswer:
    """A recorded answer in the form of a server's response (`UpstreamResponse`), for `Relay`."""

    status = int(HTTPStatus.OK)
    content_type = "application/json"

    def __init__(self, recorded: Span, *, with_token_ids: bool) -> None:
        self.headers: Headers = [(b"content-type", b"application/json")]
        self._body = dump(recorded_answer(recorded, with_token_ids=with_token_ids))

    async def read(self) -> bytes:
        return self._body

    async def pieces(self) -> AsyncIterator[bytes]:
        yield self._body


def replay_translation(
    client: Dialect, raw: bytes, request: Json, *, whole: Json, dropped_tools: Sequence[str]
) -> Translation:
    """Return the translation between the client's API and a recorded answer, which is in chat form, or a completion."""
    recorded_in = DIALECTS["chat"] if client.translates else client
    model = str(request.get("model"))
    return Translation(
        client, recorded_in, raw, request, whole=whole, model=model, record_tokens=False, dropped_tools=dropped_tools
    )


def recorded_answer(recorded: Span, *, with_token_ids: bool) -> Json:
    """Return a recorded call's answer in chat form, or as a completion.

    The tokens' texts, a server's fingerprint and the details of usage are not recorded, so they are left out.
    with_token_ids: add the ids of prompt and response, for an agent that requested them.
    """
    said, is_completion = recorded.attributes, recorded.attributes.get(semconv.GEN_AI_OPERATION) == "text_completion"
    messages: list[Json] = _recorded(recorded, semconv.GEN_AI_OUTPUT_MESSAGES)
    reasons = cast("list[str]", said.get(semconv.GEN_AI_FINISH_REASONS) or [])
    answer: Json = {
        "id": said.get(semconv.GEN_AI_RESPONSE_ID),
        "object": "text_completion" if is_completion else "chat.completion",
        "created": int(recorded.start_time or 0.0),
        "model": said.get(semconv.GEN_AI_RESPONSE_MODEL) or said.get(semconv.GEN_AI_REQUEST_MODEL),
        "choices": [
            {
                "index": index,
                **({"text": message.get("content")} if is_completion else {"message": message}),
                "finish_reason": None if reason in (None, "None") else reason,  # spans have "None" for none
                "logprobs": None,
            }
            for index, (message, reason) in enumerate(zip(messages, chain(reasons, repeat(None)), strict=False))
        ],
    }
    counts = said.get(semconv.GEN_AI_INPUT_TOKENS), said.get(semconv.GEN_AI_OUTPUT_TOKENS)
    if isinstance(counts[0], int) and isinstance(counts[1], int):
        answer["usage"] = {
            "prompt_tokens": counts[0],
            "completion_tokens": counts[1],
            "total_tokens": counts[0] + counts[1],
        }
    if with_token_ids and recorded.tokens is not None:
        holder = answer["choices"][0] if is_completion else answer
        holder["prompt_token_ids"] = recorded.tokens.prompt_ids
        answer["choices"][0]["token_ids"] = recorded.tokens.response_ids
    return answer
