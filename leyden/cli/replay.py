"""`leyden replay`: run a recorded rollout again, its first model calls answered from the record."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leyden.cli.output import AsJson, echo, echo_json

if TYPE_CHECKING:
    from leyden.algorithm.replay import Replay, ReplayResult
    from leyden.training.runs import RecordedRun
    from leyden.types import NamedResources

_NO_MODEL = "calls after the record need a model: give --model NAME=URL, NAME=FOLDER or NAME=RUN"


def replay(
    rollout: Annotated[str, typer.Argument(help="The id of a rollout, or a part that no other id contains.")],
    agent: Annotated[str, typer.Option("-a", "--agent", metavar="AGENT", help="module:agent or file.py:agent.")],
    run: Annotated[
        str,
        typer.Option(
            "-r", "--run", metavar="RUN", help="Folder, name or id of its run, its beginning, or a store's path or URL."
        ),
    ] = "latest",
    start: Annotated[
        int | None,
        typer.Option(
            "--from", min=0, metavar="K", help="The first call that is live, from 0; by default all are replayed."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            metavar="NAME=URL|FOLDER|RUN",
            help="The model of the live calls: its server's base URL or its folder; with --from the run's own by default.",
        ),
    ] = None,
    model_key: Annotated[
        str | None,
        typer.Option(envvar="LEYDEN_MODEL_KEY", show_envvar=True, help="The API key that the model's server wants."),
    ] = None,
    run_id: Annotated[
        str | None, typer.Option("--run-id", metavar="ID", help="Which run, of a store that holds several.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where to keep the replay; a new folder under .leyden/ by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a recorded rollout again. The record answers its model calls, and your code runs anew.

    Debug a failed rollout without a model, or change the agent and see at which call it leaves the record. With --from
    K the model answers the calls from K on. A request that differs from the recorded one ends the replay: the model
    answers that call and all later ones. The replay is kept as a run of its own, with a copy of the record; the
    recorded run is only read.

    \b
    Examples:
      leyden replay ro-1f2e3d --agent agent.py:agent
      leyden replay ro-1f2e3d --agent agent.py:agent --run .leyden/20260102-101500-ab12 --from 2
      leyden replay ro-1f2e3d --agent my.agents:qa --model gpt-4.1-mini=https://api.openai.com/v1
      leyden replay ro-1f2e3d --agent my.agents:qa --from 2 --model policy=./model --json
    """
    import asyncio

    from leyden._lib.logs import setup_logging
    from leyden.cli.inputs import load_agent
    from leyden.cli.run_views import await_server
    from leyden.errors import RunInterrupted
    from leyden.trainer import Trainer

    setup_logging("ERROR")
    loaded = load_agent(agent)
    await_server(run)
    algorithm = asyncio.run(_algorithm(_opened(run, run_id), rollout, start, model, model_key))
    new = Path(".leyden") / f"{time.strftime('%Y%m%d-%H%M%S')}-replay-{secrets.token_hex(2)}"
    directory = run_dir or new
    trainer = Trainer(algorithm=algorithm, concurrency=1, run_dir=directory)
    try:
        result: ReplayResult = trainer.fit(loaded, val_dataset=[None]).result
    except RunInterrupted:
        raise RunInterrupted(f"stopped; see what ended with `leyden show {directory}`") from None
    if as_json:
        echo_json(_as_data(result, directory))
    else:
        _print(result, directory, has_model=algorithm.has_model)
    if result.rollout.status != "succeeded":
        raise typer.Exit(1)


def _opened(source: str, run_id: str | None) -> RecordedRun:
    """Return the run that holds the rollout. "latest" is the newest run that is not a replay."""
    from leyden.training.runs import list_runs, open_run

    if source == "latest":
        for run in list_runs():
            if run.record.kind != "replay":
                return run
    return open_run(source, run_id=run_id)


async def _algorithm(
    run: RecordedRun, part_of_id: str, start: int | None, model: str | None, model_key: str | None
) -> Replay:
    """Read the recorded rollout, and return an algorithm that replays it.

    start: the first call that is live, from 0; None: none is.
    model: the text of `--model`. A live call without it uses the trained model of the run.
    """
    from leyden.algorithm.replay import Replay, count_recorded_calls
    from leyden.cli.eval_inputs import read_given
    from leyden.engine import IsolatedBackend
    from leyden.errors import ConfigError
    from leyden.gateway import UpstreamModel
    from leyden.training.runs.rollouts import find_rollout, latest_resources
    from leyden.types import AttemptedRollout

    async with run.open_store() as store:
        rollout = await find_rollout(run, store, part_of_id)
        if not isinstance(rollout, AttemptedRollout):
            raise ConfigError(f"rollout {rollout.rollout_id!r} is {rollout.status}, and has no attempt to replay")
        spans = await store.query_spans(rollout.rollout_id, rollout.attempt.attempt_id)
        if rollout.resources_id is not None:
            update = await store.get_resources_by_id(rollout.resources_id)
        else:
            update = await latest_resources(run, store)
    resources = {} if update is None else dict(update.resources)
    is_live = start is not None and start < count_recorded_calls(spans)
    source = str(run.directory) if is_live and model is None and run.directory is not None else None
    given = await read_given([] if model is None else [model], source)
    if is_live and given.folder is None and not given.servers:
        raise ConfigError(f"--from {start}: {_NO_MODEL}")
    backend = None
    if given.folder is not None:
        name, folder = given.folder
        backend = IsolatedBackend(folder, model_name=name, **given.loading)
    return Replay(
        rollout,
        spans,
        resources=_renamed(resources, None if model is None else model.partition("=")[0]),
        n_calls=start,
        backend=backend,
        models=[  # token ids are for training, and many servers refuse to be asked for them
            UpstreamModel(name, url, api_key=model_key, record_tokens=False) for name, url in given.servers.items()
        ],
    )


def _renamed(resources: NamedResources, model: str | None) -> NamedResources:
    """Return the resources with the model of `--model` in place of the only one that they name.

    model: None, or a model that the resources name already, changes nothing.
    Raise ConfigError if the resources name none or several models.
    """
    from leyden.errors import ConfigError
    from leyden.types import LLM

    llms = {name: each for name, each in resources.items() if isinstance(each, LLM)}
    if model is None or any(each.model == model for each in llms.values()):
        return resources
    if len(llms) != 1:
        names = ", ".join(sorted({each.model for each in llms.values()})) or "no model"
        raise ConfigError(f"--model names {model!r}, and the rollout's agent was given {names}; name one of these")
    ((name, llm),) = llms.items()
    return {**resources, name: llm.model_copy(update={"model": model})}


# ---- what it shows -------------------------------------------------------------------------------


def _as_data(result: ReplayResult, directory: Path) -> dict[str, Any]:
    """Return the result as JSON data for `--json`."""
    from dataclasses import asdict

    return {
        "rollout_id": result.rollout.rollout_id,
        "run": str(directory),
        "status": result.rollout.status,
        "reason": result.rollout.reason,
        "calls": [asdict(call) for call in result.calls],
        "reward_before": result.reward_before,
        "reward": result.rollout.reward,
    }


def _print(result: ReplayResult, directory: Path, *, has_model: bool) -> None:
    """Print the state of each call, both rewards, and the command that shows the new rollout."""
    from leyden._lib.formatting import one_line

    for call in result.calls:
        detail = "" if call.detail is None else f": {one_line(call.detail)[:300]}"
        echo(f"call {call.call_index:<6} {call.state}{detail}")
    if not has_model and any(call.state != "replayed" for call in result.calls):
        echo(_NO_MODEL)
    reason = "" if result.rollout.reason is None else f": {one_line(result.rollout.reason)[:300]}"
    echo(f"state       {result.rollout.status}{reason}")
    echo(f"reward      {_reward(result.reward_before)} before, {_reward(result.rollout.reward)} now")
    echo(f"run         {directory}")
    echo(f"            leyden show {directory} {result.rollout.rollout_id}")


def _reward(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"
