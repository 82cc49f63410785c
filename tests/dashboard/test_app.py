"""The dashboard's server: what it serves, to whom, and what it refuses."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.dashboard import Source
from leyden.errors import ConfigError
from leyden.training.runs import open_run
from tests.dashboard.conftest import HOSTILE, Dashboard, Served, make_run

STATIC = Path(ly.__file__).parent / "dashboard/static"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'"


def run_id(runs: Path, name: str = "first") -> str:
    return open_run(runs / name).record.run_id


def test_the_pages_weigh_little_and_hold_no_inline_code_and_no_other_address() -> None:
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) < 150_000
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:", page)
    for path in files:
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        assert set(re.findall(r"https?://[^\s\"'`)]+", text)) <= {"http://www.w3.org/2000/svg"}, path


def test_every_reply_has_the_policy_and_says_its_type(dashboard: Dashboard) -> None:
    for path, kind in (
        ("/", "text/html"),
        ("/main.js", "text/javascript"),
        ("/views/run.js", "text/javascript"),
        ("/app.css", "text/css"),
        ("/api/runs", "application/json"),
        ("/api/nothing", "application/json"),
        ("/nothing", "application/json"),
    ):
        _, headers, _ = dashboard.get(path)
        assert headers["content-type"].startswith(kind), path
        assert headers["content-security-policy"].startswith(POLICY), path
        assert headers["x-content-type-options"] == "nosniff"


def test_a_run_that_cannot_be_read_is_named_beside_the_others(dashboard: Dashboard, runs: Path) -> None:
    data = dashboard.view("runs")
    assert [each["name"] for each in data["runs"]] == ["second", "first"]
    assert {re.search(r"/(\w+)/run.json", each)[1] for each in data["damaged"]} == {"damaged", "newer"}  # pyright: ignore[reportOptionalSubscript]


def test_the_rollouts_are_those_of_the_store_with_every_filter(dashboard: Dashboard, runs: Path) -> None:
    run = open_run(runs / "first")

    async def stored(store: ly.LightningStore) -> list[Any]:
        return list(await store.query_rollouts())

    found = run.read_store(stored)
    whole = dashboard.view("rollouts", run=run.record.run_id)
    assert whole["total"] == len(found) == 40
    assert whole["by_status"] == {"succeeded": 39, "failed": 1}
    rewards = {each.rollout_id: each.attempt.reward for each in found}
    assert {each["rollout_id"]: each["reward"] for each in whole["rollouts"]} == rewards
    part = dashboard.view(
        "rollouts", run=run.record.run_id, min_reward=0.5, max_reward=0.75, sort="reward", order="asc"
    )
    assert part["total"] == sum(reward == 0.5 for reward in rewards.values()) > 0
    assert sum(part["reward"]["histogram"]["counts"]) == part["total"]
    (failed,) = dashboard.view("rollouts", run=run.record.run_id, status="failed")["rollouts"]
    assert HOSTILE in failed["reason"]
    one = dashboard.view("rollouts", run=run.record.run_id, id=failed["rollout_id"])
    assert (one["total"], one["by_status"], one["reward"]) == (1, {}, None), "the store does not count by ids"
    second = dashboard.view("rollouts", run=run.record.run_id, limit=15, offset=30)
    assert [len(second["rollouts"]), second["total"]] == [10, 40]


def test_a_rollout_has_its_task_conversation_and_spans_as_they_were_recorded(dashboard: Dashboard, runs: Path) -> None:
    id_ = run_id(runs)
    row = next(each for each in dashboard.view("rollouts", run=id_)["rollouts"] if each["reward"] == 0.75)
    data = dashboard.view("rollout", run=id_, id=row["rollout_id"])
    n = data["input"]["n"]
    assert data["input"] == {"n": n, "text": HOSTILE} and n % 4 == 3
    said = [(each["role"], each["text"]) for each in data["rollout"]["messages"]]
    assert ("note", f"the answer to {n} is {n * 2}") in said and ("reward", "0.75") in said
    assert all(each["start"] <= each["end"] for each in data["spans"] if each["end"] is not None)


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("rollouts", "run is missing"),
        ("rollouts?run=nothing", "there is no run 'nothing'"),
        ("rollouts?run={}&sort=password", "sort is 'password'; possible: "),
        ("rollouts?run={}&limit=1e9", "limit is 1e"),
        ("rollouts?run={}&min_reward=high", "min_reward is 'high'; give a number"),
        ("rollouts?run={}&minreward=1", "'minreward' is no parameter"),
        ("rollout?run={}&id=ro-nothing", "ro-nothing"),
        ("group?run={}&group=gr-nothing", "gr-nothing"),
        ("rollout?run={}&id=ro-", "has no rollout 'ro-'"),
        ("compare?run={}", "a comparison needs 2 to 4 runs, and 1 are given"),
        ("nothing", "there is no view 'nothing'"),
    ],
)
def test_a_bad_request_is_refused_with_its_reason(dashboard: Dashboard, runs: Path, query: str, reason: str) -> None:
    status, _, body = dashboard.get(f"api/{query.format(run_id(runs))}")
    assert status in (400, 404) and reason in json.loads(body)["error"]


@pytest.mark.parametrize("path", ["/../app.py", "/%2e%2e/app.py", "/static/../../views.py", "//etc/passwd", "/views/"])
def test_nothing_but_the_pages_is_served(dashboard: Dashboard, path: str) -> None:
    assert dashboard.get(path)[0] == 404


def test_pages_of_other_sites_and_other_names_of_the_host_are_refused(dashboard: Dashboard) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert dashboard.get("api/runs", **headers)[0] == 403, headers
    assert dashboard.get("api/runs", Origin=dashboard.url.rstrip("/"))[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(dashboard: Dashboard, method: str) -> None:
    request = urllib.request.Request(f"{dashboard.url}api/runs", method=method, data=b"{}")
    assert dashboard.ask(request)[0] == 405


def test_a_token_is_needed_for_every_view_and_stands_in_no_address(runs: Path) -> None:
    started = Dashboard(runs, "--token", "open-sesame-12345")
    try:
        for path in ("api/runs", "api/events", "api/nothing", "api/runs?token=open-sesame-12345"):
            assert started.get(path)[0] == 401, path
        assert started.get("api/runs", Authorization="Bearer open-sesame-12345")[0] == 200
        assert started.get("/")[0] == started.get("health")[0] == 200
        for path in STATIC.rglob("*.js"):
            assert "token=$" not in path.read_text()
    finally:
        started.stop()


def test_changes_arrive_as_events_and_the_view_is_read_again(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "one", 4)
    started = Dashboard(tmp_path / "runs")
    try:
        with urllib.request.urlopen(f"{started.url}api/events", timeout=30) as stream:
            assert b"event: hello" in stream.read1(1000)
            assert [each["name"] for each in started.view("runs")["runs"]] == ["one"]
            make_run(tmp_path / "runs" / "two", 4)
            new = open_run(tmp_path / "runs" / "two").record.run_id
            told = b""
            while new.encode() not in told:
                told += stream.read1(10_000)
            assert b"event: changed" in told
        assert {each["name"] for each in started.view("runs")["runs"]} == {"one", "two"}
        shutil.rmtree(tmp_path / "runs" / "one")
        assert [each["name"] for each in started.view("runs")["runs"]] == ["two"]
    finally:
        started.stop()


WAITING = """
import sys, time
import leyden as ly

@ly.rollout
def agent(task):
    print("begun", flush=True)
    time.sleep(600)

ly.Trainer(algorithm="baseline", run_dir=sys.argv[1], concurrency=1).fit(agent, [1])
"""


def test_a_view_of_a_killed_run_says_that_it_has_crashed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, str(tmp_path / "one")], stdout=subprocess.PIPE, text=True
    ) as working:
        try:
            assert working.stdout is not None
            assert any("begun" in line for line in working.stdout)
            run = open_run(tmp_path / "one").record.run_id
            with Dashboard(tmp_path / "one") as started:
                assert started.view("run", run=run)["head"]["state"] == "running"
                working.kill()
                working.wait()
                assert started.view("run", run=run)["head"]["state"] == "crashed"
        finally:
            working.kill()


def test_views_of_a_store_have_the_feedback_of_just_now(tmp_path: Path) -> None:
    make_run(tmp_path / "one", 4)
    run = open_run(tmp_path / "one").record.run_id
    with Dashboard(tmp_path / "one" / "store.sqlite") as started:
        first = started.view("review", run=run, who="ada")
        rollout = first["rollouts"][0]
        assert first["left"] == 4 and started.view("feedback", run=run, id=rollout) == []
        answer = {"rollout_id": rollout, "kind": "reward", "value": 1, "feedback_id": "fb-0123456789abcdef"}
        body = {"run": run, "who": "ada", "answers": [answer]}
        assert post(started, body, Origin=started.url.rstrip("/")) == (200, {"stored": 1})
        assert [each["source"] for each in started.view("feedback", run=run, id=rollout)] == ["ada"]
        after = started.view("review", run=run, who="ada")
        assert (after["left"], after["judged"]) == (3, 1)


def test_a_place_that_is_none_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        Source(tmp_path / "nothing")


def test_the_runs_of_a_store_are_shown_as_those_of_its_folder(runs: Path) -> None:
    by_store, by_folder = Source(runs / "first" / "store.sqlite"), Source(runs / "first")
    (one,), (other,) = by_store.runs()[0], by_folder.runs()[0]
    assert one.record.run_id == other.record.run_id
    assert one.summary_metrics().reward == other.summary_metrics().reward
    assert asyncio.run(asyncio.to_thread(by_store.state)).keys() == by_folder.state().keys()


def post(dashboard: Served, body: Any, **headers: str) -> tuple[int, Any]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{dashboard.url}api/review", data, headers, method="POST")
    status, _, answer = dashboard.ask(request)
    return status, json.loads(answer)


def test_an_answer_becomes_feedback_with_who_and_when_and_a_repeated_one_counts_once(tmp_path: Path) -> None:
    make_run(tmp_path / "one", 8)
    run = open_run(tmp_path / "one")
    with Dashboard(tmp_path / "one") as started:
        own = {"Origin": started.url.rstrip("/")}
        queue = started.view("review", run=run.record.run_id, who="ada", order="worst")
        rewards = {
            each["rollout_id"]: each["reward"] for each in started.view("rollouts", run=run.record.run_id)["rollouts"]
        }
        assert queue["left"] == 8 and rewards[queue["rollouts"][0]] == min(rewards.values())
        first, second = queue["rollouts"][:2]
        answer = {"rollout_id": first, "kind": "reward", "value": 1, "feedback_id": "fb-0123456789abcdef"}
        for _ in range(2):
            body = {"run": run.record.run_id, "who": "ada", "answers": [answer]}
            assert post(started, body, **own) == (200, {"stored": 1})
        other = {**answer, "value": 0, "feedback_id": "fb-0123456789abcde0"}
        assert post(started, {"run": run.record.run_id, "who": "bo", "answers": [other]}, **own)[0] == 200
        said = started.view("feedback", run=run.record.run_id, id=first)
        assert [(each["source"], each["value"]) for each in said] == [("ada", 1.0), ("bo", 0.0)]
        assert all(each["given_time"] and each["received_time"] for each in said)
        after = started.view("review", run=run.record.run_id, who="ada", order="worst")
        assert (after["left"], after["judged"], first in after["rollouts"]) == (7, 1, False)
        disagree = started.view("review", run=run.record.run_id, who="cy", order="disagree")["rollouts"]
        assert disagree == [first]
        by_source = {each["source"]: each["share"] for each in after["agreement"]}
        assert by_source == {"ada": 0.0, "bo": 1.0}
        assert second not in disagree


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({"who": ""}, 400, "who"),
        ({"who": "a\x1b[2J"}, 400, "who"),
        ({"answers": []}, 400, "answers"),
        (
            {
                "answers": [
                    {"rollout_id": "ro-nothing", "kind": "reward", "value": 1, "feedback_id": "fb-0123456789abcdef"}
                ]
            },
            400,
            "ro-nothing",
        ),
        (
            {"answers": [{"rollout_id": "X", "kind": "reward", "value": "high", "feedback_id": "fb-0123456789abcdef"}]},
            400,
            "reward",
        ),
        ({"answers": [{"rollout_id": "X", "kind": "reward", "value": 1, "feedback_id": "mine"}]}, 400, "feedback_id"),
        ({"run": "nothing"}, 400, "there is no run"),
        ({"more": 1}, 400, "more"),
    ],
)
def test_a_bad_answer_is_refused_with_its_reason(
    dashboard: Dashboard, runs: Path, changes: dict[str, Any], status: int, reason: str
) -> None:
    id_ = run_id(runs)
    known = dashboard.view("rollouts", run=id_)["rollouts"][0]["rollout_id"]
    answer = {"rollout_id": known, "kind": "reward", "value": 1, "feedback_id": "fb-00000000000000aa"}
    body: dict[str, Any] = {"run": id_, "who": "ada", "answers": [answer], **changes}
    for each in body["answers"]:
        each["rollout_id"] = known if each["rollout_id"] == "X" else each["rollout_id"]
    got, found = post(dashboard, body, Origin=dashboard.url.rstrip("/"))
    assert got == status and reason in found["error"], found


def test_answers_of_other_pages_and_of_programs_without_a_token_are_refused(dashboard: Dashboard, runs: Path) -> None:
    body = {"run": run_id(runs), "who": "ada", "answers": []}
    assert post(dashboard, body)[0] == 403
    assert post(dashboard, body, Origin="http://evil.example")[0] == 403


def test_a_store_server_serves_the_pages_behind_its_token(tmp_path: Path) -> None:
    make_run(tmp_path / "one", 4)
    store = tmp_path / "one" / "store.sqlite"
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "leyden",
            "store",
            "--url",
            str(store),
            "--port",
            "0",
            "--token",
            "open-sesame-12345",
            "--dashboard",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        found = re.search(r"at (http://\S+?),", server.stdout.readline())
        assert found is not None
        dashboard = Served(f"{found[1]}/dashboard/")
        own = {"Authorization": "Bearer open-sesame-12345"}
        assert dashboard.get("")[2].startswith(b"<!doctype html>") and dashboard.get("main.js")[0] == 200
        assert dashboard.get("api/runs")[0] == 401
        (run,) = json.loads(dashboard.get("api/runs", **own)[2])["runs"]
        row = json.loads(dashboard.get(f"api/rollouts?run={run['run_id']}", **own)[2])["rollouts"][0]
        answer = {"rollout_id": row["rollout_id"], "kind": "reward", "value": 1, "feedback_id": "fb-00000000000000ab"}
        assert post(dashboard, {"run": run["run_id"], "who": "ada", "answers": [answer]}, **own) == (200, {"stored": 1})
        assert Served(f"{found[1]}/").get("dashboard")[0] in (200, 308)
        assert Served(f"{found[1]}/").get("v1/agl/rollouts")[0] in (401, 404)
    finally:
        server.terminate()
        server.wait(30)
        server.stdout.close()
