"""Between rows and the nouns: the one place that knows the order of columns and which of them are JSON.

Rows come from Leyden's own database, so objects are built from them without validating again: a span costs 1
microsecond that way, 4 with `model_construct`.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, from_json, to_json

from leyden.errors import ConfigError
from leyden.store.sql.transaction import Row
from leyden.types import (
    Attempt,
    AttemptedRollout,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    Span,
    SpanEvent,
    SpanStatus,
    TokenRecord,
    Worker,
)

__all__ = [
    "ATTEMPT",
    "ATTEMPTS",
    "INPUT",
    "INTERRUPTED",
    "METADATA",
    "MODE",
    "RESOURCES_ID",
    "ROLLOUT_ID",
    "SEQ",
    "STATUS",
    "attempt_from",
    "attempted",
    "config_of",
    "from_text",
    "resources_from",
    "rollout_alone",
    "rollout_from",
    "span_from",
    "span_values",
    "text_of",
    "worker_from",
]

M = TypeVar("M", bound=BaseModel)

SEQ, ROLLOUT_ID, STATUS, MODE, RESOURCES_ID, INPUT, CONFIG, METADATA, START, END, ATTEMPTS, INTERRUPTED, ATTEMPT = (
    range(13)
)
"""The columns of `select_rollouts`. ATTEMPT is the first of its attempt's, and NULL where there is none."""

_set = object.__setattr__


def build(model: type[M], fields: dict[str, Any]) -> M:
    """A model with exactly these fields (all of them), unchecked: what `model_construct` does, without its look-ups."""
    built = model.__new__(model)
    _set(built, "__dict__", fields)
    _set(built, "__pydantic_fields_set__", set(fields))
    _set(built, "__pydantic_extra__", None)
    _set(built, "__pydantic_private__", None)
    return built


def text_of(value: Any, what: str) -> str:
    """`value` as JSON. Raises ConfigError, naming `what`, when it is not a JSON value."""
    try:
        return to_json(value).decode()
    except PydanticSerializationError as error:
        try:  # a lone surrogate is no UTF-8, and still a JSON string
            return json.dumps(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{what} must be a JSON value: {error}") from None


def from_text(text: str) -> Any:
    """The inverse of `text_of`; an empty dict for the empty text."""
    if not text:
        return {}
    try:
        return from_json(text)
    except ValueError:
        return json.loads(text)


def config_of(row: Row) -> RolloutConfig:
    """The config of a row of `select_rollouts`."""
    return RolloutConfig() if not row[CONFIG] else RolloutConfig.model_validate_json(row[CONFIG])


def rollout_fields(row: Row) -> dict[str, Any]:
    _, rollout_id, status, mode, resources_id, task, _, metadata, start_time, end_time = row[:ATTEMPTS]
    return {
        "rollout_id": rollout_id,
        "input": from_text(task),
        "start_time": start_time,
        "end_time": end_time,
        "mode": mode,
        "resources_id": resources_id,
        "status": status,
        "config": config_of(row),
        "metadata": from_text(metadata),
    }


def rollout_alone(row: Row) -> Rollout:
    """The rollout of a row of `select_rollouts`, without its attempt."""
    return build(Rollout, rollout_fields(row))


def attempted(row: Row, attempt: Attempt) -> AttemptedRollout:
    """The rollout of a row of `select_rollouts`, with this attempt."""
    fields = rollout_fields(row)
    fields["attempt"] = attempt
    return build(AttemptedRollout, fields)


def rollout_from(row: Row) -> Rollout:
    """A row of `select_rollouts`: an AttemptedRollout where there is an attempt."""
    return rollout_alone(row) if row[ATTEMPT] is None else attempted(row, attempt_from(row[ROLLOUT_ID], row[ATTEMPT:]))


def attempt_from(rollout_id: str, row: Row) -> Attempt:
    """A row of `select_attempts`."""
    sequence_id, attempt_id, status, worker_id, start_time, end_time, last_heartbeat_time, metadata = row
    return build(
        Attempt,
        {
            "rollout_id": rollout_id,
            "attempt_id": attempt_id,
            "sequence_id": sequence_id,
            "start_time": start_time,
            "end_time": end_time,
            "status": status,
            "worker_id": worker_id,
            "last_heartbeat_time": last_heartbeat_time,
            "metadata": from_text(metadata),
        },
    )


def span_values(rollout: int, attempt: int, sequence_id: int, span: Span) -> tuple[Any, ...]:
    """The values of `insert_span`."""
    return (
        rollout,
        attempt,
        sequence_id,
        span.span_id,
        span.trace_id,
        span.parent_id,
        _utf8(span.name),
        span.status.status_code,
        _utf8(span.status.description),
        span.start_time,
        span.end_time,
        text_of(span.attributes, "the attributes of a span") if span.attributes else "",
        text_of(span.events, "the events of a span") if span.events else "",
        text_of(span.resource, "the resource of a span") if span.resource else "",
        span.tokens.pack() if span.tokens is not None else None,
    )


def _utf8(text: str | None) -> str | None:
    """Text as a column takes it: a lone surrogate, which UTF-8 cannot say, is written out."""
    return text if text is None or text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def span_from(rollout_id: str, attempt_ids: dict[int, str], row: Row) -> Span:
    """A row of `select_spans`; `attempt_ids` by the attempt's number."""
    attempt, sequence_id, span_id, trace_id, parent_id, name, status_code, status_description = row[:8]
    start_time, end_time, attributes, events, resource, tokens = row[8:]
    return build(
        Span,
        {
            "rollout_id": rollout_id,
            "attempt_id": attempt_ids[attempt],
            "sequence_id": sequence_id,
            "trace_id": trace_id,
            "span_id": span_id,
            "parent_id": parent_id,
            "name": name,
            "status": build(SpanStatus, {"status_code": status_code, "description": status_description}),
            "attributes": from_text(attributes),
            "events": [] if not events else [build(SpanEvent, event) for event in from_text(events)],
            "start_time": start_time,
            "end_time": end_time,
            "resource": from_text(resource),
            "tokens": None if tokens is None else TokenRecord.unpack(tokens),
        },
    )


def resources_from(row: Row) -> ResourcesUpdate:
    """A row of `select_resources`; validated, because the kind of each resource is read from its tag."""
    resources_id, version, create_time, update_time, resources = row
    return ResourcesUpdate.model_validate(
        {
            "resources_id": resources_id,
            "version": version,
            "create_time": create_time,
            "update_time": update_time,
            "resources": from_text(resources),
        }
    )


def worker_from(row: Row) -> Worker:
    """A row of `select_workers`."""
    worker_id, status, stats, heartbeat, dequeue, busy, idle, rollout_id, attempt_id = row
    return build(
        Worker,
        {
            "worker_id": worker_id,
            "status": status,
            "heartbeat_stats": None if stats is None else from_text(stats),
            "last_heartbeat_time": heartbeat,
            "last_dequeue_time": dequeue,
            "last_busy_time": busy,
            "last_idle_time": idle,
            "current_rollout_id": rollout_id,
            "current_attempt_id": attempt_id,
        },
    )
