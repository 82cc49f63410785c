"""The controller of a cycle is killed again and again: the cycle ends once, and users notice nothing."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from leyden._lib import ids
from leyden.gateway import LLMProxy
from leyden.serving import OnlineSession
from leyden.store import LightningStore, LightningStoreServer, SqliteLightningStore
from leyden.testing import FakeUpstream
from leyden.types import PromptTemplate
from tests.serving.continual import controller, world
from tests.serving.continual.controller import CYCLE, RELEASE

ROOT = Path(__file__).parents[3]
KEY = "live-key"
REQUESTS_PER_SECOND = 60
LIFE = "LEYDEN_TEST_LIFE"
"""The environment variable that names a controller for the processes that it starts."""
OUTCOMES = ("promoted", "rolled_back", "refused")
PATHS = {
    "promoted": ["gating", "canary", "promoted"],
    "rolled_back": ["gating", "canary", "rolled_back"],
    "refused": ["gating", "refused"],
}


@dataclass
class Users:
    """Users who come one after the other, with a thumb and a correction of what they do not want."""

    session: OnlineSession
    outcome: str
    served: dict[str, tuple[world.Version, str]] = field(default_factory=dict[str, tuple[world.Version, str]])
    """Version and arm by rollout."""
    given: set[str] = field(default_factory=set[str])
    """Ids of their feedback."""

    async def come(self) -> None:
        """Come until cancelled. An error of the session is one of theirs."""
        wants = "plain" if self.outcome == "refused" else "kind"
        likes = "kind" if self.outcome == "promoted" else "plain"
        while True:
            number = len(self.served)
            with self.session.serve({"wants": wants, "number": number}, user=f"user-{number}") as served:
                template = served.resources["prompt"]
                assert isinstance(template, PromptTemplate)
                tone = world.tone_of(template)
            self.served[served.rollout_id] = (served.version, served.arm)
            thumb = "thumbs_up" if tone == likes else "thumbs_down"
            self.given.add(self.session.feedback(served, source="user", label=thumb).feedback_id)
            if tone != wants:
                self.given.add(self.session.feedback(served, source="user", correction=wants).feedback_id)
            await asyncio.sleep(1 / REQUESTS_PER_SECOND)


@asynccontextmanager
async def production(folder: Path) -> AsyncIterator[tuple[LightningStore, str, OnlineSession]]:
    """A store with its address, and a session that serves its first version."""
    async with (
        SqliteLightningStore(folder / "store.sqlite") as store,
        LightningStoreServer(store) as server,
        FakeUpstream() as upstream,
        LLMProxy(model_list=[upstream.llm()], store=store, live_key=KEY) as gateway,
    ):
        await world.release_first(store, "plain")
        async with OnlineSession(store, gateway=gateway.endpoint, live_key=KEY) as session:
            yield store, server.endpoint, session


async def one_life(url: str, folder: Path, outcome: str, *kill: object, after_seconds: float | None = None) -> int:
    """Run a controller until it ends, or for some seconds, and return its exit status."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.serving.continual.controller", url, str(folder), outcome, *map(str, kill)),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), LIFE: (life := ids.rollout_id())},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed = b""
    try:
        async with asyncio.timeout(after_seconds):
            printed, _ = await process.communicate()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
    status = await process.wait()
    assert status in (0, -signal.SIGKILL), printed.decode()
    await ends(life)
    return status


async def ends(life: str) -> None:
    """Wait until no process is left that a controller has started."""

    def is_left(process: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            return process.environ().get(LIFE) == life and process.status() != psutil.STATUS_ZOMBIE
        return False

    deadline = time.monotonic() + 20
    while left := [process for process in psutil.process_iter() if is_left(process)]:
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.05)


async def killed_until_it_has_ended(
    url: str, store: LightningStore, folder: Path, outcome: str, *, kills: int, seed: int
) -> int:
    """Kill up to `kills` controllers, and let one finish. Return how many died.

    The first one dies at a write, later ones at a write or at any moment.
    """
    chance, died = random.Random(seed), 0
    while not await controller.ended(store):
        if died == kills:
            assert await one_life(url, folder, outcome) == 0
        elif not died or chance.random() < 0.5:
            kill = chance.choice(["before", "after"]), chance.randint(1, 2)
            died += await one_life(url, folder, outcome, *kill) != 0
        else:
            died += await one_life(url, folder, outcome, after_seconds=chance.uniform(0.3, 2.5)) != 0
    return died


async def check(store: LightningStore, users: Users, outcome: str) -> None:
    """Check all that must be true of the store when a cycle has ended."""
    first, candidate = ("helpdesk", 1), ("helpdesk", 2)
    records = await store.query_audit(sort_order="asc")
    path = {
        row: [each.state for each in records if each.action == "release" and each.release_id == row]
        for row in (CYCLE, RELEASE)
    }
    assert path == {CYCLE: ["training", "trained"], RELEASE: PATHS[outcome]}
    states = {row.release_id: row.state for row in await store.query_releases()}
    assert states == {CYCLE: "trained", RELEASE: outcome}, "the cycle was begun once"
    labels = {each.label: (each.resources_id, each.version) for each in await store.get_labels()}
    moved = {"production": candidate, "previous": first}
    assert labels == (moved if outcome == "promoted" else {"production": first})
    versions = await store.query_resources(resources_id="helpdesk", all_versions=True)
    assert {each.version: each.frozen for each in versions} == {1: False, 2: outcome != "promoted"}
    rollouts = await store.query_rollouts()
    recorded = {
        each.rollout_id: ((each.resources_id, each.resources_version), each.arm, each.mode, each.status)
        for each in rollouts
    }
    expected = {rollout_id: (*served, "live", "succeeded") for rollout_id, served in users.served.items()}
    assert recorded == expected, "each request is recorded once, with what it was served with"
    feedback = await store.query_feedback()
    assert len(feedback) == len(users.given) and {each.feedback_id for each in feedback} == users.given
    assert list(users.served.values())[-1] == (labels["production"], "control"), "the last request follows the verdict"


@pytest.mark.parametrize(
    ("kills", "seed"),
    [
        pytest.param(4, 0, marks=[pytest.mark.slow, pytest.mark.timeout(240)]),
        *(
            pytest.param(
                6, seed, marks=[pytest.mark.long, pytest.mark.timeout(400), pytest.mark.xdist_group(f"{seed % 2}")]
            )
            for seed in range(1, 26)
        ),
    ],
)
async def test_a_killed_controller_ends_its_cycle_once_and_no_request_is_lost(
    tmp_path: Path, kills: int, seed: int
) -> None:
    outcome = OUTCOMES[seed % len(OUTCOMES)]
    async with production(tmp_path) as (store, url, session):
        users = Users(session, outcome)
        coming = asyncio.create_task(users.come())
        died = await killed_until_it_has_ended(url, store, tmp_path / "learning", outcome, kills=kills, seed=seed)
        await asyncio.sleep(1.0)
        coming.cancel()
        with suppress(asyncio.CancelledError):
            await coming
        status = session.status()
        assert (status.lost, status.refused, status.unrecorded) == (0, 0, 0)
        await asyncio.to_thread(session.close)
        assert died
        await check(store, users, outcome)
