"""`leyden compare`: what differs between runs, and which tasks were won and lost."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from leyden.cli.output import AsJson, Column, echo, echo_json, echo_table

_SHOWN = 5
"""Flipped tasks that are printed in each direction."""
_FILES = 8
"""Files of code that are printed."""


def compare(
    run: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Folder, name or id of a run, its beginning, latest, or a store."),
    ],
    as_json: AsJson = False,
) -> None:
    """Compare the first run with each of the others.

    Printed are the options, files of code, versions and commits that differ, what was changed while the runs worked,
    the rewards, time, tokens and cost. Where the last
    validations ran the same tasks, their difference is paired by task, with a 95 % interval, and the tasks that only
    one run has solved are listed with ids, rewards and answers. A task is solved with a mean reward of at least 0.5, or
    the higher one if there are two rewards in all.

    \b
    Examples:
      leyden compare 20260102-101500-ab12 latest
      leyden compare baseline slow fast
      leyden compare baseline latest --json | jq '.against_first[0].lost[]?.task'
    """
    from leyden._lib.formatting import duration, figure, shortened
    from leyden.cli.run_views import await_server
    from leyden.errors import ConfigError
    from leyden.training.runs import open_run
    from leyden.training.runs.comparison import compare_runs
    from leyden.training.runs.overview import as_data
    from leyden.training.runs.run_options import value_text

    if len(run) < 2:
        raise ConfigError(f"a comparison needs two runs, and one was given: {run[0]}; add another one")
    for each in run:
        await_server(each)
    opened = [open_run(each) for each in run]
    data: dict[str, Any] = {"runs": [as_data(each) for each in opened], **compare_runs(opened)}
    if as_json:
        echo_json(data)
        return

    def course(reward: dict[str, Any] | None) -> str:
        return "-" if reward is None else " ".join(figure(reward[name], 3) for name in ("first", "last", "best"))

    heads, totals = data["runs"], data["totals"]
    rows: dict[str, list[str]] = {"state": [each["state"] for each in heads]}
    rows["tags"] = [", ".join(each["tags"]) for each in heads]
    rows["note"] = [shortened(each["notes"][-1]["text"], 40) if each["notes"] else "" for each in heads]
    rows |= {name: [value_text(value) for value in of] for name, of in data["configuration"].items()}
    files: dict[str, list[str | None]] = data["code"] or {}
    rows |= {name: [(digest or "-")[:12] for digest in files[name]] for name in [*files][:_FILES]}
    rows |= {name: [str(value)[:12] for value in of] for name, of in data["versions"].items()}
    rows["uncommitted changes"] = ["yes" if each else "" for each in data["uncommitted_changes"]]
    rows["reward: first last best"] = [course(each) for each in data["reward"]]
    rows["val reward: first last best"] = [course(each) for each in data["val_reward"]]
    rows["took"] = [duration(each["seconds"]) for each in heads]
    for name in ("rollouts", "failed", "tokens", "cost"):
        rows[name] = ["-" if each.get(name) is None else figure(each[name]) for each in totals]
    partial = ["at least " if each.get("cost") is not None and each["unpriced_calls"] else "" for each in totals]
    rows["cost"] = [part + cost for part, cost in zip(partial, rows["cost"], strict=True)]
    shown = {name: of for name, of in rows.items() if any(value not in ("", "-") for value in of)}
    columns = [Column(each["name"], [of[n] for of in shown.values()]) for n, each in enumerate(heads)]
    echo_table([Column("", list(shown)), *columns])
    if len({each["run_id"] for each in heads}) == 1:
        echo("all are the same run")
    elif not data["configuration"]:
        echo("no recorded option differs")
    if data["code"] is None:
        echo("at least one of the runs did not record its code, so it may differ")
    elif len(files) > _FILES:
        echo(f"{len(files) - _FILES:,} more files of code differ")
    for head, changes in zip(heads, data["control"], strict=True):
        if changes:
            echo(f"{head['name']}, while it worked")
        for each in changes or ():
            echo("  ", each)
    for number, each in enumerate(data["against_first"], start=1):
        echo("")
        _show_difference(heads[0]["name"], heads[number]["name"], each)


def _show_difference(first: str, second: str, found: dict[str, Any]) -> None:
    """Print the difference of two last validations, and the first tasks that flipped."""
    from leyden._lib.formatting import figure
    from leyden._lib.logs import Preview

    echo(f"{second} against {first}, last validations")
    if found["reason"] is not None:
        echo(f"  not compared: {found['reason']}")
        return
    tasks, difference = found["tasks"], found["difference"]
    apart = tasks["only_first"] + tasks["only_second"]
    echo(f"  {tasks['same']:,} tasks are the same" + (f", {apart:,} are in one of them alone" if apart else ""))
    if difference is None:
        echo("  no task has a reward in both")
    else:
        end = "no interval: too few tasks"
        if difference["low"] is not None:
            end = f"95 % interval {figure(difference['low'], 3)} to {figure(difference['high'], 3)}, {difference['method']}"
        counts = f"{found['better']} better, {found['worse']} worse" if found["paired"] else "other tasks, not paired"
        counts += f"; without {found['left_out']} that failed in one" if found["left_out"] else ""
        echo(f"  reward {difference['mean']:+.3g} ({end}; {counts})")
    if tasks["same"] and found["solved_from"] is None:
        echo("  rewards beyond 0 to 1 have no line between solved and not: only failed rollouts count as not solved")
    for name, title in (("solved", "solved now, and not before"), ("lost", "solved before, and not now")):
        flipped = found[name]
        if flipped:
            echo(f"  {len(flipped):,} {title}" + (f", the first {_SHOWN}:" if len(flipped) > _SHOWN else ":"))
        for task in flipped[:_SHOWN]:
            echo(f"    {Preview(task['task'])}")
            for side in ("before", "after"):
                last = task[side]["rollouts"][-1]
                rewards = ", ".join(
                    "failed" if each["reward"] is None else figure(each["reward"], 3) for each in task[side]["rollouts"]
                )
                answer = f"  {task[side]['answer']}" if task[side]["answer"] else ""
                echo(f"      {side:<6} {rewards}  {last['rollout_id']}{answer}")
