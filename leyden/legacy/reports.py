"""How an agent is called in the protocol of Agent Lightning 0.1, and what is reported of it.

An agent may return a whole report, triplets or spans as JSON there. `LegacyAgent` records such a
result as one span, so that it reaches the process that reports; `report_of` makes the report of an
attempt's spans.
"""

from __future__ import annotations

import datetime
import inspect
import math
from collections.abc import Sequence
from typing import Any, Final, cast

from leyden.adapter import TraceAdapter
from leyden.errors import ConfigError
from leyden.legacy.types import RolloutLegacy, TripletLegacy
from leyden.litagent import LitAgent
from leyden.tracer import active_trace
from leyden.types import AttemptedRollout, NamedResources, Span, Triplet, find_final_reward

REPORT: Final = "leyden.legacy.report"
"""Name of the span that holds a report."""
REPORT_JSON: Final = "leyden.legacy.report.json"


class LegacyAgent(LitAgent[Any]):
    """Calls an agent as Agent Lightning 0.1 does, and records what only that protocol lets it
    return.

    A method may have the signature of 0.1, `training_rollout(task, rollout_id, resources)`.
    The result may be a RolloutLegacy, a list of triplets, or a list of spans as JSON, beside what
    every agent may return.
    """

    def __init__(self, agent: LitAgent[Any]) -> None:
        """Raise ConfigError for anything but an agent, for example a plain function."""
        if not isinstance(agent, LitAgent):
            raise ConfigError(
                f"the agent is a {type(agent).__name__}; decorate the function with @rollout, or subclass LitAgent"
            )
        self.agent = agent
        self.__qualname__ = getattr(agent, "__qualname__", type(agent).__name__)

    def is_async(self) -> bool:
        """See LitAgent.is_async."""
        return self.agent.is_async()

    def run(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """See LitAgent.run."""
        agent = self.agent
        method = _method(agent.training_rollout, agent.validation_rollout, rollout)
        if _is_of_v01(method):
            return _recorded(method(task, rollout_id=rollout.rollout_id, resources=resources), rollout)
        return _recorded(agent.run(task, resources, rollout), rollout)

    async def run_async(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """Run the agent as version 0.1 would, and return its result with the report as a span."""
        agent = self.agent
        method = _method(agent.training_rollout_async, agent.validation_rollout_async, rollout)
        if _is_of_v01(method):
            result = await method(task, rollout_id=rollout.rollout_id, resources=resources)
        else:
            result = await agent.run_async(task, resources, rollout)
        return _recorded(result, rollout)

    def check_resources(self, resources: NamedResources) -> None:
        """See LitAgent.check_resources."""
        self.agent.check_resources(resources)

    def set_trainer(self, trainer: Any) -> None:
        """See LitAgent.set_trainer."""
        self.agent.set_trainer(trainer)

    def set_runner(self, runner: Any) -> None:
        """See LitAgent.set_runner."""
        self.agent.set_runner(runner)


def report_of(rollout_id: str, spans: Sequence[Span], adapter: TraceAdapter[Any]) -> RolloutLegacy:
    """Return the report on an attempt with these spans, which are in the order of their numbers.

    A report that the agent returned, or a worker sent, is completed by what was recorded.
    adapter: makes the triplets; raise ConfigError if it makes something else.
    """
    given = next((span for span in reversed(spans) if span.name == REPORT), None)
    recorded = [span for span in spans if span.name != REPORT]
    if given is None:
        report = RolloutLegacy(rollout_id=rollout_id)
    else:
        report = RolloutLegacy.model_validate_json(str(given.attributes[REPORT_JSON]))
        report.rollout_id = rollout_id
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
    """Return the method for the rollout's mode.

    An agent of 0.1 without a method for validation uses the one for training.
    """
    inherited = getattr(validation, "__func__", None) is getattr(LitAgent, validation.__name__)
    return training if rollout.mode == "train" or (inherited and _is_of_v01(training)) else validation


def _is_of_v01(method: Any) -> bool:
    return "rollout_id" in inspect.signature(method).parameters


def _recorded(result: Any, rollout: AttemptedRollout) -> Any:
    """Record a result that has no other place, and return the reward in it; return any other result
    unchanged.
    """
    report = _as_report(result, rollout.rollout_id)
    if report is None:
        return result
    active_trace("a report").create_span(REPORT, {REPORT_JSON: report.model_dump_json()})
    reward = report.final_reward
    if reward is None and report.triplets:
        reward = report.triplets[-1].reward
    return reward if reward is None or math.isfinite(reward) else None


def _as_report(result: Any, rollout_id: str) -> RolloutLegacy | None:
    """Return an agent's result as a report, if it is one or a list of triplets or of spans; else
    None.
    """
    if isinstance(result, RolloutLegacy):
        return result
    if not isinstance(result, list) or not result:
        return None
    items = cast("list[Any]", result)
    if all(isinstance(item, TripletLegacy | Triplet) for item in items):
        triplets = [item if isinstance(item, TripletLegacy) else _plain(item) for item in items]
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
    return [_plain(each) for each in cast("list[Triplet]", made)]


def _plain(triplet: Triplet) -> TripletLegacy:
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
