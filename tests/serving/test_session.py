"""A session serves what is released, its rollouts and feedback reach the store once, and it outlives store and gateway."""

from __future__ import annotations

import asyncio
import math
import resource
import time
import tracemalloc
import unicodedata
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from leyden.errors import ConfigError, GatewayError, StoreAway, StoreError
from leyden.gateway import LLMProxy, recorder
from leyden.serving import Assignment, OnlineSession, outbox, unknown
from leyden.serving.assignment import place_of, user_hash
from leyden.serving.continual import CanarySettings, advance, judge, start_canary
from leyden.serving.continual import begin as begin_release
from leyden.serving.continual.watch import user_of
from leyden.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    SqliteLightningStore,
)
from leyden.testing import FakeUpstream
from leyden.types import (
    LLM,
    AttemptedRollout,
    Feedback,
    LiveClaim,
    LiveRollout,
    NamedResources,
    PromptTemplate,
    ProxyLLM,
    Rollout,
    parse_claim,
    sign_claim,
)
from tests.machine_clock import MachineClock

KEY = "live-key"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (recorder, outbox):
        monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.02)
    monkeypatch.setattr(unknown, "_ROUND_SECONDS", 0.02)


@pytest.fixture
async def upstream() -> AsyncIterator[FakeUpstream]:
    async with FakeUpstream() as upstream:
        yield upstream


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    async with InMemoryLightningStore() as store:
        for text in ("old", "new"):
            await store.update_resources("rs", resources(text))
        await store.set_label("production", "rs", 1)
        yield store


@pytest.fixture
async def gateway(upstream: FakeUpstream, store: InMemoryLightningStore) -> AsyncIterator[LLMProxy]:
    async with LLMProxy(model_list=[upstream.llm()], store=store, live_key=KEY) as gateway:
        yield gateway


@pytest.fixture
async def session(store: InMemoryLightningStore, gateway: LLMProxy) -> AsyncIterator[OnlineSession]:
    async with OnlineSession(store, gateway=gateway.endpoint, live_key=KEY, refresh_seconds=0.05) as session:
        yield session


def resources(text: str) -> NamedResources:
    return {"prompt": PromptTemplate(template=text), "llm": ProxyLLM(endpoint="gateway://any", model="fake")}


async def ask(llm: LLM) -> None:
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as client:
        answer = await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "hi"}])
    assert answer.choices


async def until(met: Callable[[], Any], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not (await found if asyncio.iscoroutine(found := met()) else found):
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


async def recorded(store: LightningStore, rollout_id: str, *, status: str = "succeeded") -> AttemptedRollout:
    """The rollout, once the store has its end."""
    found: list[Rollout] = []

    async def there() -> bool:
        found[:] = await store.query_rollouts(rollout_id_in=[rollout_id])
        return bool(found) and found[0].status == status

    await until(there)
    assert isinstance(found[0], AttemptedRollout)
    return found[0]


async def test_a_request_is_served_and_recorded(session: OnlineSession, store: InMemoryLightningStore) -> None:
    with session.serve({"question": 1}, user="ada", task_type="chat") as served:
        assert served.version == ("rs", 1)
        assert served.resources["prompt"] == PromptTemplate(template="old")
        await ask(served.llm())
        await ask(served.llm())
    session.feedback(served, source="user", reward=1.0)
    rollout = await recorded(store, served.rollout_id)
    assert (rollout.mode, rollout.arm, rollout.input) == ("live", "control", {"question": 1})
    assert (rollout.resources_id, rollout.resources_version) == ("rs", 1)
    assert rollout.metadata["task_type"] == "chat"
    assert "ada" not in str(rollout.metadata)
    assert user_of(rollout) == user_hash(KEY, "ada") != user_hash("another", "ada")
    await until(lambda: _n_calls(store, served.rollout_id, 2))
    spans = await store.query_spans(served.rollout_id)
    assert [span.attributes["leyden.call_index"] for span in spans] == [0, 1]
    await until(lambda: not session.status().waiting)
    (feedback,) = await store.query_feedback()
    assert (feedback.rollout_id, feedback.value, feedback.version) == (served.rollout_id, 1.0, 1)


async def _n_calls(store: LightningStore, rollout_id: str, n: int) -> bool:
    return (await store.query_spans(rollout_id)).total == n


async def test_a_request_that_raises_has_failed(session: OnlineSession, store: InMemoryLightningStore) -> None:
    with pytest.raises(KeyError), session.serve("q", user="ada") as served:
        raise KeyError("tool")
    rollout = await recorded(store, served.rollout_id, status="failed")
    assert rollout.attempt.metadata["reason"] == "KeyError: 'tool'"


async def test_the_gateway_reports_a_rollout_whose_session_does_not(
    session: OnlineSession, gateway: LLMProxy, store: InMemoryLightningStore
) -> None:
    claim = LiveClaim("lv", "at", "rs", 2, "canary", time.time())
    root = gateway.endpoint.removesuffix("/v1")
    await ask(LLM(endpoint=f"{root}/live/{sign_claim(KEY, claim)}/v1", model="fake", api_key="any"))
    await until(lambda: _n_rollouts(store, 1))
    rollout = await store.get_rollout_by_id("lv")
    assert (rollout.mode, rollout.arm, rollout.resources_version) == ("live", "canary", 2)


async def _n_rollouts(store: LightningStore, n: int) -> bool:
    return (await store.query_rollouts()).total == n


async def test_a_key_alone_names_the_rollout(
    session: OnlineSession, gateway: LLMProxy, store: InMemoryLightningStore
) -> None:
    served = session.begin("q", user="ada")
    llm = served.llm()
    await ask(llm.model_copy(update={"endpoint": gateway.endpoint}))
    session.end(served.claim)
    await recorded(store, served.rollout_id)
    await until(lambda: _n_calls(store, served.rollout_id, 1))
    await until(lambda: _refuses(llm))  # the gateway has the store's news within a second


async def _refuses(llm: LLM) -> bool:
    try:
        await ask(llm)
    except openai.APIStatusError as error:
        return error.status_code == 410
    return False


@pytest.mark.parametrize("key", ["other", ""])
async def test_an_unsigned_rollout_calls_no_model(
    key: str, gateway: LLMProxy, upstream: FakeUpstream, store: InMemoryLightningStore
) -> None:
    signed = sign_claim(key, LiveClaim("lv", "at", "rs", 1, "control", time.time()))
    root = gateway.endpoint.removesuffix("/v1")
    for text in (signed, signed.partition(".")[0], "x", "a.b"):
        with pytest.raises(openai.AuthenticationError, match="live key"):
            await ask(LLM(endpoint=f"{root}/live/{text}/v1", model="fake", api_key="any"))
    old = sign_claim(KEY, LiveClaim("lv", "at", "rs", 1, "control", time.time() - 2 * 86_400))
    with pytest.raises(openai.AuthenticationError, match="began"):
        await ask(LLM(endpoint=f"{root}/live/{old}/v1", model="fake", api_key="any"))
    assert not upstream.requests
    assert (await store.query_rollouts()).total == 0


async def test_a_rollback_takes_effect_without_a_request_waiting(
    session: OnlineSession, store: InMemoryLightningStore
) -> None:
    await store.set_label("production", "rs", 2)
    await until(lambda: session.begin("q", user="ada").version == ("rs", 2))
    await store.set_label("production", "rs", 1)
    session.refresh()
    assert session.begin("q", user="ada").version == ("rs", 1)


async def test_a_promotion_is_heard_of_by_news(store: InMemoryLightningStore, gateway: LLMProxy) -> None:
    rarely = {"gateway": gateway.endpoint, "live_key": KEY, "refresh_seconds": 3600.0}
    async with OnlineSession(store, **rarely) as one, OnlineSession(store, **rarely) as other:
        for version in (2, 1, 2):
            await store.set_label("production", "rs", version)
            for session in (one, other):
                await until(lambda: session.begin("q", user="ada").version == ("rs", version), 30.0)  # noqa: B023


async def test_all_sessions_give_a_release_to_its_share_of_the_users(
    store: InMemoryLightningStore, gateway: LLMProxy, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"gateway": gateway.endpoint, "live_key": KEY, "folder": tmp_path}
    users = [f"u{n}" for n in range(100)]

    def canary_users(session: OnlineSession) -> set[str]:
        return {user for user in users if session.begin("q", user=user).arm == "canary"}

    for name in ("r1", "r2"):
        release = await begin_release(store, name, candidate=("rs", 2), production=("rs", 1))
        release = await start_canary(store, release, CanarySettings(share=0.3))
        expected = {user for user in users if place_of(KEY, user, name) < 30}
        for own in (Assignment(), Assignment(canary_percent=60, salt="another")):
            async with OnlineSession(store, **options, assignment=own) as session:
                assert canary_users(session) == expected
        async with (
            LightningStoreClient("http://127.0.0.1:9", retry_seconds=0.0) as nowhere,
            OnlineSession(nowhere, **options) as session,  # from the folder
        ):
            assert canary_users(session) == expected
            await asyncio.to_thread(session.close, within_seconds=0.0)
        async with OnlineSession(store, **options) as session:
            await advance(store, release, "worse")
            await until(lambda: not canary_users(session), 30.0)
        await store.freeze_resources("rs", 2, frozen=False)


async def test_the_end_of_a_session_waits_for_its_records(store: InMemoryLightningStore, gateway: LLMProxy) -> None:
    async with OnlineSession(store, gateway=gateway.endpoint, live_key=KEY) as session:
        with session.serve("q", user="ada") as served:
            pass
        session.feedback(served, source="user", reward=1.0)
        await asyncio.to_thread(session.close, within_seconds=60.0)
    assert (await store.get_rollout_by_id(served.rollout_id)).status == "succeeded"
    assert (await store.query_feedback()).total == 1


async def test_the_gateway_admits_a_bounded_number_of_rollouts_that_the_store_does_not_have(
    tmp_path: Path, upstream: FakeUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_UNREPORTED_LIMIT", 2)
    async with SqliteLightningStore(tmp_path / "store.db") as file:
        server = LightningStoreServer(file)
        await server.start()
        async with (
            LightningStoreClient(server.endpoint, retry_seconds=0.1) as store,
            LLMProxy(model_list=[upstream.llm()], store=store, live_key=KEY) as gateway,
        ):
            claims = [LiveClaim(f"lv{n}", "at", "rs", 1, None, time.time()) for n in range(4)]
            root = gateway.endpoint.removesuffix("/v1")
            llms = [
                LLM(endpoint=f"{root}/live/{sign_claim(KEY, each)}/v1", model="fake", api_key="any") for each in claims
            ]
            await ask(llms[0])
            await until(lambda: _n_rollouts(file, 1))
            await server.stop()
            for n in (1, 2, 0, 1):  # of what the store has, and of what was admitted, more calls may come
                await ask(llms[n])
            with pytest.raises(openai.InternalServerError, match="too many live rollouts of this gateway"):
                await ask(llms[3])
            await server.start()
            await until(lambda: _n_rollouts(file, 3), 30.0)
            await ask(llms[3])
            await until(lambda: _n_rollouts(file, 4), 30.0)
        await server.stop()


async def test_users_keep_their_arms(store: InMemoryLightningStore, gateway: LLMProxy) -> None:
    await store.set_label("canary", "rs", 2)
    assignment = Assignment(canary_percent=30)
    async with OnlineSession(store, gateway=gateway.endpoint, live_key=KEY, assignment=assignment) as session:
        arms = [{session.begin("q", user=f"u{n}").arm for _ in range(3)} for n in range(200)]
        assert all(len(of_user) == 1 for of_user in arms)
        assert 30 <= arms.count({"canary"}) <= 90
        assert session.status().served["canary"] == 3 * arms.count({"canary"})


NOBODY = [
    None,
    "",
    " ",
    "\t\n",
    "\u00a0\u2003",
    "\u200b",
    "\u2800",
    "\u3164\ufe0f",
    "\u200b" * 1000,
    "null",
    "\u200bnull\u200b",
    "\uff2e\uff35\uff2c\uff2c",
    "False",
    "[object Object]",
    "None",
    "NULL ",
    "undefined",
    "NaN",
    "anonymous",
    "Guest",
]


@pytest.mark.parametrize("user", NOBODY)
async def test_requests_without_a_user_stay_with_the_control_and_count_for_no_canary(
    store: InMemoryLightningStore, gateway: LLMProxy, caplog: pytest.LogCaptureFixture, user: str | None
) -> None:
    await store.set_label("canary", "rs", 2)
    assignment = Assignment(canary_percent=99)
    async with OnlineSession(store, gateway=gateway.endpoint, live_key=KEY, assignment=assignment) as session:
        for number in range(20):
            assert session.begin(number, user=user).arm == "control"
        await until(lambda: not session.status().waiting)
    rollouts = await store.query_rollouts()
    assert [(each.metadata.get("user_hash"), each.metadata["no_user"]) for each in rollouts] == [(None, True)] * 20
    warnings = [each.message for each in caplog.records if "names nobody" in each.message]
    assert len(warnings) == (user is not None), "once, and None says it on purpose"


@pytest.mark.parametrize("hours", [1, -1])
async def test_users_keep_a_canary_after_a_step_of_the_clock_and_leave_it_at_its_deadline(
    store: InMemoryLightningStore, gateway: LLMProxy, machine_clock: MachineClock, hours: int
) -> None:
    release = await begin_release(store, "r1", candidate=("rs", 2), production=("rs", 1))
    await start_canary(store, release, CanarySettings(share=0.5, settle_seconds=0, deadline_seconds=600))
    users = [f"user {number}" for number in range(40)]
    async with OnlineSession(store, gateway=gateway.endpoint, live_key=KEY) as session:
        before = [session.begin("q", user=user).arm for user in users]
        assert "canary" in before
        machine_clock.step(3600 * hours)
        assert [session.begin("q", user=user).arm for user in users] == before
        machine_clock.let_pass(610)
        assert {session.begin("q", user=user).arm for user in users} == {"control"}


async def test_requests_without_a_user_are_left_out_of_the_verdict(
    store: InMemoryLightningStore, gateway: LLMProxy
) -> None:
    settings = CanarySettings(share=0.5, settle_seconds=0, lag_seconds=0, waiting_seconds=0)
    release = await begin_release(store, "r1", candidate=("rs", 2), production=("rs", 1))
    release = await start_canary(store, release, settings)
    async with OnlineSession(store, gateway=gateway.endpoint, live_key=KEY) as session:
        users = [f"user {number}" for number in range(40)]
        arms = [session.begin("q", user=user).arm for user in users]
        for _ in range(200):
            session.begin("q", user="")
        await until(lambda: not session.status().waiting)
    verdict = await judge(store, release, settings, now=time.time() + 60)
    assert (verdict.canary_requests, verdict.control_requests) == (arms.count("canary"), arms.count("control"))
    assert not verdict.share_alarm


@pytest.mark.parametrize(("every", "warned"), [(1, True), (2, True), (4, False)])
async def test_a_constant_for_a_user_is_noticed_by_its_share_of_the_requests(
    store: InMemoryLightningStore,
    gateway: LLMProxy,
    caplog: pytest.LogCaptureFixture,
    every: int,
    warned: bool,
) -> None:
    async with OnlineSession(store, gateway=gateway.endpoint, live_key=KEY) as session:
        for number in range(1500):
            constant = number % every == 0 or number % 10 == 1
            session.begin("q", user="web-app" if constant else f"user {number}")
    said = [each.message for each in caplog.records if "have the same user" in each.message]
    assert len(said) == warned


@pytest.mark.parametrize("user", [0, False, 7, 1.5, b"ada", ["ada"], object()])
async def test_a_user_that_is_no_text_is_refused_and_nothing_is_recorded(
    session: OnlineSession, store: InMemoryLightningStore, user: Any
) -> None:
    with pytest.raises(ConfigError, match=r"user is .* as a text"):
        session.begin("q", user=user)
    assert session.status().waiting == 0
    assert not await store.query_rollouts()


async def test_a_user_has_one_arm_in_every_spelling_of_unicode(
    store: InMemoryLightningStore, gateway: LLMProxy
) -> None:
    await store.set_label("canary", "rs", 2)
    assignment = Assignment(canary_percent=50)
    async with OnlineSession(store, gateway=gateway.endpoint, live_key=KEY, assignment=assignment) as session:
        for number in range(50):
            composed, taken_apart = (unicodedata.normalize(form, f"René {number}") for form in ("NFC", "NFD"))
            assert composed != taken_apart
            assert session.begin("q", user=composed).arm == session.begin("q", user=taken_apart).arm
        await until(lambda: not session.status().waiting)
    assert len({each.metadata["user_hash"] for each in await store.query_rollouts()}) == 50


async def test_long_ids_of_users_take_no_memory(session: OnlineSession) -> None:
    tracemalloc.start()
    try:
        for number in range(50):
            session.begin("q", user=f"{number}" + "x" * 1_000_000)
        assert tracemalloc.get_traced_memory()[0] < 20_000_000
    finally:
        tracemalloc.stop()


async def test_half_an_emoji_names_a_user(session: OnlineSession) -> None:
    assert session.begin("q", user="\ud83d").arm == "control"


@pytest.mark.parametrize(
    "wrong", [{"reward": math.nan}, {"reward": math.inf}, {}, {"reward": 1.0, "label": "x"}, {"label": ""}]
)
async def test_feedback_that_says_nothing_is_refused(session: OnlineSession, wrong: dict[str, Any]) -> None:
    served = session.begin("q", user="ada")
    with pytest.raises(ConfigError):
        session.feedback(served, source="user", **wrong)


async def test_feedback_about_an_unknown_rollout_is_dropped_and_counted(
    session: OnlineSession, store: InMemoryLightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknown, "_UNKNOWN_SECONDS", 0.2)
    session.feedback("missing", source="user", reward=1.0)
    session.feedback(session.begin("q", user="ada").rollout_id, source="user", reward=0.0)
    await until(lambda: session.status().refused == 1 and not session.status().waiting)
    assert [one.value for one in await store.query_feedback()] == [0.0]


async def test_while_the_gateway_is_away_requests_fail_or_go_unrecorded(
    store: InMemoryLightningStore, gateway: LLMProxy, upstream: FakeUpstream
) -> None:
    options: dict[str, Any] = {"gateway": gateway.endpoint, "live_key": KEY, "refresh_seconds": 0.05}
    async with (
        OnlineSession(store, **options) as strict,
        OnlineSession(store, **options, fallback=True, models={"fake": upstream.llm()}) as lenient,
    ):
        await gateway.stop()
        await until(lambda: strict.status().gateway_is_away and lenient.status().gateway_is_away)
        with pytest.raises(GatewayError, match=r"is away.*fallback=True"):
            strict.begin("q", user="ada")
        with lenient.serve("q", user="ada") as served:
            assert not served.recorded
            await ask(served.llm())
        rollout = await recorded(store, served.rollout_id)
        assert rollout.metadata["unrecorded"] is True
        assert lenient.status().unrecorded == 1
        await gateway.start()
        await until(lambda: not strict.status().gateway_is_away)
        await ask(strict.begin("q", user="ada").llm())


async def test_a_gateway_with_another_live_key_counts_as_away_and_the_session_says_why(
    store: InMemoryLightningStore, gateway: LLMProxy, upstream: FakeUpstream
) -> None:
    options: dict[str, Any] = {"gateway": gateway.endpoint, "live_key": "another key"}
    async with OnlineSession(store, **options) as strict:
        assert strict.status().gateway_is_away
        with pytest.raises(GatewayError, match=r"has another live_key.*LEYDEN_LIVE_KEY"):
            strict.begin("q", user="ada")
    async with OnlineSession(store, **options, fallback=True, models={"fake": upstream.llm()}) as lenient:
        served = lenient.begin("q", user="ada")
        assert not served.recorded
        await ask(served.llm())


async def test_while_the_store_is_away_serving_goes_on_and_everything_arrives_once(
    tmp_path: Path, upstream: FakeUpstream
) -> None:
    async with SqliteLightningStore(tmp_path / "store.db") as file:
        await file.update_resources("rs", resources("old"))
        await file.set_label("production", "rs", 1)
        server = LightningStoreServer(file)
        await server.start()
        options: dict[str, Any] = {"live_key": KEY, "refresh_seconds": 0.05, "folder": tmp_path / "session"}
        async with (
            LightningStoreClient(server.endpoint, retry_seconds=0.1) as store,
            LLMProxy(model_list=[upstream.llm()], store=store, live_key=KEY) as gateway,
        ):
            async with OnlineSession(store, gateway=gateway.endpoint, **options) as session:
                await server.stop()
                await until(lambda: session.status().store_is_away)
                first = await _serve(session)
                assert session.status().waiting
                await asyncio.to_thread(session.close, within_seconds=0.0)
            async with OnlineSession(
                store, gateway=gateway.endpoint, **options
            ) as session:  # a start without the store
                second = await _serve(session)
                await server.start()
                await until(lambda: not session.status().waiting and not session.status().store_is_away)
            for rollout_id in (first, second):
                await recorded(file, rollout_id)
                await until(lambda rollout_id=rollout_id: _n_calls(file, rollout_id, 1))
            assert sorted(one.rollout_id for one in await file.query_feedback()) == sorted([first, second])
            await server.stop()


async def test_an_end_that_waited_for_the_store_for_an_hour_still_counts(
    session: OnlineSession, store: InMemoryLightningStore
) -> None:
    served = session.begin("q", user="ada")
    await until(lambda: not session.status().waiting)
    assert not await store.sweep(now=time.time() + 2 * 3600.0), (
        "a store that is back must not give up what waits for it"
    )
    session.end(served)
    await recorded(store, served.rollout_id)
    assert await store.sweep(now=time.time() + 25 * 3600.0) == []


@pytest.mark.parametrize("jump_seconds", [-5 * 3600.0, 5 * 3600.0])
async def test_a_clock_that_jumps_in_the_middle_of_a_request_changes_no_arm_and_loses_nothing(
    store: InMemoryLightningStore, gateway: LLMProxy, machine_clock: MachineClock, jump_seconds: float
) -> None:
    await store.set_label("canary", "rs", 2)
    users = [f"user {number}" for number in range(20)]
    async with OnlineSession(
        store, gateway=gateway.endpoint, live_key=KEY, assignment=Assignment(canary_percent=50)
    ) as session:
        before = [session.begin("q", user=user) for user in users]
        machine_clock.step(jump_seconds)
        after = [session.begin("q", user=user) for user in users]
        assert [one.arm for one in after] == [one.arm for one in before]
        for served in (before[0], after[0]):
            await ask(served.llm())
            session.end(served.claim)  # which knows when it began by this clock alone
            session.feedback(served, source="user", reward=1.0)
            found = await recorded(store, served.rollout_id)
            assert 0 <= found.attempt.metadata["served_seconds"] < 60
        await until(lambda: not session.status().waiting)
        counted = await store.query_feedback(counted=True)
        assert [one.rollout_id for one in counted] == [before[0].rollout_id, after[0].rollout_id]


async def test_a_rollout_whose_session_has_gone_ends_after_a_day(
    session: OnlineSession, store: InMemoryLightningStore
) -> None:
    served = session.begin("q", user="ada")
    await until(lambda: not session.status().waiting)
    await store.sweep(now=time.time() + 25 * 3600.0)
    await recorded(store, served.rollout_id, status="failed")


async def _serve(session: OnlineSession) -> str:
    with session.serve("q", user="ada") as served:
        await ask(served.llm())
    session.feedback(served, source="user", reward=1.0)
    return served.rollout_id


async def test_a_full_spool_refuses_feedback_and_counts_rollouts(
    gateway: LLMProxy, store: InMemoryLightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with OnlineSession(store, gateway=gateway.endpoint, live_key=KEY, spool_bytes=10) as session:
        served = session.begin("q", user="ada")
        assert session.status().lost == 1
        with pytest.raises(StoreError, match="spool_bytes"):
            session.feedback(served, source="user", reward=1.0)


async def test_feedback_is_refused_by_a_full_disk_as_by_a_full_spool(
    gateway: LLMProxy, store: InMemoryLightningStore, tmp_path: Path
) -> None:
    async with OnlineSession(store, gateway=gateway.endpoint, live_key=KEY, folder=tmp_path) as session:
        served = session.begin("q", user="ada")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            with pytest.raises(StoreError, match=f"{served.rollout_id!r} is not recorded: records cannot wait in "):
                session.feedback(served, source="user", reward=1.0)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def about(rollout_id: str, value: Any = 1.0, **fields: Any) -> Feedback:
    return Feedback(rollout_id=rollout_id, source="user", value=value, given_time=time.time(), **fields)


def report(rollout_id: str) -> LiveRollout:
    return LiveClaim(rollout_id, "at", "rs", 1, "control", time.time()).rollout()


@asynccontextmanager
async def delivering(
    store: LightningStore, path: Path | None = None, max_bytes: int = 2**20
) -> AsyncGenerator[outbox.Outbox]:
    """An outbox with its background tasks, as a session runs them."""
    box = outbox.Outbox(store, path, max_bytes=max_bytes)
    tasks = [asyncio.create_task(work) for work in (box.deliver(), box.unknown.run(), box.dead_letters.run())]
    try:
        yield box
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        box.close()


async def test_feedback_that_waits_for_its_rollout_outlives_the_process(
    store: InMemoryLightningStore, tmp_path: Path
) -> None:
    async with delivering(store, tmp_path / "outbox") as box:
        for number in range(20):
            box.put(about(f"later {number}", number))
        await until(lambda: len(box.unknown) == 20)
        await store.record_live_rollouts([report(f"later {number}") for number in range(10)])
        await until(lambda: len(box) == 10)
    async with delivering(store, tmp_path / "outbox") as box:
        assert len(box) >= 10
        await store.record_live_rollouts([report(f"later {number}") for number in range(10, 20)])
        await until(lambda: not len(box))
        assert sorted(each.value for each in await store.query_feedback()) == list(range(20))
    assert not (tmp_path / "outbox-unknown").stat().st_size


class Answering(InMemoryLightningStore):
    """A store that may be away, and says when feedback is offered to it."""

    away = False
    n_offered = 0

    async def add_many_feedback(self, feedback: Sequence[Feedback]) -> Sequence[Feedback]:
        self.n_offered += 1
        if self.away:
            raise StoreAway("away on purpose")
        return await super().add_many_feedback(feedback)


async def test_the_time_in_which_a_store_is_away_does_not_count_for_feedback_that_waits_for_its_rollout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unknown, "_UNKNOWN_SECONDS", 0.5)
    monkeypatch.setattr(unknown, "_MAX_SECONDS", 0.05)
    async with Answering() as store, delivering(store) as box:
        await store.update_resources("rs", resources("old"))
        box.put(about("later"))
        await until(lambda: len(box.unknown) == 1)
        store.away = True
        for _ in range(2):  # each time longer than feedback waits for a store that answers
            offered, until_then = store.n_offered, time.monotonic() + 0.6
            await until(lambda offered=offered, end=until_then: store.n_offered > offered and time.monotonic() > end)
        store.away = False
        offered = store.n_offered
        await until(lambda: store.n_offered > offered)
        assert (len(box), box.refused) == (1, 0), "its first refusal after the outage is not its last"
        await store.record_live_rollouts([report("later")])
        await until(lambda: not len(box))
        assert [each.value for each in await store.query_feedback()] == [1.0]


@pytest.mark.parametrize("jump_seconds", [-2.0, -5 * 3600.0, 5 * 3600.0, 30 * 86400.0])
async def test_a_clock_that_jumps_drops_no_feedback_that_waits_for_its_rollout(
    store: InMemoryLightningStore, monkeypatch: pytest.MonkeyPatch, jump_seconds: float
) -> None:
    real = time.time
    async with delivering(store) as box:
        box.put(about("later"))
        await until(lambda: len(box.unknown) == 1)
        with monkeypatch.context() as jumped:
            jumped.setattr(time, "time", lambda: real() + jump_seconds)
            box.put(about("later still"))
            await until(lambda: len(box.unknown) == 2)
            await asyncio.sleep(0.1)  # some rounds
            assert (len(box), box.refused) == (2, 0)
        await store.record_live_rollouts([report("later"), report("later still")])
        await until(lambda: not len(box))
        assert len(await store.query_feedback()) == 2


def sizes_in(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


async def test_huge_feedback_about_rollouts_that_do_not_exist_costs_no_other_record(
    store: InMemoryLightningStore, tmp_path: Path
) -> None:
    limit = 2**20
    async with delivering(store, tmp_path / "outbox", max_bytes=limit) as box:
        with pytest.raises(ConfigError, match=r"one record may have 131,072"):
            box.put(about("missing", kind="correction", value="x" * (limit // 8)))
        refused = 0
        for number in range(200):  # twenty times what the file holds
            try:
                box.put(about(f"missing {number}", kind="correction", value="x" * 100_000))
            except StoreError:
                refused += 1
            box.put(report(f"real {number}"))
            box.put(about(f"real {number}", resources_id="rs", version=1))
            await asyncio.sleep(0)
        assert refused >= 190
        await until(lambda: len(box) == len(box.unknown))
        assert len(await store.query_feedback()) == len(await store.query_rollouts()) == 200
        sizes = sizes_in(tmp_path)
        assert sizes["outbox-unknown"] <= limit // 4 and sizes["outbox"] <= limit


async def test_thousands_of_small_pieces_about_rollouts_that_do_not_exist_hold_up_no_other_record(
    store: InMemoryLightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknown, "_UNKNOWN_SECONDS", 0.5)
    async with delivering(store) as box:
        refused = 0
        for number in range(3000):
            try:
                box.put(about(f"missing {number}"))
            except StoreError:
                refused += 1
        assert refused
        box.put(report("real"))
        box.put(about("real", resources_id="rs", version=1))
        await until(lambda: store.query_feedback())
        await until(lambda: box.refused == 3000 - refused and not len(box))
        box.put(about("missing"))  # its share is free again


async def test_an_id_of_feedback_that_is_taken_is_set_aside_and_not_dropped(store: InMemoryLightningStore) -> None:
    await store.record_live_rollouts([report("one"), report("other")])
    async with delivering(store) as box:
        box.put(about("one", 1.0, feedback_id="same"))
        box.put(about("other", 0.0, feedback_id="same"))
        await until(lambda: not len(box))
        assert (len(box.dead_letters), box.refused) == (1, 0)


async def test_a_session_adds_what_the_gateway_did_not_report(store: InMemoryLightningStore) -> None:
    rollout = LiveClaim("lv", "at", "rs", 1, "control", time.time()).rollout()
    await store.record_live_rollouts([rollout])
    await store.record_live_rollouts([rollout.model_copy(update={"metadata": {"user_hash": "h"}})])
    assert (await store.get_rollout_by_id("lv")).metadata == {"user_hash": "h", "served_at": rollout.start_time}


async def test_a_session_needs_a_store_or_what_was_released_before(tmp_path: Path, gateway: LLMProxy) -> None:
    async with LightningStoreClient("http://127.0.0.1:9", retry_seconds=0.0) as nowhere:
        with pytest.raises(StoreError, match="nothing can be served"):
            OnlineSession(nowhere, gateway=gateway.endpoint, live_key=KEY, folder=tmp_path).start()
    with pytest.raises(ConfigError, match="models="):
        OnlineSession(nowhere, gateway=gateway.endpoint, live_key=KEY, fallback=True)
    with pytest.raises(ConfigError, match="only used with fallback=True"):
        OnlineSession(
            nowhere, gateway=gateway.endpoint, live_key=KEY, models={"m": LLM(endpoint="http://m", model="m")}
        )


def test_a_claim_survives_the_way_through_a_url() -> None:
    claim = LiveClaim("ro/ä", "at.1", "rs é", 3, None, 5.25)
    assert parse_claim(sign_claim("key", claim)) == claim
