"""`leyden rescore`: score the rollouts of a run with another judge."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from leyden.cli.dataset import RunArgument, RunId, Where
from leyden.cli.output import AsJson, counting, echo, echo_json

_SHOWN_FLIPS = 5


def rescore(
    run: RunArgument,
    judge: Annotated[str, typer.Option("-j", "--judge", metavar="module:function", help="Or file.py:function.")],
    name: Annotated[str | None, typer.Option(help="The name of the scores; the function's by default.")] = None,
    where: Where = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Rollouts that are judged at a time.")] = 8,
    again: Annotated[
        bool, typer.Option("--again", help="Score anew what an earlier version of the judge has scored.")
    ] = False,
    run_id: RunId = None,
    as_json: AsJson = False,
) -> None:
    """Score recorded rollouts again, without running them.

    The judge is a function, sync or async, that takes a rollout's record (task, answer, reward, conversations, spans)
    and returns a number. The scores are stored beside the first rewards, which stay. leyden dataset --reward NAME and
    ly.SFT(reward="NAME") use them. If the judge fails, the same command goes on with the rollouts that are left.

    \b
    Examples:
      leyden rescore latest --judge judges.py:helpful
      leyden rescore latest --judge my.judges:strict --name strict-2 --where 'mode == "train" and reward > 0'
    """
    import asyncio
    import hashlib
    import sys
    from pathlib import Path

    from leyden._lib.formatting import figure
    from leyden._lib.logs import Preview
    from leyden.cli.inputs import load_object
    from leyden.cli.run_views import await_server
    from leyden.errors import AgentError, ConfigError
    from leyden.training.runs import open_run
    from leyden.training.runs.dataset import Selection
    from leyden.training.runs.rescoring import Rescored
    from leyden.training.runs.rescoring import rescore as score

    function: Any = load_object(judge, command="leyden rescore")
    if not callable(function):
        raise ConfigError(f"{judge} is a {type(function).__name__} and no function; name one")
    source, _, object_name = judge.rpartition(":")
    module = Path(source).stem if source.endswith(".py") else source
    file = getattr(sys.modules[module], "__file__", None)
    digest = hashlib.sha256(Path(file).read_bytes() if file else b"").hexdigest()[:12]
    scores = name or object_name.rpartition(".")[2]
    await_server(run)
    opened = open_run(run, run_id=run_id)

    async def work() -> Rescored:
        async with opened.open_store(read_only=False) as store:
            with counting("rollouts") as show:
                return await score(
                    opened,
                    store,
                    function,
                    name=scores,
                    judge_id=f"rescore:{module}:{object_name}:{digest}",
                    selection=Selection(where, modes=()),
                    again=again,
                    concurrency=concurrency,
                    on_progress=show,
                )

    found = asyncio.run(work())
    compared = found.comparison()
    if as_json:
        failures = [{"rollout": rollout_id, "reason": reason} for rollout_id, reason in found.failures]
        counts = {"scored": found.scored, "have_a_score": len(found.scores), "left": found.left}
        echo_json({"name": scores, **counts, "failures": failures, "comparison": compared})
        raise typer.Exit(1 if failures else 0)
    echo(
        f"{scores}: {found.scored:,} rollouts scored now, {len(found.scores):,} have a score, {found.left:,} have none"
    )
    if compared["rollouts"]:
        correlation = compared["correlation"]
        shown = "not defined, one side is constant" if correlation is None else figure(correlation, 3)
        echo(f"  mean reward {figure(compared['mean_reward'], 3)}, mean score {figure(compared['mean_score'], 3)}")
        echo(f"  correlation {shown} ({compared['rollouts']:,} rollouts with both)")
    for side, title in (("gained", "solved by the score alone"), ("lost", "solved by the reward alone")):
        ids: list[str] = compared[side] or []
        if compared[side] is not None:
            echo(f"  {len(ids):,} {title}" + ":" * bool(ids))
        for rollout_id in ids[:_SHOWN_FLIPS]:
            old, new, task = found.scores[rollout_id]
            echo(f"    {rollout_id}  {figure(old, 3) if old is not None else '-'} -> {figure(new, 3)}  {Preview(task)}")
    if found.failures:
        rollout_id, reason = found.failures[0]
        raise AgentError(
            f"the judge {judge} failed at {len(found.failures):,} rollouts, first at {rollout_id}: {reason}; correct it, or "
            f"repeat the command, which goes on with the {found.left:,} rollouts that have no score"
        )
