"""`leyden prompts`: show, compare and export the prompts that a run has tried, or extract an agent's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leyden.cli.output import AsJson, Column, echo, echo_data, echo_json, echo_table, echo_text, write_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from leyden.algorithm.prompts import CandidateRecord
    from leyden.training.runs import RecordedRun
    from leyden.types import PromptTemplate, ResourcesUpdate

prompts_commands = typer.Typer(rich_markup_mode=None, no_args_is_help=True)

_Run = Annotated[
    str, typer.Argument(help="Folder, name or id of a run, its beginning, latest, or the path or URL of a store.")
]
_RunId = Annotated[str | None, typer.Option("--run-id", metavar="ID", help="Which run, of a store that holds several.")]


@prompts_commands.callback()
def prompts() -> None:
    """Show the prompts of a run of APO, GEPA or FewShot, or prompts that an agent has hard-coded.

    \b
    Examples:
      leyden prompts best latest
      leyden prompts history latest --full
      leyden prompts diff latest
      leyden prompts export latest --out prompts
      leyden prompts apply latest agent.py --dry-run
      leyden prompts extract latest
    """


@prompts_commands.command()
def best(run: _Run, run_id: _RunId = None, as_json: AsJson = False) -> None:
    """Print the best prompts of a run. A single prompt is printed without its name.

    \b
    Examples:
      leyden prompts best latest
      leyden prompts best http://127.0.0.1:4747 --run-id 3f0c2a9b11de --json
    """

    found = _prompts(_best(_opened(run, run_id)))
    if as_json:
        echo_json({name: prompt.model_dump(mode="json") for name, prompt in found.items()})
    elif len(found) == 1:
        echo_text(next(iter(found.values())).template)
    else:
        echo_text("\n\n".join(f"--- {name}\n{prompt.template}" for name, prompt in found.items()))


@prompts_commands.command()
def history(
    run: _Run,
    full: Annotated[bool, typer.Option("--full", help="Print whole critiques.")] = False,
    run_id: _RunId = None,
    as_json: AsJson = False,
) -> None:
    """List the prompts that a run has measured: in which round, with which reward, and why they were written.

    `best`: the prompt became the best one. `kept`: it was in the beam after its last measurement. APO's reward is the
    expected one after all its measurements, GEPA's the mean over the validation tasks.

    \b
    Examples:
      leyden prompts history latest --full
      leyden prompts history latest --json | jq -r '.[] | select(.accepted) | .reason'
    """
    found = _history(_opened(run, run_id))
    if as_json:
        echo_json([record.model_dump(mode="json") for record in found])
        return
    from leyden._lib.formatting import figure

    columns = [
        Column("round", [str(each.round) for each in found], right=True),
        Column("reward", [figure(each.reward, 3) for each in found], right=True),
        Column("tasks", [str(each.tasks) for each in found], right=True),
        Column("", ["best" if each.accepted else "kept" if each.kept else "" for each in found]),
        Column("resources", [each.resources_id for each in found], 1),
    ]
    echo_table(columns, tail=Column("reason", [each.reason or "the first prompts" for each in found]), full=full)


@prompts_commands.command()
def diff(
    run: _Run,
    resources_id: Annotated[
        str | None, typer.Argument(help="The resources id of a prompt in the history; by default the best one.")
    ] = None,
    run_id: _RunId = None,
    as_json: AsJson = False,
) -> None:
    """Print what differs between the run's first prompts and the best or given ones, line by line.

    \b
    Examples:
      leyden prompts diff latest
      leyden prompts diff latest rs-0a1b2c3d4e5f6071
    """
    import difflib

    opened = _opened(run, run_id)
    old = _resources(opened, _history(opened)[0].resources_id)
    new = _best(opened) if resources_id is None else _resources(opened, resources_id)
    before, after = _prompts(old), _prompts(new)
    lines = [
        line
        for name in after
        for line in difflib.unified_diff(
            before[name].template.splitlines() if name in before else [],
            after[name].template.splitlines(),
            f"{name} {old.resources_id}",
            f"{name} {new.resources_id}",
            lineterm="",
        )
    ]
    echo_data(as_json, {"before": old.resources_id, "after": new.resources_id, "diff": lines}, *lines)


@prompts_commands.command()
def export(
    run: _Run,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The folder to write to.")] = Path("prompts"),
    run_id: _RunId = None,
    as_json: AsJson = False,
) -> None:
    """Write the best prompts to files, NAME.txt each.

    \b
    Examples:
      leyden prompts export latest --out prompts
    """
    from leyden.errors import ConfigError

    found = _prompts(_best(_opened(run, run_id)))
    if unfit := next((name for name in found if name != Path(name).name or name.startswith(".")), None):
        raise ConfigError(f"the prompt {unfit!r} cannot be the name of a file; use leyden prompts best --json")
    paths = {name: out / f"{name}.txt" for name in found}
    for name, path in paths.items():
        write_output(path, found[name].template)
    echo_data(as_json, paths, *paths.values())


@prompts_commands.command(name="apply")
def apply_(
    run: _Run,
    file: Annotated[Path, typer.Argument(help="The file that has the first prompts: .py, .json, .txt or .md.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would change, and change nothing.")] = False,
    run_id: _RunId = None,
    as_json: AsJson = False,
) -> None:
    """Put the best prompts of a run into a file, in place of the prompts with which the run began.

    The file is Python source or JSON that holds the first text of each changed prompt exactly once, as one string, or a
    text file that is the prompt. Any other file stays as it is, and the string to paste is printed. The changes are
    printed line by line.

    \b
    Examples:
      leyden prompts apply latest agent.py --dry-run
      leyden prompts apply latest prompts.json
    """
    import difflib

    from leyden.cli.prompts_apply import with_prompts, write_whole
    from leyden.errors import ConfigError

    opened = _opened(run, run_id)
    first = _prompts(_resources(opened, _history(opened)[0].resources_id))
    pairs = {name: (first[name].template, each.template) for name, each in _prompts(_best(opened)).items()}
    if file.exists() and not file.is_file():  # a pipe or a device may have no end
        raise ConfigError(f"{file} is no file; give a file that has the prompt")
    try:
        before = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    after = with_prompts(before, file.suffix, pairs, path=str(file))
    old_lines, new_lines = (each.decode("utf-8-sig", "replace").splitlines() for each in (before, after))
    lines = list(difflib.unified_diff(old_lines, new_lines, str(file), str(file), lineterm=""))
    if is_changed := not dry_run and after != before:
        write_whole(file, after)
    data = {"file": file, "changed": is_changed, "diff": lines}
    echo_data(as_json, data, *(lines or [f"{file} stays as it is: the first prompts are the best"]))


@prompts_commands.command()
def extract(
    run: _Run,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FOLDER", help="Write NAME.txt for each prompt, and tasks.jsonl, to this folder."
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=2, help="How many rollouts to compare, the newest first.")] = 200,
    run_id: _RunId = None,
    as_json: AsJson = False,
) -> None:
    """Find the prompts that an agent has hard-coded, in the model calls of its rollouts.

    Text that the calls share becomes a template, text that differs becomes a placeholder, and the inputs of the
    rollouts become tasks. `leyden eval` records an agent as it is. Nothing is
    changed: read the prompts, and write them to files with --out.

    \b
    Examples:
      leyden prompts extract latest
      leyden prompts extract .leyden/support --out prompts
      leyden prompts extract http://127.0.0.1:4747 --run-id 3f0c2a9b11de --limit 50 --json
    """

    from leyden.cli.prompts_extract import read_recorded
    from leyden.errors import ConfigError

    opened = _opened(run, run_id)
    found = opened.read_store(lambda store: read_recorded(store, opened.record.run_id, limit))
    if not found.prompts:
        raise ConfigError(
            f"the calls of {found.n_rollouts:,} rollouts have no prompt in common: {found.n_calls:,} model calls "
            "were recorded; at least two rollouts that call a model through the gateway or a traced client are needed"
        )
    if out is not None:
        for path in found.write(out):
            echo(path, err=True)
    if as_json:
        echo_json(found.as_json())
    else:
        echo_text("\n".join(found.shown(out)))


# ---- reading -------------------------------------------------------------------------------------


def _opened(run: str, run_id: str | None) -> RecordedRun:
    from leyden.cli.run_views import await_server
    from leyden.training.runs import open_run

    await_server(run)
    return open_run(run, run_id=run_id)


def _best(run: RecordedRun) -> ResourcesUpdate:
    from leyden.algorithm.prompts import read_best

    return run.read_store(lambda store: read_best(store, run.record.run_id))


def _resources(run: RecordedRun, resources_id: str) -> ResourcesUpdate:
    return run.read_store(lambda store: store.get_resources_by_id(resources_id))


def _history(run: RecordedRun) -> Sequence[CandidateRecord]:
    from leyden.algorithm.prompts import read_history
    from leyden.errors import ConfigError

    found = run.read_store(lambda store: read_history(store, run.record.run_id))
    if not found:
        raise ConfigError(f"run {run.record.name!r} has no history of prompts; give a run of APO or GEPA")
    return found


def _prompts(update: ResourcesUpdate) -> dict[str, PromptTemplate]:
    from leyden.types import PromptTemplate

    found: dict[str, Any] = update.resources
    return {name: each for name, each in found.items() if isinstance(each, PromptTemplate)}
