"""Agent Lightning's adapters: they can be called, return triplets that also work like dicts, and take OpenTelemetry's
own spans too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from opentelemetry.sdk.trace import ReadableSpan

from leyden import adapter as native
from leyden.adapter import RewardMatchPolicy
from leyden.tracing import LOCAL
from leyden.types import Span as NativeSpan
from leyden_compat.agentlightning.otel import filter_attributes, unflatten_attributes
from leyden_compat.agentlightning.types import Span, SpanLike, Triplet

S = TypeVar("S", contravariant=True)
T = TypeVar("T", covariant=True)


class Adapter(native.Adapter[S, T], Generic[S, T]):
    """Converts anything to anything; `adapter(source)` is `adapter.adapt(source)`."""

    def __call__(self, source: S, /) -> T:
        """Return the converted data."""
        return self.adapt(source)

    def adapt(self, source: S) -> T:
        raise NotImplementedError


class TraceAdapter(Adapter[Sequence[NativeSpan], T], native.TraceAdapter[T], Generic[T]):
    """Converts the spans of one attempt."""


class OtelTraceAdapter(Adapter[Sequence[ReadableSpan], T], Generic[T]):
    """Converts OpenTelemetry's own spans."""


class TraceToTripletBase(TraceAdapter[list[Any]]):
    """Base class of adapters that return triplets."""


class TracerTraceToTriplet(TraceToTripletBase):
    """Make a triplet of each model call of an attempt.

    llm_call_match: a regular expression for the names of calls' spans. Agent Lightning's default,
        `openai\\.chat\\.completion`, is the name that its tracer gives to any call, so it selects every call here.
    """

    def __init__(
        self,
        repair_hierarchy: bool = True,
        llm_call_match: str | None = r"openai\.chat\.completion",
        agent_match: str | None = None,
        exclude_llm_call_in_reward: bool = True,
        reward_match: RewardMatchPolicy = RewardMatchPolicy.FIRST_OCCURRENCE,
        _skip_empty_token_spans: bool = False,
    ) -> None:
        self.repair_hierarchy = repair_hierarchy
        self.llm_call_match = llm_call_match
        self.agent_match = agent_match
        self.exclude_llm_call_in_reward = exclude_llm_call_in_reward
        self.reward_match = reward_match
        self._skip_empty_token_spans = _skip_empty_token_spans

    @property
    def _native(self) -> native.TraceToTriplet:
        """Leyden's adapter with the options that this one has now."""
        return native.TraceToTriplet(
            repair_hierarchy=self.repair_hierarchy,
            llm_call_match=None if self.llm_call_match == r"openai\.chat\.completion" else self.llm_call_match,
            agent_match=self.agent_match,
            exclude_llm_call_in_reward=self.exclude_llm_call_in_reward,
            reward_match=self.reward_match,
            _skip_empty_token_spans=self._skip_empty_token_spans,
        )

    def adapt(self, source: Sequence[SpanLike]) -> list[Any]:
        """Return one triplet for each model call of one attempt."""
        return _old_triplets(self._native, source)

    def visualize(
        self, source: Sequence[SpanLike], filename: str = "trace_tree", interested_span_match: str | None = None
    ) -> native.TraceTree:
        """Draw the tree that the calls are selected from, and return it."""
        return self._native.visualize(as_spans(source), filename, interested_span_match)


class TripletExporter(TracerTraceToTriplet):
    """The adapter's name in Agent Lightning 0.1."""

    def export(self, spans: Sequence[SpanLike]) -> list[Any]:
        """Return one triplet for each model call of one attempt."""
        return self.adapt(spans)


class LlmProxyTraceToTriplet(TraceToTripletBase):
    """Make a triplet of each call that the gateway recorded."""

    def adapt(self, source: Sequence[SpanLike]) -> list[Any]:
        """Return one triplet for each recorded call of one attempt."""
        return _old_triplets(native.LlmProxyTraceToTriplet(), source)


class TraceToMessages(TraceAdapter[list[native.OpenAIMessages]], native.TraceToMessages):
    """Make fine-tuning messages of each answer in an attempt, with the messages before it."""

    def adapt(self, source: Sequence[SpanLike]) -> list[native.OpenAIMessages]:
        """Return one entry for each answer of one attempt, as Agent Lightning does."""
        return self.every_answer(as_spans(source))


def as_spans(source: Sequence[SpanLike]) -> list[NativeSpan]:
    """Convert OpenTelemetry's own spans to spans of one attempt, numbered from 1 in their order. Leyden's spans are
    returned as they are.
    """
    return [
        span if isinstance(span, NativeSpan) else Span.from_opentelemetry(span, LOCAL, LOCAL, number)
        for number, span in enumerate(source, 1)
    ]


def _old_triplets(adapter: native.TraceAdapter[Any], source: Sequence[SpanLike]) -> list[Triplet]:
    """Return the triplets of an adapter with what Agent Lightning reads in each call's span: the prompt and the
    completion as they are recorded, and the request and the response.
    """
    spans = as_spans(source)
    by_id = {span.span_id: span.attributes for span in spans}
    triplets = [Triplet.of(triplet) for triplet in adapter.adapt(spans)]
    for triplet in triplets:
        attributes = by_id.get(str(triplet.metadata.get("span_id")), {})
        for part, prefix in ((triplet.prompt, "gen_ai.prompt"), (triplet.response, "gen_ai.completion")):
            if recorded := _recorded(attributes, prefix):
                part.raw_content = recorded
        for name in ("request", "response"):
            triplet.metadata[name] = _recorded(attributes, f"gen_ai.{name}")
    return triplets


def _recorded(attributes: Mapping[str, Any], prefix: str) -> Any:
    """Return the attributes below a prefix as a nested value; empty if there are none."""
    found = filter_attributes(attributes, prefix)
    found.pop(prefix, None)
    return unflatten_attributes({name[len(prefix) + 1 :]: value for name, value in found.items()})
