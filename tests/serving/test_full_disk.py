"""The disk of the store is full: serving goes on, the disk is named, and all that waited arrives once when there is room."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest

from leyden.store import LightningStoreClient
from leyden.testing import audit_store
from tests.serving.processes import Place, call_model, opened_forker, opened_place
from tests.serving.test_faults import n_calls, post, rollouts_in, until
from tests.store.killing import Forker
from tests.store.test_faults_disk import alone

pytestmark = [pytest.mark.faults, pytest.mark.merge, pytest.mark.timeout(120)]
UNLIMITED = -1


class Disk:
    """What the store writes to: a file system of its own of 16 MiB, or files that may not grow."""

    def __init__(self, kind: Literal["tmpfs", "limit"], forker: Forker, folder: Path) -> None:
        self.folder = folder
        self._kind = kind
        self._seen = Path(f"{forker.root}{folder}") if kind == "tmpfs" else folder
        """The folder as this process sees it."""

    def fill(self, place: Place) -> None:
        """Leave room for nothing."""
        if self._kind == "limit":
            largest = max(file.stat().st_size for file in self._seen.iterdir())
            place.limit_files("store", largest)
            return
        with suppress(OSError), (self._seen / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def empty(self, place: Place) -> None:
        """Give room again."""
        if self._kind == "limit":
            place.limit_files("store", UNLIMITED)
        else:
            (self._seen / "filler").unlink()


@pytest.fixture(params=["tmpfs", "limit"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Forker, Disk]]:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = f'mount -t tmpfs -o size=16m leyden {folder} && exec "$@"'
    within = [*alone(), "sh", "-c", mount, "sh"] if request.param == "tmpfs" else []
    with opened_forker(tmp_path, within=within) as forker:
        yield forker, Disk(request.param, forker, folder)


async def test_serving_goes_on_while_the_disk_of_the_store_is_full_and_all_arrives_once(
    disk: tuple[Forker, Disk], tmp_path: Path
) -> None:
    forker, small = disk
    given: list[str] = []
    ended: list[str] = []

    async def request(http: aiohttp.ClientSession, place: Place) -> None:
        begun = await post(http, place, "begin", {"input": "x" * 2000, "user": f"user {len(given)}"})
        assert await call_model(http, begun["resources"]["llm"]) == 200
        await post(http, place, "end", {"claim": begun["claim"]})
        said = {"rollout": begun["claim"], "source": "user", "value": len(given)}
        given.append((await post(http, place, "feedback", said))["feedback_id"])
        ended.append(begun["rollout_id"])

    async def status(http: aiohttp.ClientSession, place: Place) -> dict[str, Any]:
        async with http.get(f"{place.url('serve')}/v1/serving/status") as response:
            return await response.json()

    store_path = small.folder / "store.db"
    async with (
        opened_place(forker, tmp_path, "gateway", "serve", store=store_path) as place,
        LightningStoreClient(place.url("store")) as store,
        aiohttp.ClientSession() as http,
    ):
        for _ in range(10):
            await request(http, place)
        await until(lambda: _delivered(place))
        small.fill(place)
        deadline = asyncio.get_running_loop().time() + 60
        while (now := await status(http, place))["waiting"] < 150 or not place.calls.stat().st_size:
            assert asyncio.get_running_loop().time() < deadline, now
            await request(http, place)
        assert now["store_is_away"]
        assert "store.db" in now["store_error"]
        assert "free some space" in now["store_error"]
        assert await store.query_feedback(limit=1), "the store still answers"
        await place.kill("serve")  # records wait on another disk, and survive
        await place.start("serve")
        for _ in range(10):
            await request(http, place)
        small.empty(place)
        await until(lambda: _delivered(place), 60.0)
        log = forker.log.read_text()
        assert "records of model calls wait" in log
        assert log.count("free some space") < 10, "one line for each kind of record, not for each record"
        assert [one.feedback_id for one in await store.query_feedback()] == given
        rollouts = await rollouts_in(store)
        assert {key: each.status for key, each in rollouts.items()} == dict.fromkeys(ended, "succeeded")
        await until(lambda: _all_calls(store, Counter(ended)))
        now = await status(http, place)
        assert (now["lost"], now["refused"], now["waiting"], now["store_error"]) == (0, 0, 0, None)
        assert await audit_store(store) == []


async def _delivered(place: Place) -> bool:
    return not place.outbox.stat().st_size and not place.calls.stat().st_size


async def _all_calls(store: LightningStoreClient, calls: Counter[str]) -> bool:
    return await n_calls(store) == calls
