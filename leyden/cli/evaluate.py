"""`leyden eval`: measure an agent, before and after training."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leyden.cli.output import AsJson, echo, echo_json, write_output

if TYPE_CHECKING:
    from leyden.algorithm.evaluation import Evaluation, EvaluationResult
    from leyden.cli.eval_inputs import Given
    from leyden.gateway import Prices

_SHOWN_REASONS = 5


def evaluate(
    agent: Annotated[str, typer.Argument(help="module:agent or file.py:agent.")],
    tasks: Annotated[Path, typer.Option("-t", "--tasks", metavar="FILE", help="The tasks: .jsonl, .json or .csv.")],
    resources: Annotated[
        str | None,
        typer.Option(
            "-r",
            "--resources",
            metavar="RUN|FILE",
            help="A run whose trained model and prompts are measured, or a .json file of prompt templates by name.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "-m",
            "--model",
            metavar="NAME=URL|FOLDER|RUN",
            help="A model's name, and its server's base URL, its folder, or the run that trained it.",
        ),
    ] = None,
    model_key: Annotated[
        str | None,
        typer.Option(envvar="LEYDEN_MODEL_KEY", show_envvar=True, help="The API key that the models' servers want."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("-n", "--limit", min=1, help="Take at most this many tasks, the first ones; all by default."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rollouts of each task.")] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Rollouts at a time.")] = 64,
    timeout: Annotated[
        float, typer.Option(min=0.001, metavar="SECONDS", help="The longest that a rollout may take.")
    ] = 600.0,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Suggested to the agent; the run's own by default.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Suggested to the agent; the run's own by default.")
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(
            metavar="IN,OUT|FILE",
            help="What a million prompt tokens and response tokens cost, such as 0.15,0.6; or a file of prices.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write one JSON line per rollout there.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where to keep the run; a new folder under .leyden/ by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure an agent on tasks: its mean reward with a 95 % interval, its failures, tokens and cost.

    Measure once before training, and once after it with --resources RUN. The interval is over the
    tasks: Wilson's for rewards of 0 and 1 with one rollout each, else a bootstrap. The rollouts are kept as a run:
    leyden show latest --worst.

    \b
    Examples:
      leyden eval agent.py:agent --tasks test.jsonl --model policy=./start-model
      leyden eval agent.py:agent --tasks test.jsonl --resources latest --repeats 4
      leyden eval agent.py:agent --tasks test.jsonl --resources latest --model policy=./start-model
      leyden eval my.agents:qa --tasks qa.csv -n 50 --model gpt-4.1-mini=https://api.openai.com/v1 --price prices.yaml
      leyden eval my.agents:qa --tasks qa.csv --resources prompts.json --json
    """
    import asyncio

    from leyden._lib.logs import setup_logging
    from leyden.cli.eval_inputs import read_given
    from leyden.cli.inputs import load_agent, load_tasks
    from leyden.errors import ConfigError, RunInterrupted
    from leyden.trainer import Trainer

    setup_logging("WARNING")
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(f"--output {output}: the folder {output.absolute().parent} does not exist")
    prices = _prices(price)
    data = load_tasks(tasks)[:limit]
    loaded = load_agent(agent)
    given = asyncio.run(read_given(model or [], resources))
    if given.run_name is not None:
        echo(f"resources of run {given.run_name}", err=True)
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    if not given.llms and (unused := [name for name, value in sampling.items() if value is not None]):
        raise ConfigError(
            f"--{unused[0].replace('_', '-')} is suggested to an agent with its model, and there is none; give --model, or "
            "leave it out"
        )
    evaluation = _evaluation(given, sampling, model_key, repeats=repeats, timeout_seconds=timeout, prices=prices)
    new = Path(".leyden") / f"{time.strftime('%Y%m%d-%H%M%S')}-eval-{secrets.token_hex(2)}"
    directory = run_dir or new
    evaluation.result_is_shown = True  # below, on standard output
    trainer = Trainer(algorithm=evaluation, concurrency=concurrency, run_dir=directory)
    try:
        result: EvaluationResult = trainer.fit(loaded, val_dataset=data).result
    except RunInterrupted:
        raise RunInterrupted(f"stopped; see the rollouts that ended with `leyden show {directory}`") from None
    if output is not None:
        rows = (json.dumps(asdict(each), ensure_ascii=False) for each in result.rollouts)
        write_output(output, "".join(f"{row}\n" for row in rows), private=True)
    if as_json:
        echo_json(_as_data(result, agent, tasks, directory))
    else:
        _print(result, agent, tasks, directory, "" if prices is None else prices.currency)
    if result.reward is None:
        raise typer.Exit(1)


def _prices(text: str | None) -> Prices | None:
    """Return the prices of a file, or of all models from "0.15,0.6"."""
    from leyden.errors import ConfigError
    from leyden.gateway import Price, Prices

    if text is None:
        return None
    if Path(text).suffix in (".yaml", ".yml", ".toml", ".json"):
        return Prices.of(text)
    try:
        prompts, responses = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--price is {text!r}; it must be two numbers, such as 0.15,0.6, or a file such as prices.yaml"
        ) from None
    if not (0 <= prompts < float("inf") and 0 <= responses < float("inf")):
        raise ConfigError(f"--price is {text!r}; both numbers must be 0 or more")
    return Prices({"*": Price(prompts, responses)})


def _evaluation(
    given: Given,
    sampling: dict[str, Any],
    model_key: str | None,
    *,
    repeats: int,
    timeout_seconds: float,
    prices: Prices | None,
) -> Evaluation:
    """Return the algorithm that runs the evaluation.

    sampling: suggested options of each model call, over those of the resources; None suggests none.
    model_key: the API key of all servers.
    """
    from leyden.algorithm.evaluation import Evaluation
    from leyden.engine import IsolatedBackend
    from leyden.gateway import UpstreamModel

    chosen = {name: value for name, value in sampling.items() if value is not None}
    backend = None
    if given.folder is not None:
        name, folder = given.folder
        backend = IsolatedBackend(folder, model_name=name, **given.loading)
    models = [  # token ids are for training, and many servers refuse to be asked for them
        UpstreamModel(name, url, api_key=model_key, record_tokens=False) for name, url in given.servers.items()
    ]
    return Evaluation(
        repeats=repeats,
        backend=backend,
        models=models,
        llms={name: (model, {**suggested, **chosen}) for name, (model, suggested) in given.llms.items()},
        resources=given.resources,
        timeout_seconds=timeout_seconds,
        prices=prices,
    )


# ---- what it shows -------------------------------------------------------------------------------


def _as_data(result: EvaluationResult, agent: str, tasks: Path, directory: Path) -> dict[str, Any]:
    """Return the result as JSON data for `--json`."""
    from dataclasses import asdict

    return {
        "agent": agent,
        "tasks_file": str(tasks),
        "run": str(directory),
        "tasks": result.tasks,
        "repeats": result.repeats,
        "reward": None if result.reward is None else asdict(result.reward),
        "reward_with_failures_as_zero": asdict(result.reward_with_failures_as_zero),
        "rollouts": len(result.rollouts),
        "failed": result.failed,
        "failures": [
            {"reason": reason, "count": count, "example": example} for reason, count, example in result.failures
        ],
        "model_calls": result.model_calls,
        "prompt_tokens": result.prompt_tokens,
        "response_tokens": result.response_tokens,
        "cost": result.cost,
        "unpriced_calls": None if result.spending is None else result.spending.unpriced_calls,
        "seconds": round(result.seconds, 3),
    }


def _print(result: EvaluationResult, agent: str, tasks: Path, directory: Path, currency: str) -> None:
    """Print the result as a table, with the commands that show an example of each failure."""
    from leyden._lib.formatting import duration, one_line

    times = f" x {result.repeats}" if result.repeats > 1 else ""
    echo(f"agent       {agent}")
    echo(f"tasks       {tasks}: {result.tasks:,}{times}")
    echo(f"reward      {result.reward or 'none: every rollout failed'}")
    if result.failed:
        if result.reward is not None:
            echo(f"            {result.reward_with_failures_as_zero} with failures as 0")
        echo(f"failed      {result.failed:,} of {len(result.rollouts):,} rollouts")
        for reason, count, example in result.failures[:_SHOWN_REASONS]:
            echo(f"  {count:,} x {one_line(reason)[:300]}")
            echo(f"      leyden show {directory} {example}")
    if result.model_calls:
        words = None if result.spending is None else result.spending.in_words(currency)
        cost = f"; cost {words}" if words else ""
        echo(
            f"model       {result.model_calls:,} calls, {result.prompt_tokens:,} prompt tokens, "
            f"{result.response_tokens:,} response tokens{cost}"
        )
    echo(f"took        {duration(result.seconds)}")
    echo(f"run         {directory}")
