"""Every test runs in exactly one part of a night, and its results are joined for the commit that they belong to."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import nightly
from tests.groups import GROUPS, Result
from tests.nightly import Piece, part, pieces, results_of, table

ROOT = Path(__file__).parents[2]
N_PARTS = 5


def test_each_piece_is_in_one_part_and_no_part_takes_too_long():
    filled = [part(number, N_PARTS) for number in range(1, N_PARTS + 1)]
    assert sorted(piece.name for some in filled for piece in some) == sorted(piece.name for piece in pieces())
    possible = {group.name for group in GROUPS if not group.missing()}
    assert {piece.group.name for piece in pieces()} == possible | {"quick"}
    assert all(sum(piece.minutes for piece in some) <= nightly.PART_MINUTES for some in filled)


def test_too_few_parts_are_refused():
    with pytest.raises(SystemExit, match=r"a part of 1 may take .* minutes, and 70 are allowed; use more parts"):
        part(1, 1)


def test_the_shards_of_a_group_have_each_test_once(tmp_path: Path):
    (tmp_path / "tests").mkdir()
    for name in ("pyproject.toml", "tests/conftest.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "tests/test_many.py").write_text("\n".join(f"def test_{n}(): pass" for n in range(40)))

    def collected(shard: str) -> set[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--shard", shard]
        printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        return {line for line in printed.splitlines() if "::" in line}

    first, second = collected("1/2"), collected("2/2")
    assert not first & second
    assert len(first | second) == 40
    assert first == collected("1/2")


def test_the_table_joins_the_parts_of_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nightly, "RESULTS", tmp_path)
    for file, row in {
        "abc-1of2": Result("slow", passed=3, minutes=2.5),
        "abc-2of2": Result("faults", failed=1, trouble="its 18 minutes are over"),
        "other-1of2": Result("ray", passed=9),
    }.items():
        (tmp_path / f"{file}.json").write_text(json.dumps([vars(row)]))
    assert set(results_of("abc")) == {"slow", "faults"}
    lines = table("abc").splitlines()
    assert lines[1].split() == ["slow", "3", "0", "0", "2.5"]
    assert lines[2].endswith("its 18 minutes are over")
    assert lines[3].startswith(f"abc: 1 of {len(pieces())} passed; not run: ") and "ray" in lines[3]


def test_a_piece_that_is_cut_has_a_share_of_the_time():
    long = next(group for group in GROUPS if group.name == "long")
    assert (Piece(long, "1/2").name, Piece(long, "1/2").minutes) == ("long 1/2", long.minutes / 2)
