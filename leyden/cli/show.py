"""`leyden show`: a run, what failed in it, and one rollout with its conversation."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from leyden._lib.formatting import one_line
from leyden.cli.output import AsJson, Coloured, echo, echo_json, terminal

if TYPE_CHECKING:
    from leyden.store import LightningStore
    from leyden.training.runs import RecordedRun
    from leyden.training.runs.recorded_runs import FailedRollout
    from leyden.training.runs.rollouts import ScoredRollout

_SHOWN_REASONS = 5


def show(
    run: Annotated[
        str, typer.Argument(help="Folder, name or id of a run, its beginning, latest, or the path or URL of a store.")
    ],
    rollout: Annotated[
        str | None, typer.Argument(help="The id of a rollout, or a part that no other id contains.")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="List the rollouts that failed, the last first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="List the rollouts with the highest rewards.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="List the rollouts with the lowest rewards.")] = False,
    limit: Annotated[
        int | None, typer.Option("-n", "--limit", min=1, help="The most rollouts to list; 10 by default.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten long messages.")] = False,
    run_id: Annotated[
        str | None, typer.Option("--run-id", metavar="ID", help="Which run, of a store that holds several.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a run that is running, finished or crashed, or one of its rollouts.

    A run: its state, the options that are not defaults, rewards, newest metrics and counts, why rollouts failed, with
    an example of each reason, and the command that started it. A rollout: its steps, its conversation with tool calls
    and rewards, and how many tokens were recorded.

    \b
    Examples:
      leyden show latest
      leyden show latest --worst -n 3
      leyden show .leyden/20260102-101500-ab12 --failed
      leyden show latest ro-1f2e3d
      leyden show latest --failed --json | jq -r '.[].reason'
    """
    import asyncio

    from leyden.cli.run_views import await_server
    from leyden.errors import ConfigError
    from leyden.training.runs import open_run

    chosen = [name for name, wanted in (("--failed", failed), ("--best", best), ("--worst", worst)) if wanted]
    if rollout is not None:
        chosen.append("a rollout")
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} are different views; give one of them")
    if limit is not None and (rollout is not None or not chosen):
        raise ConfigError("--limit is for a list of rollouts; give --failed, --best or --worst, or leave it out")
    if full and rollout is None:
        raise ConfigError("--full is for one rollout; give its id, or leave --full out")
    listed = limit or 10
    await_server(run)
    opened = open_run(run, run_id=run_id)
    if rollout is not None:
        asyncio.run(_show_rollout(opened, rollout, full=full, as_json=as_json))
    elif failed:
        asyncio.run(_list_failed(opened, listed, as_json=as_json))
    elif best or worst:
        asyncio.run(_list_scored(opened, listed, best=best, as_json=as_json))
    else:
        asyncio.run(_show_run(opened, run, as_json=as_json))


# ---- a run ---------------------------------------------------------------------------------------


async def _show_run(run: RecordedRun, source: str, *, as_json: bool) -> None:
    """Print a run: its state and rewards, rollouts by status, failures by reason, and how to continue it.

    source: the run as the user named it, for the commands in the output.
    If the store cannot be opened, the run is shown from its folder, without counts.
    """
    from dataclasses import asdict

    from leyden.errors import LeydenError, UnknownRun
    from leyden.training.runs.display import rollout_counts
    from leyden.training.runs.folder import METRICS, report_of, size_text
    from leyden.training.runs.overview import as_data, control_of, newest_metrics, paused_of, warnings_of
    from leyden.training.runs.rollouts import count_by_status, failures_of, group_failures
    from leyden.training.runs.run_options import spending_of

    counts, trouble, spent = dict[str, int](), None, spending_of(run)
    try:
        async with run.open_store() as store:
            counts, failures = await count_by_status(run, store), await failures_of(run, store)
            with suppress(UnknownRun):
                spent = await store.sum_spending(run.record.run_id)
    except LeydenError as error:  # the folder has everything but the counts
        failures = await failures_of(run, None)
        if run.record.config.get("store"):  # a run in a simulator has no store that could be missing
            trouble = str(error)
    groups = group_failures(failures)
    if as_json:
        reasons = [
            {"count": each.count, "reason": each.reason, "reason_kind": each.reason_kind, "example": each.example}
            for each in groups
        ]
        data = {
            **as_data(run),
            "metrics": newest_metrics(run),
            "rollouts_by_status": counts,
            "spending": None if spent is None else spent.model_dump(),
            "failures": reasons,
            "warnings": warnings_of(run),
            "control": [asdict(line) for line in control_of(run)],
            "paused": paused_of(run)[0] is not None,
            "paused_seconds": paused_of(run)[1],
            "config": run.record.config,
        }
        echo_json(data)
        return
    _print_head(run)
    if trouble is not None:
        echo(f"rollouts    unknown: {trouble}")
    elif shown := rollout_counts(counts, run.summary_metrics().reflection_calls):
        echo(f"rollouts    {shown}")
    if spent is not None and (cost := spent.in_words(str(run.record.config.get("currency", "")))) is not None:
        echo(f"cost        {cost}")
    if groups:
        echo(f"failures    {len(failures):,}, for {len(groups)} reason{'s' * (len(groups) > 1)}")
        for group in groups[:_SHOWN_REASONS]:
            kind = f"[{group.reason_kind}] " if group.reason_kind else ""
            echo(f"  {group.count:,} x {kind}{group.reason[:300]}")
            echo(f"      leyden show {source} {group.example}")
        if len(groups) > _SHOWN_REASONS:
            echo(f"  and {len(groups) - _SHOWN_REASONS} other reasons: leyden show {source} --failed")
    if warnings := warnings_of(run):
        echo(f"warning     {warnings[-1]}")
    if run.directory is not None:
        echo(f"size        {size_text(run.directory)}")
    if run.log_path is not None:
        echo(f"log         {run.log_path}")
    if run.directory is not None and (report := report_of(run.directory)) is not None:
        rows = run.directory / METRICS
        is_old = rows.exists() and report.stat().st_mtime < rows.stat().st_mtime - 1
        echo(f"report      {report}" + (f" (older than the run; leyden report {source})" if is_old else ""))
    if (how := _how_to_continue(run)) is not None:
        echo(f"continue    {how}")
    if run.state in ("failed", "crashed") or groups:
        echo(f"explain     leyden doctor {source}")


def _how_to_continue(run: RecordedRun) -> str | None:
    """Return the command or call that continues a run which ended too early.

    Return None if the run is running or has succeeded, if it never started, or if its kind cannot be continued.
    """
    from leyden.training.runs.opening import NEVER_STARTED
    from leyden.training.runs.start import how_to_continue

    config, kind = run.record.config, run.record.kind
    if run.state not in ("stopped", "failed", "crashed") or config.get(NEVER_STARTED):
        return None
    if kind not in ("rl", "fit") or run.directory is None:
        return None
    if kind == "rl" and not config.get("start"):
        return f"leyden rl train --resume {run.directory}, or fit(..., resume=True)"
    higher = " --set trainer.max_cost=..." if "max_cost=" in (run.record.cause or "") and config.get("start") else ""
    return how_to_continue(config.get("start"), run.directory) + higher


def _print_head(run: RecordedRun) -> None:
    """Print the run's name, state, time, algorithm, tasks and rewards, as far as it has them."""
    from leyden._lib.formatting import duration, figure
    from leyden.cli.run_views import COLOURS, age, reward_text
    from leyden.training.runs.chart import sparkline
    from leyden.training.runs.control import in_words
    from leyden.training.runs.overview import (
        as_data,
        budget_left,
        control_of,
        newest_metrics,
        part_of,
        paused_of,
        seconds_of,
    )
    from leyden.training.runs.run_description import command_of
    from leyden.training.runs.run_options import changed_of, value_text
    from leyden.training.runs.start import short_path

    record, data, metrics = run.record, as_data(run), run.summary_metrics()
    echo(f"run         {record.name}" + (f"  ({run.directory})" if run.directory is not None else ""))
    if run.notes.tags:
        echo(f"tags        {', '.join(run.notes.tags)}")
    for note in run.notes.notes:
        echo(f"note        {note.text}  ({note.by}, {age(note.time)})")
    colour = COLOURS[run.state]
    cause = record.cause or ("its process is gone" if run.state == "crashed" else "")
    paused, paused_seconds = paused_of(run)
    cause = ", ".join(
        [*([cause] if cause else []), *([] if paused is None else [f"{in_words(paused)} by {paused.by}"])]
    )
    echo("state       ", Coloured(run.state, colour), f": {cause}" if cause else "")
    of_them = f", {duration(paused_seconds)} of it paused" if paused_seconds >= 1 else ""
    echo(f"started     {age(record.start_time)}, took {duration(seconds_of(run))}{of_them}")
    for name in ("algorithm", "model"):
        if data[name]:
            echo(f"{name:<12}{data[name]}")
    sets = part_of(record.config, "data")
    lengths = [f"{n:,} {name}" for name in sets if isinstance(n := part_of(sets, name).get("length"), int)]
    if lengths:
        echo(f"tasks       {', '.join(lengths)}")
    options = changed_of(record)
    _echo_list("options", [f"{short_path(each)} {value_text(value)}" for each, value in options.items()])
    if metrics.iterations:
        echo(f"steps       {metrics.iterations:,}")
    for name, reward in (("reward", metrics.reward), ("val reward", metrics.val_reward)):
        if reward is None or (name == "val reward" and metrics.reward == reward):
            continue
        best = f", best {figure(reward.best, 3)} at step {reward.best_iteration}" if len(reward.values) > 1 else ""
        echo(f"{name:<12}{reward_text(reward)}{best}  {sparkline(reward.values, 24)}".rstrip())
    for stage, values in newest_metrics(run).items():
        title = "metrics" if stage == "train" else f"{stage} metrics"
        _echo_list(title, [f"{name} {figure(value)}" for name, value in sorted(values.items()) if name != "reward"])
    if left := [f"{value} {name}" for name, value in budget_left(run).items()]:
        echo(f"budget left {', '.join(left)}")
    if (command := command_of(record.config)) is not None:
        echo(f"command     {command}")
    control = control_of(run)
    answered = {line.id for line in control if line.state != "asked"}
    title = "control"
    for line in control:
        if line.state != "asked" or line.id not in answered:
            echo(f"{title:<12}{age(line.time)} by {line.by}: {in_words(line)}")
            title = ""


def _echo_list(title: str, items: Iterable[str]) -> None:
    """Print items after a title. An item is broken only where it is longer than a line."""
    # what belongs together stays together, because lines break at plain spaces only
    listed = ", ".join(one_line(item).replace(" ", "\xa0") for item in items)
    for line in textwrap.wrap(listed, max(20, min(88, terminal().width - 12)), break_on_hyphens=False):
        echo(f"{title:<12}{line}".replace("\xa0", " "))
        title = ""


# ---- rollouts ------------------------------------------------------------------------------------


async def _list_failed(run: RecordedRun, limit: int, *, as_json: bool) -> None:
    """Print the run's newest failures, from its folder, or from its store if the folder has none."""
    from leyden.cli.run_views import age
    from leyden.training.runs.rollouts import failures_of

    failures: list[FailedRollout] = await failures_of(run, None)
    if not failures:
        async with run.open_store() as store:
            failures = await failures_of(run, store)
    newest = failures[::-1][:limit]
    if as_json:
        from dataclasses import asdict

        echo_json([asdict(each) for each in newest])
        return
    if not failures:
        echo("no rollout has failed")
    for each in newest:
        kind = f"[{each.reason_kind}] " if each.reason_kind else ""
        echo(f"{each.rollout_id}  {age(each.time)}{_step(each.iteration)}  {kind}{' '.join(each.reason.split())}")
    if len(failures) > len(newest):
        echo(f"{len(failures) - len(newest):,} more are not shown; use --limit", err=True)


async def _list_scored(run: RecordedRun, limit: int, *, best: bool, as_json: bool) -> None:
    """Print the rollouts with the best or worst rewards, with their steps, tasks and answers."""
    from leyden._lib.logs import Preview
    from leyden.adapter.transcript import answer_of
    from leyden.training.runs.recorded_runs import iteration_of
    from leyden.training.runs.rollouts import scored_rollouts

    async with run.open_store() as store:
        found: list[ScoredRollout] = await scored_rollouts(run, store, order="best" if best else "worst", limit=limit)
        spans = await store.query_spans_of([each.rollout.rollout_id for each in found])
    answers = {rollout_id: answer_of(own) for rollout_id, own in spans.items()}
    if as_json:
        rows = [
            {
                "rollout_id": each.rollout.rollout_id,
                "reward": each.reward,
                "iteration": iteration_of(each.rollout),
                "input": each.rollout.input,
                "answer": answers.get(each.rollout.rollout_id),
            }
            for each in found
        ]
        echo_json(rows)
        return
    if not found:
        echo("no rollout has a reward")
    for each in found:
        step = _step(iteration_of(each.rollout))
        echo(f"{each.rollout.rollout_id}  {each.reward:>8.4g}{step}  {Preview(each.rollout.input)}")
        if answer := answers.get(each.rollout.rollout_id):
            echo(f"    answer: {Preview(answer)}")


def _step(iteration: int | None) -> str:
    return "" if iteration is None else f"  step {iteration}"


async def _show_rollout(run: RecordedRun, part_of_id: str, *, full: bool, as_json: bool) -> None:
    """Print the rollout with this id, or with this part of its id."""
    from leyden.training.runs.rollouts import find_rollout

    async with run.open_store() as store:
        rollout = await find_rollout(run, store, part_of_id)
        if as_json:
            await _print_rollout_as_json(store, rollout.rollout_id)
        else:
            await print_rollout(store, rollout.rollout_id, full=full)


async def _print_rollout_as_json(store: LightningStore, rollout_id: str) -> None:
    """Print a rollout with its attempts, conversations, token counts and spans as JSON."""
    from leyden.adapter import TraceToMessages, TraceToTrajectory
    from leyden.types import find_final_reward

    rollout = await store.get_rollout_by_id(rollout_id)
    spans = (await store.query_spans_of([rollout_id]))[rollout_id]
    trajectories = TraceToTrajectory().adapt(spans)
    data = {
        "rollout": rollout.model_dump(mode="json"),
        "reward": find_final_reward(spans),
        "attempts": [attempt.model_dump(mode="json") for attempt in await store.query_attempts(rollout_id)],
        "conversations": TraceToMessages().adapt(spans),
        "tokens": [{"total": len(each.token_ids), "of_the_model": each.n_trained} for each in trajectories],
        "spans": [span.model_dump(mode="json", exclude={"tokens"}) for span in spans],
    }
    echo_json(data)


async def print_rollout(store: LightningStore, rollout_id: str, *, full: bool) -> None:
    """Print a rollout, its attempts and the transcript of the latest one.

    full: print long texts and stack traces whole.
    """
    from leyden.adapter import FEW_MERGED, call_roles, count_roles, turn_merges
    from leyden.adapter.calls import model_calls
    from leyden.adapter.transcript import transcript_lines
    from leyden.types import find_final_reward

    rollout = await store.get_rollout_by_id(rollout_id)
    spans = (await store.query_spans_of([rollout_id]))[rollout_id]
    reward = find_final_reward(spans)
    echo(f"rollout     {rollout.rollout_id}" + (f" ({rollout.mode})" if rollout.mode else ""))
    echo(f"state       {rollout.status}" + ("" if reward is None else f", reward {reward:g}"))
    echo(f"task        {json.dumps(rollout.input, ensure_ascii=False, default=str)}")
    attempts = await store.query_attempts(rollout_id)
    for attempt in attempts:
        took = "" if attempt.end_time is None else f", {attempt.end_time - attempt.start_time:.2f} s"
        reason = attempt.metadata.get("reason")
        why = f": {' '.join(str(reason).split())}" if reason else ""
        echo(f"attempt {attempt.sequence_id}   {attempt.status}{took}{why}")
    if not spans:
        echo("no step was recorded")
        return
    latest = [span for span in spans if span.attempt_id == attempts[-1].attempt_id]
    roles = count_roles(call_roles(model_calls(latest), latest))
    if roles.total() > roles["agent"]:
        echo(f"calls       {', '.join(f'{number} {role}' for role, number in roles.items())}")
    turns = turn_merges(latest)
    if turns.share is not None:
        echo(f"turns       {turns.merged} of {turns.continued} continue the tokens of an earlier call")
        if turns.share < FEW_MERGED:
            echo(f"            {turns.splits[0]}")
    echo("")
    for line in transcript_lines(spans, max_characters=None if full else 2000):
        echo(line)
