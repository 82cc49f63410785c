"""Write the rows of a data set to a JSON Lines or Parquet file, whole or not at all.

A column of Parquet has one type, so objects of any shape (tools, `info`, metrics) are JSON text there. The module knows
columns, and no run or store.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from leyden._lib.atomic import open_aside
from leyden._lib.json import Json
from leyden.errors import ConfigError
from leyden.store.export import arrow_modules

_TEXTS = ("tools", "tool_defs", "info", "metrics")
_BATCH = 1000


@contextmanager
def open_rows(path: Path, format: str) -> Generator[Callable[[Json], object]]:
    """Open a file for rows of `format` that replaces `path` at the end, and yield the function that takes a row.

    The function raises ValueError for a row that JSON cannot hold: half of a surrogate pair, or a number that is not
    finite. Raise ConfigError for another suffix than .jsonl and .parquet, and if Parquet cannot hold a row exactly.
    """
    if path.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{path} is no name of a data set; it must end in .jsonl or .parquet")
    waiting = list[Json]()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_aside(path, "wb") as file, ExitStack() as stack:
            if path.suffix == ".jsonl":
                yield lambda row: file.write(_line(row) + b"\n")
                return
            arrow, parquet = arrow_modules()
            schema = _schema(arrow, format)
            table = stack.enter_context(parquet.ParquetWriter(file, schema, compression="zstd"))

            def write(row: Json) -> None:
                _line(row)  # raises for what no JSON holds
                waiting.append({**row, **{name: _line(row[name]).decode() for name in _TEXTS if name in row}})
                if len(waiting) == _BATCH:
                    table.write_table(_table(arrow, waiting, schema, path))
                    waiting.clear()

            yield write
            table.write_table(_table(arrow, waiting, schema, path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; give another path") from error


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _table(arrow: Any, rows: list[Json], schema: Any, path: Path) -> Any:
    """Return rows as a table. Raise ConfigError for one that would change, such as a message with an image."""
    changed: Json | None = None
    try:
        table = arrow.Table.from_pylist(rows, schema)
        pairs = zip(rows, table.to_pylist(), strict=True)
        if (changed := next((row for row, read in pairs if _known(row) != _known(read)), None)) is None:
            return table
    except (arrow.ArrowException, TypeError, OverflowError):
        changed = rows[0]
    raise ConfigError(
        f"{path} cannot hold a row exactly, of {json.dumps(changed['provenance'])[:200]} or one after it: it has parts, such "
        "as images, that a column of texts lacks; give a path that ends in .jsonl"
    )


def _known(value: Any) -> Any:
    """Return a value without what is None in it, which Parquet has where JSON has nothing."""
    if isinstance(value, dict):
        return {name: _known(each) for name, each in cast(Json, value).items() if each is not None}
    return [_known(each) for each in cast(list[Any], value)] if isinstance(value, list) else value


def _schema(arrow: Any, format: str) -> Any:
    text, number, whole, truth = arrow.string(), arrow.float64(), arrow.int64(), arrow.bool_()
    function = arrow.struct({"name": text, "arguments": text})
    call = text if format == "verifiers" else arrow.struct({"id": text, "type": text, "function": function})
    names = ("role", "content", "name", "tool_call_id", "refusal", "reasoning_content")
    messages = arrow.list_(arrow.struct({**dict.fromkeys(names, text), "tool_calls": arrow.list_(call)}))
    source = arrow.struct(
        {
            **dict.fromkeys(("run", "rollout", "attempt", "mode", "group", "task", "reward_name", "model"), text),
            **dict.fromkeys(("iteration", "resources_version"), whole),
            "resources_id": text,
            "reward": number,
            "policy_versions": arrow.list_(whole),
            "spans": arrow.list_(text),
        }
    )
    columns: dict[str, dict[str, Any]] = {
        "messages": {"messages": messages, "tools": text},
        "completion": {"prompt": messages, "completion": messages, "tools": text},
        "preference": {"prompt": messages, "chosen": messages, "rejected": messages, "tools": text, "margin": number},
        "tokens": {
            "input_ids": arrow.list_(whole),
            "assistant_masks": arrow.list_(arrow.int8()),
            "logprobs": arrow.list_(number),
        },
        "verifiers": {
            "example_id": whole,
            **dict.fromkeys(("prompt", "completion"), messages),
            **dict.fromkeys(("answer", "info", "metrics", "tool_defs"), text),
            **dict.fromkeys(("is_completed", "is_truncated"), truth),
            "reward": number,
        },
    }
    both = arrow.struct({"chosen": source, "rejected": source})
    return arrow.schema({**columns[format], "provenance": both if format == "preference" else source})
