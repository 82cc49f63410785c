"""Convert rows to and from Leyden's types. This module alone knows the order of columns, and which of them are JSON.

Rows come from Leyden's own database, so objects are built from them without validating again: a span costs 1
microsecond that way, 4 with `model_construct`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, TypeVar, get_args

from pydantic import BaseModel
from pydantic_core import from_json, to_json

from leyden.store.sql.transaction import Row
from leyden.types import (
    Attempt,
    AttemptedRollout,
    AuditRecord,
    Feedback,
    MetricPoint,
    PaginatedResult,
    Release,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RunRecord,
    Sample,
    Span,
    SpanEvent,
    SpanStatus,
    TokenRecord,
    VersionKey,
    Worker,
)
from leyden.types.checks import typed_json_text
from leyden.types.tokens import PACKED

M = TypeVar("M", bound=BaseModel)

SEQ, ROLLOUT_ID, STATUS, MODE, RESOURCES_ID, INPUT, CONFIG, METADATA, START, END, ATTEMPTS, INTERRUPTED, PRIORITY = (
    range(13)
)
RESOURCES_VERSION, ATTEMPT, ATTEMPT_SIZE = 16, 17, slice(25, 27)
"""The columns of `select_rollouts`. ATTEMPT is the first column of the attempt, NULL if there is none.

ATTEMPT_SIZE: the attempt's bytes and its number of spans."""

KEY, TOKENS_BASE, TOKENS, ATTEMPT_NUMBER, SEQUENCE_ID, ATTRIBUTES, OF_ROLLOUT, OF_ATTEMPT = 0, 1, 2, 3, 4, 14, 17, 18
"""Columns of `select_spans` that are read by themselves; only `select_spans_of_all` has the last two."""
_WHICH, _WHAT = slice(SEQUENCE_ID, 12), slice(12, OF_ROLLOUT)
"""The columns with a span's own fields."""

DEFAULT_CONFIG = RolloutConfig()
"""The default config, for reading only. `config_of` builds one for each rollout."""
_SPAN_BYTES = 200
"""Bytes of a span's row without attributes, events, resource and tokens."""

# Setters of a model's four slots, which take half the time of `object.__setattr__`.
_SLOTS: dict[str, Any] = dict(vars(BaseModel))
_set_values, _set_given, _set_extra, _set_private = (
    _SLOTS[slot].__set__
    for slot in ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
)


def build(model: type[M], fields: dict[str, Any]) -> M:
    """Build a model with exactly these fields (all of them), unchecked: `model_construct` without its look-ups."""
    built: M = object.__new__(model)
    _set_values(built, fields)
    _set_given(built, _all_fields(model))
    _set_extra(built, None)
    _set_private(built, None)
    return built


@cache
def _all_fields(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields)


def from_text(text: str) -> Any:
    """Return the value that `text_of` wrote as JSON. The empty text gives an empty dict."""
    if not text:
        return {}
    try:
        return from_json(text, cache_strings="keys")  # values repeat too seldom to look for them
    except ValueError:
        return json.loads(text)


def config_of(row: Row) -> RolloutConfig:
    """Return the config in a row of `select_rollouts`."""
    if row[CONFIG]:
        return RolloutConfig.model_validate_json(row[CONFIG])
    return build(RolloutConfig, DEFAULT_CONFIG.__dict__ | {"retry_condition": []})


def rollout_fields(row: Row) -> dict[str, Any]:
    """Return the fields of a Rollout by name from a row of `get_rollout` or a query with its columns."""
    _, rollout_id, status, mode, resources_id, task, _, metadata, start_time, end_time = row[:ATTEMPTS]
    priority, run_id, group_id, arm, resources_version = row[PRIORITY:ATTEMPT]
    return {
        "rollout_id": rollout_id,
        "input": from_text(task),
        "start_time": start_time,
        "end_time": end_time,
        "mode": mode,
        "resources_id": resources_id,
        "resources_version": resources_version,
        "run_id": run_id,
        "group_id": group_id,
        "arm": arm,
        "status": status,
        "priority": priority,
        "config": config_of(row),
        "metadata": from_text(metadata),
    }


def rollout_alone(row: Row) -> Rollout:
    """Return the rollout in a row of `select_rollouts`, without its attempt."""
    return build(Rollout, rollout_fields(row))


def attempted(row: Row, attempt: Attempt) -> AttemptedRollout:
    """Return the rollout in a row of `select_rollouts`, with this attempt."""
    fields = rollout_fields(row)
    fields["attempt"] = attempt
    return build(AttemptedRollout, fields)


def rollout_from(row: Row) -> Rollout:
    """Return the rollout in a row of `select_rollouts`, with its attempt if it has one."""
    return rollout_alone(row) if row[ATTEMPT] is None else attempted(row, attempt_from(row[ROLLOUT_ID], row[ATTEMPT:]))


def attempt_from(rollout_id: str, row: Row) -> Attempt:
    """Return the attempt in a row of `select_attempts`."""
    sequence_id, attempt_id, status, worker_id, start_time, end_time, last_heartbeat_time, metadata = row[:8]
    reward, rewards, prompt_tokens, response_tokens, cost, failure, unpriced_calls = row[10:]
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
            "reward": reward,
            "rewards": from_text(rewards),
            "prompt_tokens": prompt_tokens,
            "response_tokens": response_tokens,
            "cost": cost,
            "unpriced_calls": unpriced_calls,
            "failure": failure,
        },
    )


def span_values(
    rollout: int, attempt: int, sequence_id: int, span: Span, tokens: tuple[int | None, bytes | None]
) -> tuple[Any, ...]:
    """Return the values of `insert_span` in the order of its columns.

    tokens: the key of the base and the packed record, from `TokenWriter`.
    """
    of = span.__dict__  # three times as fast as a model's attributes
    status, attributes, events, resource = of["status"].__dict__, of["attributes"], of["events"], of["resource"]
    return (
        rollout,
        attempt,
        sequence_id,
        of["span_id"],
        of["trace_id"],
        of["parent_id"],
        utf8_text(of["name"]),
        of["kind"],
        status["status_code"],
        utf8_text(status["description"]),
        of["start_time"],
        of["end_time"],
        *tokens,
        typed_json_text(attributes, "the attributes of a span") if attributes else "",
        typed_json_text(events, "the events of a span") if events else "",
        typed_json_text(resource, "the resource of a span") if resource else "",
    )


def bytes_of(values: Sequence[Any]) -> int:
    """Return the approximate bytes of a row of `insert_span` in SQLite, with its index."""
    tokens, attributes, events, resource = values[-4:]
    taken = _SPAN_BYTES + utf8_length(attributes)
    if events or resource:
        taken += utf8_length(events) + utf8_length(resource)
    return taken if tokens is None else taken + len(tokens)


def utf8_length(text: str) -> int:
    """Return how many bytes a text takes; a lone surrogate counts like any other character."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def utf8_text(text: str | None) -> str | None:
    """Return the text as every database takes it: with lone surrogates, which UTF-8 lacks, and U+0000 written out."""
    if text is None:
        return None
    if "\0" in text:
        text = text.replace("\0", "\\x00")
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def numbered(span: Span, sequence_id: int) -> Span:
    """Return a copy of a span with this sequence id, in a fifth of the time of `model_copy`."""
    if type(span) is not Span:
        return span.model_copy(update={"sequence_id": sequence_id})
    return build(Span, {**span.__dict__, "sequence_id": sequence_id})


_PLAIN = {code: SpanStatus(status_code=code) for code in get_args(SpanStatus.model_fields["status_code"].annotation)}
"""The statuses without a description, which most spans share."""


FoundSpan = tuple[str, str, Row, TokenRecord | None]
"""A span as it was read: its rollout, its attempt, a row with the columns of `select_spans` first, and the result of
`read_tokens`. `span_from` makes an object of it for callers in this process, `span_json` makes JSON for others."""


def span_from(rollout_id: str, attempt_id: str, row: Row, tokens: TokenRecord | None) -> Span:
    """Build a span from its parts: its ids, a row of `select_spans`, and its token record."""
    sequence_id, span_id, trace_id, parent_id, name, kind, status_code, description = row[_WHICH]
    start_time, end_time, attributes, events, resource = row[_WHAT]
    return build(
        Span,
        {
            "rollout_id": rollout_id,
            "attempt_id": attempt_id,
            "sequence_id": sequence_id,
            "trace_id": trace_id,
            "span_id": span_id,
            "parent_id": parent_id,
            "name": name,
            "kind": kind,
            "status": _PLAIN[status_code]
            if description is None
            else build(SpanStatus, {"status_code": status_code, "description": description}),
            "attributes": from_text(attributes) if attributes else {},
            "events": [build(SpanEvent, event) for event in from_text(events)] if events else [],
            "start_time": start_time,
            "end_time": end_time,
            "resource": from_text(resource) if resource else {},
            "tokens": tokens,
        },
    )


def span_json(rollout_id: str, attempt_id: str, row: Row, tokens: TokenRecord | None, *, packed: bool) -> str:
    """Return a span as JSON text, without making the Span. Columns that hold JSON are inserted unchanged.

    packed: write tokens as base64 of their arrays, for Leyden's client, not as lists of numbers.
    """
    sequence_id, span_id, trace_id, parent_id, name, kind, status_code, description = row[_WHICH]
    start_time, end_time, attributes, events, resource = row[_WHAT]
    record = "null" if tokens is None else to_json(tokens, context=PACKED if packed else None).decode()
    return (
        f'{{"rollout_id":{quoted(rollout_id)},"attempt_id":{quoted(attempt_id)},"sequence_id":{sequence_id},'
        f'"trace_id":{quoted(trace_id)},"span_id":{quoted(span_id)},"parent_id":{_text_or_null(parent_id)},'
        f'"name":{quoted(name)},"kind":"{kind}",'
        f'"status":{{"status_code":"{status_code}","description":{_text_or_null(description)}}},'
        f'"attributes":{attributes or "{}"},"events":{events or "[]"},'
        f'"start_time":{_seconds(start_time)},"end_time":{_seconds(end_time)},'
        f'"resource":{resource or "{}"},"tokens":{record}}}'
    )


def _text_or_null(text: str | None) -> str:
    return "null" if text is None else quoted(text)


def _seconds(time: float | None) -> str:
    if time is None:
        return "null"
    return repr(time) if math.isfinite(time) else json.dumps(time)


def span_page(found: PaginatedResult[FoundSpan]) -> PaginatedResult[Span]:
    """Return the result of `query_spans` from found rows, with the tokens of each span unpacked."""
    return PaginatedResult([span_from(*one) for one in found], found.limit, found.offset, found.total, found.exact)


def span_page_json(found: PaginatedResult[FoundSpan], packed: bool) -> bytes:
    """Return the result of `query_spans` as JSON, with tokens `packed` as in `span_json`."""
    exact = "true" if found.exact else "false"
    return (
        f'{{"items":{_json_list(found.items, packed)},"limit":{found.limit},"offset":{found.offset},'
        f'"total":{found.total},"exact":{exact}}}'
    ).encode()


def spans_by_rollout(found: Mapping[str, Sequence[FoundSpan]]) -> dict[str, list[Span]]:
    """Return the result of `query_spans_of`: the spans of each rollout, with tokens unpacked."""
    return {rollout_id: [span_from(*one) for one in spans] for rollout_id, spans in found.items()}


def spans_by_rollout_json(found: Mapping[str, Sequence[FoundSpan]], packed: bool) -> bytes:
    """Return the result of `query_spans_of` as JSON, with tokens `packed` as in `span_json`."""
    fields = [f"{quoted(rollout_id)}:{_json_list(spans, packed)}" for rollout_id, spans in found.items()]
    return f"{{{','.join(fields)}}}".encode()


def _json_list(spans: Sequence[FoundSpan], packed: bool) -> str:
    return f"[{','.join([span_json(*one, packed=packed) for one in spans])}]"


def resources_from(row: Row) -> ResourcesUpdate:
    """Build a version of resources from a row. It is validated, so that each becomes an object of its kind."""
    resources_id, version, create_time, update_time, resources, parent_id, parent_version, author, frozen = row
    return ResourcesUpdate.model_validate(
        {
            "resources_id": resources_id,
            "version": version,
            "create_time": create_time,
            "update_time": update_time,
            "resources": from_text(resources),
            "parent": None if parent_id is None else (parent_id, parent_version),
            "author": author,
            "frozen": bool(frozen),
        }
    )


def feedback_from(row: Row) -> Feedback:
    """Build feedback from a row of `select_feedback`."""
    key, feedback_id, rollout_id, source, kind, value, given_time, received_time, resources_id, version, arm = row
    return build(
        Feedback,
        {
            "feedback_id": feedback_id,
            "rollout_id": rollout_id,
            "source": source,
            "kind": kind,
            "value": from_text(value),
            "given_time": given_time,
            "received_time": received_time,
            "sequence_id": key,
            "resources_id": resources_id,
            "version": version,
            "arm": arm,
        },
    )


def audit_from(row: Row) -> AuditRecord:
    """Build a record of the audit log from a row of `select_audit`."""
    key, action, time, label, from_id, from_version, to_id, to_version, release_id, state, who, why = row
    return build(
        AuditRecord,
        {
            "sequence_id": key,
            "action": action,
            "time": time,
            "label": label,
            "before": _version(from_id, from_version),
            "after": _version(to_id, to_version),
            "release_id": release_id,
            "state": state,
            "who": who,
            "why": why,
        },
    )


def release_from(row: Row) -> Release:
    """Build a release from a row of `select_releases`."""
    release_id, state, from_id, from_version, canary_id, canary_version, details, deadline, created, updated = row
    return build(
        Release,
        {
            "release_id": release_id,
            "state": state,
            "from_version": _version(from_id, from_version),
            "canary_version": (canary_id, canary_version),
            "details": from_text(details),
            "deadline": deadline,
            "create_time": created,
            "update_time": updated,
        },
    )


def _version(resources_id: str | None, version: int | None) -> VersionKey | None:
    return None if resources_id is None or version is None else (resources_id, version)


def worker_from(row: Row) -> Worker:
    """Return the worker in a row of `select_workers`."""
    worker_id, status, stats, heartbeat, dequeue, busy, idle, rollout_id, attempt_id, paused = row
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
            "paused": bool(paused),
        },
    )


def sample_from(row: Row) -> Sample:
    """Return the sample in a row of `select_samples`."""
    name, time, value, worker_id = row
    return build(Sample, {"name": name, "time": time, "value": value, "worker_id": worker_id or None})


def run_from(row: Row) -> RunRecord:
    """Build a run from a row of `select_runs`."""
    _, run_id, name, kind, status, start_time, end_time, last_heartbeat_time, cause, config = row
    return build(
        RunRecord,
        {
            "run_id": run_id,
            "name": name,
            "kind": kind,
            "status": status,
            "start_time": start_time,
            "end_time": end_time,
            "last_heartbeat_time": last_heartbeat_time,
            "cause": cause,
            "config": from_text(config),
        },
    )


def metric_from(row: Row) -> MetricPoint:
    """Build a metric from a row of `select_metrics`."""
    stage, iteration, name, value, time = row
    return build(MetricPoint, {"stage": stage, "iteration": iteration, "name": name, "value": value, "time": time})
