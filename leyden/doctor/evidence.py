"""`Evidence`: the data of a run that rules read. Each part is read once, when a rule asks for it, and within limits."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard, TypeVar, cast

from leyden.adapter.calls import model_calls
from leyden.adapter.normalise import ModelCallView
from leyden.errors import LeydenError
from leyden.store.base import LightningStore
from leyden.training import MetricsRow, Stage
from leyden.training.runs import RecordedRun
from leyden.training.runs.control import read_control
from leyden.training.runs.folder import FAILURES, METRICS
from leyden.training.runs.recorded_runs import FailedRollout, read_failures, read_rows
from leyden.training.runs.rollouts import FailureGroup, group_failures, has_the_store_for_itself
from leyden.training.runs.run_metrics import metrics_of
from leyden.types import AttemptedRollout, Rollout, RolloutSummary, Span, Worker
from leyden.types.run_record import algorithm_group

T = TypeVar("T")

_LOG_BYTES = 4_000_000
_SAMPLED = 48
"""Succeeded rollouts whose spans are read, the newest; and a third of it failed ones."""
_SPANS = 500
"""Spans that are read of one rollout."""
_TASKS = 2000
"""Rollouts of each mode whose tasks are read, the first."""
_TAIL_BYTES = 500_000
_REFUSED = re.compile(r"(\d+) x (.+?)(?=; \d+ x |\. \d+ rollouts were cancelled|\. See such rollouts|\s*$)", re.S)
_LINE = re.compile(r"^(\S+ \S+) (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)$")


class LogLine(NamedTuple):
    """A record of the run's log. Continuation lines belong to it."""

    time: str
    level: str
    text: str


@dataclass(frozen=True, slots=True)
class SampledRollout:
    """A rollout with the spans of its latest attempt."""

    rollout: AttemptedRollout
    spans: Sequence[Span]
    """At most 500."""


class Evidence:
    """The data of one run.

    A part that cannot be read is empty, and `unread` has the reason.
    run: the run.
    source: the run as the user names it, for the commands of remedies; its recorded name by default.
    tail: read only the ends of the run's metrics, failures and log, and nothing of its store.
    """

    def __init__(self, run: RecordedRun, source: str | None = None, *, tail: bool = False) -> None:
        self.run, self.source, self._last_bytes = run, source or run.record.name, _TAIL_BYTES if tail else None
        self.unread: list[str] = []

    # ---- what was recorded in the folder ---------------------------------------------------------

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return self.run.record.config

    def option(self, path: str) -> Any:
        """Return a part of the configuration by its dotted path, such as `data.train.length`; None if it is not
        recorded. `algorithm.NAME` is an option of the algorithm; one that was left at its default is not recorded. If
        the option was changed while the run worked, return its last value.
        """
        if path in self._changed:
            return self._changed[path]
        names = path.split(".")
        if names[0] == "algorithm" and names[1] != "name":
            names.insert(1, "options")
        at: Any = self.config
        for name in names:
            at = cast("Mapping[str, Any]", at).get(name) if isinstance(at, Mapping) else None
        return at

    @cached_property
    def _changed(self) -> dict[str, Any]:
        """The options that `leyden set` and `leyden extend` have changed, by path."""
        directory = self.run.directory
        lines = [] if directory is None else self._read("what was asked of it", lambda: read_control(directory)) or []
        return {line.path: line.value for line in lines if line.path is not None and line.state == "done"}

    @cached_property
    def rows(self) -> list[MetricsRow]:
        """The rows of all stages in order."""
        directory, last = self.run.directory, self._last_bytes
        if last is None or directory is None:
            return self._read("its metrics", self.run.metrics) or []
        return self._read("its metrics", lambda: read_rows(directory / METRICS, last_bytes=last)) or []

    @cached_property
    def train_rows(self) -> list[MetricsRow]:
        return [row for row in self.rows if row.stage == "train"]

    def series(self, name: str, stage: Stage = "train") -> list[tuple[int, float]]:
        """Return the iterations and the finite values of a metric."""
        found = [(row.iteration, row.metrics.get(name)) for row in self.rows if row.stage == stage]
        return [(n, float(value)) for n, value in found if _is_finite(value)]

    def total(self, *names: str, last: int = 0) -> float:
        """Return the sum of metrics over the training rows, or over the last ones of them."""
        rows = self.train_rows[-last:]
        return math.fsum(n for row in rows for name in names if _is_finite(n := row.metrics.get(name, 0)))

    @cached_property
    def failures(self) -> list[FailedRollout]:
        directory, last = self.run.directory, self._last_bytes
        if last is None or directory is None:
            return self._read("its failures", self.run.failures) or []
        return self._read("its failures", lambda: read_failures(directory / FAILURES, last_bytes=last)) or []

    @cached_property
    def failure_groups(self) -> list[FailureGroup]:
        """The failures by reason, the most frequent first."""
        return group_failures(self.failures)

    def failed_like(self, pattern: str) -> list[FailureGroup]:
        """Return the groups of failures whose reason or kind matches a regular expression; case does not matter."""
        search = re.compile(pattern, re.I).search
        return [each for each in self.failure_groups if search(f"{each.reason_kind}: {each.reason}")]

    @cached_property
    def log(self) -> list[LogLine]:
        """The records in the last 4 MB of the run's log."""
        path = self.run.log_path
        if path is None:
            return []
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - (self._last_bytes or _LOG_BYTES)))
            text = file.read().decode("utf-8", "replace")
        lines: list[LogLine] = []
        for line in text.split("\n"):
            if (found := _LINE.match(line)) is not None:
                lines.append(LogLine(*found.groups()))
            elif lines:
                lines[-1] = lines[-1]._replace(text=f"{lines[-1].text}\n{line}".rstrip())
        return lines

    def logged(self, pattern: str) -> list[LogLine]:
        """Return the warnings and errors of the log that match a regular expression; case does not matter."""
        search = re.compile(pattern, re.I | re.S).search
        return [line for line in self.log if line.level in ("WARNING", "ERROR", "CRITICAL") and search(line.text)]

    @cached_property
    def refusals(self) -> Counter[str]:
        """The model calls that could not be trained on, by reason, as far as the log and the cause of the end name
        them.
        """
        found = Counter[str]()
        for text in (*(line.text for line in self.logged("cannot be trained on: ")), self.cause):
            for count, reason in _REFUSED.findall(text.partition("cannot be trained on: ")[2]):
                found[reason] += int(count)
        return found

    @cached_property
    def cause(self) -> str:
        """Why the run ended too early, as it was recorded; empty otherwise."""
        return self.run.record.cause or ""

    def share_of_rollouts(self, n: int) -> float:
        """Return which share of the run's finished rollouts so many are: of those in its metrics, or in its store."""
        total = metrics_of(self.rows).rollouts or (0 if self.counts is None else self.counts.finished)
        return min(1.0, n / max(total, n, 1))

    # ---- what the store has ----------------------------------------------------------------------

    @cached_property
    def counts(self) -> RolloutSummary | None:
        """Counts and measures of all rollouts; None without a store."""
        return self._query("its rollouts", lambda store: store.summarise_rollouts(run_id=self._run_id))

    @cached_property
    def succeeded(self) -> list[SampledRollout]:
        """The newest succeeded rollouts of the agent: up to 48."""
        return self._sample("succeeded", _SAMPLED)

    @cached_property
    def failed(self) -> list[SampledRollout]:
        """The newest failed rollouts that have an attempt: up to 16."""
        return self._sample("failed", _SAMPLED // 3)

    @cached_property
    def calls(self) -> list[tuple[SampledRollout, list[ModelCallView]]]:
        """The sampled succeeded rollouts that have model calls, with these calls."""
        return [(each, calls) for each in self.succeeded if (calls := model_calls(each.spans))]

    @cached_property
    def tasks(self) -> dict[str, list[Rollout]]:
        """The first rollouts by mode, `train` and `val`: one of each group, among up to 2,000 rollouts each."""

        async def read(store: LightningStore) -> dict[str, list[Rollout]]:
            found: dict[str, list[Rollout]] = {}
            for mode in ("train", "val"):
                rollouts = await store.query_rollouts(
                    mode_in=[mode], run_id=self._run_id, sort_by="start_time", limit=_TASKS
                )
                own = algorithm_group(self.run.record.run_id)
                groups = {each.group_id or each.rollout_id: each for each in rollouts if each.group_id != own}
                found[mode] = list(groups.values())
            return found

        return self._query("its tasks", read) or {}

    @cached_property
    def workers(self) -> list[Worker]:
        return list(self._query("its workers", lambda store: store.query_workers()) or [])

    @property
    def _run_id(self) -> str | None:
        return None if has_the_store_for_itself(self.run) else self.run.record.run_id

    def _sample(self, status: Any, limit: int) -> list[SampledRollout]:
        async def read(store: LightningStore) -> list[SampledRollout]:
            found = await store.query_rollouts(
                status_in=[status], run_id=self._run_id, sort_by="end_time", sort_order="desc", limit=limit
            )
            own = algorithm_group(self.run.record.run_id)  # the algorithm's calls of a reflection model
            sampled: list[SampledRollout] = []
            for each in found:
                if isinstance(each, AttemptedRollout) and each.group_id != own:
                    spans = await store.query_spans(each.rollout_id, each.attempt.attempt_id, limit=_SPANS)
                    sampled.append(SampledRollout(each, list(spans)))
            return sampled

        return self._query("its rollouts", read) or []

    def _query(self, what: str, query: Callable[[LightningStore], Awaitable[T]]) -> T | None:
        """Return what a query of the store finds; None if the run has no store, or it cannot or must not be read."""
        if self._last_bytes is not None:
            return None
        if self.run.directory is not None and not self.config.get("store") and not has_the_store_for_itself(self.run):
            return None
        return self._read(what, lambda: self.run.read_store(query))

    def _read(self, what: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except LeydenError as error:
            self.unread.append(f"{what} cannot be read: {error}")
            return None


def _is_finite(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and math.isfinite(value)
