"""A canary that comes to no verdict, in real processes: without traffic, or without a controller.

Store, gateway, serving process and controller are processes of their own, and users come over HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from leyden.store import LightningStoreClient
from leyden.types import Release
from tests.serving.continual.endless import check_releases
from tests.serving.processes import Place, opened_forker, opened_place
from tests.serving.test_faults import post, until
from tests.store.killing import Forker, dead

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]
FIRST = ("rs", 1)
DEADLINE_SECONDS = 8.0
"""Of the canaries that are to end at it."""


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    with opened_forker(tmp_path_factory.mktemp("forker"), "leyden.cli", "tests.serving.continual.endless") as forker:
        yield forker


class Production:
    """Users, what they are served with, and the controller that learns from them."""

    def __init__(self, forker: Forker, place: Place, http: aiohttp.ClientSession, folder: Path) -> None:
        self._forker, self._place, self._http, self._folder = forker, place, http, folder
        self._controller: int | None = None
        self.store = LightningStoreClient(place.url("store"))
        self.n_users = 0

    def start_controller(self, deadline_seconds: float) -> None:
        """Start a controller whose canaries end after so long without a verdict."""
        learn = "tests.serving.continual.endless:learn"
        where = self._place.url("store"), self._folder / "learning"
        self._controller = self._forker.start(learn, *where, deadline_seconds)

    async def kill_controller(self) -> None:
        """`kill -9`."""
        assert self._controller is not None
        await asyncio.to_thread(self._forker.kill, self._controller)

    async def operate(self, *command: object) -> None:
        """Run a command of `leyden` as an operator does, to its end."""
        pid = self._forker.start("leyden", *command, "--store", self._place.url("store"))
        await until(lambda: dead(pid))
        self._forker.alive.discard(pid)

    async def user(self) -> tuple[str, tuple[str, int]]:
        """Serve a new user, who is content. Return arm and version."""
        self.n_users += 1
        begun = await post(self._http, self._place, "begin", {"input": self.n_users, "user": f"user {self.n_users}"})
        await post(self._http, self._place, "end", {"claim": begun["claim"]})
        said = {"rollout": begun["claim"], "source": "user", "value": 1.0}
        await post(self._http, self._place, "feedback", said)
        return begun["arm"], (begun["version"][0], begun["version"][1])

    async def canary(self) -> Release:
        """Let users come until a release is in its canary, and return it."""
        while not (found := await self.store.query_releases(state_in=["canary"])):
            await self.user()
            await asyncio.sleep(0.02)
        return found[0]

    async def has_no_canary(self) -> bool:
        """Return whether the serving process has heard that there is no canary."""
        async with self._http.get(f"{self._place.url('serve')}/v1/serving/status") as response:
            return "canary" not in (await response.json())["labels"]

    async def has_state(self, release: Release, state: str) -> bool:
        return (await self.store.get_release(release.release_id)).state == state


@asynccontextmanager
async def opened_production(forker: Forker, folder: Path) -> AsyncGenerator[Production]:
    async with opened_place(forker, folder, "gateway", "serve") as place, aiohttp.ClientSession() as http:
        production = Production(forker, place, http, folder)
        async with production.store:
            yield production


async def test_a_canary_without_traffic_is_rolled_back_at_its_deadline(forker: Forker, tmp_path: Path) -> None:
    async with opened_production(forker, tmp_path) as production:
        production.start_controller(DEADLINE_SECONDS)
        release = await production.canary()  # from now on nobody comes
        assert release.deadline is not None
        await until(lambda: production.has_state(release, "rolled_back"), DEADLINE_SECONDS + 60)
        ended = await production.store.get_release(release.release_id)
        assert ended.update_time >= release.deadline
        (last, *_) = await production.store.query_audit(limit=1)
        assert (last.release_id, last.state) == (release.release_id, "rolled_back")
        assert str(last.why).startswith("no verdict after")
        assert {await production.user() for _ in range(10)} == {("control", FIRST)}
        await production.kill_controller()
        await check_releases(production.store, FIRST)


async def test_without_a_controller_users_leave_the_canary_at_its_deadline_and_the_next_controller_rolls_it_back(
    forker: Forker, tmp_path: Path
) -> None:
    async with opened_production(forker, tmp_path) as production:
        production.start_controller(DEADLINE_SECONDS)
        release = await production.canary()
        await production.kill_controller()
        assert release.deadline is not None
        served: list[tuple[str, tuple[str, int]]] = []
        while ("canary", release.canary_version) not in served:
            assert time.time() < release.deadline, served
            served.append(await production.user())
        await asyncio.sleep(max(0.0, release.deadline - time.time()))
        assert {await production.user() for _ in range(20)} == {("control", FIRST)}
        assert await production.has_state(release, "canary"), "nobody is there to end it"
        production.start_controller(DEADLINE_SECONDS)
        await until(lambda: production.has_state(release, "rolled_back"), 60)
        await production.kill_controller()
        await check_releases(production.store, FIRST)


async def test_the_kill_switch_ends_a_canary_whose_controller_is_away(forker: Forker, tmp_path: Path) -> None:
    async with opened_production(forker, tmp_path) as production:
        production.start_controller(1000.0)
        release = await production.canary()
        await production.kill_controller()
        await production.operate("learning", "stop", "--why", "users complain")
        await until(lambda: production.has_state(release, "rolled_back"), 60)
        labels = {each.label: (each.resources_id, each.version) for each in await production.store.get_labels()}
        assert labels == {"production": FIRST, "learning-stopped": FIRST}
        await until(production.has_no_canary)
        assert {await production.user() for _ in range(10)} == {("control", FIRST)}
        production.start_controller(1000.0)  # it begins nothing, although there is enough to learn from
        n_rows = (await production.store.query_releases()).total
        for _ in range(60):
            await production.user()
        await asyncio.sleep(1.0)
        assert (await production.store.query_releases()).total == n_rows
        await production.operate("learning", "allow")
        await production.canary()
        await production.kill_controller()
        await check_releases(production.store, FIRST)
