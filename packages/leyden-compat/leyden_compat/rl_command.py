"""`leyden rl`: train and backtest policies of order execution, as a configuration file says."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from leyden._lib.extras import require_packages
from leyden.cli.output import AsJson, echo, echo_data
from leyden.errors import ConfigError, LeydenError

rl_commands = typer.Typer(
    help="Train and test policies in simulators.", no_args_is_help=True, rich_markup_mode=None, add_completion=False
)

_CONFIG_NAME = "config.json"


@rl_commands.command()
def train(
    config_file: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="YAML or JSON; with --resume, the run's own by default.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where to keep the run; trainer.checkpoint_path, or a new folder under .leyden/, by default."
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with a stopped, killed or finished run.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a policy that executes orders.

    \b
    Examples:
      leyden rl train ppo.yaml
      leyden rl train ppo.yaml --run-dir runs/ppo
      leyden rl train --resume runs/ppo
      leyden rl train longer.yaml --resume runs/ppo

    Sections of the file: runtime, env, simulator, data, state_interpreter, action_interpreter, reward, network, policy,
    trainer. `_base_: other.yaml` starts from another file. Paths in it are relative to the current folder.
    """
    require_packages("numpy", "gymnasium", "torch", extra="rl", needed_by="leyden rl")
    from leyden._lib.atomic import private_directory
    from leyden._lib.logs import setup_logging
    from leyden.training import ProgressBar
    from leyden_compat.order_execution.config import load_config, read_config
    from leyden_compat.order_execution.run import train_orders

    if resume is not None and run_dir is not None:
        raise ConfigError("give --run-dir for a new run or --resume for one that is there, not both")
    if config_file is None and resume is None:
        raise ConfigError("give a configuration file, or --resume and a run")
    if resume is not None and not (resume / _CONFIG_NAME).is_file():
        raise ConfigError(f"{resume} is no run: it has no {_CONFIG_NAME}")
    setup_logging("WARNING")
    chosen = config_file or (resume or Path()) / _CONFIG_NAME
    config = load_config(chosen)
    given = config.trainer.checkpoint_path
    new = Path(".leyden") / f"{time.strftime('%Y%m%d-%H%M%S')}-rl-{secrets.token_hex(2)}"
    directory = resume or run_dir or (Path(given) if given else new)
    if resume is None and (directory / _CONFIG_NAME).exists():
        raise ConfigError(
            f"{directory} holds a run already; continue it with --resume {directory}, or give another --run-dir"
        )
    content = json.dumps(read_config(chosen), indent=2, default=str) + "\n"
    echo(f"run: {directory}", err=as_json)
    how_to_go_on = f"Continue with: leyden rl train --resume {directory}"
    bar = ProgressBar(metrics=("reward", "pa", "val/pa", "loss"), unit="orders")
    private_directory(directory)
    (directory / _CONFIG_NAME).write_text(content, encoding="utf-8")
    try:
        result = train_orders(config, directory, resume=resume is not None, callbacks=[bar])
    except KeyboardInterrupt:
        _report_stopped(how_to_go_on)
        raise typer.Exit(130) from None
    except ConfigError:
        raise
    except LeydenError as error:
        raise type(error)(f"{error}\n{how_to_go_on}") from error
    if not result.finished:
        _report_stopped(how_to_go_on)
        raise typer.Exit(130)
    shown = [f"{name} {result.metrics[name]:.4g}" for name in ("reward", "pa", "val/pa") if name in result.metrics]
    echo_data(
        as_json,
        {"run": directory, "iterations": result.iterations, "metrics": dict(result.metrics)},
        f"trained: {result.iterations} iterations  {'  '.join(shown)}",
        f"test:    leyden rl backtest {config_file or chosen} --run {directory}",
    )


@rl_commands.command()
def backtest(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML or JSON, as for training.")],
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="The run, or one of its checkpoints, whose policy is tested; trainer.checkpoint_path by default.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The table, a row for each order; backtest.csv in the run by default."),
    ] = None,
    orders: Annotated[str, typer.Option(help="Which orders: test, valid or train.")] = "test",
    as_json: AsJson = False,
) -> None:
    """Execute every order of a test once, and compare its price with the average market price.

    \b
    Examples:
      leyden rl backtest ppo.yaml --run runs/ppo
      leyden rl backtest twap.yaml --output twap.csv
      leyden rl backtest ppo.yaml --run runs/ppo/checkpoints/step-000050 --orders valid
    """
    require_packages("numpy", "gymnasium", "torch", extra="rl", needed_by="leyden rl")
    from leyden._lib.logs import setup_logging
    from leyden_compat.order_execution.config import load_config
    from leyden_compat.order_execution.run import backtest_orders

    setup_logging("WARNING")
    config = load_config(config_file)
    given = config.trainer.checkpoint_path
    checkpoint = run or (Path(given) if given and Path(given).exists() else None)
    if checkpoint is not None and not checkpoint.exists():
        raise ConfigError(f"--run {checkpoint}: there is no such run or checkpoint")
    table = output or (checkpoint if checkpoint is not None and checkpoint.is_dir() else Path()) / "backtest.csv"
    result = backtest_orders(config, checkpoint, table, tag=orders)
    echo_data(
        as_json,
        {**asdict(result), "table": table},
        f"{result.n_orders} orders: price advantage {result.pa:+.2f} +- {result.pa_standard_error:.2f} basis points (standard error)",
        f"traded: {result.ffr:.1%} of their amounts",
        f"table:  {table}",
    )


def _report_stopped(how_to_go_on: str) -> None:
    echo(err=True)
    echo(f"stopped; every finished iteration is kept. {how_to_go_on}", err=True)
