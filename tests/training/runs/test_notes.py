"""Names, tags and notes of runs: kept beside what the run itself writes, whole, with who wrote them."""

from __future__ import annotations

import multiprocessing
import resource
import signal
from pathlib import Path

import pytest

import leyden as ly
from leyden.errors import ConfigError
from leyden.training.runs import Run, list_runs, open_run
from leyden.training.runs.notes import NOTES, NoteKind, RunNotes, add_notes
from leyden.training.runs.opening import begin_run


def make(folder: Path) -> Path:
    directory, manifest = begin_run(folder, config={})
    manifest.write(directory)
    return directory


def write_many(folder: Path, person: str) -> None:
    run = open_run(folder)
    for number in range(50):
        add_notes(folder, lambda: run.notes, person, [("note", f"{person} {number}"), ("tag", f"{person}{number % 2}")])


def test_what_is_said_about_a_run_is_read_back_with_who_and_when(tmp_path: Path) -> None:
    run = open_run(make(tmp_path / "first"))
    assert run.notes == RunNotes()
    add_notes(
        tmp_path / "first", lambda: run.notes, "ada", [("tag", "good"), ("tag", "old"), ("note", "two\nlines \ud800")]
    )
    add_notes(tmp_path / "first", lambda: run.notes, "bob", [("untag", "old"), ("tag", "good"), ("name", "better 🎉")])
    assert (run.record.name, run.notes.tags) == ("better 🎉", ("good",))
    assert [(note.text, note.by) for note in run.notes.notes] == [("two\nlines \ud800", "ada")]
    assert len((tmp_path / "first" / NOTES).read_text().splitlines()) == 5, "a tag that is there is not written again"


def test_a_run_that_works_keeps_the_name_that_it_was_given_meanwhile(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    @ly.algo
    async def search(*, run: Run) -> None:
        add_notes(folder, lambda: open_run(folder).notes, "ada", [("name", "mine"), ("tag", "good")])
        run.report({"reward": 1.0})

    @ly.rollout
    async def agent(task: int) -> float:
        return 1.0

    ly.Trainer(algorithm=search, run_dir=folder, progress=False).fit(agent)
    run = open_run(folder)
    assert (run.state, run.record.name, run.notes.tags) == ("succeeded", "mine", ("good",))


def test_two_people_who_write_at_once_lose_no_line(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    context = multiprocessing.get_context("spawn")
    people = [context.Process(target=write_many, args=(folder, person)) for person in ("ada", "bob")]
    for each in people:
        each.start()
    for each in people:
        each.join(50)
    notes = open_run(folder).notes
    assert sorted(notes.tags) == ["ada0", "ada1", "bob0", "bob1"]
    for person in ("ada", "bob"):
        assert [each.text for each in notes.notes if each.by == person] == [f"{person} {n}" for n in range(50)]


def test_half_of_a_line_is_removed_and_a_damaged_line_is_named(tmp_path: Path) -> None:
    run = open_run(make(tmp_path / "run"))
    add_notes(tmp_path / "run", lambda: run.notes, "ada", [("tag", "good")])
    path = tmp_path / "run" / NOTES
    path.write_text(path.read_text() + '{"kind": "tag", "te')
    assert run.notes.tags == ("good",)
    add_notes(tmp_path / "run", lambda: run.notes, "ada", [("tag", "new")])
    assert run.notes.tags == ("good", "new")
    make(tmp_path / "other")
    for line in ('{"kind": "tag"}', "[]", '{"kind": "shout", "text": "x", "time": 1, "by": "x"}', "\0"):
        path.write_text(f'{{"kind": "tag", "text": "good", "time": 1, "by": "ada"}}\n{line}\n')
        with pytest.raises(ConfigError, match=rf"line 2 of .*{NOTES} is damaged: .*; remove the line"):
            open_run(tmp_path / "run")
        assert [each.record.name for each in list_runs(tmp_path)] == ["other"], "it hides no other run"


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("note", "  ", "the note is '  '; give 1 to 10,000 characters"),
        ("note", "x" * 10_001, "give 1 to 10,000"),
        ("name", "a\nb", "give 1 to 200 printable"),
        ("name", " a", "give 1 to 200 printable"),
        ("name", "\x1b[31m", "give 1 to 200 printable"),
        ("tag", "a b", "without spaces and commas"),
        ("tag", "a,b", "without spaces and commas"),
        ("tag", "-old", "without spaces and commas"),
        ("tag", "", "give 1 to 50"),
        ("untag", "old", "the run has no tag 'old'; its tags: good"),
    ],
)
def test_what_cannot_be_said_is_refused_and_changes_nothing(
    tmp_path: Path, kind: NoteKind, text: str, reason: str
) -> None:
    run = open_run(make(tmp_path / "run"))
    add_notes(tmp_path / "run", lambda: run.notes, "ada", [("tag", "good")])
    with pytest.raises(ConfigError, match=reason):
        add_notes(tmp_path / "run", lambda: run.notes, "ada", [("note", "fine"), (kind, text)])
    assert run.notes == RunNotes(tags=("good",))


def test_a_folder_that_takes_no_notes_says_so(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    (folder / NOTES).mkdir()
    with pytest.raises(ConfigError, match=r"cannot be written: Is a directory; nothing was changed"):
        add_notes(folder, RunNotes, "ada", [("tag", "good")])


def write_on_a_full_disk(folder: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        add_notes(folder, RunNotes, "ada", [("note", "x" * 50)])


def test_a_note_that_does_not_fit_on_the_disk_leaves_the_others(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    add_notes(folder, RunNotes, "ada", [("tag", "good")])
    before = (folder / NOTES).read_bytes()
    writer = multiprocessing.get_context("spawn").Process(target=write_on_a_full_disk, args=(folder,))
    writer.start()
    writer.join(50)
    assert (writer.exitcode, (folder / NOTES).read_bytes()) == (0, before)
