"""What token records cost: bytes kept, statements run, rows read."""

from __future__ import annotations

import random
import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.errors import StoreError
from leyden.gateway.prefixes import Prefixes
from leyden.store import InMemoryLightningStore, SqliteLightningStore
from leyden.store.sql.body import rollouts, search, spans
from leyden.store.sql.body import token_columns as tokens
from leyden.store.sql.rows import FoundSpan, span_from
from leyden.store.sql.sqlite import SqliteTransaction, connect, migrate
from leyden.types import AttemptedRollout, Span, TokenRecord, pack_ints, semconv
from leyden.types.tokens import shared_length


def call(
    rollout: AttemptedRollout,
    number: int,
    prompt: Sequence[int],
    response: Sequence[int],
    known_prefix: tuple[int, int] | None = None,
) -> Span:
    """A model call. known_prefix: the number of the call that it says it goes on from, and with how many ids."""
    claim = {} if known_prefix is None else {semconv.GOES_ON_FROM: span_id(known_prefix[0])}
    return Span(
        rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id, sequence_id=0, trace_id="f" * 32,
        span_id=span_id(number), name="call", tokens=TokenRecord(prompt_ids=[*prompt], response_ids=[*response]),
        attributes=claim | {semconv.KNOWN_PREFIX: known_prefix[1] if known_prefix else 0},
    )  # fmt: skip


def span_id(number: int) -> str:
    return f"{number:016x}"


def conversation(rollout: AttemptedRollout, n_turns: int, n_new: int) -> list[Span]:
    """Turns with `n_new` ids of observation and as many of response."""
    rng = random.Random(n_turns)
    context: list[int] = []
    turns: list[Span] = []
    for number in range(n_turns):
        known_prefix = (number - 1, len(context)) if number else None
        context = context + [rng.randrange(150_000) for _ in range(n_new)]
        response = [rng.randrange(150_000) for _ in range(n_new)]
        turns.append(call(rollout, number, context, response, known_prefix))
        context = context + response
    return turns


@pytest.mark.parametrize("bulk", [False, True])
async def test_a_conversation_costs_what_its_last_prompt_and_responses_cost(tmp_path: Path, bulk: bool) -> None:
    path = tmp_path / "s.db"
    async with SqliteLightningStore(path) as store:
        turns = conversation(await store.start_rollout(1), n_turns=6, n_new=200)
        for part in [turns] if bulk else [[turn] for turn in turns]:
            await store.add_many_spans(part)
    with sqlite3.connect(path) as connection:
        kept = connection.execute("SELECT sum(length(tokens)) FROM spans").fetchone()[0]
    connection.close()
    last = turns[-1].tokens
    assert last is not None
    once = len(zlib.compress(pack_ints(last.prompt_ids + last.response_ids), level=1))
    sum_of_prompts = sum(len(turn.tokens.pack()) for turn in turns if turn.tokens is not None)
    assert once <= kept < 1.1 * once
    assert sum_of_prompts > 3 * kept


SEQUENCES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 90), st.integers(0, 40), st.integers(0, 30), st.integers(0, 3)),
    min_size=1,
    max_size=25,
)


def calls_of(shape: list[tuple[int, int, int, int, int]]) -> list[tuple[list[int], list[int]]]:
    """Prompts that begin like any call before them, in an alphabet so small that they often agree by chance; and responses."""
    calls: list[tuple[list[int], list[int]]] = []
    for back, kept, n_new, n_response, letter in shape:
        start = whole(calls[-1 - back % len(calls)]) if calls else []
        calls.append((start[:kept] + [letter] * n_new, [letter] * n_response))
    return calls


def whole(prompt_and_response: tuple[list[int], list[int]]) -> list[int]:
    prompt, response = prompt_and_response
    return prompt + response


def stored(rollout_spans: Sequence[Span], tx: SqliteTransaction) -> list[tuple[int | None, int]]:
    """Add calls one by one, check what is read back, and return each one's base and how many ids it shares with that."""
    added = [one for span in rollout_spans for one in spans.add_many_spans(tx, [span])]
    rollout_id = rollout_spans[0].rollout_id
    assert [span.tokens for span in added] == [span.tokens for span in rollout_spans]
    assert spans_of(search.query_spans(tx, rollout_id)) == added
    for number, expected in enumerate(added):
        assert spans_of(search.query_spans(tx, rollout_id, limit=1, offset=number)) == [expected]
    rows = tx._cursor.execute("SELECT tokens_base, tokens FROM spans ORDER BY key").fetchall()
    return [(base, shared_length(packed)) for base, packed in rows]


@settings(max_examples=60)
@given(SEQUENCES)
def test_a_prompt_that_the_gateway_recorded_shares_all_that_any_earlier_call_begins_with(
    shape: list[tuple[int, int, int, int, int]],
) -> None:
    calls, prefixes = calls_of(shape), Prefixes()
    with closing(connect(":memory:", {})) as connection:
        migrate(connection, "memory://")
        tx = SqliteTransaction(connection, "memory://")
        rollout = rollouts.start_rollout(tx, 1)
        recorded: list[Span] = []
        most: list[int] = []
        for number, (prompt, response) in enumerate(calls):
            known, earlier = prefixes.add(("ro", "at"), str(number), prompt, response)
            recorded.append(call(rollout, number, prompt, response, None if earlier is None else (int(earlier), known)))
            longest = max((agreement(prompt, whole(before)) for before in calls[:number]), default=0)
            most.append(longest if longest >= 16 else 0)
        assert [shared for _, shared in stored(recorded, tx)] == most


@settings(max_examples=60)
@given(SEQUENCES, st.data())
def test_a_claim_is_used_only_if_it_is_so_and_nothing_that_is_read_back_depends_on_it(
    shape: list[tuple[int, int, int, int, int]], data: st.DataObject
) -> None:
    """Claims name any call of the attempt, also itself and later ones, and any length."""
    calls = calls_of(shape)
    with closing(connect(":memory:", {})) as connection:
        migrate(connection, "memory://")
        tx = SqliteTransaction(connection, "memory://")
        rollout = rollouts.start_rollout(tx, 1)
        recorded: list[Span] = []
        expected: list[int] = []
        for number, (prompt, response) in enumerate(calls):
            named = data.draw(st.integers(0, len(calls)))
            agreed = agreement(prompt, whole(calls[named])) if named < number else 0
            n_ids = data.draw(st.sampled_from([agreed, agreed - 1, agreed + 1]) | st.integers(-5, 200))
            recorded.append(call(rollout, number, prompt, response, (named, n_ids)))
            expected.append(n_ids if 16 <= n_ids <= agreed else 0)
        found = stored(recorded, tx)
        assert [shared for _, shared in found] == expected
        for base, shared in found:
            if base is not None:
                assert found[base - 1][1] < shared, "the way to the beginning is as short as it can be"


def spans_of(found: Iterable[FoundSpan]) -> list[Span]:
    return [span_from(*one) for one in found]


def agreement(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Counting(SqliteTransaction):
    """Says which statements were run, and how many rows they answered."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__(connection, "memory://")
        self.ran: list[str] = []
        self.rows = 0

    def put(self, query: str, values: Sequence[Any], /) -> int:
        self.ran.append(query)
        return super().put(query, values)

    def one(self, query: str, /, **parameters: Any) -> Sequence[Any] | None:
        self.ran.append(query)
        row = super().one(query, **parameters)
        self.rows += row is not None
        return row

    def all(self, query: str, /, **parameters: Any) -> list[Sequence[Any]]:
        self.ran.append(query)
        rows = super().all(query, **parameters)
        self.rows += len(rows)
        return rows


@pytest.fixture
def tx() -> Any:
    connection = connect(":memory:", {})
    migrate(connection, "memory://")
    yield Counting(connection)
    connection.close()


def test_spans_without_tokens_pay_nothing_for_those_with_them(tx: Counting) -> None:
    rollout = rollouts.start_rollout(tx, 1)
    plain = [call(rollout, number, [], []).model_copy(update={"tokens": None}) for number in range(5)]
    spans.add_many_spans(tx, plain)
    spans.add_many_spans(tx, [call(rollout, 9, range(100), [1])])
    assert "get_token_record" not in tx.ran
    spans.add_many_spans(tx, [call(rollout, 10, range(100), [1], (9, 100))])
    assert tx.ran.count("get_token_record") == 1


def test_a_turn_is_added_without_reading_other_conversations(tx: Counting) -> None:
    rollout = rollouts.start_rollout(tx, 1)
    spans.add_many_spans(tx, conversation(rollout, n_turns=200, n_new=20))
    other = [7] * 50
    spans.add_many_spans(tx, [call(rollout, 1000, other, other)])
    spans.add_many_spans(tx, [call(rollout, 1001, other * 3, other, (1000, 100))])
    tx.rows = 0
    tx.ran.clear()
    spans.add_many_spans(tx, [call(rollout, 1002, other * 5, other, (1001, 200))])
    assert (tx.ran.count("get_token_record"), tx.rows) == (1, 1)


def test_a_turn_that_goes_on_is_added_without_unpacking_those_before_it(
    tx: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = rollouts.start_rollout(tx, 1)
    turns = conversation(rollout, n_turns=30, n_new=20)
    spans.add_many_spans(tx, turns[:20])
    monkeypatch.setattr(tokens, "own_ids", lambda *_: pytest.fail("a record was unpacked"))
    spans.add_many_spans(tx, turns[20:])
    monkeypatch.undo()
    assert spans_of(search.query_spans(tx, rollout.rollout_id)) == [
        turn.model_copy(update={"sequence_id": number}) for number, turn in enumerate(turns, 1)
    ]


def test_a_whole_attempt_is_read_in_one_statement_and_one_call_in_two(tx: Counting) -> None:
    rollout = rollouts.start_rollout(tx, 1)
    turns = spans.add_many_spans(tx, conversation(rollout, n_turns=300, n_new=20))
    tx.ran.clear()
    assert spans_of(search.query_spans(tx, rollout.rollout_id)) == turns
    assert "select_token_chain" not in tx.ran
    assert spans_of(search.query_spans(tx, rollout.rollout_id, limit=1, offset=299)) == [turns[299]]
    assert tx.ran.count("select_token_chain") == 1
    tx.ran.clear()
    odd = search.query_spans(tx, rollout.rollout_id, limit=100, offset=150)
    assert spans_of(odd) == turns[150:250]
    assert tx.ran.count("select_token_chain") == 1


def test_records_that_say_the_same_do_not_lengthen_the_way(tx: Counting) -> None:
    """Samples of one prompt all begin with the first of them, not each with the one before."""
    rollout = rollouts.start_rollout(tx, 1)
    prompt = range(50)
    samples = spans.add_many_spans(
        tx, [call(rollout, number, prompt, [number] * 9, (number - 1, 50) if number else None) for number in range(30)]
    )
    bases = [tx.all("get_token_record", rollout=1, attempt=1, span_id=span_id(number))[0][1] for number in range(30)]
    assert bases == [None, *[1] * 29]
    assert spans_of(search.query_spans(tx, rollout.rollout_id)) == list(samples)


async def test_a_beginning_that_was_deleted_by_hand_is_said_to_be_lost() -> None:
    async with InMemoryLightningStore() as store:
        rollout = await store.start_rollout(1)
        await store.add_many_spans(conversation(rollout, n_turns=3, n_new=20))

        def delete(tx: Any) -> None:
            tx._cursor.execute("DELETE FROM spans WHERE key = 1")

        await store._driver.write(delete, (), {})
        with pytest.raises(StoreError, match="lost the span with key 1"):
            await store.query_spans(rollout.rollout_id)


@pytest.mark.parametrize("damage", ["missing", "another format", "a byte of it"])
async def test_a_call_is_recorded_where_those_before_it_are_damaged(damage: str) -> None:
    """What it goes on from is not read when it is written; who reads the damaged one is told which it is."""
    async with InMemoryLightningStore() as store:
        rollout = await store.start_rollout(1)
        first, second, third = conversation(rollout, n_turns=3, n_new=20)
        await store.add_many_spans([first])

        def spoil(tx: Any) -> None:
            packed = tx._cursor.execute("SELECT tokens FROM spans").fetchone()[0]
            other = {"missing": b"", "another format": b"\x02" + packed[1:]}
            spoilt = other.get(damage, packed[:60] + bytes([packed[60] ^ 255]) + packed[61:])
            tx._cursor.execute("UPDATE spans SET tokens = ?", (spoilt,))

        await store._driver.write(spoil, (), {})
        await store.add_many_spans(
            [second, third, branch := call(rollout, 9, first.tokens.prompt_ids + [7] * 30, [1], (0, 20))]
        )
        with pytest.raises(StoreError, match="memory:// cannot read the tokens of the span with key 1"):
            await store.query_spans(rollout.rollout_id, span_id=first.span_id)
        (read,) = await store.query_spans(rollout.rollout_id, span_id=branch.span_id)
        assert read.tokens == branch.tokens


def test_the_shortest_base_is_what_the_tests_think() -> None:
    assert tokens._MIN_SHARED == 16
