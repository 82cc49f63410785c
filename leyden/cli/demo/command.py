"""`leyden demo`: train an agent on this machine, and show it."""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leyden._lib.extras import require_packages
from leyden.cli.output import AsJson, echo_json, terminal
from leyden.errors import ConfigError, LeydenError, RunInterrupted

if TYPE_CHECKING:
    from rich.console import Console


def demo(
    seed: Annotated[int | None, typer.Option(help="Of tasks, sampling and minibatches; 0 by default.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps; the recipe's number by default.")] = None,
    games: Annotated[
        int | None, typer.Option(min=1, help="Games that success is measured on, before and after; 1000 by default.")
    ] = None,
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="Two runs with one seed end with the same weights, to the bit (slower)."),
    ] = False,
    engine: Annotated[
        str | None, typer.Option(help="What samples the policy: embedded (the default), or vllm, a server on the CPU.")
    ] = None,
    vllm_python: Annotated[
        Path | None, typer.Option(help="The interpreter that has vLLM, with --engine vllm; this one by default.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where to keep the run; a new folder under .leyden/ by default.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Continue a run, by folder or name, with the options that it has; with --steps, until it has done that many.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a small language model to play guess-the-number, in a few minutes, on two cores.

    An agent written with the official openai client plays over HTTP; every token is recorded; reinforcement learning
    does the rest.

    \b
    Examples:
      leyden demo
      leyden demo --seed 3 --json > figures.json
      leyden demo --engine vllm --vllm-python .venvs/vllm/bin/python
      leyden demo --resume .leyden/20261121-101500-demo-ab12
      leyden demo --resume .leyden/20261121-101500-demo-ab12 --steps 60
    """
    from leyden._lib.logs import setup_logging

    require_packages("torch", "transformers", "openai", "matplotlib", extra="demo", needed_by="the demo")
    setup_logging("WARNING")
    if engine is not None:
        from leyden._lib.options import check_choice  # not above: it loads asyncio, which --help does without

        check_choice("--engine", engine, ("embedded", "vllm"))
    if vllm_python is not None and engine != "vllm":
        raise ConfigError("--vllm-python is the interpreter of the vLLM server; give --engine vllm too")
    if deterministic and engine == "vllm":
        raise ConfigError(
            "--deterministic needs --engine embedded: what vLLM samples depends on the requests of a batch"
        )
    python = None if vllm_python is None else str(vllm_python.absolute())
    given = {
        "seed": seed,
        "steps": steps,
        "games": games,
        "deterministic": deterministic or None,
        "engine": engine,
        "vllm_python": python,
    }
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    fixed = [*(name for name in chosen if name != "steps"), *(["run-dir"] if run_dir else [])]
    if resume is not None and fixed:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in fixed)
        raise ConfigError(f"a resumed run goes on as it was started; leave {names} out (--steps may change)")
    if resume is not None and not resume.is_dir():
        from leyden.training.runs import open_run

        source, resume = resume, open_run(resume).directory
        if resume is None:
            raise ConfigError(f"{source} is a store; give the folder of a run, or its name")
    console = terminal(err=as_json)
    console.print(
        "A language model learns to guess a number from 0 to 9 in four turns. "
        "It is measured on games before and after training.",
        highlight=False,
    )
    directory = resume or run_dir or Path(".leyden") / f"{time.strftime('%Y%m%d-%H%M%S')}-demo-{secrets.token_hex(2)}"
    _line(console, "run", str(directory))
    _train_and_show(console, directory, resume=resume is not None, chosen=chosen, as_json=as_json)


def _train_and_show(console: Console, directory: Path, *, resume: bool, chosen: dict[str, Any], as_json: bool) -> None:
    """Train, then print two games, one from before and one from after training, and the results.

    The imports take seconds, so they happen here, after the first lines were printed.
    chosen: the options that the user gave, for `DemoOptions`.
    """
    import asyncio

    from rich.columns import Columns
    from rich.panel import Panel
    from rich.text import Text

    from leyden._lib.formatting import duration
    from leyden.cli.demo.demo_run import (
        DemoOptions,
        draw_curve,
        games_before_and_after,
        python_line,
        run_demo,
        set_steps,
        start_run,
    )
    from leyden.training.runs.chart import sparkline
    from leyden.training.runs.display import show_command

    if not resume:
        start_run(directory, DemoOptions(**chosen))
    elif "steps" in chosen:
        set_steps(directory, chosen["steps"])
    how_to_go_on = f"Continue with: leyden demo --resume {directory}"
    try:
        result, summary = run_demo(directory)
    except RunInterrupted:
        raise RunInterrupted(f"stopped; what the run had finished is kept. {how_to_go_on}") from None
    except ConfigError:
        raise
    except LeydenError as error:
        raise type(error)(f"{error}\n{how_to_go_on}") from error
    before, after = asyncio.run(games_before_and_after(directory))
    games = {"before": before, "after": after}
    console.print(Columns([Panel(Text("\n".join(lines)), title=name) for name, lines in games.items()]))
    console.print(
        f"games won: {result.success_before:.1%} before, [bold]{result.success_after:.1%}[/] after training",
        highlight=False,
        soft_wrap=True,
    )
    _line(console, "by step", sparkline(result.rewards, 40))
    _line(
        console,
        "training",
        f"{result.rollouts:,} games, {result.model_calls:,} model calls, {duration(result.train_seconds)}",
    )
    _line(console, "curve", str(draw_curve(directory)))
    _line(console, "run", str(summary.run_dir))
    _line(console, "look", show_command(directory))
    _line(console, "play", python_line(directory))
    if as_json:
        echo_json(asdict(result))


def _line(console: Console, name: str, text: str) -> None:
    """Print one line that the terminal may wrap, so that a path or command can be copied."""
    console.print(f"{name + ':':10} {text}", highlight=False, soft_wrap=True, markup=False)
