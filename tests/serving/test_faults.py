"""Store, gateway and serving process are killed in the middle of requests: serving goes on, and every record counts once."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from leyden.errors import GatewayError
from leyden.serving import OnlineSession
from leyden.serving.continual import open_releases, stop_learning
from leyden.serving.session import Served
from leyden.store import LightningStore, LightningStoreClient, SqliteLightningStore
from leyden.testing import FakeUpstream, audit_store
from leyden.types import AttemptedRollout, LiveClaim, sign_claim
from leyden.types.semconv import CALL_INDEX
from tests.serving.continual.endless import check_releases, likes
from tests.serving.processes import KEY, Place, Role, call_model, opened_forker, opened_place
from tests.store.killing import Forker, integrity

pytestmark = pytest.mark.timeout(120)
SPOOL_BYTES = 2**20


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    with opened_forker(tmp_path_factory.mktemp("forker"), "tests.serving.continual.endless") as forker:
        yield forker


@asynccontextmanager
async def opened_session(place: Place, folder: Path, **options: Any) -> AsyncIterator[OnlineSession]:
    async with (
        LightningStoreClient(place.url("store"), retry_seconds=0.1) as store,
        OnlineSession(
            store,
            gateway=place.url("gateway"),
            live_key=KEY,
            folder=folder,
            spool_bytes=SPOOL_BYTES,
            refresh_seconds=0.05,
            **options,
        ) as session,
    ):
        yield session


async def until(met: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not (await found if asyncio.iscoroutine(found := met()) else found):
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


async def rollouts_in(store: LightningStore) -> dict[str, AttemptedRollout]:
    """Every rollout by its id; each has exactly one attempt."""
    found = await store.query_rollouts()
    assert all(isinstance(each, AttemptedRollout) and each.attempt.sequence_id == 1 for each in found)
    return {each.rollout_id: each for each in found if isinstance(each, AttemptedRollout)}


async def n_calls(store: LightningStore) -> Counter[str]:
    """How many calls are recorded, by rollout."""
    rollouts = [each.rollout_id for each in await store.query_rollouts()]
    spans = await store.query_spans_of(rollouts)
    return Counter({rollout_id: len(of_rollout) for rollout_id, of_rollout in spans.items()})


@pytest.mark.faults
@pytest.mark.merge
async def test_serving_goes_on_while_the_store_is_killed_and_all_arrives_once_in_order(
    forker: Forker, tmp_path: Path
) -> None:
    served: list[Served] = []
    given: list[str] = []
    waited: list[int] = []
    over = asyncio.Event()

    async def visitor(name: int, http: aiohttp.ClientSession, session: OnlineSession) -> None:
        while not over.is_set():
            with session.serve(f"visitor {name}", user=f"user {name}") as one:
                assert await call_model(http, one.llm()) == 200
            served.append(one)
            given.append(session.feedback(one, source="user", reward=1.0).feedback_id)
            waited.append(session.status().waiting)
            await asyncio.sleep(0.02)

    async def killer(place: Place) -> None:
        for at in (20, 60):
            await until(lambda at=at: len(served) >= at)
            await place.kill("store")
            away_from = len(served)
            await until(lambda away_from=away_from: len(served) >= away_from + 20)
            assert outbox.stat().st_size <= SPOOL_BYTES
            await place.start("store")
        over.set()

    outbox = tmp_path / "session" / "outbox"
    async with (
        opened_place(forker, tmp_path, "gateway") as place,
        LightningStoreClient(place.url("store")) as store,
        opened_session(place, outbox.parent) as session,
        aiohttp.ClientSession() as http,
    ):
        await store.set_label("production", "rs", 2)
        await until(lambda: session.status().labels["production"] == ("rs", 2))
        await asyncio.gather(killer(place), *(visitor(name, http, session) for name in range(4)))
        assert max(waited) >= 20
        assert {one.version for one in served} == {("rs", 2)}
        await until(lambda: not session.status().waiting and not session.status().store_is_away)
        assert [one.feedback_id for one in await store.query_feedback()] == given
        rollouts = await rollouts_in(store)
        assert {(key, each.status) for key, each in rollouts.items()} == {
            (one.rollout_id, "succeeded") for one in served
        }
        expected = Counter(one.rollout_id for one in served)
        await until(lambda: _holds(store, expected))
        assert (session.status().lost, session.status().refused) == (0, 0)


async def _holds(store: LightningStore, calls: Counter[str]) -> bool:
    found = await n_calls(store)
    assert found <= calls, "a call is recorded twice"
    return found == calls


@pytest.mark.faults
@pytest.mark.merge
async def test_the_session_says_that_the_gateway_was_killed_and_calls_the_model_itself_if_it_may(
    forker: Forker, tmp_path: Path
) -> None:
    async with (
        opened_place(forker, tmp_path, "gateway") as place,
        FakeUpstream() as own,
        LightningStoreClient(place.url("store")) as store,
        opened_session(place, tmp_path / "strict") as strict,
        opened_session(place, tmp_path / "lenient", fallback=True, models={"fake": own.llm()}) as lenient,
        aiohttp.ClientSession() as http,
    ):
        with lenient.serve("before", user="ada") as before:
            assert await call_model(http, before.llm()) == 200
        await until(lambda: _holds(store, Counter([before.rollout_id])))  # the gateway has written the call
        under_way = lenient.begin("under way", user="ada")
        await place.kill("gateway")
        with pytest.raises(aiohttp.ClientError):
            await call_model(http, under_way.llm())
        await until(lambda: strict.status().gateway_is_away and lenient.status().gateway_is_away)
        with pytest.raises(GatewayError, match=rf"{place.url('gateway')} is away.*start it again.*fallback=True"):
            strict.begin("q", user="ada")
        assert (strict.status().served, strict.status().unrecorded) == ({}, 0)
        for _ in range(3):
            with lenient.serve("meanwhile", user="ada") as one:
                assert not one.recorded
                assert await call_model(http, one.llm()) == 200
        assert (len(own.calls), lenient.status().unrecorded) == (3, 3)
        await place.start("gateway")
        await until(lambda: not strict.status().gateway_is_away and not lenient.status().gateway_is_away)
        with lenient.serve("after", user="ada") as after:
            assert await call_model(http, after.llm()) == 200
        await until(lambda: _holds(store, Counter([before.rollout_id, after.rollout_id])))
        await until(lambda: not lenient.status().waiting)
        unrecorded = [each.metadata.get("unrecorded") for each in await store.query_rollouts(sort_order="asc")]
        assert (unrecorded.count(True), unrecorded.count(None)) == (3, 3)
        assert len(own.calls) == 3


async def post(http: aiohttp.ClientSession, place: Place, what: str, body: dict[str, Any]) -> dict[str, Any]:
    """Post to the serving process again and again until it replies, as an application does that must not lose the request."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with suppress(aiohttp.ClientError):
            async with http.post(f"{place.url('serve')}/v1/serving/{what}", json=body) as response:
                if response.status == 200:
                    return await response.json()
                assert response.status == 503, await response.text()
        await asyncio.sleep(0.01)
    raise AssertionError(f"{what}: the serving process did not reply in time")


@pytest.mark.faults
@pytest.mark.merge
async def test_what_a_killed_serving_process_had_on_disk_is_delivered_once_by_the_next(
    forker: Forker, tmp_path: Path
) -> None:
    async with opened_place(forker, tmp_path, "gateway", "serve") as place, aiohttp.ClientSession() as http:
        given: list[str] = []
        ended: list[str] = []

        async def request(number: int) -> None:
            begun = await post(http, place, "begin", {"input": number, "user": "ada"})
            assert await call_model(http, begun["resources"]["llm"]) == 200
            await post(http, place, "end", {"claim": begun["claim"]})
            said = await post(http, place, "feedback", {"rollout": begun["claim"], "source": "user", "value": number})
            ended.append(begun["rollout_id"])
            given.append(said["feedback_id"])

        for number in range(5):  # the kill falls between the end of the last request and its delivery, or into it
            await request(number)
        await place.kill("serve", "store")
        await place.start("serve")  # without the store, with what was released last
        for number in range(5, 10):
            await request(number)
        await place.kill("serve")
        assert 0 < place.outbox.stat().st_size <= 64 * 2**20
        await place.start("store", "serve")
        async with LightningStoreClient(place.url("store")) as store:
            await until(lambda: _n_feedback(store, 10))
            assert [one.feedback_id for one in await store.query_feedback()] == given
            assert [one.value for one in await store.query_feedback()] == list(range(10))
            rollouts = await rollouts_in(store)
            assert {key: each.status for key, each in rollouts.items()} == dict.fromkeys(ended, "succeeded")
            await until(lambda: _holds(store, Counter(ended)))
        await until(lambda: not place.outbox.stat().st_size)


async def _n_feedback(store: LightningStore, n: int) -> bool:
    return (await store.query_feedback(limit=1)).total == n


@pytest.mark.parametrize(
    "kills", [pytest.param(12, marks=pytest.mark.faults), pytest.param(100, marks=pytest.mark.long)]
)
@pytest.mark.timeout(900)
async def test_no_feedback_is_lost_or_counted_twice_whatever_is_killed_at_any_time(
    forker: Forker, tmp_path: Path, kills: int
) -> None:
    """Session, gateway, store and trainer are killed in turn, while the trainer releases one candidate after the other."""
    chance = random.Random(kills)
    given: dict[str, tuple[str, float]] = {}
    ended: set[str] = set()
    versions: dict[str, int] = {}
    calls: Counter[str] = Counter()
    killed: Counter[str] = Counter()
    over = asyncio.Event()

    async def visitor(name: int, http: aiohttp.ClientSession, place: Place) -> None:
        number = 0
        while not over.is_set():
            number += 1
            begun = await post(http, place, "begin", {"input": [name, number], "user": f"user {name} {number}"})
            rollout_id = begun["rollout_id"]
            versions[rollout_id] = begun["version"][1]
            calls[rollout_id] += 1
            with suppress(aiohttp.ClientError):  # the gateway was killed in the middle
                await call_model(http, begun["resources"]["llm"])
            await post(http, place, "end", {"claim": begun["claim"]})
            ended.add(rollout_id)
            is_canary, prompt = begun["arm"] == "canary", begun["resources"]["prompt"]["template"]
            value = float(likes(prompt) if is_canary else number % 2)
            said = {"rollout": begun["claim"], "source": "user", "value": value, "feedback_id": f"{name}-{number}"}
            await post(http, place, "feedback", said)
            given[f"{name}-{number}"] = (rollout_id, value)

    async def killer(place: Place) -> None:
        roles: list[Role] = ["store", "gateway", "serve"]
        trainer = ("tests.serving.continual.endless:learn", place.url("store"), tmp_path / "learning")
        training = forker.start(*trainer)
        async with LightningStoreClient(place.url("store")) as store:
            for number in range(kills):
                size = len(given)
                await until(lambda size=size: len(given) > size, 60.0)  # somebody works
                if number % 4 == 3:
                    if number % 8 == 3:
                        await transition(store)
                    await asyncio.sleep(chance.random() * 2.5)
                    forker.kill(training)
                    training = forker.start(*trainer)
                    killed["trainer"] += 1
                    continue
                role = roles[number % 4]
                await asyncio.sleep(chance.random() * 0.1)
                await place.kill(role)
                await asyncio.sleep(chance.random() * 0.2)
                await place.start(role)
                killed[role] += 1
            await until(lambda: _has_released(store), 120.0)
            await stop_learning(store)
            await until(lambda: _all_ended(store), 60.0)
        over.set()

    async with opened_place(forker, tmp_path, "gateway", "serve") as place, aiohttp.ClientSession() as http:
        await asyncio.gather(killer(place), *(visitor(name, http, place) for name in range(4)))
        assert len(killed) == 4
        assert min(killed.values()) >= 3
        await until(lambda: not place.outbox.stat().st_size, 60.0)
    async with SqliteLightningStore(place.path) as store:
        feedback = await store.query_feedback()
        assert {one.feedback_id: (one.rollout_id, one.value) for one in feedback} == given
        assert len(feedback) == len(given)
        rollouts = await rollouts_in(store)
        assert versions.keys() <= rollouts.keys()
        assert {key for key, each in rollouts.items() if each.status == "succeeded"} == ended
        assert {key: rollouts[key].resources_version for key in versions} == versions
        assert await n_calls(store) <= calls, "a call is recorded twice"
        states = Counter((await check_releases(store, ("rs", 1))).values())
        print(f"killed {dict(killed)}; {len(given)} requests; rows {dict(states)}")
        assert states["promoted"] + states["rolled_back"]
        assert await audit_store(store) == []
    integrity(place.path)


async def transition(store: LightningStore) -> None:
    """Wait until a cycle or a release enters a state."""
    before = (await store.query_audit(limit=1)).total
    await until(lambda: _has_audit(store, before + 1), 60.0)


async def _has_audit(store: LightningStore, n: int) -> bool:
    return (await store.query_audit(limit=1)).total >= n


async def _has_released(store: LightningStore) -> bool:
    return any(row.state in ("promoted", "rolled_back") for row in await store.query_releases())


async def _all_ended(store: LightningStore) -> bool:
    return not await open_releases(store)


@pytest.mark.faults
@pytest.mark.merge
async def test_a_gateway_without_its_store_keeps_the_calls_of_rollouts_that_a_killed_session_began(
    forker: Forker, tmp_path: Path
) -> None:
    async with opened_place(forker, tmp_path, "gateway") as place, aiohttp.ClientSession() as http:
        await place.kill("store")
        claim = LiveClaim("ro-1", "at-1", "rs", 1, "control", time.time())
        llm = {
            "endpoint": f"{place.url('gateway')}/live/{sign_claim(KEY, claim)}/v1",
            "model": "fake",
            "api_key": "any",
        }
        for _ in range(3):
            assert await call_model(http, llm) == 200
        await until(lambda: (tmp_path / "calls").stat().st_size)
        await place.kill("gateway")
        await place.start("store", "gateway")
        async with LightningStoreClient(place.url("store")) as store:
            await until(lambda: _n_rollouts(store, 1))
            await until(lambda: _holds(store, Counter({"ro-1": 3})))
            assert (await store.get_rollout_by_id("ro-1")).mode == "live"


async def _n_rollouts(store: LightningStore, n: int) -> bool:
    return (await store.query_rollouts(limit=1)).total == n


@pytest.mark.faults
@pytest.mark.merge
@pytest.mark.parametrize("ahead_seconds", [-3600.0, 3600.0])
async def test_calls_are_numbered_on_after_a_killed_gateway_whatever_the_clock_of_the_sessions_host(
    forker: Forker, tmp_path: Path, ahead_seconds: float
) -> None:
    async with opened_place(forker, tmp_path, "gateway") as place, aiohttp.ClientSession() as http:
        claim = LiveClaim("ro-1", "at-1", "rs", 1, "control", time.time() + ahead_seconds)
        llm = {
            "endpoint": f"{place.url('gateway')}/live/{sign_claim(KEY, claim)}/v1",
            "model": "fake",
            "api_key": "any",
        }
        async with LightningStoreClient(place.url("store")) as store:
            for n in range(1, 3):
                assert await call_model(http, llm) == 200
                await until(lambda n=n: _holds(store, Counter({"ro-1": n})))
                await place.kill("gateway")
                await place.start("gateway")
            spans = await store.query_spans("ro-1")
        assert [span.attributes[CALL_INDEX] for span in spans] == [0, 1]


@pytest.mark.faults
@pytest.mark.merge
async def test_requests_of_a_process_that_was_stopped_while_a_label_moved_are_marked_until_it_knows(
    forker: Forker, tmp_path: Path
) -> None:
    async with (
        opened_place(forker, tmp_path, "gateway", "serve") as place,
        aiohttp.ClientSession() as http,
        LightningStoreClient(place.url("store")) as store,
    ):
        place.pause("serve")
        await store.set_label("production", "rs", 2)
        asked = [asyncio.create_task(_begin(http, place)) for _ in range(5)]
        await asyncio.sleep(4.5)  # longer than a session goes without news
        place.pause("serve", stop=False)
        versions = dict(await asyncio.gather(*asked))
        while 2 not in versions.values():
            versions.update([await _begin(http, place)])
        await until(lambda: _n_rollouts(store, len(versions)))
        old = [each for each in await store.query_rollouts() if versions[each.rollout_id] == 1]
        assert all(each.metadata.get("labels_are_old") for each in old)


async def _begin(http: aiohttp.ClientSession, place: Place) -> tuple[str, int]:
    """Begin a request, and return its rollout's id and its version."""
    async with http.post(f"{place.url('serve')}/v1/serving/begin", json={"input": "q", "user": "ada"}) as response:
        begun = await response.json()
    return begun["rollout_id"], begun["version"][1]
