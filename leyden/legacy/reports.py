"""Call an agent as Agent Lightning 0.1 does, and make the report on its attempt.

In that protocol an agent may return a whole report, triplets, or spans as JSON. `LegacyAgent` records such a result as
one span, so that it reaches the process that reports. `report_of` makes the report from an attempt's spans.
"""

from __future__ import annotations

import datetime
import inspect
import math
from collections.abc import Sequence
from typing import Any, Final, cast

from leyden.adapter import TraceAdapter
from leyden.agent import LitAgent
from leyden.errors import ConfigError
from leyden.legacy.types import RolloutLegacy, TripletLegacy
from leyden.tracing import active_trace
from leyden.types import AttemptedRollout, NamedResources, Span, Triplet, find_final_reward

REPORT: Final = "leyden.legacy.report"
"""The name of the span that holds a report."""
REPORT_JSON: Final = "leyden.legacy.report.json"
"""The attribute of that span with the report as JSON."""


class LegacyAgent(LitAgent[Any]):
    """Wraps an agent that was written for Agent Lightning 0.1, and records its special results.

    A method of the agent may have the signature of 0.1, `training_rollout(task, rollout_id, resources)`. In addition to
    the results of other agents, it may return a RolloutLegacy, a list of triplets, or a list of spans as JSON. Raise
    ConfigError for an object that is no agent, for example a plain function.
    """

    def __init__(self, agent: LitAgent[Any]) -> None:
        if not isinstance(agent, LitAgent):
            raise ConfigError(
                f"the agent is a {type(agent).__name__}; decorate the function with @rollout, or subclass LitAgent"
            )
        self.agent = agent
        self.__qualname__ = getattr(agent, "__qualname__", type(agent).__name__)

    def is_async(self) -> bool:
        return self.agent.is_async()

    def run(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """Run the agent as version 0.1 would. Record a report, triplets or spans that it returns. Return the reward in
        such a result, or any other result unchanged.
        """
        agent = self.agent
        method = _method(agent.training_rollout, agent.validation_rollout, rollout)
        if _takes_rollout_id(method):
            return _recorded(method(task, rollout_id=rollout.rollout_id, resources=resources), rollout)
        return _recorded(agent.run(task, resources, rollout), rollout)

    async def run_async(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """Await the agent as version 0.1 would. Record a report, triplets or spans that it returns. Return the reward
        in such a result, or any other result unchanged.
        """
        agent = self.agent
        method = _method(agent.training_rollout_async, agent.validation_rollout_async, rollout)
        if _takes_rollout_id(method):
            result = await method(task, rollout_id=rollout.rollout_id, resources=resources)
        else:
            result = await agent.run_async(task, resources, rollout)
        return _recorded(result, rollout)

    def check_resources(self, resources: NamedResources) -> None:
        """Raise ConfigError if the wrapped agent lacks a resource that it needs."""
        self.agent.check_resources(resources)

    def set_trainer(self, trainer: Any) -> None:
        self.agent.set_trainer(trainer)

    def set_runner(self, runner: Any) -> None:
        self.agent.set_runner(runner)


def report_of(rollout_id: str, spans: Sequence[Span], adapter: TraceAdapter[Any]) -> RolloutLegacy:
    """Return the report on an attempt.

    If the agent returned a report, or a worker sent one, its missing triplets and reward are taken from the other
    spans.
    spans: those of the attempt, in the order of their numbers.
    adapter: makes the triplets.
    Raise ConfigError if the adapter makes something else.
    """
    given = next((span for span in reversed(spans) if span.name == REPORT), None)
    recorded = [span for span in spans if span.name != REPORT]
    if given is None:
        report = RolloutLegacy(rollout_id=rollout_id)
    else:
        report = RolloutLegacy.model_validate_json(str(given.attributes[REPORT_JSON]))
        report.rollout_id = rollout_id
    report.final_reward = _finite(report.final_reward)
    for triplet in report.triplets or ():
        triplet.reward = _finite(triplet.reward)
    if report.triplets is None:
        report.triplets = _triplets(adapter, recorded) or None
    if report.final_reward is None:
        report.final_reward = find_final_reward(recorded)
    if report.final_reward is None and report.triplets:
        report.final_reward = report.triplets[-1].reward
    if report.trace is None and given is None:
        report.trace = [_as_json(span) for span in recorded] or None
    return report


def _method(training: Any, validation: Any, rollout: AttemptedRollout) -> Any:
    inherited = getattr(validation, "__func__", None) is getattr(LitAgent, validation.__name__)
    return training if rollout.mode == "train" or (inherited and _takes_rollout_id(training)) else validation


def _takes_rollout_id(method: Any) -> bool:
    """Return whether an agent's method has the signature of Agent Lightning 0.1."""
    return "rollout_id" in inspect.signature(method).parameters


def _recorded(result: Any, rollout: AttemptedRollout) -> Any:
    """Record a report, triplets or spans as a span, and return the reward in them; return any other result as it is."""
    report = _as_report(result, rollout.rollout_id)
    if report is None:
        return result
    active_trace("a report").create_span(REPORT, {REPORT_JSON: report.model_dump_json()})
    reward = report.final_reward
    if reward is None and report.triplets:
        reward = report.triplets[-1].reward
    return _finite(reward)


def _finite(reward: float | None) -> float | None:
    return reward if reward is not None and math.isfinite(reward) else None


def _as_report(result: Any, rollout_id: str) -> RolloutLegacy | None:
    """Return an agent's result as a report, if it is one or a list of triplets or of spans; else None."""
    if isinstance(result, RolloutLegacy):
        return result
    if not isinstance(result, list) or not result:
        return None
    items = cast("list[Any]", result)
    if all(isinstance(item, TripletLegacy | Triplet) for item in items):
        triplets = [item if isinstance(item, TripletLegacy) else _as_legacy(item) for item in items]
        return RolloutLegacy(rollout_id=rollout_id, triplets=triplets)
    if all(isinstance(item, dict) for item in items):
        return RolloutLegacy(rollout_id=rollout_id, trace=items)
    return None


def _triplets(adapter: TraceAdapter[Any], spans: Sequence[Span]) -> list[TripletLegacy]:
    made: Any = adapter.adapt(spans)
    if not isinstance(made, list) or not all(isinstance(each, Triplet) for each in cast("list[Any]", made)):
        raise ConfigError(
            f"the task protocol of Agent Lightning 0.1 reports triplets, and {type(adapter).__name__} makes none; "
            "use TraceToTriplet or TracerTraceToTriplet"
        )
    return [_as_legacy(each) for each in cast("list[Triplet]", made)]


def _as_legacy(triplet: Triplet) -> TripletLegacy:
    return TripletLegacy.model_validate(triplet.model_dump(mode="json"))


def _as_json(span: Span) -> dict[str, Any]:
    """Return a span in the form of OpenTelemetry's `ReadableSpan.to_json`."""
    return {
        "name": span.name,
        "context": {"trace_id": f"0x{span.trace_id}", "span_id": f"0x{span.span_id}", "trace_state": "[]"},
        "kind": f"SpanKind.{span.kind}",
        "parent_id": None if span.parent_id is None else f"0x{span.parent_id}",
        "start_time": _time(span.start_time),
        "end_time": _time(span.end_time),
        "status": span.status.model_dump(exclude_none=True),
        "attributes": span.attributes,
        "events": [
            {"name": event.name, "timestamp": _time(event.timestamp), "attributes": event.attributes}
            for event in span.events
        ],
        "links": [],
        "resource": {"attributes": span.resource, "schema_url": ""},
    }


def _time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
