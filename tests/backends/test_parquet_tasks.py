"""Tasks in Parquet files, which are read with pyarrow."""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from leyden.errors import ConfigError
from leyden_compat.importing import read_tasks

pytestmark = pytest.mark.merge


def test_tasks_of_lines_and_tables_are_read(tmp_path: Path) -> None:
    tasks = [{"question": "1 + 1", "answer": 2}, {"question": "2 + 2", "answer": 4}]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)) + "\n\n")
    parquet.write_table(pyarrow.Table.from_pylist(tasks), tmp_path / "tasks.parquet")
    assert read_tasks(tmp_path / "tasks.jsonl") == read_tasks(tmp_path / "tasks.parquet") == tasks


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tasks.parquet").write_bytes(b"no table")
    with pytest.raises(ConfigError, match="no Parquet file"):
        read_tasks(tmp_path / "tasks.parquet")
