"""Make one span of one call, and prove its tokens.

Pure functions. Tokens are recorded only if ids, log-probabilities and the upstream's own count agree. A call that
cannot be proven keeps its text, and its span has the reason why its tokens were refused. Shapes: P prompt tokens, R
response tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, cast

from leyden._lib import ids
from leyden._lib.json import Json
from leyden.dialects import dump, echoes
from leyden.dialects.sampling import SAMPLING_PARAMETERS
from leyden.types import Attributes, Span, SpanStatus, TokenRecord, semconv

_REQUEST_SETTINGS = (*SAMPLING_PARAMETERS, "max_tokens", "max_completion_tokens", "seed")
"""Options of a request that become attributes of its span; lists and objects as JSON text."""
_LARGEST_ID = 2**31 - 1
"""The largest token id that is recorded, because ids are kept as 32-bit integers."""
_OF_ANSWER = (
    semconv.GEN_AI_RESPONSE_ID,
    semconv.GEN_AI_RESPONSE_MODEL,
    semconv.GEN_AI_INPUT_TOKENS,
    semconv.GEN_AI_OUTPUT_TOKENS,
    semconv.GEN_AI_OUTPUT_MESSAGES,
    semconv.GEN_AI_FINISH_REASONS,
    semconv.POLICY_VERSION,
    semconv.POLICY_VERSION_AT_END,
    semconv.TOKENS_REFUSED,
)
"""Attributes of a recorded answer that a replayed call takes over."""
_RESOURCE: Attributes = {"service.name": "leyden.gateway"}


@dataclass(slots=True)
class ModelCall:
    """One call, filled in while it is under way. Times are Unix seconds."""

    rollout_id: str
    attempt_id: str
    trace_id: str
    parent_id: str | None
    call_index: int | None
    """The number of the call within its attempt, from 0; None for a call that came too late."""
    operation: str
    start_time: float
    live_claim: str | None = None
    """The signed claim of a live rollout, which the store may not know yet."""
    retry_of: str | None = None
    """The span id of the failed try that this call repeats."""
    sent_time: float | None = None
    """When the agent's process sent the call, by that process's clock; None if unknown."""
    end_time: float = 0.0
    request: Json = field(default_factory=dict[str, Any])
    """The agent's request in chat form, with the seed that the gateway added."""
    response: Json | None = None
    """The upstream's response in chat form, also of a stream; None if there was none."""
    error: str | None = None
    """Why the call failed; None if it did not."""
    unread: str | None = None
    """What of the response could not be read; None if it was read whole."""
    cost: float | None = None
    """The cost in the unit of `UpstreamModel.price_per_million`; None if it is unknown or the call cost nothing."""
    cost_unknown: str | None = None
    """Why the cost is unknown; None if it is known."""
    policy_version: int | None = None
    """The version of the weights when the server was called (`LLMProxy.set_policy_version`)."""
    policy_version_at_end: int | None = None
    """The version of the weights when the call had ended."""
    fields: Json = field(default_factory=dict[str, Any])
    """The fields of the agent's own request that a replay compares (`call_replay.compared_fields`)."""
    misdirected: str | None = None
    """Why it is not proven that the attempt of the call's address made it; None if nothing speaks against it. Such a
    call is recorded as an error, so that no algorithm trains on it."""
    replayed: Span | None = None
    """The recorded call that answers this one; None if the model answers it."""
    replay_diverged: str | None = None
    """The difference from the recorded request that ended a replay, in one line."""
    restored: list[str] = field(default_factory=list[str])
    """The paths in the request that the server got as the model had written them, not as the agent sent them."""
    user_agent: str | None = None
    """The client's own name for itself; None if it sent none."""
    dropped_tools: list[str] = field(default_factory=list[str])
    """The hosted tools that were left out of the request (`LLMProxy(dropped_tools=...)`)."""
    span_id: str = field(default_factory=ids.span_id)


class Unproven(ValueError):
    """Raised when the tokens of a call cannot be proven. The message says why."""


def span_of(call: ModelCall) -> Span:
    attributes: Attributes = {semconv.GEN_AI_OPERATION: call.operation}
    if call.call_index is not None:
        attributes[semconv.CALL_INDEX] = call.call_index
    if call.live_claim is not None:
        attributes[semconv.LIVE_CLAIM] = call.live_claim
    if call.retry_of is not None:
        attributes[semconv.RETRY_OF] = call.retry_of
    if call.sent_time is not None:
        attributes[semconv.SENT_TIME] = call.sent_time
    if call.user_agent is not None:
        attributes[semconv.USER_AGENT] = call.user_agent
    if call.restored:
        attributes[semconv.RESTORED] = call.restored
    if call.dropped_tools:
        attributes[semconv.DROPPED_TOOLS] = call.dropped_tools
    _describe_request(call.request, attributes)
    if call.fields and call.operation != "embeddings":
        attributes[semconv.REQUEST_FIELDS] = _text(call.fields)
    if call.response is not None:
        _describe_response(call.response, attributes)
    if call.unread is not None:
        attributes[semconv.UNREAD] = _encodable(call.unread)
    if call.policy_version is not None:
        attributes[semconv.POLICY_VERSION] = call.policy_version
    if call.policy_version_at_end not in (None, call.policy_version):
        attributes[semconv.POLICY_VERSION_AT_END] = call.policy_version_at_end
    if call.cost is not None:
        attributes[semconv.COST] = call.cost
    elif call.cost_unknown is not None:
        attributes[semconv.COST_UNKNOWN] = call.cost_unknown
    name, tokens = semconv.MODEL_CALL, None
    if call.replay_diverged is not None:
        attributes[semconv.REPLAY_DIVERGED] = call.replay_diverged
    if call.operation == "embeddings":
        name = semconv.EMBEDDINGS
    elif call.replayed is not None:
        recorded, tokens = call.replayed.attributes, call.replayed.tokens
        attributes |= {name: recorded[name] for name in _OF_ANSWER if name in recorded}
        attributes |= {semconv.REPLAYED: True, semconv.REPLAY_OF: call.replayed.span_id}
    else:
        try:
            tokens = token_record(call)
        except Unproven as refused:
            attributes[semconv.TOKENS_REFUSED] = _encodable(str(refused))
    status = (
        SpanStatus(status_code="OK")
        if (error := call.error or call.misdirected) is None
        else SpanStatus(status_code="ERROR", description=_encodable(error))
    )
    return Span(
        rollout_id=call.rollout_id,
        attempt_id=call.attempt_id,
        sequence_id=0,
        trace_id=call.trace_id,
        span_id=call.span_id,
        parent_id=call.parent_id,
        name=name,
        status=status,
        attributes=attributes,
        start_time=call.start_time,
        end_time=call.end_time,
        resource=dict(_RESOURCE),
        tokens=tokens,
    )


def token_record(call: ModelCall) -> TokenRecord:
    """Return the exact tokens of a call. `logprobs` is None if the upstream returned none at all.

    Raise Unproven if anything else is missing, or if ids, log-probabilities and usage disagree.
    """
    if call.error is not None:
        raise Unproven(f"the call failed: {call.error}")
    if call.misdirected is not None:
        raise Unproven(call.misdirected)
    if echoes(call.request):
        raise Unproven("the completion echoes its prompt, which answers with token ids leave out; call without `echo`")
    response = call.response or {}
    choice = _only_choice(response)
    prompt_ids = _ids("prompt_token_ids", choice.get("prompt_token_ids") or response.get("prompt_token_ids"))
    response_ids = _ids("token_ids", choice.get("token_ids"))
    usage = response.get("usage")
    if not isinstance(usage, dict):
        raise Unproven("the upstream gave no usage to check the ids against")
    for name, ids_ in (("prompt_tokens", prompt_ids), ("completion_tokens", response_ids)):
        if (count := cast(Json, usage).get(name)) != len(ids_):
            raise Unproven(f"usage counts {count!r} {name}, but the upstream gave {len(ids_)} ids")
    logprobs = _logprobs(choice.get("logprobs"), len(response_ids))
    versions = choice.get("policy_versions")
    if versions is not None:
        versions = _ids("policy_versions", versions)
        if len(versions) != len(response_ids):
            raise Unproven(f"{len(versions)} policy_versions for {len(response_ids)} response tokens")
    elif call.policy_version is not None:
        versions = [call.policy_version] * len(response_ids)
    return TokenRecord.model_construct(
        prompt_ids=prompt_ids, response_ids=response_ids, logprobs=logprobs, policy_versions=versions
    )


def _only_choice(response: Json) -> Json:
    """Return the response's only choice. Raise Unproven for any other number, because a record holds one response."""
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices:
        raise Unproven("the answer has no choices")
    found = cast(list[Any], choices)
    if len(found) != 1:
        raise Unproven(
            f"the answer has {len(found)} choices; a record holds one response (call with n=1, once for each)"
        )
    if not isinstance(found[0], dict):
        raise Unproven(f"the choice is a {type(found[0]).__name__}, not an object")
    return cast(Json, found[0])


def _ids(name: str, value: Any) -> list[int]:
    """Return the value if it is a list of token ids. Raise Unproven, which names the field, if not."""
    if not isinstance(value, list):
        raise Unproven(f"the upstream gave no {name}; it must honour return_token_ids (vLLM 0.10.2 and later do)")
    ids_ = cast(list[Any], value)
    if ids_ and not ({*map(type, ids_)} == {int} and 0 <= min(ids_) <= max(ids_) <= _LARGEST_ID):
        raise Unproven(f"{name} holds a value that is no token id")
    return ids_


def _logprobs(value: Any, n_response: int) -> list[float] | None:
    """Return R log-probabilities, from `content[i].logprob` (chat) or `token_logprobs[i]` (completions); None if there
    are none. Raise Unproven if they cannot be read or are not R finite numbers.
    """
    if value is None:
        return None
    try:
        given = value.get("token_logprobs")
        if given is None:
            given = [entry["logprob"] for entry in value.get("content") or ()]
        logprobs = [float(item) for item in given]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Unproven(f"logprobs cannot be read: {type(error).__name__}: {error}") from error
    if len(logprobs) != n_response:
        raise Unproven(f"{len(logprobs)} logprobs for {n_response} response tokens")
    if not all(map(math.isfinite, logprobs)):
        raise Unproven("logprobs holds a value that is not finite")
    return logprobs


def _describe_request(request: Json, attributes: Attributes) -> None:
    if isinstance(model := request.get("model"), str):
        attributes[semconv.GEN_AI_REQUEST_MODEL] = _encodable(model)
    for name in _REQUEST_SETTINGS:
        if (value := request.get(name)) is not None:
            plain = isinstance(value, int | float | str)
            attributes[f"{semconv.GEN_AI_REQUEST_PREFIX}.{name}"] = value if plain else _text(value)
    if (messages := input_messages(request)) is not None:
        attributes[semconv.GEN_AI_INPUT_MESSAGES] = _text(messages)
    if request.get("tools") is not None:
        attributes[semconv.GEN_AI_TOOL_DEFINITIONS] = _text(request["tools"])


def input_messages(request: Json) -> Any:
    """Return the messages of a request in chat form, or None if it has none.

    The `prompt` of a completion and the `input` of embeddings, or of a Responses request that could not be translated,
    become one user message.
    """
    messages = request.get("messages")
    for name in ("prompt", "input"):
        if messages is None and name in request:
            messages = [{"role": "user", "content": request[name]}]
    return messages


def _describe_response(response: Json, attributes: Attributes) -> None:
    for name, key in (("id", semconv.GEN_AI_RESPONSE_ID), ("model", semconv.GEN_AI_RESPONSE_MODEL)):
        if isinstance(value := response.get(name), str):
            attributes[key] = _encodable(value)
    if isinstance(usage := response.get("usage"), dict):
        counted = cast(Json, usage)
        for name, key in (
            ("prompt_tokens", semconv.GEN_AI_INPUT_TOKENS),
            ("completion_tokens", semconv.GEN_AI_OUTPUT_TOKENS),
        ):
            if isinstance(count := counted.get(name), int):
                attributes[key] = count
    for name in ("content", "output"):  # of an Anthropic or Responses answer that chat cannot express
        if name in response:
            attributes[semconv.GEN_AI_OUTPUT_MESSAGES] = _text([{"role": "assistant", "content": response[name]}])
    choices = response.get("choices")
    if isinstance(choices, list):
        found = [cast(Json, choice) for choice in cast(list[Any], choices) if isinstance(choice, dict)]
        attributes[semconv.GEN_AI_FINISH_REASONS] = [_encodable(str(choice.get("finish_reason"))) for choice in found]
        messages = [
            choice["message"] if "message" in choice else {"role": "assistant", "content": choice.get("text")}
            for choice in found
        ]
        attributes[semconv.GEN_AI_OUTPUT_MESSAGES] = _text(messages)


def _encodable(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _text(value: object) -> str:
    return dump(value).decode()
