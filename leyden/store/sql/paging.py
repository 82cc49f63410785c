"""Make the results of span queries from their rows: spans for a caller in this process, JSON for the server.

The module knows no database. Its functions run after the transaction, so that no other operation waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from leyden.store.sql.rows import FoundSpan, quoted, span_from, span_json
from leyden.types import PaginatedResult, Span


def page(found: PaginatedResult[FoundSpan]) -> PaginatedResult[Span]:
    """Return the result of `query_spans` from found rows, with the tokens of each span unpacked."""
    return PaginatedResult([span_from(*one) for one in found], found.limit, found.offset, found.total, found.exact)


def page_json(found: PaginatedResult[FoundSpan], packed: bool) -> bytes:
    """Return the result of `query_spans` as JSON, without making the Spans.

    packed: write tokens as base64 of their arrays, for Leyden's client, not as lists of numbers.
    """
    exact = "true" if found.exact else "false"
    return (
        f'{{"items":{_list(found.items, packed)},"limit":{found.limit},"offset":{found.offset},'
        f'"total":{found.total},"exact":{exact}}}'
    ).encode()


def by_rollout(found: Mapping[str, Sequence[FoundSpan]]) -> dict[str, list[Span]]:
    """Return the result of `query_spans_of`: the spans of each rollout, with tokens unpacked."""
    return {rollout_id: [span_from(*one) for one in spans] for rollout_id, spans in found.items()}


def by_rollout_json(found: Mapping[str, Sequence[FoundSpan]], packed: bool) -> bytes:
    """Return the result of `query_spans_of` as JSON, without making the Spans.

    packed: write tokens as base64 of their arrays, for Leyden's client, not as lists of numbers.
    """
    fields = [f"{quoted(rollout_id)}:{_list(spans, packed)}" for rollout_id, spans in found.items()]
    return f"{{{','.join(fields)}}}".encode()


def _list(spans: Sequence[FoundSpan], packed: bool) -> str:
    return f"[{','.join([span_json(*one, packed=packed) for one in spans])}]"
