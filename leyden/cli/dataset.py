"""`leyden dataset`: write the rollouts of a run as a data set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leyden.cli.output import AsJson, counting, echo, echo_json
from leyden.errors import ConfigError

if TYPE_CHECKING:
    from leyden.training.runs.dataset import Rows

_SHOWN_IDS = 3
FORMATS = ("messages", "completion", "preference", "tokens", "verifiers")
RunArgument = Annotated[
    str, typer.Argument(help="Folder, name or id of a run, its beginning, latest, or the path or URL of a store.")
]
Where = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="CONDITION",
        help="Only rollouts of which this holds, such as reward > 0 and mode == 'train'.",
    ),
]
RunId = Annotated[str | None, typer.Option("--run-id", metavar="ID", help="Which run, of a store that holds several.")]


def dataset(
    run: RunArgument,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The file to write: .jsonl, or .parquet.")
    ],
    format: Annotated[
        str, typer.Option("-f", "--format", help="messages, completion, preference, tokens or verifiers.")
    ] = "messages",
    min_reward: Annotated[
        float | None, typer.Option(metavar="REWARD", help="Only rollouts with at least this reward.")
    ] = None,
    where: Where = None,
    reward: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A dimension of the reward, or the name of a rescore, in place of the reward."
        ),
    ] = None,
    every_answer: Annotated[
        bool, typer.Option("--every-answer", help="A row for each answer, not only for the last of each branch.")
    ] = False,
    margin: Annotated[
        float | None, typer.Option(min=0, help="The rewards of a pair differ by more than this; 0 by default.")
    ] = None,
    between: Annotated[
        bool, typer.Option("--between", help="Pairs may have tool results between their answers.")
    ] = False,
    run_id: RunId = None,
    as_json: AsJson = False,
) -> None:
    """Write the rollouts of a run as rows to train on elsewhere, or again with ly.SFT and ly.DPO.

    Rollouts that succeeded are written, without those of validation; a condition that names mode or status decides
    itself. Only the agent's own calls become rows. A rollout that cannot fill the format exactly gives no row, and is
    counted with the reason. Columns of a condition: rollout, mode, status, iteration, reward, rewards.NAME, tokens,
    prompt_tokens, response_tokens, cost, seconds, attempt, group, arm, resources_version, task, metadata.

    \b
    Examples:
      leyden dataset latest --min-reward 1 --output sft.jsonl
      leyden dataset latest --where 'task.city in ["Oslo", "Rome"] and tokens < 500' -o some.parquet
      leyden dataset latest --format preference --margin 0.5 --output dpo.jsonl
      leyden dataset latest --format tokens --reward helpful --output tokens.jsonl
    """
    import asyncio

    from leyden._lib.options import check_choice, check_number
    from leyden.cli.run_views import await_server
    from leyden.training.runs import open_run
    from leyden.training.runs.dataset import Rows, Selection

    check_choice("--format", format, FORMATS)
    check_number("--min-reward", min_reward, or_none="no lower limit")
    check_number("--margin", margin, or_none="0")
    given = {"--every-answer": every_answer, "--margin": margin is not None, "--between": between}
    takes = {"--every-answer": ("messages", "completion"), "--margin": ("preference",), "--between": ("preference",)}
    for name, formats in takes.items():
        if given[name] and format not in formats:
            raise ConfigError(
                f"{name} has no effect with --format {format}; leave it out, or give {' or '.join(formats)}"
            )
    await_server(run)
    selection = Selection(where, min_reward=min_reward, reward=reward)
    rows = Rows(open_run(run, run_id=run_id), selection, format, every_answer, margin or 0.0, between)  # pyright: ignore[reportArgumentType] -- checked above
    n_rows, n_rollouts = asyncio.run(_write(rows, output))
    reasons = _reasons(selection.left_out)
    if as_json:
        left_out = [{"reason": reason, "count": len(ids), "rollouts": ids} for reason, ids in reasons]
        echo_json({"file": str(output), "rows": n_rows, "rollouts": n_rollouts, "left_out": left_out})
        return
    echo(f"{output}: {n_rows:,} rows of {n_rollouts:,} rollouts, format {format}")
    for reason, ids in reasons:
        echo(f"  {_in_words(reason, ids)}")


def _reasons(left_out: dict[str, list[str]]) -> list[tuple[str, list[str]]]:
    """Return the ids by reason, each once, the most frequent reason first."""
    return sorted(
        ((reason, list(dict.fromkeys(ids))) for reason, ids in left_out.items() if ids), key=lambda of: -len(of[1])
    )


def _in_words(reason: str, ids: list[str]) -> str:
    more = f" and {len(ids) - _SHOWN_IDS:,} more" if len(ids) > _SHOWN_IDS else ""
    return f"{len(ids):,} left out: {reason} ({', '.join(ids[:_SHOWN_IDS])}{more})"


async def _write(rows: Rows, output: Path) -> tuple[int, int]:
    """Write a file, and return the number of its rows and of the rollouts that they come from. Raise ConfigError, and
    write none, if there are no rows.
    """
    from leyden.training.runs.dataset_file import open_rows

    n_rows, rollouts, left_out = 0, set[Any](), rows.selection.left_out
    async with rows.run.open_store() as store:
        with counting("rollouts") as show, open_rows(output, rows.format) as write:
            async for row in rows.read(store, show):
                source = row["provenance"]
                ids = [source["rollout"]] if "rollout" in source else [each["rollout"] for each in source.values()]
                try:
                    write(row)
                except ConfigError:
                    raise
                except ValueError:
                    left_out["a text has half of a surrogate pair, or a number is not finite"] += ids
                    continue
                n_rows, rollouts = n_rows + 1, rollouts | {*ids}
            if not n_rows:
                reasons = _reasons(left_out)
                for reason, ids in reasons:
                    echo(f"  {_in_words(reason, ids)}", err=True)
                most = f"most often because {reasons[0][0]}" if reasons else "the run has no rollouts"
                raise ConfigError(
                    f"no rollout of run {rows.run.record.name} gives a row of format {rows.format}, {most}; no file was "
                    "written, change the options or the format"
                )
    return n_rows, len(rollouts)
