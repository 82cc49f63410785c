"""`control.jsonl`: requests to a run and their answers, with damage, full disks and several writers."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leyden.errors import ConfigError
from leyden.training.runs.control import (
    CONTROL,
    ControlFile,
    ControlLine,
    answer_to,
    ask,
    in_words,
    pause_in_force,
    paused_seconds,
    read_control,
)
from leyden.training.runs.folder import Manifest, read_manifest
from leyden.training.runs.opening import new_manifest
from leyden.training.runs.steering import Steering


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The folder of a run that this process works on."""
    begin(tmp_path)
    return tmp_path


def begin(directory: Path, **changes: Any) -> Manifest:
    manifest = new_manifest(kind="fit", name="first", config={}).of_this_process()
    manifest = replace(manifest, **changes)
    manifest.write(directory)
    return manifest


def line(command: str, time: float = 0.0, state: Any = "done", **others: Any) -> ControlLine:
    return ControlLine(f"{command}{time}", time, "ann@host", command, state=state, **others)


def test_a_request_is_read_back_and_finds_its_answer(directory: Path) -> None:
    asked = ask(directory, "set", by="ann", path="gain", value={"a": [1, None, "ü\n"]})
    file = ControlFile(directory)
    assert file.read_new() == [asked]
    assert not file.has_grown()
    assert file.read_new() == []
    answer = asked.answer("done", before=1, iteration=3)
    ControlFile(directory).append([answer])
    assert file.has_grown()
    assert answer_to(asked, [asked, *file.read_new()]) == answer
    assert oct((directory / CONTROL).stat().st_mode & 0o777) == "0o600"


def test_damaged_lines_are_skipped_and_named_and_a_half_one_is_cut(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = ask(directory, "pause", by="ann")
    path = directory / CONTROL
    bad = [
        b"",
        b"[]",
        b"{",
        b'{"id": 1}',
        b'{"id": "a", "time": "x", "by": "b", "command": "stop"}',
        b"\xff\xfe",
        b"null",
    ]
    with path.open("ab") as file:
        file.write(b"\n".join(bad) + b'\n{"id": "half')
    with caplog.at_level(logging.WARNING):
        assert read_control(directory) == [first]
    assert f"line 3 of {path} is damaged and skipped" in caplog.text
    second = ask(directory, "resume", by="ann")
    assert read_control(directory) == [first, second]
    assert b"half" not in path.read_bytes()


def test_requests_of_many_writers_are_whole_and_in_an_order(directory: Path) -> None:
    def write(person: int) -> None:
        for number in range(20):
            ask(directory, "set", by="ann", path=f"p{person}", value=number)

    writers = [threading.Thread(target=write, args=(person,)) for person in range(4)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    found = read_control(directory)
    assert len(found) == len({each.id for each in found}) == 80
    for person in range(4):
        assert [each.value for each in found if each.path == f"p{person}"] == list(range(20))


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({"host": "elsewhere"}, "running", "works on elsewhere"),
        ({"pid": 2**22 + 1}, "running", "is gone"),
        ({}, "succeeded", "has ended (succeeded)"),
        ({}, "stopped", "has ended (stopped); set is for a run that works"),
    ],
)
def test_a_run_that_does_not_work_here_is_not_asked(tmp_path: Path, changes: Any, status: Any, reason: str) -> None:
    manifest = begin(tmp_path, **changes)
    manifest.record.status = status
    manifest.write(tmp_path)
    with pytest.raises(ConfigError, match=r".*") as refused:
        ask(tmp_path, "set", by="ann", path="gain", value=1)
    assert reason in str(refused.value)
    assert read_control(tmp_path) == []
    with pytest.raises(ConfigError, match="holds no run"):
        ask(tmp_path / "nowhere" if (tmp_path / "nowhere").mkdir() is None else tmp_path, "stop", by="ann")


def test_a_file_that_cannot_be_written_or_read_is_an_error_with_a_remedy(directory: Path) -> None:
    (directory / CONTROL).mkdir()
    with pytest.raises(ConfigError, match="Is a directory; nothing was asked of the run"):
        ask(directory, "stop", by="ann")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_control(directory)


def test_a_full_disk_leaves_the_file_as_it_was(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ask(directory, "pause", by="ann")
    before = (directory / CONTROL).read_bytes()
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, text: write(descriptor, text[:10]))
    with pytest.raises(ConfigError, match="No space left on device; nothing was asked"):
        ask(directory, "resume", by="ann")
    assert (directory / CONTROL).read_bytes() == before
    monkeypatch.undo()
    assert read_control(directory) == [first]


class Options:
    """A `Steerable` of two options."""

    steps_path = "algorithm.n"

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"algorithm.n": 4, "algorithm.gain": 1}

    def settings(self) -> dict[str, Any]:
        return dict(self.values)

    def full_path(self, path: str) -> str:
        return path if path.startswith("algorithm.") else f"algorithm.{path}"

    def why_fixed(self, path: str) -> str | None:
        return None

    def checked(self, path: str, value: Any) -> Any:
        if value == 13:
            raise ConfigError("gain is 13, an unlucky number")
        return value

    def change(self, path: str, value: Any, n_finished: int) -> None:
        self.values[path] = value

    def reset(self) -> None:
        self.values = {"algorithm.n": 4, "algorithm.gain": 1}


def steering_of(directory: Path, stops: Callable[[], None] = lambda: None) -> tuple[Steering, Options]:
    options = Options()
    steering = Steering(directory, options, stop=stops, is_async=False)
    steering.begin()
    steering.restart()
    return steering, options


def test_of_two_people_the_later_value_wins_and_both_stand_in_the_history(directory: Path) -> None:
    ask(directory, "set", by="ann", path="gain", value=2)
    ask(directory, "set", by="ann", path="gain", value=3)
    steering, options = steering_of(directory)
    steering.boundary(1, lambda: True)
    assert options.values["algorithm.gain"] == 3
    done = [each for each in read_control(directory) if each.state == "done"]
    assert [in_words(each) for each in done] == ["gain 1 -> 2 from step 2", "gain 2 -> 3 from step 2"]


def test_a_later_request_at_an_earlier_step_replaces_what_was_to_be_repeated(directory: Path) -> None:
    history = [line("set", 1.0, path="algorithm.gain", value=5, before=1, iteration=3)]
    ControlFile(directory).append(history)
    steering, options = steering_of(directory)
    steering.boundary(1, lambda: True)
    assert options.values["algorithm.gain"] == 1
    ask(directory, "set", by="ann", path="gain", value=7)
    for finished in (2, 3, 4):
        steering.boundary(finished, lambda: True)
    assert options.values["algorithm.gain"] == 7
    again, options = steering_of(directory)
    seen = list[int]()
    for finished in range(5):
        again.boundary(finished, lambda: True)
        seen.append(options.values["algorithm.gain"])
    assert seen == [1, 1, 7, 7, 7]


def test_nothing_changes_on_a_full_disk_until_there_is_room_and_a_stop_works(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stops = list[int]()
    steering, options = steering_of(directory, lambda: stops.append(1))
    ask(directory, "set", by="ann", path="gain", value=2)
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, text: write(descriptor, text[:1]))
    steering.boundary(1, lambda: True)
    steering.boundary(2, lambda: True)
    assert options.values["algorithm.gain"] == 1
    assert caplog.text.count("cannot be written (No space left on device)") == 1
    monkeypatch.undo()
    steering.boundary(3, lambda: True)
    assert options.values["algorithm.gain"] == 2
    ask(directory, "stop", by="ann")
    ask(directory, "stop", by="ann")
    monkeypatch.setattr(os, "write", lambda descriptor, text: write(descriptor, text[:1]))
    steering.look()
    assert stops == [1]
    assert steering.stopped is not None


def test_what_is_left_when_a_run_ends_is_refused_and_options_are_set_back(directory: Path) -> None:
    steering, options = steering_of(directory)
    ask(directory, "set", by="ann", path="gain", value=13)
    ask(directory, "set", by="ann", path="gain", value=2)
    steering.look()
    assert [each.reason for each in read_control(directory) if each.state == "refused"] == [
        "gain is 13, an unlucky number"
    ]
    steering.boundary(1, lambda: True)
    ask(directory, "extend", by="ann", value={"steps": 1})
    manifest = read_manifest(directory)
    manifest.record.status = "succeeded"
    manifest.write(directory)
    steering.end("succeeded")
    assert options.values["algorithm.gain"] == 1
    assert read_control(directory)[-1].reason == "the run has ended (succeeded)"


def test_a_program_that_gives_another_value_than_the_history_is_told_which_one_holds(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ControlFile(directory).append([line("set", path="algorithm.gain", value=5, before=0.5, iteration=3)])
    steering_of(directory)
    assert "the program gives algorithm.gain=1, and the run's history has other values, which hold" in caplog.text


def test_times_of_pauses_are_added_also_over_a_kill() -> None:
    lines = [line("pause", 10), line("resume", 15), line("pause", 20), line("pause", 100, value=7), line("resume", 103)]
    assert paused_seconds(lines, 200) == 5 + 7 + 3
    assert pause_in_force(lines) is None
    assert paused_seconds(lines[:3], 24) == 5 + 4
    assert pause_in_force(lines[:4]) == lines[3]
    assert pause_in_force([*lines[:4], line("stop", 104)]) is None


def test_a_history_of_another_run_in_the_folder_is_not_taken_over(directory: Path) -> None:
    from leyden.training.runs.opening import begin_run

    ask(directory, "pause", by="ann")
    (directory / "run.json").unlink()
    begin_run(directory, config={})
    assert json.dumps([str(each) for each in read_control(directory)]) == "[]"
