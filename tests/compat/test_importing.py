"""Data that is brought along: tasks in files, and a store that is not there."""

from pathlib import Path

import pytest

from leyden.errors import ConfigError
from leyden.store import open_store
from leyden_compat.importing import ImportFailed, import_store, main, read_tasks


def test_a_damaged_line_or_another_kind_of_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(ConfigError, match=r"tasks\.jsonl, line 2"):
        read_tasks(tmp_path / "tasks.jsonl")
    (tmp_path / "tasks.csv").write_text("a\n1\n")
    with pytest.raises(ConfigError, match=r"ends in \.csv"):
        read_tasks(tmp_path / "tasks.csv")
    with pytest.raises(ConfigError, match="is no file"):
        read_tasks(tmp_path / "absent.jsonl")


async def test_a_store_that_cannot_be_reached_is_named() -> None:
    async with open_store("memory://") as store:
        with pytest.raises(ImportFailed, match="cannot be reached"):
            await import_store("http://127.0.0.1:9", store)
        with pytest.raises(ConfigError, match="no address"):
            await import_store("somewhere", store)


def test_the_command_says_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "http://127.0.0.1:9", str(tmp_path / "new.sqlite")]) == 1
    assert "is the store running?" in capsys.readouterr().err
    assert main(["qlib", str(tmp_path / "absent.pth"), "weights.pth"]) == 1
    assert "does not exist" in capsys.readouterr().err
