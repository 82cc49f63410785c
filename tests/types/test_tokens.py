"""Token records: packed and unpacked, they are what they were."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.types import TokenRecord, pack_floats, pack_ints, unpack_floats, unpack_ints

INTS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50)
FLOATS = st.lists(st.floats(width=32, allow_nan=False), max_size=50)


@given(
    st.builds(
        TokenRecord, prompt_ids=INTS, response_ids=INTS, logprobs=st.none() | FLOATS, policy_versions=st.none() | INTS
    )
)
def test_packing_loses_nothing(record: TokenRecord) -> None:
    assert TokenRecord.unpack(record.pack()) == record


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


@pytest.mark.parametrize(
    "data", [b"", b"\x01", b"\x09" + b"\0" * 16, TokenRecord(prompt_ids=[], response_ids=[]).pack()[:-1]]
)
def test_bytes_that_are_no_record_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="token record"):
        TokenRecord.unpack(data)


@given(st.builds(TokenRecord, prompt_ids=INTS, response_ids=INTS), st.integers(1, 17))
def test_a_header_that_promises_more_than_there_is_is_refused(record: TokenRecord, more: int) -> None:
    data = bytearray(record.pack())
    data[1:5] = struct.pack("<i", len(record.prompt_ids) + more)
    with pytest.raises(ValueError, match="promises"):
        TokenRecord.unpack(bytes(data))
