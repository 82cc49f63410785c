"""Token records in the database: a record whose prompt begins like an earlier one's sequence keeps only the rest.

The prompts of a conversation repeat it from the beginning. So a record is stored as (base, shared, rest): the earlier record of the
same attempt with whose ids, prompt and response, it begins; how many of them; and what is its own (`types/tokens.py` is the form of that).
Every record on the way from one to its beginning gives it at least one id, so reading one costs what it is long, and an attempt that is
read whole is decoded once. A base never goes away alone: retention forgets whole rollouts. What a record goes on from is not read when it
is written, so damage there (by another program, or a disk) is told to who reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from leyden.errors import StoreError
from leyden.store.sql.rows import KEY, TOKENS, TOKENS_BASE
from leyden.store.sql.transaction import Row, Transaction
from leyden.types import TokenRecord, pack_ints
from leyden.types.tokens import ids_digest, own_ids, shared_length, whole_digest, whole_length

_CANDIDATES = 8
"""Earlier records that a new one is compared with: so many conversations of one attempt may go on at once."""
_MIN_SHARED = 16
"""Fewer ids are not worth a base."""
_Sized = tuple[int, Row]
"""For how many ids a record stands, and the record."""


class TokenWriter:
    """Packs the token records that one operation adds to one attempt, each against those that are there by then."""

    def __init__(self, tx: Transaction, rollout: int, attempt: int) -> None:
        self._tx = tx
        self._attempt = {"rollout": rollout, "attempt": attempt}
        self._records = _Records(tx)

    def pack(self, tokens: TokenRecord) -> tuple[int | None, bytes]:
        """The record's base, if it has one, and what is stored of itself. Raises what `TokenRecord.pack` raises."""
        prompt = pack_ints(tokens.prompt_ids)
        base, shared = self._beginning(prompt)
        return base, tokens.pack(shared=shared, prompt=prompt)

    def _beginning(self, prompt: bytes) -> tuple[int | None, int]:
        """The record with which a prompt, as `pack_ints` has it, begins, and how many ids they share: the longest that it has whole,
        or one with more in common that goes on from that; else the one with most in common.
        """
        n_ids = len(prompt) // 4
        if n_ids < _MIN_SHARED:
            return None, 0
        recent = self._recent()
        base, longest = None, _MIN_SHARED - 1
        left = recent
        if whole := _goes_on_from(prompt, recent):
            longest, row = whole
            base, left = row[KEY], _descendants(whole, recent)
        for length, row in left:
            if longest == n_ids:
                break
            if length > longest and (shared := self._agreement(row[KEY], prompt)) > longest:
                base, longest = row[KEY], shared
        return (None, 0) if base is None else (self._records.origin(base, longest), longest)

    def _recent(self) -> list[_Sized]:
        """The last records, the newest first. A damaged one is left out: nothing goes on from it."""
        recent: list[_Sized] = []
        for row in self._tx.all("select_recent_tokens", **self._attempt, limit=_CANDIDATES):
            try:
                recent.append((whole_length(row[TOKENS]), row))
            except ValueError:
                continue
            self._records.see(row)
        return recent

    def _agreement(self, key: int, prompt: bytes) -> int:
        try:
            return self._records.agreement(key, prompt)
        except (ValueError, StoreError):  # it is damaged, or what it goes on from is
            return 0


def read_tokens(tx: Transaction, rows: Sequence[Row]) -> list[TokenRecord | None]:
    """The token record of each row that begins like `select_spans`, whatever page of whatever attempts they are."""
    packed = sorted((row for row in rows if row[TOKENS] is not None), key=itemgetter(KEY))
    if not packed:
        return [None] * len(rows)
    records = _Records(tx)
    for row in packed:
        records.see(row)
    for row in reversed(packed):  # the last ones of a conversation bring the most of it
        records.find(row[TOKENS_BASE])
    bases = {row[TOKENS_BASE] for row in packed}
    read: dict[int, TokenRecord] = {}
    for row in packed:
        key, data = row[KEY], row[TOKENS]
        try:
            beginning = records.first_ids(row[TOKENS_BASE], shared_length(data))
            read[key] = TokenRecord.unpack(data, beginning)
            if key in bases:
                records.ids[key] = beginning + own_ids(data)
        except ValueError as error:
            raise StoreError(f"{tx.store_url} cannot read the tokens of the span with key {key}: {error}") from error
    return [read.get(row[KEY]) for row in rows]


class _Records:
    """Packed records by the key of their span, and where they begin."""

    def __init__(self, tx: Transaction) -> None:
        self.ids: dict[int, bytes] = {}
        """Whole sequences that are known, prompt and response, as `pack_ints` has them."""
        self._tx = tx
        self._packed: dict[int, tuple[int | None, bytes]] = {}

    def see(self, row: Row) -> None:
        """A record was read: its key, its base, itself."""
        self._packed[row[KEY]] = row[TOKENS_BASE], row[TOKENS]

    def find(self, key: int | None) -> None:
        """Read a record, and those that it begins with, unless that was done."""
        if key is not None and key not in self._packed:
            for row in self._tx.all("select_token_chain", key=key):
                self.see(row)

    def first_ids(self, key: int | None, most: int) -> bytes:
        """The first `most` ids of a record's sequence, or all there are."""
        pieces: list[bytes] = []
        while key is not None and most > 0:
            if (known := self.ids.get(key)) is not None:
                pieces.append(known[: 4 * most])
                break
            base, data = self._record(key)
            shared = shared_length(data)
            if most > shared:
                pieces.append(own_ids(data, most - shared))
            key, most = base, min(most, shared)
        return b"".join(reversed(pieces))

    def agreement(self, key: int, prompt: bytes) -> int:
        """With how many ids of a record's sequence a prompt begins. Unpacks no more of it than that."""
        way: list[tuple[bytes, int, int]] = []
        here: int | None = key
        end = whole_length(self._record(key)[1])
        while here is not None:
            base, data = self._record(here)
            start = shared_length(data)
            way.append((data, start, end))
            here, end = base, start
        agreed = 0
        for data, start, end in reversed(way):
            part = prompt[4 * start : 4 * end]
            agreed = start + _common_ids(part, own_ids(data, len(part) // 4))
            if agreed < end:
                break
        return agreed

    def origin(self, key: int, shared: int) -> int:
        """The earliest record that has the first `shared` ids of this one: the way there is as short as it can be."""
        while True:
            base, data = self._record(key)
            if base is None or shared > shared_length(data):
                return key
            key = base

    def _record(self, key: int) -> tuple[int | None, bytes]:
        self.find(key)
        if key not in self._packed:
            raise StoreError(
                f"{self._tx.store_url} has lost the span with key {key}, with whose tokens others begin; another program deleted it"
            )
        return self._packed[key]


def _goes_on_from(prompt: bytes, recent: Sequence[_Sized]) -> _Sized | None:
    """The longest record with the whole of which a prompt begins, by the digests: none is unpacked."""
    within = [sized for sized in recent if _MIN_SHARED <= sized[0] <= len(prompt) // 4]
    found: _Sized | None = None
    digest, end = ids_digest(b""), 0
    for length, row in sorted(within, key=itemgetter(0)):
        digest.update(prompt[end : 4 * length])
        end = 4 * length
        if digest.digest() == whole_digest(row[TOKENS]):
            found = length, row
    return found


def _descendants(sized: _Sized, recent: Sequence[_Sized]) -> list[_Sized]:
    """The records that begin with the whole of one, the newest first."""
    length, row = sized
    found = {row[KEY]: sized}
    for other in reversed(recent):
        if other[1][TOKENS_BASE] in found and shared_length(other[1][TOKENS]) >= length:
            found[other[1][KEY]] = other
    return list(found.values())[:0:-1]


def _common_ids(a: bytes, b: bytes) -> int:
    """With how many equal ids two packed sequences begin. Compares slices, not ids, each byte about once."""
    low, high = 0, min(len(a), len(b)) // 4
    if a[: 4 * high] == b[: 4 * high]:
        return high
    while low + 1 < high:  # equal before `low`, different before `high`
        middle = (low + high) // 2
        if a[4 * low : 4 * middle] == b[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle
    return low
