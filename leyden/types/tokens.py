"""The exact tokens of one model call, and their compact form.

Recorded where they are made. Text is never tokenised again to train on.
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from typing import TypeVar

from pydantic import BaseModel, Field

__all__ = ["TokenRecord", "pack_floats", "pack_ints", "unpack_floats", "unpack_ints"]


def pack_ints(values: list[int]) -> bytes:
    """`values` as little-endian signed 32-bit integers."""
    return _little_endian(array("i", values)).tobytes()


def pack_floats(values: list[float]) -> bytes:
    """`values` as little-endian 32-bit floats."""
    return _little_endian(array("f", values)).tobytes()


def unpack_ints(data: bytes) -> list[int]:
    """The inverse of `pack_ints`. Raises ValueError when the length is not a multiple of 4."""
    values = array("i")
    values.frombytes(data)
    return _little_endian(values).tolist()


def unpack_floats(data: bytes) -> list[float]:
    """The inverse of `pack_floats`; the values are those of the 32-bit floats."""
    values = array("f")
    values.frombytes(data)
    return _little_endian(values).tolist()


_Array = TypeVar("_Array", "array[int]", "array[float]")


def _little_endian(values: _Array) -> _Array:
    if sys.byteorder == "big":
        values.byteswap()
    return values


class TokenRecord(BaseModel):
    """Prompt ids, response ids and what the sampler said of them. P prompt tokens, R response tokens."""

    prompt_ids: list[int]
    """Shape (P,)."""
    response_ids: list[int]
    """Shape (R,); the end-of-turn token is part of it when it was sampled."""
    logprobs: list[float] | None = None
    """Shape (R,): the log-probability of each response token under the policy and temperature that sampled it."""
    policy_versions: list[int] | None = Field(default=None)
    """Shape (R,): which version of the policy sampled each token. None when the model is not one of ours."""

    def pack(self) -> bytes:
        """The record as bytes: a header of lengths, then arrays of 32-bit numbers, compressed."""
        lengths = (
            len(self.prompt_ids),
            len(self.response_ids),
            -1 if self.logprobs is None else len(self.logprobs),
            -1 if self.policy_versions is None else len(self.policy_versions),
        )
        body = pack_ints(self.prompt_ids) + pack_ints(self.response_ids)
        body += pack_floats(self.logprobs or []) + pack_ints(self.policy_versions or [])
        return _HEADER.pack(_FORMAT, *lengths) + zlib.compress(body, level=1)

    @classmethod
    def unpack(cls, data: bytes) -> TokenRecord:
        """The inverse of `pack`. Raises ValueError for bytes that `pack` did not make."""
        if len(data) < _HEADER.size:
            raise ValueError(f"a token record needs at least {_HEADER.size} bytes, got {len(data)}")
        form, prompt, response, logprobs, versions = _HEADER.unpack_from(data)
        if form != _FORMAT:
            raise ValueError(f"token record format {form} is not known here; this version reads format {_FORMAT}")
        try:
            body = zlib.decompress(data[_HEADER.size :])
        except zlib.error as error:
            raise ValueError(f"a token record of {len(data)} bytes is damaged: {error}") from None
        parts: list[bytes] = []
        start = 0
        for length in (prompt, response, max(logprobs, 0), max(versions, 0)):
            parts.append(body[start : start + 4 * length])
            start += 4 * length
        if start != len(body):
            raise ValueError(f"a token record of {len(body)} bytes does not hold the {start} that its header promises")
        return cls.model_construct(
            prompt_ids=unpack_ints(parts[0]),
            response_ids=unpack_ints(parts[1]),
            logprobs=None if logprobs < 0 else unpack_floats(parts[2]),
            policy_versions=None if versions < 0 else unpack_ints(parts[3]),
        )


_FORMAT = 1
_HEADER = struct.Struct("<Biiii")
