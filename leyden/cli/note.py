"""`leyden note`: names, tags and notes of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from leyden.cli.output import AsJson, echo_data
from leyden.cli.store_options import login

if TYPE_CHECKING:
    from leyden.training.runs.notes import NoteKind


def note(
    run: Annotated[str, typer.Argument(help="Folder, name or id of a run, its beginning, or latest.")],
    text: Annotated[str | None, typer.Argument(help="A note to add.", show_default=False)] = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", metavar="TAG", help="Put a tag on the run.")] = None,
    untag: Annotated[list[str] | None, typer.Option("--untag", metavar="TAG", help="Take a tag off the run.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Give the run another name.")] = None,
    as_json: AsJson = False,
) -> None:
    """Give a run a note, tags or another name, also while it is running, and show all of them.

    They are kept in `notes.jsonl` of the run's folder, each with who wrote it and when.

    \b
    Examples:
      leyden note latest "the learning rate was too high"
      leyden note 20260102-101500-ab12 --name baseline --tag good --untag doubtful
      leyden note baseline
    """
    import dataclasses

    from leyden.cli.run_views import age
    from leyden.errors import ConfigError
    from leyden.training.runs import open_run
    from leyden.training.runs.notes import add_notes
    from leyden.training.runs.recorded_runs import require_free_name

    opened = open_run(run)
    if opened.directory is None:
        raise ConfigError(f"{run} is a store, and notes are kept in the run's folder; give the folder")
    given: dict[NoteKind, list[str]] = {
        "note": [] if text is None else [text],
        "tag": tag or [],
        "untag": untag or [],
        "name": [] if name is None else [name],
    }
    for each in given["name"]:
        require_free_name(opened, each)
    changes: list[tuple[NoteKind, str]] = [(kind, each) for kind, texts in given.items() for each in texts]
    if changes:
        add_notes(opened.directory, lambda: opened.notes, login(), changes)
    record, notes = opened.record, opened.notes
    data = {"run_id": record.run_id, "name": record.name, "directory": str(opened.directory)}
    lines = [f"run         {record.name}  ({opened.directory})", f"tags        {', '.join(notes.tags) or 'none'}"]
    lines += [f"note        {each.text}  ({each.by}, {age(each.time)})" for each in notes.notes]
    echo_data(as_json, {**dataclasses.asdict(notes), **data}, *lines)
