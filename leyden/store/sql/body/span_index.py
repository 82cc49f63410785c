"""The attributes by which spans of all rollouts are searched, and their index rows.

An attribute's values are kept as digests, so that a long text costs no more than a short one. Strings, booleans and
numbers have digests; lists have none. A trigger deletes the rows with their spans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from leyden.errors import ConfigError
from leyden.store.sql.rows import from_text
from leyden.store.sql.transaction import Transaction
from leyden.types import AttributeValue, Span
from leyden.types.checks import check_id

_STEP = 2000
"""Spans that one transaction indexes while an attribute becomes searchable. It takes milliseconds, in which no other
write runs."""


def attribute_digest(value: AttributeValue | None) -> bytes | None:
    """Return the digest of a value; None for a value that cannot be searched.

    Equal values of one kind have one digest: 1 and 1.0 are one number, True and "1" are no numbers.
    """
    match value:
        case bool():
            tagged = f"b{value:d}"
        case str():
            tagged = f"s{value}"
        case int() | float():
            tagged = f"n{int(value) if isinstance(value, float) and value.is_integer() else value!r}"
        case _:
            return None
    return blake2b(tagged.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def begin_attribute_index(tx: Transaction, key: str) -> None:
    """Begin to index an attribute: that of spans which arrive from now on. `extend_attribute_index` indexes the earlier
    ones.

    Raise ConfigError for a name that no store takes.
    """
    check_id("key", key)
    if tx.one("get_attribute_index", attribute=key) is None:
        tx.run("await_span_writers")
        tx.run("insert_attribute_index", attribute=key)


def extend_attribute_index(tx: Transaction, key: str) -> bool:
    """Index an attribute of the next `_STEP` spans that were stored before `begin_attribute_index`. Return True once
    all of these spans are indexed.
    """
    tx.expect(_STEP)
    row = tx.one("get_attribute_index", attribute=key)
    assert row is not None, "call begin_attribute_index first; an attribute index is never deleted"
    index, done, until = row
    end = min(done + _STEP, until)
    for span, attributes in tx.all("select_attributes", after=done, until=end):
        digest = attribute_digest(from_text(attributes).get(key))
        if digest is not None:
            tx.run("insert_attribute_value", attribute=index, value=digest, span=span)
    tx.run("set_attribute_indexed", id=index, done=end)
    return end == until


def index_values(tx: Transaction, rollout: int, attempt: int, spans: Sequence[Span]) -> None:
    """Add index rows for the indexed attributes of spans that were just inserted."""
    if not any(span.attributes for span in spans):
        return
    for attribute, key in tx.all("select_attribute_indexes"):
        for span in spans:
            digest = attribute_digest(span.attributes.get(key))
            if digest is not None:
                where = {"rollout": rollout, "attempt": attempt, "span_id": span.span_id}
                tx.run("insert_attribute_value_of", attribute=attribute, value=digest, **where)


def indexed_attribute(tx: Transaction, key: str) -> int:
    """Return the number of an indexed attribute. Raise ConfigError for another one."""
    row = tx.one("get_attribute_index", attribute=key)
    if row is None or row[1] < row[2]:
        raise ConfigError(
            f"spans of all rollouts in {tx.store_url} cannot be found by the attribute {key!r}; "
            + (
                "call index_span_attribute with it first"
                if row is None
                else "its index is being made; wait for index_span_attribute"
            )
        )
    return row[0]


def matches(attributes: Mapping[str, AttributeValue], asked: Mapping[str, bytes]) -> bool:
    """Return whether each requested attribute has the value with this digest."""
    return all(attribute_digest(attributes.get(key)) == digest for key, digest in asked.items())
