"""Store token records so that a record whose prompt continues an earlier call holds only the rest.

Each prompt of a conversation repeats the conversation so far. A record is therefore stored as three parts. The base is
the earlier record of the same attempt with whose ids (prompt, then response) its prompt begins. `shared` is the number
of these ids. The rest is the record's own part (`types/tokens.py` defines its form). Each record in a chain of bases
contributes at least one id, so the cost of reading a record grows with its length, and an attempt that is read as a
whole is decoded once.

The span of a record names the call that it continues (`get_known_prefix`), so nothing is searched, but the ids are
compared. A record whose span names no call, or a wrong one, is stored whole.

A base is never deleted alone, because retention deletes whole rollouts. If a new record continues an earlier one to its
last id, a digest is compared and the earlier one is not unpacked. Damage in it (by another program, or a disk) is then
reported when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from leyden.errors import StoreError
from leyden.store.sql.rows import KEY, TOKENS, TOKENS_BASE
from leyden.store.sql.transaction import Row, Transaction
from leyden.types import TokenRecord, pack_ints
from leyden.types.tokens import ids_digest, own_ids, shared_length, whole_digest, whole_length

_MIN_SHARED = 16
"""A record that shares fewer ids than this with an earlier one is stored whole."""


class TokenWriter:
    """Packs the token records that one operation adds to one attempt, each as the continuation of its base."""

    def __init__(self, tx: Transaction, rollout: int, attempt: int) -> None:
        self._tx = tx
        self._attempt = {"rollout": rollout, "attempt": attempt}
        self._records = _Records(tx)

    def pack(self, tokens: TokenRecord, known_prefix: tuple[str, int] | None) -> tuple[int | None, bytes]:
        """Return the key of the record's base (None if it is stored whole) and the bytes to store.

        known_prefix: the result of `get_known_prefix` for the record's span.
        Raise ConfigError for a number that 32 bits do not hold, and for a bad mask.
        """
        prompt = pack_ints(tokens.prompt_ids)
        base = None if known_prefix is None else self._base(*known_prefix, prompt)
        shared = 0 if base is None or known_prefix is None else known_prefix[1]
        return base, tokens.pack(shared=shared, prompt=prompt)

    def _base(self, span_id: str, n_ids: int, prompt: bytes) -> int | None:
        """Return the key of the earliest record that begins with the first `n_ids` of a prompt.

        span_id: the id of the call that the prompt continues.
        prompt: its ids as `pack_ints` packs them, four bytes each.
        Return None if that call is not stored, does not begin with those ids, or is damaged.
        """
        if not (_MIN_SHARED <= n_ids <= len(prompt) // 4 and span_id.isprintable()):
            return None  # the ids of stored spans are printable, and PostgreSQL refuses some others
        row = self._tx.one("get_token_record", **self._attempt, span_id=span_id)
        if row is None:
            return None
        self._records.see(row)
        try:
            if self._records.begins_with(row[KEY], prompt[: 4 * n_ids]):
                return self._records.origin(row[KEY], n_ids)
        except (ValueError, StoreError):  # the record is damaged, or its base is
            pass
        return None


def read_tokens(tx: Transaction, rows: Sequence[Row]) -> list[TokenRecord | None]:
    """Return the token record of each row, None for a span without one. Raise StoreError for a record that is damaged
    or whose base is lost.

    rows: with the columns of `select_spans` first; they may belong to different attempts.
    """
    packed = [row for row in rows if row[TOKENS] is not None]
    if not packed:
        return [None] * len(rows)
    packed.sort(key=itemgetter(KEY))
    records = _Records(tx)
    for row in packed:
        records.see(row)
    for row in reversed(packed):  # the chain of a conversation's last record contains most of the others
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
    """Packed records by the key of their span. Missing ones are read with their chain of bases."""

    def __init__(self, tx: Transaction) -> None:
        self.ids: dict[int, bytes] = {}
        """Known whole sequences, prompt and response, as `pack_ints` packs them."""
        self._tx = tx
        self._packed: dict[int, tuple[int | None, bytes]] = {}

    def see(self, row: Row) -> None:
        self._packed[row[KEY]] = row[TOKENS_BASE], row[TOKENS]

    def find(self, key: int | None) -> None:
        """Read a record and its chain of bases, unless the record is known."""
        if key is not None and key not in self._packed:
            for row in self._tx.all("select_token_chain", key=key):
                self.see(row)

    def first_ids(self, key: int | None, most: int) -> bytes:
        """Return the first `most` ids of a record's sequence, or all if it has fewer."""
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

    def begins_with(self, key: int, ids: bytes) -> bool:
        """Return whether a record's sequence begins with these ids, which `pack_ints` packed.

        If the sequence has just as many ids, compare digests without unpacking the record.
        """
        data = self._record(key)[1]
        if len(ids) == 4 * whole_length(data):
            return ids_digest(ids).digest() == whole_digest(data)
        return self.first_ids(key, len(ids) // 4) == ids

    def origin(self, key: int, shared: int) -> int:
        while True:
            base, data = self._record(key)
            if base is None or shared > shared_length(data):
                return key
            key = base

    def _record(self, key: int) -> tuple[int | None, bytes]:
        """Return a record's base and its bytes. Raise StoreError if it is not in the store."""
        self.find(key)
        if key not in self._packed:
            raise StoreError(
                f"{self._tx.store_url} has lost the span with key {key}, with whose tokens others begin; another program deleted it"
            )
        return self._packed[key]
