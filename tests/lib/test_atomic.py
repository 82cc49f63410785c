"""Files that hold records are private, and whole or absent."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import TypeAdapter

import leyden as ly
from leyden._lib.atomic import ASIDE, append_privately, commit_directory, open_aside, private_directory, write_file
from leyden.gateway.spool import Spool


@pytest.fixture(params=[0o000, 0o022, 0o177])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    old = os.umask(request.param)
    try:
        yield request.param
    finally:
        os.umask(old)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("umask")
def test_a_file_is_private_whatever_the_umask_and_the_file_before_it(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    (tmp_path / "old").chmod(0o644)
    (tmp_path / f"{ASIDE}old").touch()  # of a process that was killed
    (tmp_path / f"{ASIDE}old").chmod(0o666)
    for name in ("old", "new"):
        write_file(tmp_path / name, "secret\n")
        assert mode(tmp_path / name) == 0o600
        assert (tmp_path / name).read_text() == "secret\n"
    with append_privately(tmp_path / "log") as file:
        file.write(b"secret")
    assert mode(tmp_path / "log") == 0o600


def test_a_file_that_is_not_private_follows_the_umask(tmp_path: Path) -> None:
    with open_aside(tmp_path / "weights", "wb", private=False) as file:
        file.write(b"1")
    old = os.umask(0)
    os.umask(old)
    assert mode(tmp_path / "weights") == 0o666 & ~old


def test_a_committed_directory_is_private(tmp_path: Path) -> None:
    (tmp_path / "aside").mkdir()
    commit_directory(tmp_path / "aside", tmp_path / "done")
    assert mode(tmp_path / "done") == 0o700


async def test_nothing_that_a_run_records_can_be_read_by_others(tmp_path: Path) -> None:
    @ly.rollout
    async def agent(task: int) -> float:
        return float(task)

    old = os.umask(0)
    try:
        await ly.Trainer(algorithm="baseline", run_dir=tmp_path / "run", progress=False).afit(agent, [1, 2])
    finally:
        os.umask(old)
    assert mode(tmp_path / "run") == 0o700
    open_to_others = [path.name for path in (tmp_path / "run").rglob("*") if path.is_file() and mode(path) & 0o077]
    assert open_to_others == []


@pytest.mark.usefixtures("umask")
async def test_the_directories_that_a_store_and_a_spool_make_are_private(tmp_path: Path) -> None:
    async with ly.open_store(tmp_path / "a" / "b" / "store.db"):
        pass
    Spool(tmp_path / "c" / "d" / "spool", max_bytes=2**20, items=TypeAdapter(int)).close()
    private_directory(tmp_path / "e" / "f")
    made = {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "c", "c/d", "e", "e/f")}
    assert made == dict.fromkeys(made, 0o700)
