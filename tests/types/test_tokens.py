"""Token records: packed and unpacked, they are what they were."""

from __future__ import annotations

import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.errors import ConfigError
from leyden.types import TokenRecord, pack_floats, pack_ints, unpack_floats, unpack_ints
from leyden.types.tokens import common_prefix, ids_digest, own_ids, shared_length, whole_digest, whole_length

INTS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50)
FLOATS = st.lists(st.floats(width=32, allow_nan=False), max_size=50)

MASKS = st.lists(st.integers(0, 1), max_size=50)
RECORDS = st.builds(
    TokenRecord,
    prompt_ids=INTS,
    response_ids=INTS,
    logprobs=st.none() | FLOATS,
    policy_versions=st.none() | INTS,
    loss_mask=st.none() | MASKS,
)


@given(RECORDS, st.data())
def test_packing_loses_nothing_but_what_is_shared(record: TokenRecord, data: st.DataObject) -> None:
    shared = data.draw(st.integers(0, len(record.prompt_ids)))
    packed = record.pack(shared=shared)
    assert record.pack(shared=shared, prompt=pack_ints(record.prompt_ids)) == packed
    assert TokenRecord.unpack(packed, pack_ints(record.prompt_ids[:shared])) == record
    assert shared_length(packed) == shared
    assert whole_length(packed) == len(record.prompt_ids + record.response_ids)
    assert whole_digest(packed) == ids_digest(pack_ints(record.prompt_ids + record.response_ids)).digest()
    own = record.prompt_ids[shared:] + record.response_ids
    assert own_ids(packed) == pack_ints(own)
    most = data.draw(st.integers(0, 120))
    assert own_ids(packed, most) == pack_ints(own[:most])


@pytest.mark.parametrize(
    "numbers",
    [{"prompt_ids": [2**31]}, {"response_ids": ["a"]}, {"policy_versions": [-(2**31) - 1]}, {"loss_mask": [2]}],
)
def test_numbers_that_do_not_fit_are_refused(numbers: dict[str, list[int]]) -> None:
    record = TokenRecord.model_construct(**{"prompt_ids": [], "response_ids": []} | numbers)
    with pytest.raises(ConfigError, match="must be"):
        record.pack()


def test_a_record_that_nothing_could_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyden.types.tokens._MAX_TOKENS", 5)
    assert whole_length(TokenRecord(prompt_ids=[1] * 3, response_ids=[2] * 2).pack()) == 5
    with pytest.raises(ConfigError, match="at most 5 ids, got 6"):
        TokenRecord(prompt_ids=[1] * 3, response_ids=[2] * 3).pack()


def test_a_record_is_not_read_with_another_beginning_than_its_own() -> None:
    packed = TokenRecord(prompt_ids=[1, 2, 3], response_ids=[4]).pack(shared=2)
    for beginning in (b"", pack_ints([1]), pack_ints([1, 2, 3])):
        with pytest.raises(ValueError, match="shares 2 ids"):
            TokenRecord.unpack(packed, beginning)
    with pytest.raises(ValueError, match="not those"):
        TokenRecord.unpack(packed, pack_ints([1, 3]))


@given(INTS, FLOATS)
def test_arrays_are_little_endian_numbers_of_four_bytes(ints: list[int], floats: list[float]) -> None:
    assert pack_ints(ints) == struct.pack(f"<{len(ints)}i", *ints)
    assert pack_floats(floats) == struct.pack(f"<{len(floats)}f", *floats)
    assert (unpack_ints(pack_ints(ints)), unpack_floats(pack_floats(floats))) == (ints, floats)


def test_an_empty_list_is_not_a_missing_one() -> None:
    empty = TokenRecord(prompt_ids=[], response_ids=[], logprobs=[], policy_versions=[])
    missing = TokenRecord(prompt_ids=[], response_ids=[])
    assert TokenRecord.unpack(empty.pack()) == empty != missing == TokenRecord.unpack(missing.pack())


def test_a_repeated_prompt_is_small() -> None:
    record = TokenRecord(prompt_ids=[7] * 10_000, response_ids=[1])
    assert len(record.pack()) < 1000


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x09" + b"\0" * 40, b"\x02" + b"\0" * 40, b"\x03" + b"\0" * 20])
def test_bytes_that_are_no_record_are_refused(data: bytes) -> None:
    for read in (TokenRecord.unpack, shared_length, whole_length, whole_digest, own_ids):
        with pytest.raises(ValueError, match="token record"):
            read(data)


@given(st.builds(TokenRecord, prompt_ids=INTS, response_ids=INTS), st.integers(1, 17))
def test_a_header_that_promises_more_than_there_is_is_refused(record: TokenRecord, more: int) -> None:
    data = bytearray(record.pack())
    data[21:25] = struct.pack("<i", len(record.prompt_ids) + more)
    for read in (TokenRecord.unpack, own_ids):
        with pytest.raises(ValueError, match="promises"):
            read(bytes(data))


def test_a_damaged_record_is_refused() -> None:
    packed = TokenRecord(prompt_ids=[1, 2], response_ids=[3]).pack()
    with pytest.raises(ValueError, match="does not hold"):
        TokenRecord.unpack(packed[:-1])
    with pytest.raises(ValueError, match="damaged"):
        own_ids(packed[:41] + b"\xff" + packed[42:])


@given(st.lists(st.integers(0, 1), max_size=300), st.lists(st.integers(0, 1), max_size=300), st.integers(0, 9000))
def test_the_common_prefix_ends_at_the_first_difference(a: list[int], b: list[int], n_equal: int) -> None:
    one, other = [7] * n_equal + a, [7] * n_equal + b
    expected = next((n for n, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
    assert common_prefix(one, other) == expected
    assert common_prefix(array("i", one), array("i", other)) == expected
