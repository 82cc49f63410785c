"""`leyden demo`: train an agent on this machine, and show it."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel

from leyden.errors import ConfigError, RunInterrupted

__all__ = ["demo"]


def demo(
    seed: Annotated[int, typer.Option(help="Of tasks, sampling and minibatches.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps; the recipe's number by default.")] = None,
    games: Annotated[int, typer.Option(min=1, help="Games that success is measured on, before and after.")] = 1000,
    deterministic: Annotated[
        bool, typer.Option(help="Two runs with one seed end with the same weights, to the bit (slower).")
    ] = False,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where to keep the run; a new folder under .leyden/ by default.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Continue a stopped or killed run.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")] = None,
) -> None:
    """Train a small language model to play guess-the-number, in a few minutes, on two cores.

    An agent written with the official openai client plays over HTTP; every token is recorded; reinforcement learning does the rest.

    \b
    Examples:
      leyden demo
      leyden demo --seed 3 --json figures.json
      leyden demo --resume .leyden/20261121-101500-demo-ab12
    """
    _require_demo_packages()
    from leyden.demo.run import DemoOptions, draw_curve, games_before_and_after, python_line, run_demo
    from leyden.utils.logs import setup_logging

    setup_logging("WARNING")
    console = Console()
    if resume is not None and run_dir is not None:
        raise ConfigError("--resume names the run's folder already; leave --run-dir out")
    directory = resume or run_dir or Path(".leyden") / f"{time.strftime('%Y%m%d-%H%M%S')}-demo-{secrets.token_hex(2)}"
    options = DemoOptions(
        seed=seed, games=games, deterministic=deterministic, **({} if steps is None else {"steps": steps})
    )
    console.print(f"run: {directory}", highlight=False, soft_wrap=True)
    try:
        result, summary = run_demo(directory, options, resume=resume is not None)
    except RunInterrupted:
        raise RunInterrupted(
            f"stopped; everything finished is kept. Continue with: leyden demo --resume {directory}"
        ) from None
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(result), indent=2) + "\n")
    before, after = asyncio.run(games_before_and_after(directory))
    console.print(Columns([Panel("\n".join(before), title="before"), Panel("\n".join(after), title="after")]))
    console.print(
        f"games won: {result.success_before:.1%} before, [bold]{result.success_after:.1%}[/] after "
        f"{result.rollouts:,} games ({result.model_calls:,} model calls, {result.train_seconds:.0f} s of training)",
        highlight=False,
    )
    console.print(f"curve:     {draw_curve(directory)}", highlight=False, soft_wrap=True)
    console.print(f"run:       {summary.run_dir}", highlight=False, soft_wrap=True)
    console.print(f"play:      {python_line(directory)}", highlight=False, soft_wrap=True, markup=False)


def _require_demo_packages() -> None:
    import importlib.util

    missing = [
        name for name in ("torch", "transformers", "openai", "matplotlib") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise ConfigError(f"the demo needs {', '.join(missing)}; install it with: pip install 'leyden[demo]'")
