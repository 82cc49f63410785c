"""`leyden lr-range`: try a few learning rates for a few steps each, and recommend one."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leyden.cli.output import AsJson, echo, echo_json

if TYPE_CHECKING:
    from leyden.algorithm.policy_gradient.rate_finder import RateFinder


def lr_range(
    agent: Annotated[str, typer.Argument(help="module:agent or file.py:agent.")],
    tasks: Annotated[Path, typer.Option("-t", "--tasks", metavar="FILE", help="The tasks: .jsonl, .json or .csv.")],
    model: Annotated[str, typer.Option("-m", "--model", metavar="FOLDER", help="The folder or hub name to train.")],
    rates: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Learning rates; by default five that suit the model's size.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Updates at each rate.")] = 4,
    lora: Annotated[
        int | None, typer.Option(min=1, metavar="RANK", help="Train an adapter; all weights by default.")
    ] = None,
    tasks_per_step: Annotated[int, typer.Option(min=1, help="Tasks in a step.")] = 8,
    rollouts: Annotated[int, typer.Option(min=2, help="Rollouts of each task in a step.")] = 8,
    minibatch_size: Annotated[
        int | None, typer.Option(min=1, help="Rollouts of each optimizer step; all by default.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Suggested to the agent; the context by default.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(min=2, help="The longest sequence; the model's by default.")] = None,
    seed: Annotated[int, typer.Option(help="Of tasks, sampling and minibatches.")] = 0,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where to keep the run; a new folder under .leyden/ by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find a learning rate: train with GRPO for a few steps at each of several, and recommend one.

    Every rate begins with the same weights and the same rollouts. The smallest rate is recommended whose reward is as
    good as the best up to noise. Ctrl-C keeps what was tried.

    \b
    Examples:
      leyden lr-range agent.py:agent --tasks train.jsonl --model ./start-model --max-tokens 64
      leyden lr-range agent.py:agent --tasks train.jsonl --model ./start-model --lora 16 --steps 6
      leyden lr-range agent.py:agent --tasks train.jsonl --model ./start-model --rates 1e-5,1e-4,1e-3 --json
    """
    from leyden._lib.logs import setup_logging
    from leyden.algorithm.policy_gradient.rate_finder import RateFinder
    from leyden.cli.inputs import load_agent, load_tasks
    from leyden.cli.model_option import ModelOption
    from leyden.engine import IsolatedBackend
    from leyden.errors import ConfigError, RunInterrupted
    from leyden.trainer import Trainer

    setup_logging("WARNING")
    try:
        chosen = None if rates is None else [float(rate) for rate in rates.split(",")]
    except ValueError:
        raise ConfigError(f"--rates is {rates!r}; it must be numbers, such as 1e-5,1e-4,1e-3") from None
    folder = ModelOption.of(f"policy={model}")
    if not folder.is_folder:
        raise ConfigError(
            f"--model is {model!r}; give a folder or a hub name, because a server's model cannot be trained"
        )
    options: dict[str, Any] = {"lora": {"rank": lora, "alpha": 2 * lora}} if lora else {}
    finder = RateFinder(
        IsolatedBackend(folder.address, max_length=max_length, seed=seed, **options),
        rates=chosen,
        steps_per_rate=steps,
        tasks_per_step=tasks_per_step,
        rollouts_per_task=rollouts,
        minibatch_size=minibatch_size,
        max_tokens=max_tokens,
        seed=seed,
    )
    finder.result_is_shown = True  # below
    directory = run_dir or Path(".leyden") / f"{time.strftime('%Y%m%d-%H%M%S')}-lr-range-{secrets.token_hex(2)}"
    stopped = False
    try:
        Trainer(algorithm=finder, run_dir=directory).fit(load_agent(agent), load_tasks(tasks))
    except RunInterrupted:
        stopped = True
    if as_json:
        trials = [
            {"rate": e.rate, "rewards": e.rewards, "max_kl": e.max_kl, "fall": e.fall or None} for e in finder.trials
        ]
        echo_json({"trials": trials, "recommended": finder.recommended, "run": str(directory)})
    else:
        _print(finder, stopped=stopped)
    if stopped:
        raise typer.Exit(130)


def _print(finder: RateFinder, *, stopped: bool) -> None:
    from leyden._lib.formatting import figure

    echo(f"{'rate':>9}  {'kl':>9}  reward before each update, and after the last")
    for trial in finder.trials:
        rewards = " ".join(f"{reward:.2f}" for reward in trial.rewards)
        note = "  fell" if trial.fall else "" if trial.last else "  stopped"
        mark = "  <- recommended" if trial.rate == finder.recommended else ""
        echo(f"{figure(trial.rate, 2):>9}  {figure(trial.max_kl, 2):>9}  {rewards}{note}{mark}")
    if stopped:
        echo(
            f"stopped: {len(finder.rates) - sum(bool(each.last or each.fall) for each in finder.trials)} rates are not tried to the end"
        )
    if finder.recommended is None:
        echo("no rate has raised the reward by more than noise: try more --steps or --rollouts, or larger --rates")
    else:
        rate = figure(finder.recommended, 2)
        echo(f"use it: PolicyGradient(..., optim=OptimParams(learning_rate={rate}))")
