"""Check arguments beyond their types, so that every database takes them.

PostgreSQL takes no NUL in a text and no long text in an index, SQLite no number above 2**63.
Control characters would mislead a reader of messages and paths.
"""

from __future__ import annotations

import math

from leyden.errors import ConfigError
from leyden.types import Span

_ID_LENGTH = 200
_HIGHEST = 2**53
"""The highest sequence id that a caller may give. The counter continues from there, and must not
overflow."""


def check_id(what: str, value: str | None) -> None:
    """Raise ConfigError for an id that no store takes. None stands for an id that the store makes.

    what: what the message calls the id, such as "worker_id".
    """
    if value is not None and not (value.isprintable() and 0 < len(value) <= _ID_LENGTH):
        shown = repr(value) if len(value) <= _ID_LENGTH else f"{value[:20]!r}... ({len(value)} characters)"
        raise ConfigError(f"{what} {shown} must have 1 to {_ID_LENGTH} printable characters")


def check_attempt_id(value: str | None) -> None:
    """Raise ConfigError for an id that a new attempt cannot have, such as "latest", which stands
    for the newest attempt.
    """
    check_id("attempt_id", value)
    if value == "latest":
        raise ConfigError("attempt_id 'latest' stands for a rollout's newest attempt; choose another")


def check_span(span: Span) -> None:
    """Raise ConfigError for a span that no store accepts."""
    of = span.__dict__  # see `rows.span_values`
    span_id, trace_id, parent_id = of["span_id"], of["trace_id"], of["parent_id"]
    all_ids = span_id + trace_id if parent_id is None else span_id + trace_id + parent_id
    if not (span_id and trace_id and parent_id != "" and len(all_ids) <= _ID_LENGTH and all_ids.isprintable()):
        # The check above is stricter, because it limits the ids' length together. Find the bad one,
        # if any.
        check_id("span_id", span_id)
        check_id("trace_id", trace_id)
        check_id("parent_id", parent_id)
    if of["sequence_id"] > _HIGHEST:
        raise ConfigError(
            f"sequence_id {span.sequence_id} of span {span.span_id!r} is above {_HIGHEST}; give 0 for the next one"
        )


def check_time(what: str, seconds: float) -> None:
    """Raise ConfigError unless the time is finite."""
    if not math.isfinite(seconds):
        raise ConfigError(f"{what} {seconds!r} must be a finite number of Unix seconds")
