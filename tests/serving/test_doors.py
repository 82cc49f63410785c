"""What a session accepts is in the store afterwards, whatever it is given; everything else is refused at the call."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leyden._lib.event_loops import LoopThread
from leyden._lib.host.http import Message, SiteGuard
from leyden.errors import ConfigError
from leyden.serving import BlockingStore, OnlineSession
from leyden.serving.serving_app import ServingApp
from leyden.store import InMemoryLightningStore, LightningStoreClient, LightningStoreServer
from leyden.types import LLM, PromptTemplate
from leyden.types.checks import MAX_JSON_DEPTH, MAX_JSON_DIGITS

OWN = {"fake": LLM(endpoint="http://127.0.0.1:9/v1", model="fake")}


class Doors:
    """A session, and the store behind it."""

    def __init__(self, session: OnlineSession, store: BlockingStore) -> None:
        self.session, self.store = session, store
        self.n_unknown = 0
        """How many pieces of feedback about unknown rollouts were accepted, which wait."""

    def delivered(self) -> tuple[int, int]:
        """Wait until all else is in the store, and return how many records the store did not take."""
        deadline = time.monotonic() + 20
        while self.session.status().waiting > self.n_unknown:
            assert time.monotonic() < deadline, self.session.status()
            time.sleep(0.005)
        status = self.session.status()
        return status.refused + status.lost, status.set_aside


@pytest.fixture(scope="module", params=["memory", "http"])
def doors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    loop, folder = LoopThread("store of the doors"), tmp_path_factory.mktemp("session")
    memory = InMemoryLightningStore()
    store = BlockingStore(memory)
    store.update_resources("rs", {"prompt": PromptTemplate(template="x"), "llm": OWN["fake"]})
    store.set_label("production", "rs", 1)
    server = LightningStoreServer(memory)
    loop.run(server.start())
    try:
        given = memory if request.param == "memory" else LightningStoreClient(server.endpoint)
        options: dict[str, Any] = {"gateway": "http://127.0.0.1:9", "fallback": True, "models": OWN}
        with OnlineSession(given, live_key="key", folder=folder, **options) as session:
            yield Doors(session, store)
    finally:
        loop.run(server.stop())
        loop.stop()
        store.close()


def nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


TEXTS = st.one_of(
    st.text(max_size=12),
    st.text(st.characters(categories=["Cs", "Cc", "Cf", "Zs", "Lu"]), max_size=6),
    st.sampled_from(["", " ", "u" * 200, "u" * 201, "a\nb", "\u200d", "\ud800", "\0", "NaN", "latest"]),
)
ODD = {
    "deep": nested(MAX_JSON_DEPTH),
    "too deep": nested(300),
    "digits": 10**MAX_JSON_DIGITS,
    "object": object(),
    "infinity": 1e308 * 10,
    "complex": 1j,
}
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    TEXTS,
    st.binary(max_size=3),
    st.sets(st.integers(), max_size=2),
    st.sampled_from(["deep", "too deep", "digits", "object", "infinity", "complex"]).map(lambda name: ODD[name]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | st.integers(), inner, max_size=3),
    max_leaves=6,
)
ANY = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@ANY
@given(input=VALUES, metadata=st.none() | VALUES, task_type=st.none() | TEXTS | LEAVES, quality=st.none() | LEAVES)
def test_a_request_is_refused_or_recorded_with_its_input_and_user(doors: Doors, **request: Any) -> None:
    before = doors.delivered()
    try:
        served = doors.session.begin(user="ada", **request)
    except ConfigError:
        return
    doors.session.end(served)
    assert doors.delivered() == before
    found = doors.store.get_rollout_by_id(served.rollout_id)
    assert found.status == "succeeded" and found.metadata["user_hash"]
    if json_like(request["input"]):
        assert found.input == request["input"]


def json_like(value: Any) -> bool:
    """Return whether a value comes back from JSON as it is."""
    try:
        return json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError, RecursionError):
        return False


@ANY
@given(
    rollout=st.none() | TEXTS,
    source=TEXTS | LEAVES,
    feedback_id=st.none() | TEXTS | LEAVES,
    kind=st.sampled_from(["reward", "label", "correction"]),
    value=VALUES,
)
def test_feedback_is_refused_or_in_the_store(
    doors: Doors, rollout: str | None, source: Any, feedback_id: Any, kind: str, value: Any
) -> None:
    before = doors.delivered()
    served = doors.session.begin("q", user="ada")
    if isinstance(feedback_id, str) and feedback_id:
        feedback_id = f"{feedback_id}{served.rollout_id}"  # an id that is not taken
    about: Any = served if rollout is None else served.rollout_id if rollout == "latest" else rollout
    try:
        said = doors.session.feedback(about, source=source, feedback_id=feedback_id, **{kind: value})
    except ConfigError:
        return
    if isinstance(about, str) and about != served.rollout_id:
        doors.n_unknown += 1  # a possible id of a rollout that another process may report: it waits
        return
    assert doors.delivered() == before
    kept = {each.feedback_id for each in doors.store.query_feedback(rollout_id=served.rollout_id)}
    assert said.feedback_id in kept


@ANY
@given(status=st.sampled_from(["succeeded", "failed", "cancelled", "running", "", "Succeeded", None, 5]), reason=VALUES)
def test_an_end_is_refused_or_recorded(doors: Doors, status: Any, reason: Any) -> None:
    before = doors.delivered()
    served = doors.session.begin("q", user="ada")
    try:
        doors.session.end(served, status, reason=reason)
    except ConfigError:
        return
    assert doors.delivered() == before
    found = doors.store.get_rollout_by_id(served.rollout_id)
    assert found.status == status or (status is None and found.status in ("preparing", "running"))


# ---- over HTTP -------------------------------------------------------------------------------------------------------


def post(app: ServingApp, what: str, body: bytes) -> tuple[int, Any]:
    """Send a request to the application, and return the status and the JSON of its reply."""
    sent: list[Message] = []

    async def call() -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": body}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": (path := f"/v1/serving/{what}"), "raw_path": path.encode()}
        await app(scope | {"headers": [(b"host", b"localhost")], "query_string": b""}, receive, send)

    asyncio.run(call())
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


@pytest.fixture
def app(doors: Doors) -> ServingApp:
    return ServingApp(doors.session, token=None, guard=SiteGuard(local_only=True))


REFUSED: dict[str, tuple[str, Any]] = {
    "a quality beyond every float": ("begin", '{"user": "ada", "quality": 1e999}'),
    "an input with infinity": ("begin", '{"user": "ada", "input": [1e999]}'),
    "an input with NaN": ("begin", '{"user": "ada", "input": NaN}'),
    "metadata with NaN": ("begin", '{"user": "ada", "metadata": {"a": NaN}}'),
    "metadata that is a list": ("begin", '{"user": "ada", "metadata": [1]}'),
    "an input that is too deep": ("begin", json.dumps({"user": "ada", "input": nested(150)})),
    "a task type with a line break": ("begin", json.dumps({"user": "ada", "task_type": "a\nb"})),
    "half an emoji": ("begin", '{"user": "ada", "input": "\\ud83d"}'),
    "no user at all": ("begin", '{"input": 1}'),
    "a number for a user": ("begin", '{"user": 5}'),
    "an empty source": ("feedback", '{"rollout": "r", "source": "", "value": 1}'),
    "a long source": ("feedback", json.dumps({"rollout": "r", "source": "u" * 201, "value": 1})),
    "a source with a joined emoji": (
        "feedback",
        json.dumps({"rollout": "r", "source": "\U0001f469\u200d", "value": 1}),
    ),
    "an empty feedback_id": ("feedback", '{"rollout": "r", "source": "u", "value": 1, "feedback_id": ""}'),
    "an empty rollout": ("feedback", '{"rollout": "", "source": "u", "value": 1}'),
    "a rollout with a line break": ("feedback", json.dumps({"rollout": "a\nb", "source": "u", "value": 1})),
    "a long rollout": ("feedback", json.dumps({"rollout": "r" * 300, "source": "u", "value": 1})),
    "a reward beyond every float": ("feedback", '{"rollout": "r", "source": "u", "value": 1e999}'),
    "a correction with NaN": ("feedback", '{"rollout": "r", "source": "u", "kind": "correction", "value": {"a": NaN}}'),
    "a correction that is null": ("feedback", '{"rollout": "r", "source": "u", "kind": "correction", "value": null}'),
}


@pytest.mark.parametrize(("what", "body"), REFUSED.values(), ids=REFUSED)
def test_what_the_store_would_refuse_is_a_400_over_http(doors: Doors, app: ServingApp, what: str, body: str) -> None:
    before = doors.session.status()
    status, said = post(app, what, body.encode())
    assert status == 400, said
    assert said["error"]
    after = doors.session.status()
    assert after.served == before.served and after.waiting <= before.waiting


def test_a_record_that_would_crowd_out_the_others_is_refused_over_http(tmp_path: Path) -> None:
    store = InMemoryLightningStore()
    with BlockingStore(store) as setup:
        setup.update_resources("rs", {"llm": OWN["fake"]})
        setup.set_label("production", "rs", 1)
        options: dict[str, Any] = {"gateway": "http://127.0.0.1:9", "fallback": True, "models": OWN}
        with OnlineSession(store, live_key="key", spool_bytes=2**20, **options) as session:
            app = ServingApp(session, token=None, guard=SiteGuard(local_only=True))
            for what, body in (
                ("begin", {"user": "ada", "input": "x" * 2**17}),
                ("begin", {"user": "ada", "metadata": {"a": "x" * 2**17}}),
                ("feedback", {"rollout": "r", "source": "u", "kind": "correction", "value": "x" * 2**17}),
            ):
                status, said = post(app, what, json.dumps(body).encode())
                assert status == 400 and "spool_bytes" in said["error"], said
            assert session.status().waiting == 0
