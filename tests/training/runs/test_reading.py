"""A run is read from its folder while it runs, after it has ended, and after its process was killed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from leyden.errors import ConfigError
from leyden.training.runs import FailedRollout, list_runs, open_run
from leyden.training.runs.folder import Manifest, read_manifest
from leyden.training.runs.rollouts import group_failures
from leyden.types.run_record import RunRecord


def manifest(name: str = "a run", *, run_id: str = "abc123", start_time: float = 100.0, **changes: object) -> Manifest:
    record = RunRecord(run_id=run_id, name=name, kind="fit", start_time=start_time, config={"seed": 7})
    return Manifest(record.model_copy(update=changes), options={"mine": 1})


def test_what_run_json_is_given_is_read_back(tmp_path: Path) -> None:
    written = manifest(status="failed", end_time=200.0, cause="StoreError: disk full").of_this_process()
    written.write(tmp_path)
    assert read_manifest(tmp_path) == written


def test_a_run_of_this_process_is_running_and_its_heartbeat_is_the_files_time(tmp_path: Path) -> None:
    manifest().of_this_process().write(tmp_path)
    os.utime(tmp_path / "run.json", (5.0, 5.0))
    run = open_run(tmp_path)
    assert run.state == "running"
    assert run.record.last_heartbeat_time == 5.0


def test_a_run_whose_process_was_killed_has_crashed(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = psutil.Process(child.pid).create_time()
    replace(manifest(), host=socket.gethostname(), pid=child.pid, process_start_time=started).write(tmp_path)
    assert open_run(tmp_path).state == "running"
    child.kill()
    child.wait()
    assert open_run(tmp_path).state == "crashed"
    child.stdin.close()  # type: ignore[union-attr]


def test_a_process_that_was_given_the_number_of_the_runs_process_does_not_keep_it_running(tmp_path: Path) -> None:
    ours = manifest().of_this_process()
    replace(ours, process_start_time=(ours.process_start_time or 0) - 3600).write(tmp_path)
    assert open_run(tmp_path).state == "crashed"


@pytest.mark.parametrize(("seconds", "state"), [(1, "running"), (61, "crashed")])
def test_a_run_on_another_machine_lives_while_its_heartbeat_is_young(tmp_path: Path, seconds: int, state: str) -> None:
    replace(manifest().of_this_process(), host="elsewhere").write(tmp_path)
    then = time.time() - seconds
    os.utime(tmp_path / "run.json", (then, then))
    assert open_run(tmp_path).state == state


def test_a_folder_of_the_previous_format_is_read(tmp_path: Path) -> None:
    content = {"format": 1, "run_id": "old", "started": 12.5, "options": {"mine": 1}}
    (tmp_path / "run.json").write_text(json.dumps(content))
    run = open_run(tmp_path)
    assert (run.record.run_id, run.record.start_time, run.state) == ("old", 12.5, "stopped")
    assert run.metrics() == run.failures() == []
    assert run.summary_metrics().reward is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ("{}", "names no run"),
        ('{"run_id": "x", "format": 99}', "has format 99; this version of Leyden reads 1 and 2"),
        ('{"run_id": "x", "format": 2}', "is damaged"),
    ],
)
def test_a_damaged_manifest_is_refused_by_its_name(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        open_run(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_rows_come_in_the_order_of_the_run_and_a_repeated_row_counts_once(tmp_path: Path) -> None:
    manifest().write(tmp_path)
    rows = [
        {"iteration": 0, "stage": "val", "seconds": 1.0, "reward": 0.1},
        {"iteration": 1, "stage": "train", "seconds": 2.0, "reward": 0.2, "loss": None},
        {"iteration": 2, "stage": "train", "seconds": 3.0, "reward": 0.9},
        {"iteration": 2, "stage": "train", "seconds": 3.5, "reward": 0.6, "rollouts": 8, "failed": 1},
        {"iteration": 2, "stage": "val", "seconds": 4.0, "reward": 0.5, "rollouts": 4},
    ]
    lines = [json.dumps(row) + "\n" for row in rows]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"iteration": 3, "sta')
    run = open_run(tmp_path)
    assert [(row.iteration, row.stage) for row in run.metrics()] == [(0, "val"), (1, "train"), (2, "train"), (2, "val")]
    assert [row.metrics["reward"] for row in run.metrics("train")] == [0.2, 0.6]
    figures = run.summary_metrics()
    assert figures.reward is not None and figures.val_reward is not None
    assert (figures.reward.first, figures.reward.last, figures.reward.best_iteration) == (0.2, 0.6, 2)
    assert (figures.val_reward.values, figures.val_reward.iterations) == ((0.1, 0.5), (0, 2))
    assert (figures.iterations, figures.rollouts, figures.failed, figures.seconds) == (2, 12, 1, 4.0)


def test_failures_are_read(tmp_path: Path) -> None:
    manifest().write(tmp_path)
    failure = {"rollout_id": "ro-1", "attempt_id": None, "reason_kind": "timeout", "reason": "too slow", "time": 3.0}
    (tmp_path / "failures.jsonl").write_text(json.dumps(failure) + "\n")
    assert open_run(tmp_path).failures() == [FailedRollout("ro-1", None, "timeout", "too slow", 3.0)]


def test_failures_are_one_group_whatever_ids_addresses_and_numbers_they_name() -> None:
    reasons = (
        "ValueError: <Agent at 0x7f3a> of user-17 gave up after 0.31 s",
        "ValueError: <Agent at 0x91bc> of user-9 gave up after 12.5 s",
        "APIError: status 429 for 3f0c2a9b-11de-4b7c-9a10-5f1d2c3b4a59",
        "APIError: status 500 for 8d1b6c2e-40aa-4f0e-8a4e-0c9e2b7d1f63",
    )
    groups = group_failures(FailedRollout(f"ro-{n}", None, "exception", each, 3.0) for n, each in enumerate(reasons))
    assert [(group.count, group.example, group.reason) for group in groups] == [
        (2, "ro-1", reasons[1]),
        (1, "ro-2", reasons[2]),
        (1, "ro-3", reasons[3]),
    ]


def test_runs_are_found_by_name_by_id_by_a_unique_beginning_and_as_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(["games-1", "games-2", "other"]):
        manifest(name, run_id=f"{number}{name}", start_time=100.0 - number).write(tmp_path / ".leyden" / name)
    (tmp_path / ".leyden" / "damaged").mkdir()
    (tmp_path / ".leyden" / "damaged" / "run.json").write_text("{")
    assert [run.record.name for run in list_runs()] == ["games-1", "games-2", "other"]
    for source in ("games-2", "1games-2", "1g", ".leyden/games-2", Path(".leyden/games-2")):
        assert open_run(source).record.name == "games-2"
    assert open_run("latest").record.name == "games-1"
    with pytest.raises(ConfigError, match="'games' fits 2 runs; there are: games-1, games-2"):
        open_run("games")
    with pytest.raises(ConfigError, match=r"no run 'nothing' in .*; there are: games-1, games-2, other"):
        open_run("nothing")
    with pytest.raises(ConfigError, match=r"holds no run .*; there are: games-1"):
        open_run(".leyden")
