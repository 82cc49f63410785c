"""`leyden runs`: the runs in a folder or a store, one line each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from leyden.cli.output import AsJson, Coloured, Column, echo, echo_json, echo_table

if TYPE_CHECKING:
    from leyden.training.runs import RecordedRun
    from leyden.types.run_record import RunRecord


def runs(
    source: Annotated[
        str | None, typer.Argument(help="The store whose runs to list: http://host:port, postgresql://..., or a file.")
    ] = None,
    directory: Annotated[Path, typer.Option("--dir", metavar="FOLDER", help="The folder that the runs are in.")] = Path(
        ".leyden"
    ),
    limit: Annotated[
        int, typer.Option("-n", "--limit", min=1, help="The most runs to show; the newest come first.")
    ] = 20,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Options and metrics to show, by the ends of their names: learning_rate,val/reward.",
        ),
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option("--tag", metavar="TAG", help="Only runs with this tag; may be repeated.")
    ] = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", metavar="STATE", help="Only runs in this state; may be repeated.")
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove runs, after saying what that frees; never a tagged or needed one.")
    ] = False,
    older_than: Annotated[
        float | None, typer.Option(min=0, metavar="DAYS", help="With --prune: only runs that ended so long ago.")
    ] = None,
    keep: Annotated[int | None, typer.Option(min=0, help="With --prune: not the newest so many runs.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="With --prune: do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """List runs with their algorithm, state and reward.

    A run is `running`, `succeeded`, `failed`, `stopped` (Ctrl-C, `leyden stop`, a limit) or `crashed` (its process
    is gone). The time that it took does not include pauses before a resume. The size is that of its folder. As far
    as there is room, columns show the options that differ between the runs; `(default)` is an option that a run
    left alone, and `-` one that it does not have or did not record.

    --prune removes runs that fit all of --older-than, --state and --keep, of which at least one is needed. A run stays
    if it is running, tagged or open, if a label is on its resources, or if a run that stays began from its model or
    uses its store. Other files in a folder that you have named yourself stay too.

    \b
    Examples:
      leyden runs
      leyden runs --dir experiments/.leyden -n 5
      leyden runs --columns learning_rate,val/reward
      leyden runs --tag good
      leyden runs --prune --older-than 30 --state failed --state crashed
      leyden runs --prune --keep 10 --yes
      leyden runs http://127.0.0.1:4747
      leyden runs --json | jq -r '.[] | select(.state == "failed") | .name'
    """

    from leyden._lib.options import nearest
    from leyden.cli.prune import prune as prune_runs
    from leyden.cli.run_views import open_runs
    from leyden.errors import ConfigError, LeydenError
    from leyden.training.runs.folder import RunState
    from leyden.training.runs.overview import as_data
    from leyden.training.runs.pruning import choose_runs
    from leyden.training.runs.recorded_runs import find_runs
    from leyden.training.runs.run_options import column_of

    if unknown := set(state or ()) - set(get_args(RunState)):
        raise ConfigError(f"--state {min(unknown)}: {nearest(min(unknown), get_args(RunState))}")
    if not prune and (older_than is not None or keep is not None or yes):
        raise ConfigError("--older-than, --keep and --yes are for --prune; add it, or leave them out")
    if prune:
        if source is not None or tag or (older_than is None and keep is None and not state):
            raise ConfigError(
                "--prune is for the runs in a folder, never for tagged ones, and needs --older-than, --keep or --state; "
                "leave SOURCE and --tag out, and give one of these"
            )
        chosen_runs, damaged = choose_runs(directory, days=older_than, states=cast(Any, state or ()), keep=keep)
        prune_runs(chosen_runs, damaged, yes=yes, as_json=as_json)
        return
    damaged = []
    if source is None and not directory.exists():
        if directory != Path(".leyden"):
            raise ConfigError(f"--dir {directory}: there is no such folder")
        found, total = [], 0
    elif source is None:
        listed, damaged = find_runs(directory)
        listed = [
            run for run in listed if set(tag or ()) <= set(run.notes.tags) and run.state in (state or [run.state])
        ]
        found, total = listed[:limit], len(listed)
    elif tag or state:
        raise ConfigError("--tag and --state are for the runs in a folder; leave them out")
    else:
        found, total = open_runs(source, limit=limit)
    readable: list[tuple[RecordedRun, dict[str, Any]]] = []
    for run in found:
        try:
            readable.append((run, as_data(run)))
        except LeydenError as error:
            damaged.append(f"{run.directory or run.record.name}: {error}")
    names = [each.strip() for each in (columns or "").split(",") if each.strip()]
    chosen = {name: column_of([run for run, _ in readable], name) for name in names if readable}
    if as_json:
        for number, (_, data) in enumerate(readable):
            data.update({"columns": {name: values[number] for name, values in chosen.items()}} if names else {})
        echo_json([data for _, data in readable])
    elif not found and state:
        echo(
            f"no run in {directory} is {' or '.join(state)}" + (f" and has the tag {' and '.join(tag)}" if tag else "")
        )
    elif not found and tag:
        echo(f"no run in {directory} has the tag {' and '.join(tag)}; leyden note RUN --tag {tag[0]} puts it on one")
    elif not found and not damaged:
        echo(f"no runs in {source or directory}; a trainer's fit() makes one, and so does leyden demo")
    else:
        _show(readable, chosen)
        if total > len(found):
            echo(f"{total - len(found):,} older runs are not shown; use --limit", err=True)
    for trouble in damaged:
        echo(f"a run is left out: {trouble}", err=True)


def _show(found: list[tuple[RecordedRun, dict[str, Any]]], chosen: Mapping[str, list[Any]]) -> None:
    """Print the runs as a table, with the course of the reward as a sparkline.

    chosen: the values of further columns by name.
    """
    from leyden._lib.formatting import duration, size
    from leyden.cli.run_views import COLOURS, age, reward_text
    from leyden.training.runs.chart import sparkline
    from leyden.training.runs.run_options import value_text

    rows, rewards = [data for _, data in found], [run.summary_metrics().reward for run, _ in found]
    names = [
        each["name"]
        + (f" ({folder})" if (folder := Path(each["directory"] or "").name) not in ("", each["name"]) else "")
        for each in rows
    ]
    columns = [
        Column("name", names),
        Column("kind", [each["kind"] for each in rows], 60),
        Column("algorithm", [(each["algorithm"] or "-").rpartition(".")[2] for each in rows], 30),
        Column("model", [Path(each["model"]).name if each["model"] else "-" for each in rows], 40),
        Column("state", [Coloured(each["state"], COLOURS[each["state"]]) for each in rows]),
        Column("steps", [str(each["iterations"] or "-") for each in rows], right=True),
        Column("reward", [reward_text(each) for each in rewards]),
        Column("", ["" if each is None else sparkline(each.values, 12) for each in rewards], 90),
        *(Column(name, list(map(value_text, values))) for name, values in chosen.items()),
        *_options([run.record for run, _ in found], chosen),
        *([Column("tags", [", ".join(each["tags"]) for each in rows])] if any(each["tags"] for each in rows) else []),
        Column("started", [age(each["start_time"]) for each in rows], 10, right=True),
        Column("took", [duration(each["seconds"]) for each in rows], 50, right=True),
        Column("size", [size(sum(each["bytes"].values())) if each["bytes"] else "-" for each in rows], 70, right=True),
    ]
    notes = [each["notes"][-1]["text"] if each["notes"] else "" for each in rows]
    echo_table(columns, tail=Column("note", notes) if any(notes) else None)


def _options(records: list[RunRecord], chosen: Mapping[str, Any]) -> list[Column]:
    """Return columns of the options that differ between runs; none if the user has chosen columns."""
    from leyden.training.runs.run_options import differing, short_names, value_text, without_classes

    options = {path: values for path, values in differing(records).items() if "." in path}
    found = {} if chosen else without_classes(options)
    names = short_names(found)
    return [Column(names[path], list(map(value_text, found[path])), 11 + n) for n, path in enumerate(found)]
