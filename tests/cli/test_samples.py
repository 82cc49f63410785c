"""`leyden samples`, as a user runs it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import pytest

from leyden.cli import main
from leyden.monitor import Monitor
from leyden.store import LightningStoreServer, SqliteLightningStore, open_store
from leyden.types import Sample


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with an hour of a worker's CPU that rises, and of a disk that stays as it is."""
    now = time.time()

    async def write() -> None:
        async with SqliteLightningStore(tmp_path / "s.db") as store:
            rising = [
                Sample(name="cpu_percent", worker_id="a[b]", time=now - 3500 + 100 * n, value=n) for n in range(35)
            ]
            disk = [Sample(name="disk_free_percent", time=now - 60 * n, value=56.25) for n in range(1, 5)]
            await store.add_many_samples([*rising, *disk, Sample(name="cpu_percent", time=now - 7000, value=99)])

    asyncio.run(write())
    return f"sqlite://{tmp_path / 's.db'}"


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["leyden", "samples", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        return capsys.readouterr().out

    return run


def test_each_series_is_a_line_from_its_lowest_to_its_highest_value(url: str, said) -> None:
    head, cpu, disk = said(url).splitlines()
    assert head.split() == ["metric", "worker", "lowest", "highest", "last", "1", "h", "ago", "to", "now"]
    name, worker, *values, _ = cpu.split(maxsplit=5)
    assert (name, worker, *values) == ("cpu_percent", "a[b]", "0", "34", "34")
    line = cpu[head.index("1 h ago") :]
    blocks = [block for block in line if block != " "]
    assert blocks == sorted(blocks)  # block characters are in the order of their heights
    assert (blocks[0], blocks[-1]) == ("▁", "█")
    assert disk.split()[:4] == ["disk_free_percent", "56.2", "56.2", "56.2"]
    assert set(disk[head.index("1 h ago") :].strip()) == {"▄"}


def test_names_workers_and_time_choose(url: str, said) -> None:
    assert "disk" not in said(url, "cpu_percent")
    assert "cpu" not in said(url, "--worker", "")
    assert said(url, "cpu_percent", "--hours", "2").count("cpu_percent") == 2  # the older one is the store's
    assert said(url, "gpu_percent").startswith("no such samples in this time; a monitor writes them")
    found = json.loads(said(url, "cpu_percent", "--json"))
    assert [each["value"] for each in found] == list(range(35))


async def test_a_store_that_a_monitor_watches_is_read_over_http(said) -> None:
    async with open_store("memory://") as store, Monitor().watch(store) as watch:
        await watch.check()
        server = LightningStoreServer(store, host="127.0.0.1", port=0)
        await server.start()
        try:
            shown = await asyncio.to_thread(said, server.endpoint)
        finally:
            await server.stop()
    assert "cpu_percent" in shown and "disk_free_percent" in shown
