"""The gateway's record to triplets: one for each model call, with the reward that followed it.

Only what the gateway recorded counts: exact token ids or none. A call whose tokens could not be proven keeps its text and says why in
`metadata["refused"]`; it is never trained on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from leyden import semconv
from leyden.adapter.base import TraceAdapter
from leyden.types import Span, Triplet, TripletPrompt, TripletResponse, get_reward_value

__all__ = ["LlmProxyTraceToTriplet"]


class LlmProxyTraceToTriplet(TraceAdapter[list[Triplet]]):
    """Spans named `leyden.model_call` in the order in which the calls started; a repeated response id is one call.

    A reward belongs to the last call that had ended when it was emitted, and to the first call if none had. Several rewards of one
    call: the last one stands. Failed calls (status ERROR) are left out.
    """

    def adapt(self, source: Sequence[Span]) -> list[Triplet]:
        """One triplet for each model call of one attempt."""
        calls = _distinct(span for span in sorted(source, key=_started) if _is_answered_call(span))
        rewards: list[float | None] = [None] * len(calls)
        for span in sorted(source, key=_started):
            value = get_reward_value(span)
            if value is not None and calls:
                rewards[_call_before(calls, span)] = value
        return [_triplet(call, reward) for call, reward in zip(calls, rewards, strict=True)]


def _is_answered_call(span: Span) -> bool:
    return span.name == semconv.MODEL_CALL and span.status.status_code != "ERROR"


def _started(span: Span) -> tuple[float, int]:
    return (span.start_time or 0.0, span.sequence_id)


def _ended(span: Span) -> float:
    return span.end_time if span.end_time is not None else (span.start_time or 0.0)


def _call_before(calls: Sequence[Span], reward: Span) -> int:
    moment = _ended(reward)
    before = [index for index, call in enumerate(calls) if _ended(call) <= moment]
    return before[-1] if before else 0


def _distinct(calls: Any) -> list[Span]:
    seen: set[str] = set()
    kept: list[Span] = []
    for call in calls:
        key = str(call.attributes.get(semconv.GEN_AI_RESPONSE_ID) or call.span_id)
        if key not in seen:
            seen.add(key)
            kept.append(call)
    return kept


def _triplet(call: Span, reward: float | None) -> Triplet:
    metadata: dict[str, Any] = {"span_id": call.span_id, "sequence_id": call.sequence_id}
    if response_id := call.attributes.get(semconv.GEN_AI_RESPONSE_ID):
        metadata["response_id"] = response_id
    temperature = call.attributes.get(f"{semconv.GEN_AI_REQUEST_PREFIX}.temperature")
    if temperature is not None:
        metadata["temperature"] = temperature
    tokens = call.tokens
    if tokens is None:
        metadata["refused"] = call.attributes.get(semconv.TOKENS_REFUSED, "the call was recorded without token ids")
    return Triplet(
        prompt=TripletPrompt(
            token_ids=[] if tokens is None else tokens.prompt_ids,
            raw_content=_content(call, semconv.GEN_AI_INPUT_MESSAGES),
        ),
        response=TripletResponse(
            token_ids=[] if tokens is None else tokens.response_ids,
            raw_content=_content(call, semconv.GEN_AI_OUTPUT_MESSAGES),
            logprobs=None if tokens is None else tokens.logprobs,
            policy_versions=None if tokens is None else tokens.policy_versions,
        ),
        reward=reward,
        metadata=metadata,
    )


def _content(call: Span, attribute: str) -> Any:
    text = call.attributes.get(attribute)
    if not isinstance(text, str):
        return cast(Any, text)
    try:
        return json.loads(text)
    except ValueError:
        return text
