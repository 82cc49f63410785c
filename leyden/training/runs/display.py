"""A run in words and a small curve: its first line, and the summary at its end.

Pure functions from data to text or HTML, which know no trainer, and `show`, which prints a text.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
import textwrap
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leyden._lib.formatting import duration, figure, one_line, printable_on, shortened
from leyden._lib.json import object_or_empty
from leyden._lib.text import text_of
from leyden.training.runs.chart import share, sparkline
from leyden.training.runs.folder import size_text

if TYPE_CHECKING:
    from leyden.training.runs.run import Run
    from leyden.training.runs.run_metrics import RewardMetrics
    from leyden.training.runs.summary import RunSummary

_CURVE_COLUMNS = 40
_SHOWN_REASONS = 5
_REASON_CHARACTERS = 300
_RUNS = Path(".leyden")
_WIDTH = 120
"""The columns of output that does not go to a terminal."""


def _terminal_width() -> int:
    """Return the columns of the terminal on standard error, or $COLUMNS if that is set."""
    chosen = os.environ.get("COLUMNS", "")
    if chosen.isdecimal() and int(chosen) > 0:
        return int(chosen)
    try:
        return os.get_terminal_size(sys.__stderr__.fileno()).columns or _WIDTH if sys.__stderr__ else _WIDTH
    except (OSError, ValueError):
        return _WIDTH


def show(text: str) -> None:
    """Write a text to standard error, if it is open: an error of the stream must not end the run."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{printable_on(sys.stderr, text)}\n")
        sys.stderr.flush()


# ---- the first line ------------------------------------------------------------------------------


def first_line(run: Run, config: Mapping[str, Any], *, width: int | None = None) -> str:
    """Return the run's name, algorithm, model and data in one line.

    For example `run 20261122-101500-ab12 | PolicyGradient on tiny (117k weights) | 32 tasks, 8 x 16 rollouts a step`.
    Parts that `config` lacks are left out. A part that makes the line wider than `width` is shortened or left out.

    config: the configuration in the run's `run.json`.
    width: columns; None takes those of the terminal on standard error, 120 without a terminal.
    """
    width = width or _terminal_width()
    algorithm, model = object_or_empty(config.get("algorithm")), object_or_empty(config.get("model"))
    options = object_or_empty(algorithm.get("options"))
    name = "run" if run.directory is None else f"run {run.directory.name}"
    length = object_or_empty(object_or_empty(config.get("data")).get("train")).get("length")
    noun = "initial states" if "episode_per_iter" in options else "tasks"
    tasks = f"{length:,} {noun}" if isinstance(length, int) else ""
    sampling = [tasks]
    if episodes := options.get("episode_per_iter"):
        sampling.append(f"{episodes:,} episodes an iteration")
    elif (n_tasks := options.get("tasks_per_step")) and (n_rollouts := options.get("rollouts_per_task")):
        sampling.append(f"{n_tasks} x {n_rollouts} rollouts a step")
    learner = str(algorithm.get("name") or "").rpartition(".")[2]
    policy = Path(str(model.get("name") or "")).name
    parts = [  # each with its shorter forms, the longest first
        [name],
        [f"{learner} on {policy}{_weights(model)}", f"{learner} on {policy}", learner] if policy else [learner],
        [", ".join(sampling), tasks],
    ]
    line = ""
    for choices in parts:
        for choice in choices:
            longer = f"{line} | {choice}" if line else choice
            if choice and (len(longer) <= width or not line):
                line = longer
                break
    return shortened(one_line(line), width)


def _weights(model: Mapping[str, Any]) -> str:
    n = model.get("n_weights")
    if not isinstance(n, int):
        return ""
    for limit, divisor, suffix in ((10**3, 1, ""), (10**6, 10**3, "k"), (10**9, 10**6, "M")):
        if n < limit:
            return f" ({figure(n / divisor, 3)}{suffix} weights)"
    return f" ({figure(n / 10**9, 3)}B weights)"


# ---- the summary ---------------------------------------------------------------------------------


def closing_summary(summary: RunSummary, width: int | None = None) -> str:
    """Return the lines that `fit` shows at the end of a run.

    They say how the run ended, how many rollouts it had and why some failed, its reward with a small curve, the reward
    of its validations, where its files are, and which commands show more.

    width: columns, for all lines but paths and commands; None takes those of the terminal on standard error, 120
        without a terminal.
    """
    width = width or _terminal_width()
    lines: list[str] = []
    if summary.seconds:
        lines.append(f"{_state(summary)} in {duration(summary.seconds)}")
    lines.append(": ".join(_counts(summary)))
    for reason in _failures(summary):
        lines += textwrap.wrap(
            reason, max(20, width), initial_indent="  ", subsequent_indent="    ", break_long_words=False
        )
    if summary.reward is not None and not _result_has_reward(summary):
        lines += textwrap.wrap(f"reward: {_reward(summary.reward)}", max(20, width), subsequent_indent="  ")
        if len(summary.reward.values) > 1:
            lines.append(f"  {sparkline(summary.reward.values, min(_CURVE_COLUMNS, width - 2))}")
    if validation := _validation(summary):
        lines.append(f"validation: {validation}")
    if (cost := _cost(summary)) is not None:
        lines += textwrap.wrap(f"cost: {cost}", max(20, width), subsequent_indent="  ")
    if summary.result is not None:
        lines.append(shortened(f"result: {one_line(text_of(repr, summary.result))}", max(20, width)))
    if summary.stopped is not None:
        lines += textwrap.wrap(f"stopped: {summary.stopped}", max(20, width), subsequent_indent="  ")
    if summary.run_dir is not None:
        lines += [f"{name}: {path}" for name, path in _paths(summary.run_dir).items()]
        if summary.seconds:
            commands = _commands(summary, summary.run_dir)
            together = f"look: {', '.join(commands)}"
            lines += (
                [together]
                if len(together) <= width
                else [f"look: {commands[0]}", *(f"      {command}" for command in commands[1:])]
            )
    return "\n".join(lines)


def summary_html(summary: RunSummary) -> str:
    """Return the summary as a table for a notebook, with the curve of the reward."""
    rows: list[tuple[str, str]] = []
    if summary.seconds:
        rows.append(("status", f"{_state(summary)} in {duration(summary.seconds)}"))
    rows.append(_counts(summary))
    rows += [("", reason) for reason in _failures(summary)]
    if summary.reward is not None and not _result_has_reward(summary):
        rows.append(("reward", _reward(summary.reward)))
    if validation := _validation(summary):
        rows.append(("validation", validation))
    if (cost := _cost(summary)) is not None:
        rows.append(("cost", cost))
    if summary.result is not None:
        rows.append(("result", shortened(one_line(text_of(repr, summary.result)), 200)))
    if summary.stopped is not None:
        rows.append(("stopped", summary.stopped))
    if summary.run_dir is not None:
        rows += _paths(summary.run_dir).items()
    if summary.run_dir is not None and summary.seconds:
        rows.append(("look", ", ".join(_commands(summary, summary.run_dir))))
    cells = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(text)}</td></tr>'
        for name, text in rows
    )
    return f"<div><table>{cells}</table>{_curve(summary.reward)}</div>"


def _state(summary: RunSummary) -> str:
    return "finished" if summary.stopped is None else "stopped"


def rollout_counts(by_status: Mapping[str, int], reflection_calls: int) -> str:
    counts = ", ".join(f"{count:,} {status}" for status, count in by_status.items() if count)
    calls = f"{reflection_calls:,} reflection call{'s' * (reflection_calls > 1)}" if reflection_calls else ""
    return "; ".join(filter(None, (counts, calls)))


def _counts(summary: RunSummary) -> tuple[str, str]:
    """Return what the run counts, rollouts or a simulator's episodes, and how many there were."""
    episodes, steps = (summary.metrics.get(name) for name in ("total_episodes", "total_steps"))
    if not any(summary.rollouts.values()) and isinstance(episodes, int) and isinstance(steps, int):
        return "episodes", f"{episodes:,} with {steps:,} steps"
    counts = rollout_counts(summary.rollouts, summary.reflection_calls) or "none"
    return "rollouts", counts + (
        f"; and {summary.forgotten:,} that retention has forgotten" if summary.forgotten else ""
    )


def _failures(summary: RunSummary) -> list[str]:
    shown = list(summary.failures.items())[:_SHOWN_REASONS]
    lines = [f"{count:,} x {shortened(one_line(reason), _REASON_CHARACTERS)}" for reason, count in shown]
    if len(summary.failures) > len(shown):
        rest = sum(summary.failures.values()) - sum(count for _, count in shown)
        lines.append(f"{rest:,} x something else ({len(summary.failures) - len(shown):,} other reasons)")
    return lines


def _result_has_reward(summary: RunSummary) -> bool:
    has_one = summary.reward is not None and len(summary.reward.values) == 1
    return has_one and getattr(summary.result, "reward", None) is not None


def _reward(reward: RewardMetrics) -> str:
    if len(reward.values) < 2:
        return figure(reward.last)
    return (
        f"{figure(reward.first)} -> {figure(reward.last)}, "
        f"best {figure(reward.best)} at iteration {reward.best_iteration:,}"
    )


def _validation(summary: RunSummary) -> str:
    """Return the first and last reward of the validations, and the best one if it is neither; an empty text if the line
    of the reward shows them.
    """
    reward = summary.val_reward
    if reward is None or reward == summary.reward:
        return ""
    if reward.best not in (reward.first, reward.last):
        return _reward(reward)
    return figure(reward.last) if len(reward.values) < 2 else f"{figure(reward.first)} -> {figure(reward.last)}"


def _cost(summary: RunSummary) -> str | None:
    return None if summary.spending is None else summary.spending.in_words(summary.currency)


def _paths(directory: Path) -> dict[str, str]:
    model = directory / "model"
    written = {"size": size_text(directory)} if directory.is_dir() else {}
    return {"run": str(directory), **({"model": str(model)} if model.is_dir() else {}), **written}


def show_command(directory: Path) -> str:
    return f"leyden show {_name(directory)}"


def _name(directory: Path) -> str:
    """Return a run as `leyden show` takes it: its name in `.leyden/`, else its folder's path."""
    return shlex.quote(directory.name if directory.parent in (_RUNS, _RUNS.resolve()) else str(directory))


def _commands(summary: RunSummary, directory: Path) -> list[str]:
    """Return the commands that show more of a run; `plot` only if there is a curve to draw."""
    show = show_command(directory)
    commands = [show, f"{show} --failed"] if summary.failures else [show]
    numbers = [name for name, value in summary.metrics.items() if isinstance(value, (int, float))]
    if any(reward is not None and len(reward.values) > 1 for reward in (summary.reward, summary.val_reward)):
        commands.append(f"leyden plot {_name(directory)}")
    elif summary.reward is None and numbers:
        metric = "loss" if "loss" in numbers else numbers[0]
        commands.append(f"leyden plot {_name(directory)} --metric {shlex.quote(metric)}")
    return commands


def _curve(reward: RewardMetrics | None) -> str:
    """Return the rewards as an SVG polyline of a few hundred points; empty for fewer than two."""
    values = () if reward is None else reward.values[:: max(1, len(reward.values) // 300)]
    points = [(index, value) for index, value in enumerate(values) if math.isfinite(value)]
    if len(points) < 2:
        return ""
    low, high = min(value for _, value in points), max(value for _, value in points)
    shares = [(index / (len(values) - 1), share(value, low, high) if high > low else 0.0) for index, value in points]
    line = " ".join(f"{4 + 292 * x:.1f},{56 - 52 * y:.1f}" for x, y in shares)
    return (
        '<svg width="300" height="60" role="img" aria-label="reward">'
        f'<polyline points="{line}" fill="none" stroke="#7c3aed" stroke-width="2"/></svg>'
    )
