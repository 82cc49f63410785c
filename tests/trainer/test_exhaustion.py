"""A resource of the machine that runs out is named in the log, without the monitor."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

import leyden as ly
from leyden._lib import exhaustion
from leyden._lib.throttle import Throttle
from leyden.errors import StoreError
from leyden.store.sql.sqlite import store_error


@pytest.fixture(autouse=True)
def nothing_was_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exhaustion, "_warnings", Throttle())


def fills_a_disk() -> None:
    with Path("/dev/full").open("w") as file:
        file.write("x")


def opens_too_many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        Path("/dev/null").open().close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def takes_all_memory() -> None:
    bytearray(1 << 62)


@pytest.mark.parametrize(
    ("use_up", "name"),
    [
        (fills_a_disk, "the disk is full"),
        (opens_too_many_files, "no file descriptors are left"),
        (takes_all_memory, "memory is used up"),
    ],
)
def test_what_agents_lack_is_named_once_with_a_remedy(
    use_up: Callable[[], None], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    @ly.rollout
    async def greedy(task: int) -> float:
        try:
            use_up()
        except (OSError, MemoryError) as error:
            raise RuntimeError("the client could not connect") from error
        return 1.0

    summary = ly.Trainer(algorithm="baseline", store="memory").fit(greedy, [1, 2, 3])
    assert summary.rollouts["failed"] == 3
    told = [record.getMessage() for record in caplog.records if "failed because" in record.getMessage()]
    assert len(told) == 1
    assert name in told[0] and "rollout ro-" in told[0]


def test_what_a_run_lacks_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    @ly.algo
    async def writes(*, store: ly.LightningStore) -> None:
        await asyncio.to_thread(fills_a_disk)

    with pytest.raises(OSError, match="No space left"):
        ly.Trainer(algorithm=writes, run_dir=tmp_path).fit(ly.rollout(lambda task: None))
    assert "the run failed because the disk is full: free some space" in caplog.text


def test_a_store_that_is_full_says_so(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "small.sqlite")
    connection.execute("PRAGMA max_page_count = 1")
    with pytest.raises(sqlite3.OperationalError) as full:
        connection.execute("CREATE TABLE t AS SELECT randomblob(100000)")
    connection.close()
    error: StoreError = store_error("sqlite:///x", full.value)
    assert (exhaustion.exhausted_resource(error) or "").startswith("the disk is full")


@pytest.mark.parametrize(
    "error", [ValueError("no"), OSError(2, "No such file"), ExceptionGroup("several", [KeyError("a")])]
)
def test_other_errors_name_no_resource(error: Exception) -> None:
    assert exhaustion.exhausted_resource(error) is None


def test_a_resource_is_found_in_a_group_and_in_a_circle_of_causes() -> None:
    memory = MemoryError()
    memory.__cause__ = ValueError("a")
    memory.__cause__.__context__ = memory
    found = exhaustion.exhausted_resource(ExceptionGroup("several", [KeyError("a"), memory]))
    assert found is not None and found.startswith("memory is used up")
