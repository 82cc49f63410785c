"""`leyden demo`: command lines that are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from leyden.cli.demo.demo_run import DemoOptions, start_run
from leyden.errors import ConfigError


def test_a_folder_of_runs_is_no_place_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "run.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r"is a folder of runs \(first is one\); choose a new folder, such as --run-dir"
    ):
        start_run(tmp_path, DemoOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
