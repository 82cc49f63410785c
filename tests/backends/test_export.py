"""What is exported to Parquet is what the store holds, to the last bit, also while it changes."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pyarrow.parquet
import pytest

from leyden.errors import ConfigError, StoreError, VersionFrozen
from leyden.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    SqliteLightningStore,
    export,
    restore,
)
from leyden.store.export import export_parquet
from leyden.store.restore import import_parquet
from leyden.testing import audit_store
from leyden.types import (
    LLM,
    EnqueueRolloutRequest,
    Feedback,
    LabelMove,
    LiveRollout,
    MetricPoint,
    PaginatedResult,
    PromptTemplate,
    ProxyLLM,
    Retention,
    Rollout,
    RolloutConfig,
    RunRecord,
    Span,
    SpanEvent,
    SpanStatus,
    TokenRecord,
    reward_attributes,
)
from tests.contracts.store.support import claimed, ids, span_of
from tests.store.conftest import STORES
from tests.store.postgres_server import fresh_url

pytestmark = pytest.mark.merge

ODD = 'π "quoted" \\ \n \x00 😀 \ud800'
TOKENS = TokenRecord(
    prompt_ids=[0, 1, 2**31 - 1], response_ids=[5, 6], logprobs=[-0.1, -1e-30], policy_versions=[3, 4], loss_mask=[1, 0]
)


def read(directory: Path, name: str) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(directory / f"{name}.parquet").to_pylist()


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def as_float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


async def fill(store: LightningStore) -> None:
    """Rollouts of every kind: waiting, retried, failed, odd, with and without spans and tokens."""
    await store.add_resources({"llm": LLM(endpoint="http://x", model="m")}, resources_id="rs-1")
    for version in range(2):
        await store.update_resources("prompt", {"prompt": PromptTemplate(template=f"{version} π", engine="f-string")})
    retried = await claimed(
        store,
        {"q": ODD, "n": [1, 2.5, None, True]},
        "worker",
        mode="train",
        priority=-7,
        resources_id="rs-1",
        metadata={"a": {"b": ODD}},
        config=RolloutConfig(max_attempts=2, retry_condition=["failed"], timeout_seconds=60.5),
    )
    await store.add_span(span_of(retried, "a" * 16, attributes=reward_attributes({"primary": 0.25})))
    await store.update_attempt(**ids(retried), status="failed", metadata={"reason": ODD})
    again = await store.dequeue_rollout("worker")
    assert again is not None
    events = [SpanEvent(name="e", timestamp=1.5, attributes={"k": ["a", "b"]}), SpanEvent(name="bare")]
    await store.add_many_spans(
        [
            span_of(
                again,
                "b" * 16,
                name="π",
                kind="CLIENT",
                parent_id="a" * 16,
                status=SpanStatus(status_code="ERROR", description="x\ny"),
                attributes={"s": ODD, "i": 2**62, "f": 0.1, "b": True, "l": [1, 2], "e": ""},
                events=events,
                start_time=1.1,
                end_time=2.2,
                resource={"service.name": "π"},
                tokens=TOKENS,
            ),
            span_of(again, "c" * 16, tokens=TokenRecord(prompt_ids=[], response_ids=[])),
            span_of(again, "d" * 16, attributes=reward_attributes({"primary": 1 / 3, "style": 2})),
        ]
    )
    await store.update_attempt(**ids(again), status="succeeded")
    for run_id in ("run-1", "run-2"):
        await store.start_run(
            RunRecord(run_id=run_id, name="first π", kind="fit", start_time=1.5, config={"a": [ODD, None]})
        )
    await store.update_run("run-1", status="failed", cause="why")
    points = [(i, name) for i in range(3) for name in ("loss", "reward")]
    await store.add_metrics(
        "run-1",
        [MetricPoint(stage="train", iteration=i, name=n, value=None if i == 1 else i / 3, time=2.5) for i, n in points],
    )
    await store.start_rollout(None, run_id="run-1", group_id="g π")
    await store.enqueue_rollout("waits")
    await release(store)


async def release(store: LightningStore) -> None:
    """Labels that moved, a release that was rolled back, a frozen version, and feedback of every kind."""
    who: dict[str, Any] = {"who": "ada π", "why": ODD}
    await store.set_label("production", "prompt", 1, **who)
    await store.create_release(
        "r1",
        ("prompt", 2),
        state="canary",
        from_version=("prompt", 1),
        details={"share": 0.25, "salt": ODD},
        deadline=5.5,
        labels=[LabelMove(label="canary", to=("prompt", 2), expected=None)],
    )
    live = {"resources_id": "prompt", "version": 2, "arm": "canary", "start_time": 5.0}
    for number in range(2):
        rollout = LiveRollout(rollout_id=f"lv-{number}", attempt_id="at", input=number, status="succeeded", **live)
        await store.record_live_rollouts([rollout])
    opinions: list[Any] = [("reward", 1 / 3), ("label", "thumbs_up"), ("correction", {"a": [ODD, None]})]
    await store.add_many_feedback(
        [Feedback(rollout_id="lv-0", source="user", kind=kind, value=value, given_time=6.5) for kind, value in opinions]
    )
    await store.advance_release(
        "r1",
        expected_state="canary",
        state="rolled_back",
        details={"verdict": None},
        deadline=None,
        labels=[LabelMove(label="canary", to=None, expected=("prompt", 2))],
        freeze=[("prompt", 2)],
        **who,
    )
    await store.create_release("r2", ("rs-1", 1), state="waiting")


async def expected(store: LightningStore) -> dict[str, list[dict[str, Any]]]:
    """What the files must hold, by other calls than the export's."""
    rollouts: list[dict[str, Any]] = []
    attempts: list[dict[str, Any]] = []
    spans: list[dict[str, Any]] = []
    for rollout in await store.query_rollouts():
        row = rollout.model_dump(mode="json", exclude={"attempt"})
        rollouts.append(row | {"reward": 1 / 3 if (rollout.mode, rollout.status) == ("train", "succeeded") else None})
        for attempt in await store.query_attempts(rollout.rollout_id):
            attempts.append(attempt.model_dump(mode="json"))
            for span in await store.query_spans(rollout.rollout_id, attempt.attempt_id):
                row = span.model_dump(exclude={"tokens", "status"})
                row |= {"status_code": span.status.status_code, "status_description": span.status.description}
                tokens = dict.fromkeys(TokenRecord.model_fields)
                if span.tokens is not None:
                    tokens = span.tokens.model_dump()
                    if tokens["logprobs"] is not None:
                        tokens["logprobs"] = [as_float32(value) for value in tokens["logprobs"]]
                spans.append(row | tokens)
    resources = [update.model_dump(mode="json") for update in await store.query_resources(all_versions=True)]
    runs = [run.model_dump() for run in await store.query_runs(sort_by="run_id", sort_order="asc")]
    metrics = [
        m.model_dump() | {"run_id": run["run_id"]} for run in runs for m in await store.query_metrics(run["run_id"])
    ]
    return {
        "rollouts": rollouts,
        "attempts": attempts,
        "spans": spans,
        "resources": resources,
        "runs": runs,
        "metrics": metrics,
        "feedback": [one.model_dump(mode="json") for one in await store.query_feedback()],
        "labels": [label.model_dump() for label in await store.get_labels()],
        "releases": [each.model_dump(mode="json") for each in await store.query_releases(sort_order="asc")],
        "audit": [each.model_dump(mode="json") for each in await store.query_audit(sort_order="asc")],
    }


JSON = {"input", "config", "metadata", "rewards", "attributes", "events", "resource", "resources", "parent"}
JSON |= {"value", "from_version", "canary_version", "details", "before", "after"}


def parsed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    texts = JSON - {"value"} if rows and "iteration" in rows[0] else JSON
    return [{name: json.loads(value) if name in texts else value for name, value in row.items()} for row in rows]


async def test_every_field_comes_back_as_it_was(store: LightningStore, tmp_path: Path) -> None:
    await fill(store)
    exported = await export_parquet(store, tmp_path / "out")
    want = await expected(store)
    for name, rows in want.items():
        assert parsed(read(tmp_path / "out", name)) == rows
    assert exported.rows == {name: len(rows) for name, rows in want.items()}
    sizes = {"rollouts": 5, "attempts": 5, "spans": 4, "resources": 3, "runs": 2, "metrics": 6}
    sizes |= {"feedback": 3, "labels": 1, "releases": 2, "audit": 7}
    assert exported.rows == sizes
    assert {"out"} <= names(tmp_path) <= {"out", "store.db", "store.db-wal", "store.db-shm", "store.db.lock"}


async def test_numbers_keep_their_types(tmp_path: Path) -> None:
    async with InMemoryLightningStore() as store:
        await fill(store)
        await export_parquet(store, tmp_path / "out")
    schema = pyarrow.parquet.read_schema(tmp_path / "out" / "spans.parquet")
    assert schema.field("prompt_ids").type == pyarrow.list_(pyarrow.int32())
    assert schema.field("logprobs").type == pyarrow.list_(pyarrow.float32())
    assert schema.field("start_time").type == pyarrow.float64()


async def test_an_empty_store_has_files_without_rows(store: LightningStore, tmp_path: Path) -> None:
    exported = await export_parquet(store, tmp_path / "a" / "b" / "out")
    assert exported.directory == tmp_path / "a" / "b" / "out"
    assert set(exported.rows.values()) == {0}
    assert read(exported.directory, "spans") == []


async def test_rollouts_are_chosen_by_status(tmp_path: Path) -> None:
    async with InMemoryLightningStore() as store:
        await fill(store)
        exported = await export_parquet(store, tmp_path / "out", status_in=["succeeded", "failed"])
    assert exported.rows["rollouts"] == 3
    assert exported.rows["attempts"] == 4
    assert [row["status"] for row in read(tmp_path / "out", "rollouts")] == ["succeeded"] * 3


async def test_pages_and_row_groups_meet_without_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "_PAGE", 7)
    monkeypatch.setattr(export, "_BATCH_ROLLOUTS", 3)
    monkeypatch.setattr(export, "_GROUP_ROWS", 10)
    seen: list[tuple[int, int]] = []
    async with InMemoryLightningStore() as store:
        for index in range(50):
            rollout = await store.start_rollout(index)
            await store.add_many_spans([span_of(rollout, str(span)) for span in range(2)])
        await export_parquet(store, tmp_path / "out", on_progress=lambda *told: seen.append(told))
    assert [json.loads(row["input"]) for row in read(tmp_path / "out", "rollouts")] == list(range(50))
    assert len(read(tmp_path / "out", "spans")) == 100
    assert pyarrow.parquet.ParquetFile(tmp_path / "out" / "spans.parquet").num_row_groups >= 8
    assert seen[-1] == (50, 50)
    assert seen == sorted(seen)


class Changing(InMemoryLightningStore):
    """A store in which something happens before each page that is asked for."""

    def __init__(self, happens: Any) -> None:
        super().__init__()
        self._happens = happens
        self.pages = 0

    async def query_rollouts(self, **filters: Any) -> PaginatedResult[Rollout]:
        answer = await super().query_rollouts(**filters)
        if filters.get("limit", -1) > 0:
            self.pages += 1
            await self._happens(self)
        return answer


@pytest.mark.parametrize("forgotten", [1, 3, 10, 30, 1000])
async def test_what_is_forgotten_meanwhile_takes_nothing_else_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: int
) -> None:
    monkeypatch.setattr(export, "_PAGE", 10)
    monkeypatch.setattr(export, "_BATCH_ROLLOUTS", 4)

    async def forget(store: Changing) -> None:
        if store.pages < 6:
            await store.prune(Retention(max_rollouts=0), limit=forgotten)

    async with Changing(forget) as store:
        requests = [EnqueueRolloutRequest(input=index) for index in range(100)]
        rollouts = await store.enqueue_many_rollouts(requests)
        for index, rollout in enumerate(rollouts):
            if index % 3:
                await store.update_rollout(rollout.rollout_id, status="cancelled")
        await export_parquet(store, tmp_path / "out")
        left = {rollout.rollout_id for rollout in await store.query_rollouts()}
    found = [row["rollout_id"] for row in read(tmp_path / "out", "rollouts")]
    assert len(found) == len(set(found))
    assert left <= set(found)


async def test_a_rollout_that_is_tried_again_meanwhile_is_whole(tmp_path: Path) -> None:
    async def retry(store: Changing) -> None:
        if store.pages == 1:
            attempt = await store.get_latest_attempt(rollout.rollout_id)
            assert attempt is not None
            await store.update_attempt(rollout.rollout_id, attempt.attempt_id, status="failed")
            again = await store.dequeue_rollout()
            assert again is not None
            await store.add_span(span_of(again, "b" * 16))

    async with Changing(retry) as store:
        rollout = await claimed(store, config=RolloutConfig(max_attempts=2, retry_condition=["failed"]))
        await store.add_span(span_of(rollout, "a" * 16))
        await export_parquet(store, tmp_path / "out")
    attempts = [row["attempt_id"] for row in read(tmp_path / "out", "attempts")]
    assert [row["attempt_id"] for row in read(tmp_path / "out", "spans")] == attempts
    assert len(attempts) == 2


async def test_an_export_that_fails_or_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    async def fail(store: Changing) -> None:
        raise StoreError("the disk did not answer")

    async def stop(store: Changing) -> None:
        raise asyncio.CancelledError

    for happens, error in ((fail, StoreError), (stop, asyncio.CancelledError)):
        async with Changing(happens) as store:
            await store.enqueue_rollout(1)
            with pytest.raises(error):
                await export_parquet(store, tmp_path / "out")
        assert names(tmp_path) == set()


async def test_a_place_that_is_taken_or_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").touch()
    async with InMemoryLightningStore() as store:
        with pytest.raises(ConfigError, match="is there already"):
            await export_parquet(store, tmp_path / "taken")
        with pytest.raises(ConfigError, match="cannot export"):
            await export_parquet(store, tmp_path / "file" / "out")


async def test_a_file_is_exported_while_its_owner_writes_it(tmp_path: Path) -> None:
    async with SqliteLightningStore(tmp_path / "x.db") as owner:
        await fill(owner)
        async with SqliteLightningStore(tmp_path / "x.db", read_only=True) as store:
            await owner.enqueue_rollout("later")
            assert (await export_parquet(store, tmp_path / "out")).rows["rollouts"] == 6


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def second(request: pytest.FixtureRequest, tmp_path: Path, postgres_server: str) -> AsyncIterator[LightningStore]:
    """A new store."""
    with fresh_url(postgres_server) as url:
        async with STORES[request.param](tmp_path / "second.db", lambda: url) as store:
            yield store


async def test_what_is_released_survives_an_export_and_an_import(
    store: LightningStore, second: LightningStore, tmp_path: Path
) -> None:
    await fill(store)
    await export_parquet(store, tmp_path / "out")
    imported = await import_parquet(second, tmp_path / "out")
    assert imported.rows == {"resources": 3, "labels": 1, "releases": 2, "audit": 7, "feedback": 3}
    before, after = await expected(store), await expected(second)
    for name in imported.rows:
        assert after[name] == before[name]
    late = Feedback(rollout_id="lv-1", source="user", value=0.5)  # its rollout is not in the new store
    (stored,) = await second.add_many_feedback([late])
    assert (stored.resources_id, stored.version, stored.arm, stored.sequence_id) == ("prompt", 2, "canary", 4)
    assert (await second.update_resources("prompt", {"prompt": PromptTemplate(template="next")})).version == 3
    with pytest.raises(VersionFrozen):
        await second.set_label("production", "prompt", 2)
    await second.set_label("production", "prompt", 3, expected=("prompt", 1))
    assert [each.sequence_id for each in await second.query_audit(sort_order="asc")] == list(range(1, 9))
    assert (await second.statistics())["total_resources"] == 2
    with pytest.raises(ConfigError, match="import into a new store"):
        await import_parquet(second, tmp_path / "out")
    assert await audit_store(second) == []


async def test_an_import_that_cannot_be_adds_nothing(tmp_path: Path) -> None:
    async with InMemoryLightningStore() as store, InMemoryLightningStore() as new:
        await fill(store)
        await export_parquet(store, tmp_path / "out")
        async with LightningStoreServer(new) as server, LightningStoreClient(server.endpoint) as client:
            with pytest.raises(ConfigError, match="the file or the database behind it"):
                await import_parquet(client, tmp_path / "out")
        with pytest.raises(ConfigError, match=r"nowhere.*cannot be read"):
            await import_parquet(new, tmp_path / "nowhere")
        audit, feedback = (tmp_path / "out" / f"{name}.parquet" for name in ("audit", "feedback"))
        kept = audit.read_bytes()
        audit.write_bytes(feedback.read_bytes())
        with pytest.raises(ConfigError, match="lacks the columns action"):
            await import_parquet(new, tmp_path / "out")
        audit.write_bytes(kept)
        table = pyarrow.parquet.read_table(feedback)
        values = pyarrow.array(["1.0", '"x"', "NaN"])
        place = table.column_names.index("value")
        pyarrow.parquet.write_table(table.set_column(place, "value", values), feedback)
        with pytest.raises(ConfigError, match=r"feedback\.parquet, row 3, column value, is no Feedback: NaN"):
            await import_parquet(new, tmp_path / "out")
        assert not await new.query_resources()
        assert not await new.query_audit()


async def test_an_export_is_private_and_holds_no_keys(tmp_path: Path) -> None:
    secrets = {"api_key": "sk-one", "x-api-key": "sk-two", "token": "sk-three", "nested": [{"api-key": "sk-four"}]}
    headers = {"extra_headers": {"Authorization": "Bearer sk-five"}, "temperature": 0.5}
    async with InMemoryLightningStore() as store, InMemoryLightningStore() as new:
        llm = LLM(
            endpoint="http://me:sk-six@host/v1", model="m", api_key="sk-seven", sampling_parameters=secrets | headers
        )
        proxy = ProxyLLM(endpoint="http://x?api_key=sk-eight", model="m", api_key="sk-nine")
        await store.add_resources(
            {"llm": llm, "proxy": proxy, "prompt": PromptTemplate(template='{"api_key": "shown"}')}, resources_id="r"
        )
        await store.create_release("rel", ("r", 1), state="shadow", details={"resources": {"api_key": "sk-ten"}})
        old = os.umask(0)
        try:
            await export_parquet(store, tmp_path / "out")
        finally:
            os.umask(old)
        assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700
        for path in (tmp_path / "out").iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert "sk-" not in str(pyarrow.parquet.read_table(path).to_pylist())
        await import_parquet(new, tmp_path / "out")
        read = (await new.get_resources_by_id("r")).resources
        assert read["prompt"] == PromptTemplate(template='{"api_key": "shown"}')
        assert read["llm"].api_key is None
        assert read["llm"].sampling_parameters["temperature"] == 0.5


BAD_CELLS = {
    "nested": ("feedback", "value", "[" * 5000 + "]" * 5000, "row 2, column value.*200 deep"),
    "objects": ("feedback", "value", "[" + "{}," * 600_000 + "1]", "row 2, column value.*500,000 objects"),
    "a bomb": ("resources", "resources", " " * 100 * 2**20, "row 2, column resources, has 104,857,600 bytes"),
    "a number": ("feedback", "value", "1e999", "row 2, is no Feedback"),
    "digits": ("feedback", "value", "9" * 4400, "row 2"),
    "an id": ("feedback", "rollout_id", "x" * 5000, "row 2.*5000 characters"),
    "an empty id": ("feedback", "feedback_id", "", "row 2.*feedback_id ''"),
    "a source": ("feedback", "source", "user\n", "row 2.*source"),
    "a label": ("labels", "label", "a\x1b[31m", "row 1.*label"),
    "an author": ("resources", "author", "\u202e", "row 2.*author"),
    "a reason": ("audit", "why", "x" * 20_000, "row 2.*20,000 characters"),
    "a list": ("feedback", "value", [1], "column value, has the type list"),
    "a rollout's id": ("rollouts", "rollout_id", "a\0b", "row 2.*rollout_id"),
    "no rollout's id": ("rollouts", "rollout_id", None, "row 2.*rollout_id"),
    "a rollout's arm": ("rollouts", "arm", "x" * 5000, "row 2.*arm"),
    "a label of nothing": ("labels", "version", 7, "row 1.*which resources.parquet lacks"),
    "a state": ("releases", "state", "", "row 2.*state"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CELLS)
async def test_a_cell_that_no_store_takes_is_refused_by_row_and_column(name: str, tmp_path: Path) -> None:
    table, column, cell, reason = BAD_CELLS[name]
    async with InMemoryLightningStore() as store, InMemoryLightningStore() as new:
        await fill(store)
        await export_parquet(store, tmp_path / "out")
        path = tmp_path / "out" / f"{table}.parquet"
        rows = pyarrow.parquet.read_table(path)
        place = rows.column_names.index(column)
        cells = rows.column(column).to_pylist()
        cells[min(1, len(cells) - 1)] = cell
        if isinstance(cell, list):
            cells = [cell] * len(cells)
        pyarrow.parquet.write_table(rows.set_column(place, column, pyarrow.array(cells)), path, compression="zstd")
        began = psutil.Process().memory_info().rss
        with pytest.raises(ConfigError, match=reason):
            await import_parquet(new, tmp_path / "out")
        assert psutil.Process().memory_info().rss - began < 400 * 2**20
        assert not await new.query_resources()


@pytest.mark.parametrize("table", ["resources", "labels", "releases", "feedback", "rollouts"])
async def test_a_row_that_stands_twice_is_refused_by_its_number(table: str, tmp_path: Path) -> None:
    async with InMemoryLightningStore() as store, InMemoryLightningStore() as new:
        await fill(store)
        await export_parquet(store, tmp_path / "out")
        path = tmp_path / "out" / f"{table}.parquet"
        rows = pyarrow.parquet.read_table(path)
        pyarrow.parquet.write_table(pyarrow.concat_tables([rows, rows.slice(0, 1)]), path)
        with pytest.raises(ConfigError, match=f"row {rows.num_rows + 1}, .*an earlier row has the same"):
            await import_parquet(new, tmp_path / "out")
        assert not (await new.query_resources())


async def test_a_cell_that_many_rows_share_is_not_unpacked_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "_MAX_BYTES", 50 * 2**20)
    async with InMemoryLightningStore() as store, InMemoryLightningStore() as new:
        await fill(store)
        await export_parquet(store, tmp_path / "out")
        path = tmp_path / "out" / "resources.parquet"
        rows = pyarrow.parquet.read_table(path).slice(0, 1)
        place = rows.column_names.index("resources")
        large = pyarrow.array([json.dumps({"p": {"resource_type": "prompt_template", "template": "x" * 2**20}})])
        rows = rows.set_column(place, "resources", large).take(pyarrow.array([0] * 100))
        rows = rows.set_column(
            rows.column_names.index("version"), "version", pyarrow.array(range(1, 101), pyarrow.int64())
        )
        pyarrow.parquet.write_table(rows, path, compression="zstd", write_statistics=False)
        with pytest.raises(ConfigError, match=r"resources\.parquet unpacks to more than 52,428,800 bytes by row"):
            await import_parquet(new, tmp_path / "out")


@pytest.fixture
def command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`leyden store` with these arguments."""
    program = "import sys; from leyden.cli import main; main()"
    environment = {name: value for name, value in os.environ.items() if name != "LEYDEN_STORE_TOKEN"}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", program, "store", *map(str, arguments)]
        return subprocess.run(words, capture_output=True, text=True, env=environment, check=False)

    return run


async def test_the_command_exports_a_file_that_is_in_use_and_a_served_store(
    tmp_path: Path, command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    async with SqliteLightningStore(tmp_path / "x.db") as store:
        await fill(store)
        done = await asyncio.to_thread(command, "export", "--url", store.path, tmp_path / "one")
        assert (done.stderr, done.returncode) == ("", 0)
        assert done.stdout.startswith(
            f"{tmp_path / 'one'}: 5 rollouts, 5 attempts, 4 spans, 3 resources, 2 runs, 6 metrics, 3 feedback, 1 labels, "
        )
        async with LightningStoreServer(store, token="secret") as server:
            words = ("export", "--url", server.endpoint, "--token", "secret", "--status", "succeeded", tmp_path / "two")
            assert "two: 3 rollouts, 4 attempts, 4 spans" in (await asyncio.to_thread(command, *words)).stdout
    assert read(tmp_path / "one", "spans") == read(tmp_path / "two", "spans")
    done = await asyncio.to_thread(command, "import", "--url", tmp_path / "new.db", tmp_path / "one")
    assert done.stdout == f"{tmp_path / 'new.db'}: 3 resources, 1 labels, 2 releases, 7 audit, 3 feedback\n"
    async with SqliteLightningStore(tmp_path / "new.db") as new:
        assert [label.label for label in await new.get_labels()] == ["production"]


def test_the_command_says_what_is_wrong(
    tmp_path: Path, command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    for words, message in (
        (["--url", tmp_path / "x.db"], "does not exist"),
        (["--url", "memory://"], "read_only"),
        (["--url", tmp_path / "x.db", "--status", "done"], "possible: queuing"),
    ):
        failed = command("export", *words, tmp_path / "out")
        assert message in failed.stderr
        assert "Traceback" not in failed.stderr
        assert failed.returncode == 1
    assert names(tmp_path) == set()


EARLIER = {
    "rollouts": "rollout_id status mode priority:int32 resources_id run_id group_id arm resources_version:int64 "
    "reward:double start_time:double end_time:double input config metadata",
    "attempts": "rollout_id attempt_id sequence_id:int64 status worker_id start_time:double end_time:double "
    "last_heartbeat_time:double reward:double rewards prompt_tokens:int64 response_tokens:int64 cost:double failure "
    "metadata",
    "spans": "rollout_id attempt_id sequence_id:int64 trace_id span_id parent_id name kind status_code "
    "status_description start_time:double end_time:double attributes events resource prompt_ids:list<int32> "
    "response_ids:list<int32> logprobs:list<float> policy_versions:list<int32> loss_mask:list<int8>",
    "resources": "resources_id version:int64 create_time:double update_time:double parent author frozen:bool resources",
    "runs": "run_id name kind status start_time:double end_time:double last_heartbeat_time:double cause config",
    "metrics": "run_id stage iteration:int64 name value:double time:double",
    "feedback": "sequence_id:int64 feedback_id rollout_id source kind value given_time:double received_time:double "
    "resources_id version:int64 arm",
    "labels": "label resources_id version:int64",
    "releases": "release_id state from_version canary_version details deadline:double create_time:double "
    "update_time:double",
    "audit": "sequence_id:int64 action time:double label before after release_id state who why",
}
"""The columns that exports have had from the first, in the order of the first. A type that is left out is string."""
LATER = {"attempts": {"unpriced_calls": "int64"}}
"""The columns and types that were added since, by table."""


async def test_the_columns_and_types_are_those_of_earlier_exports_which_are_imported_too(tmp_path: Path) -> None:
    async with InMemoryLightningStore() as store, InMemoryLightningStore() as new:
        await fill(store)
        await export_parquet(store, tmp_path / "out")
        for name, words in EARLIER.items():
            path = tmp_path / "out" / f"{name}.parquet"
            table = pyarrow.parquet.read_table(path)
            earlier = {word.partition(":")[0]: word.partition(":")[2] or "string" for word in words.split()}
            types = {field.name: str(field.type).replace("element: ", "") for field in table.schema}
            assert types == {**earlier, **LATER.get(name, {})}
            pyarrow.parquet.write_table(table.select(list(earlier)), path)
        imported = await import_parquet(new, tmp_path / "out")
        before, after = await expected(store), await expected(new)
    for name in imported.rows:
        assert after[name] == before[name]


def test_the_fields_of_a_span_and_of_its_tokens_have_columns() -> None:
    fields = {*Span.model_fields, *TokenRecord.model_fields} - {"tokens", "status"}
    assert fields | {"status_code", "status_description"} == set(export._COLUMNS["spans"])
