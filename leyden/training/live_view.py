"""The state of a run as its live view shows it, and the lines of that view for any width and height.

A few lines, the most important first: the run, its stage, the queue, failures by reason, the last rollout. The module
knows neither terminals nor notebooks (`screens.py`). Counting an event costs the same however many there were; all
texts are made when a screen asks for them. To show something more, add a part to a block of `RunView`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import reprlib
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from rich.cells import cell_len, set_cell_size

from leyden._lib.formatting import duration, figure, one_line, size
from leyden.training.callbacks import Progress

if TYPE_CHECKING:
    from leyden.types import Rollout, Span

Line: TypeAlias = list[tuple[str, str]]
"""The pieces of one line, each a text and its style: "", "bar" and "rest" (of a bar), "bad", "dim"."""
Part: TypeAlias = tuple[int, str]
"""A piece of information and its rank: of those that do not fit, the ones with the highest ranks are left out."""

_MAX_BAR, _MIN_BAR = 24, 4
"""Columns of a bar; with less room than the minimum, none is drawn."""
_MAX_LINES = 14
_DIGITS = 3
"""Significant digits of metrics and rates."""
_POINTS = 1000
"""Of a longer curve, about so many values are drawn."""
_REASONS = 1000
"""The most different reasons that are counted; further ones count as one."""
_SHOWN_REASONS = 3
_ANSWER_LINES = 3
_ROLLOUT_SECONDS = 2.0
"""How long a rollout is shown, so that it can be read."""
_MEMORY_SECONDS = 10.0
"""Seconds between two measurements of memory, which looks at all processes of the machine."""
_EARLY = 0.05
"""The share of a run or stage after which the time left is worth showing."""


class RolloutTally:
    """Counts a run's rollouts for the views of the run. One thread adds to it, and any thread reads it.

    concurrency: how many rollouts the runners work on at once; None if unknown.
    running: returns how many rollouts run now; None if this process does not know.
    """

    def __init__(self, *, concurrency: int | None = None, running: Callable[[], int | None] = lambda: None) -> None:
        self.concurrency, self.running = concurrency, running
        self.unfinished: Callable[[], int] = lambda: 0
        """Returns how many rollouts are requested and not collected. The collector sets it."""
        self.done = self.failed = self.tokens = self.rewarded = 0
        self.rewards = 0.0
        """The sum of the rewards of `rewarded` rollouts."""
        self.cost: float | None = None
        self.unpriced_calls = 0
        """Calls whose cost is unknown, so that `cost` is a part of the whole."""
        self._reasons: Counter[str] = Counter()
        """The failures with each reason, without the numbers and ids in which equal ones differ."""
        self._newest: dict[str, str] = {}
        """The newest reason of each such group, as it is."""
        self._group_of: dict[str, str] = {}
        """The groups of reasons that came lately."""
        self.last: tuple[Rollout, Sequence[Span], float | None] | None = None

    def add(self, rollout: Rollout, spans: Sequence[Span], reward: float | None, *, cached: bool) -> None:
        """Count a finished rollout.

        cached: it had finished before it was requested, so that its tokens and cost are not this run's.
        """
        self.done += 1
        self.last = rollout, spans, reward
        if reward is not None:
            self.rewarded += 1
            self.rewards += reward
        if not cached and (attempt := getattr(rollout, "attempt", None)) is not None:
            self.tokens += attempt.prompt_tokens + attempt.response_tokens
            self.unpriced_calls += attempt.unpriced_calls
            if attempt.cost is not None:
                self.cost = (self.cost or 0.0) + attempt.cost
        if reward is None and rollout.status == "failed":
            from leyden.types import failure_reason

            self.add_failure(failure_reason(rollout))

    def add_failure(self, reason: str) -> None:
        self.failed += 1
        if (group := self._group_of.get(reason)) is None:
            from leyden.training.runs.rollouts import VARYING  # not above, because that package needs this one

            shown = one_line(reason[:300])
            group = VARYING.sub("#", shown)
            if group not in self._newest and len(self._newest) >= _REASONS:
                group = shown = "another reason"
            self._newest[group] = shown
            if len(self._group_of) >= _REASONS:
                self._group_of.clear()
            self._group_of[reason] = group
        self._reasons[group] += 1

    def sums(self) -> tuple[int, int, float]:
        return self.tokens, self.rewarded, self.rewards

    def top_reasons(self, n: int) -> list[str]:
        """Return the most frequent reasons of failures with their counts, one of each group."""
        return [f"{count:,} x {self._newest[group]}" for group, count in self._reasons.copy().most_common(n)]


@dataclass(slots=True)
class RunPause:
    """Whether somebody has paused a run. The run's steering changes it, and the run's views read it."""

    texts: Sequence[str] = ()
    """Who has paused the run, and the command that continues it; empty if it is not paused."""
    ended_at: float = -math.inf
    """When the newest pause ended, of `time.monotonic()`."""


@dataclass(slots=True)
class RunView:
    """The progress of a run, and the texts that show it. Times are those of `time.monotonic()`."""

    metrics: tuple[str, ...]
    unit: str
    iteration: int = 0
    total: int | None = None
    tally: RolloutTally = field(default_factory=RolloutTally)
    stage: str = ""
    """The current stage's name."""
    pause: RunPause = field(default_factory=lambda: RunPause())
    report: Progress | None = None
    """The stage's newest report; None before the first one."""
    stage_started: float = field(default_factory=time.monotonic)
    reported_at: float = field(default_factory=time.monotonic)
    before: tuple[int, int, float] = (0, 0, 0.0)
    """Tokens, rollouts with a reward and the sum of their rewards, as the tally had them when the stage began."""
    after: tuple[int, int, float] | None = None
    """The same numbers when the stage ended; None during a stage."""
    measured: dict[str, Any] = field(default_factory=dict[str, Any])
    """The metrics of the newest iteration that has any."""
    validated: dict[str, tuple[int, Any]] = field(default_factory=dict[str, tuple[int, Any]])
    """The newest validation metrics that are shown, each with the iteration in which it was measured."""
    every: int | None = None
    """After how many iterations a validation follows; None: never."""
    ended: bool = False
    marked_at: float = field(default_factory=time.monotonic)
    """When the newest stage ended, or the run began."""
    curve: list[float] = field(default_factory=list[float])
    """The values of the first metric."""
    _seconds: dict[str, deque[float]] = field(
        default_factory=lambda: {"train": deque(maxlen=100), "val": deque(maxlen=100)}
    )
    """How long the newest stages of each kind took, with everything before them."""
    _shown_rollout: tuple[float, Any, list[str]] = (0.0, None, [])
    """When the shown rollout was chosen, the rollout, and its texts."""
    _memory: tuple[float, str] = (-_MEMORY_SECONDS, "")

    # ---- what happens ----------------------------------------------------------------------------

    def begin_stage(self, name: str) -> None:
        self.stage, self.report, self.stage_started = name, None, time.monotonic()
        self.before, self.after = self.tally.sums(), None

    def progress(self, report: Progress) -> None:
        if self.after is not None:  # an algorithm that owns its loop announces no stages
            self.before, self.after, self.stage_started = self.after, None, time.monotonic()
        self.report, self.reported_at = report, time.monotonic()

    def end_stage(self, name: Literal["train", "val"], iteration: int, metrics: dict[str, Any]) -> None:
        now = time.monotonic()
        self._seconds[name].append(now - max(self.marked_at, self.pause.ended_at))
        self.iteration, self.marked_at = iteration, now
        self.update(metrics)
        self.after = self.tally.sums()
        if self.metrics and self.metrics[0].startswith("val/") == (name == "val"):
            self.extend_curve(metrics)

    def extend_curve(self, metrics: Mapping[str, Any]) -> None:
        """Add the first metric's value to the curve, if a stage has measured it."""
        value = metrics.get(self.metrics[0]) if self.metrics else None
        if isinstance(value, (int, float)):
            self.curve.append(value)

    def update(self, metrics: dict[str, Any]) -> None:
        self.measured = dict(metrics)
        self.validated.update(
            (name, (self.iteration, metrics[name]))
            for name in self.metrics
            if name.startswith("val/") and name in metrics
        )

    # ---- texts -----------------------------------------------------------------------------------

    @property
    def in_iterations(self) -> bool:
        """Whether the run is known to have iterations. Otherwise only its stage is shown."""
        return self.total is not None or self.iteration > 0

    @property
    def label(self) -> str:
        return f"iteration {self.iteration}" + ("" if self.total is None else f"/{self.total}")

    def under_way(self) -> str:
        """Return the stage with `done/total`; with the time since it began if it has reported none."""
        if self.report is None:
            return f"{self.stage} {duration(time.monotonic() - self.stage_started)}".strip()
        return f"{self.stage} {self.report.done:,}/{self.report.total:,} {self.unit}".strip()

    def values(self) -> list[str]:
        """Return the metrics of the newest iteration that are shown."""
        return [_value(name, self.measured[name]) for name in self.metrics if name in self.measured]

    def rates(self) -> list[str]:
        report, (tokens_before, _, _) = self.report, self.before
        if report is None or report.seconds <= 0 or not report.done:
            return []
        counts = {self.unit: float(report.done), **report.counts}
        counts.pop("cost", None)
        if tokens := self.tally.tokens - tokens_before:
            counts.setdefault("tokens", tokens)
        return [f"{figure(count / report.seconds, _DIGITS)} {name}/s" for name, count in counts.items()]

    def failures(self) -> str:
        return f"{self.tally.failed:,} failed" if self.tally.failed else ""

    def left(self) -> str:
        """Return the time that the run, or a stage without iterations, will probably still take.

        The rest is assumed to go as fast as this process has been on average; the first step, which warms up, counts
        only while there are few. Return an empty text if the total is unknown, at the beginning, when that would be a
        guess, at the end, and while the run is paused.
        """
        now, report = time.monotonic(), self.report
        if self.pause.texts:
            return ""
        if self.in_iterations:
            steps, (n_done, each) = (self.total or 0) - self.iteration, self._mean_seconds("train")
            if steps <= 0 or not n_done or (n_done < 2 and n_done < _EARLY * (n_done + steps)):
                return ""
            every, is_val = self.every or self.iteration + steps + 1, self.stage == "val" and self.after is None
            validations = (self.iteration + steps) // every - self.iteration // every + is_val
            _, each_val = self._mean_seconds("val")
            seconds = each * steps + each_val * validations - min(each_val if is_val else each, now - self.marked_at)
        else:
            if report is None or not 0 < report.done < report.total:
                return ""
            enough = max(2, _EARLY * report.total, self.tally.concurrency or 0)  # the first ones run together
            if report.done < min(enough, report.total / 2):
                return ""
            seconds = report.seconds * (report.total - report.done) / report.done - (now - self.reported_at)
        return f"{duration(max(0.0, seconds))} left"

    def _mean_seconds(self, name: str) -> tuple[int, float]:
        """Return how many of the newest stages of a kind are known, and how long one takes."""
        seconds = list(self._seconds[name])
        counted = seconds[1:] if len(seconds) > 2 else seconds
        return len(seconds), sum(counted) / max(1, len(counted))

    # ---- lines -----------------------------------------------------------------------------------

    def lines(self, width: int, height: int) -> list[Line]:
        """Return at most `height` lines of at most `width` columns.

        Each block gets a line, in order of importance; then blocks that have more to say get more, in the same order.
        At the end of a run one block is left.
        """
        blocks = [(self._run_lines, 2)] if self.in_iterations else []
        if not self.ended:
            blocks.append((self._paused_lines, 2))
        if (self.stage or self.report) and not (self.ended and blocks) and not self.pause.texts:
            blocks.append((self._stage_lines, 2))
        if len(blocks) > 1 and not self.ended:
            blocks += [(self._queue_lines, 2), (self._failure_lines, _SHOWN_REASONS), (self._rollout_lines, 5)]
        height = max(1, min(height, _MAX_LINES))
        drawn = [(block, lines) for block, most in blocks if (lines := block(width, 1 if self.ended else most))][
            :height
        ]
        rows = [1] * len(drawn)
        while sum(rows) < height and any(row < len(lines) for row, (_, lines) in zip(rows, drawn, strict=True)):
            for index, (_, lines) in enumerate(drawn):
                rows[index] += rows[index] < len(lines) and sum(rows) < height
        return [
            line
            for row, (block, lines) in zip(rows, drawn, strict=True)
            for line in (lines if row == len(lines) else block(width, row))
        ]

    def _run_lines(self, width: int, n_lines: int) -> list[Line]:
        parts: list[Part] = [(0, self.label)]
        for name in self.metrics:
            if name in self.validated:
                iteration, value = self.validated[name]
                at = "" if iteration == self.iteration else f" at {iteration}"
                parts.append((3, _value(name, value) + at))
            elif name in self.measured:
                parts.append((1 if name == self.metrics[0] else 5, _value(name, self.measured[name])))
            if name == self.metrics[0] and len(self.curve) > 1 and not self.ended:
                from leyden.training.runs.chart import sparkline  # not above, because that package needs this one

                sampled = self.curve[:: len(self.curve) // _POINTS + 1]
                parts.append((4, sparkline(sampled, max(8, min(32, width // 5)))))
        parts.append((2, "" if self.ended else self.left()))
        return flowed(parts, width, n_lines, self.iteration / self.total if self.total else None)

    def _paused_lines(self, width: int, n_lines: int) -> list[Line]:
        return [
            [(text, "bar") for text, _ in line] for line in flowed(list(enumerate(self.pause.texts)), width, n_lines)
        ]

    def _stage_lines(self, width: int, n_lines: int) -> list[Line]:
        tally, (_, rewarded, rewards) = self.tally, self.before
        parts: list[Part] = [(0, self.under_way())]
        if not self.in_iterations:
            parts += [*((1, value) for value in self.values()), (2, self.left())]
        if tally.rewarded > rewarded:
            parts.append(
                (3, f"reward {figure((tally.rewards - rewards) / (tally.rewarded - rewarded), _DIGITS)} so far")
            )
        parts += [(4, rate) for rate in self.rates()]
        indent = "  " if self.in_iterations else ""
        fraction = self.report.done / self.report.total if self.report and self.report.total else None
        return [[(indent, ""), *line] for line in flowed(parts, width - len(indent), n_lines, fraction)]

    def _queue_lines(self, width: int, n_lines: int) -> list[Line]:
        tally, report = self.tally, self.report
        parts = list[Part]()
        if (unfinished := tally.unfinished()) or tally.done:
            running = tally.running()
            parts.append((0, "queue"))
            if running is None:
                parts.append((0, f"{unfinished:,} waiting or running"))
            else:
                parts += [(0, f"{max(0, unfinished - running):,} waiting"), (0, f"{running:,} running")]
            parts.append((0, f"{tally.done:,} done"))
        cost = tally.cost if report is None else report.counts.get("cost", tally.cost)
        if cost is not None:
            parts.append((1, f"cost {'at least ' if tally.unpriced_calls else ''}{figure(float(cost), 4)}"))
        return flowed([*parts, (2, self._memory_text())], width, n_lines)

    def _memory_text(self) -> str:
        now = time.monotonic()
        if now - self._memory[0] >= _MEMORY_SECONDS:
            self._memory = now, f"memory {size(_memory_bytes())}"
        return self._memory[1]

    def _failure_lines(self, width: int, n_lines: int) -> list[Line]:
        if not self.tally.failed:
            return []
        label = f"failed {self.tally.failed:,}: "
        reasons = self.tally.top_reasons(_SHOWN_REASONS)
        if n_lines == 1:
            reasons = [", ".join(reasons)]
        texts = [(label if index == 0 else " " * len(label)) + each for index, each in enumerate(reasons[:n_lines])]
        return [[(cut(text, width), "bad")] for text in texts]

    def _rollout_lines(self, width: int, n_lines: int) -> list[Line]:
        """Show the task, the reward and the end of the last answer of the newest rollout."""
        now, (chosen_at, shown, texts) = time.monotonic(), self._shown_rollout
        if self.tally.last is not shown and now - chosen_at >= _ROLLOUT_SECONDS:
            shown = self.tally.last
            assert shown is not None
            rollout, spans, reward = shown
            outcome = rollout.status if reward is None else f"reward {figure(float(reward), _DIGITS)}"
            texts = [f"last rollout  {outcome}  {_shown(rollout.input)}", *_last_answer(spans)]
            self._shown_rollout = now, shown, texts
        if not texts:
            return []
        first, *answer = texts
        if n_lines == 1:
            return [[(cut(first, width), "dim")]]
        return [[(cut(text, width), "dim")] for text in (first, *(f"  > {each}" for each in answer[1 - n_lines :]))]


def flowed(parts: Sequence[Part], width: int, n_lines: int, fraction: float | None = None) -> list[Line]:
    """Return the parts of the lowest ranks that fit into `n_lines` lines of `width` columns, in their order.

    fraction: how much of a bar behind the first part is full, if there is room for a bar; None: no bar.
    """
    parts = [part for part in parts if part[1]]
    kept: list[int] = []
    for index in sorted(range(len(parts)), key=lambda index: parts[index][0]):
        more = sorted([*kept, index])
        if not kept or len(_broken([parts[each][1] for each in more], width)) <= n_lines:
            kept = more
    rows = _broken([parts[index][1] for index in kept], width)
    lines: list[Line] = [[("  ".join(row), "")] for row in rows]
    if lines and fraction is not None and (room := width - cell_len(lines[0][0][0]) - 1) >= _MIN_BAR:
        bar = min(_MAX_BAR, room)
        full = round(bar * min(1.0, max(0.0, fraction)))
        rest = "  ".join(["", *rows[0][1:]])
        lines[0] = [(f"{rows[0][0]} ", ""), ("━" * full, "bar"), ("─" * (bar - full), "rest"), (rest, "")]
    return lines


def _broken(texts: Sequence[str], width: int) -> list[list[str]]:
    """Return the texts in lines of at most `width` columns, with two spaces between them and before further lines."""
    rows: list[list[str]] = []
    used = 0
    for text in texts:
        if rows and used + 2 + cell_len(text) <= width:
            rows[-1].append(text)
            used += 2 + cell_len(text)
        else:
            rows.append([cut(text, width)] if not rows else ["", cut(text, width - 2)])
            used = sum(map(cell_len, rows[-1])) + 2 * (len(rows) > 1)
    return rows


def cut(text: str, width: int) -> str:
    """Return the text in at most `width` columns of a terminal; the end of a longer one is replaced by `…`."""
    if len(text) <= 4 * width and cell_len(text) <= width:
        return text
    return f"{set_cell_size(text[: 4 * width], max(0, width - 1)).rstrip()}…"[: max(0, width)]


def _value(name: str, value: Any) -> str:
    return f"{name} {figure(value, _DIGITS) if isinstance(value, (int, float)) else one_line(str(value))}"


def _shown(value: Any) -> str:
    """Return a task in one line, without reading all of a large one."""
    if isinstance(value, dict):
        items = itertools.islice(cast("dict[str, Any]", value).items(), 6)
        return ", ".join(f"{one_line(str(name)[:50])}: {_shown(each)}" for name, each in items)
    return one_line(value[:400] if isinstance(value, str) else reprlib.repr(value))


def _last_answer(spans: Sequence[Span]) -> list[str]:
    """Return the last lines of what the model said in the last call that is recorded; [] if there is none."""
    from leyden.adapter import read_model_call
    from leyden.adapter.attributes import as_dict, as_list

    for span in reversed(spans):
        if (call := read_model_call(span)) is not None and call.output_messages:
            message = as_dict(call.output_messages[0])
            content = message.get("content")
            texts = [content] if isinstance(content, str) else [as_dict(each).get("text") for each in as_list(content)]
            said = [line for line in " ".join(map(str, filter(None, texts)))[-2000:].splitlines() if line.strip()]
            tools = [as_dict(as_dict(tool).get("function")) for tool in as_list(message.get("tool_calls"))]
            said += [f"{tool.get('name')}({str(tool.get('arguments'))[:400]})" for tool in tools]
            return [one_line(line).strip() for line in said[-_ANSWER_LINES:]]
    return []


def _memory_bytes() -> int:
    """Return the resident memory of this process and its children. Pages that they share are counted for each."""
    import psutil

    total = 0
    with contextlib.suppress(psutil.Error, OSError):
        own = psutil.Process(os.getpid())
        for process in [own, *own.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):  # it has ended
                total += process.memory_info().rss
    return total
