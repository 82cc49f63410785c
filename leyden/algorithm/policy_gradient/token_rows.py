"""Read the rows of tokens that `leyden dataset --format tokens` wrote, to train on them again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, FiniteFloat, ValidationError, model_validator

from leyden._lib.json import Json
from leyden._lib.text import fault_reason
from leyden.errors import ConfigError
from leyden.store.export import arrow_modules
from leyden.types import Trajectory

Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31, strict=True)]], Field(min_length=1, fail_fast=True)]


class TokenSource(BaseModel):
    """The rollout that a row comes from."""

    run: str
    rollout: str
    group: str | None = None
    task: str
    reward: FiniteFloat | None = None


class TokenRow(BaseModel):
    """A sequence of T tokens, with what the model sampled of it."""

    input_ids: Ids
    assistant_masks: Annotated[list[Annotated[int, Field(ge=0, le=1, strict=True)]], Field(fail_fast=True)]
    logprobs: Annotated[list[FiniteFloat], Field(fail_fast=True)]
    provenance: TokenSource

    @model_validator(mode="after")
    def _fits(self) -> TokenRow:
        ids, masks, logprobs = len(self.input_ids), len(self.assistant_masks), len(self.logprobs)
        if not ids == masks == logprobs:
            raise ValueError(f"it has {ids} input_ids, {masks} assistant_masks and {logprobs} logprobs")
        if not any(self.assistant_masks):
            raise ValueError("assistant_masks has no 1, so nothing of it was sampled")
        return self

    def trajectory(self) -> Trajectory:
        return Trajectory(self.input_ids, self.assistant_masks, self.logprobs, self.provenance.reward)


def read_token_rows(path: Path) -> Iterator[TokenRow]:
    """Yield the rows of a .jsonl or .parquet file. Raise ConfigError, with its number, for one that holds no tokens."""
    number = 0
    try:
        for row in _rows(path):
            number += 1
            if not isinstance(row, str):
                yield TokenRow.model_validate(row)
            elif row.strip():
                yield TokenRow.model_validate_json(row)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"][:2]))
        raise ConfigError(
            f"{path}, row {number}{': ' * bool(where)}{where}: {fault_reason(first)}; make the file with leyden dataset "
            "--format tokens"
        ) from None
    except (OSError, UnicodeDecodeError) as error:  # OSError: also what Arrow raises for a damaged file
        raise ConfigError(f"{path} cannot be read: {error}; give another file") from error


def _rows(path: Path) -> Iterator[str | Json]:
    if path.suffix == ".parquet":
        for batch in arrow_modules()[1].ParquetFile(path).iter_batches(1000):
            yield from batch.to_pylist()
    else:
        with path.open(encoding="utf-8") as file:
            yield from file
