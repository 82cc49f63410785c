"""`Evidence`: the data of a run that rules read. Each part is read once, when a rule asks for it, and within limits."""

from __future__ import annotations

import asyncio
import math
import re
import shlex
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard, TypeVar, cast

from leyden._lib.formatting import one_line
from leyden.adapter.calls import model_calls
from leyden.adapter.normalise import ModelCallView
from leyden.errors import LeydenError
from leyden.store.base import LightningStore
from leyden.training import MetricsRow, Stage
from leyden.training.runs import RecordedRun
from leyden.training.runs.control import read_control
from leyden.training.runs.folder import FAILURES, METRICS, Manifest, read_manifest
from leyden.training.runs.recorded_runs import FailedRollout, read_failures, read_rows
from leyden.training.runs.rollouts import VARYING, FailureGroup, group_failures, has_the_store_for_itself
from leyden.training.runs.run_metrics import metrics_of
from leyden.types import AttemptedRollout, Rollout, RolloutSummary, Span, Worker
from leyden.types.run_record import algorithm_group
from leyden.types.semconv import GEN_AI_REQUEST_MODEL

T = TypeVar("T")

_LOG_BYTES = 4_000_000
_WARNINGS = 2000
"""Different warnings of the log that are searched, the newest."""
_FEW, _ONE = 0.01, 0.1
"""Shares of the rollouts, and of a single one, below which a failure of a machine or a network is normal."""
_STORE_SECONDS = 3.0
"""The longest wait for a server's answer. A client would try again for a minute."""
_SAMPLED = 48
"""Succeeded rollouts whose spans are read, the newest; and a third of it failed ones."""
_SPANS = 500
"""Spans that are read of one rollout."""
_ALL_SPANS = 5000
"""After so many spans, no further rollout is read."""
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


@dataclass(frozen=True, slots=True)
class Said:
    """What a run's records say about one cause."""

    evidence: tuple[str, ...]
    """Failures and messages with their counts, the strongest first."""
    share: float
    """The share of the run's rollouts that it touches; 1 if the run ended because of it."""
    ended: bool
    """Whether the run ended because of it."""
    example: str | None
    """The id of a rollout that shows it."""


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
        self.store_trouble: str | None = None
        """Why the store could not be read; None if it was not needed yet, or answers."""

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
    def manifest(self) -> Manifest | None:
        """Which process works, or has worked, on the run; None for a run that is read from a store."""
        return None if self.run.directory is None else read_manifest(self.run.directory)

    @property
    def resume_command(self) -> str | None:
        """The command that resumes the run; None if its own program must do it."""
        if self.run.directory is None or not self.config.get("start"):
            return None
        return f"leyden run --from {shlex.quote(self.source)} --resume"

    @cached_property
    def cause(self) -> str:
        """Why the run ended too early, as it was recorded; empty otherwise."""
        return self.run.record.cause or ""

    def said(self, pattern: str) -> Said | None:
        """Return what failed rollouts, model calls, the log and the cause of the end say that matches a regular
        expression; None if nothing does. Case does not matter. With `tail`, only failed rollouts are read.
        """
        search = re.compile(pattern, re.I).search
        groups = self.failed_like(pattern)
        if self._last_bytes is not None:
            evidence = tuple(f"{each.count:,} rollouts failed: {each.reason}" for each in groups[:3])
            share = self.share_of_rollouts(sum(each.count for each in groups))
            return Said(evidence, share, False, groups[0].example) if groups else None
        lines = [line for line in self.warnings if search(line)]
        calls = {text: ids for text, ids in self.lost_calls.items() if search(text)}
        ended = bool(search(self.cause)) and self.run.state in ("failed", "stopped")
        if not (groups or lines or calls or ended):
            return None
        evidence = [f"{each.count:,} rollouts failed: {each.reason}" for each in groups[:3]]
        evidence += [f"the run ended: {self.cause}"] if ended and not groups else []
        if not groups:
            evidence += [
                f"the last model call of {len(ids):,} sampled rollouts failed: {text}" for text, ids in calls.items()
            ][:3]
        evidence += [f"the log: {line}" for line in lines[::-1]][: 3 - len(evidence)]
        in_calls = {each for ids in calls.values() for each in ids}
        sampled = len(self.succeeded) + len(self.failed)
        share = max(self.share_of_rollouts(sum(each.count for each in groups)), len(in_calls) / max(sampled, 1))
        example = groups[0].example if groups else next(iter(in_calls), None)
        n = max(len(in_calls), sum(each.count for each in groups))
        if not ended and not lines and (share < _FEW or (n < 2 and share < _ONE)):
            return None
        return Said(tuple(evidence), 1.0 if ended else share, ended, example)

    @cached_property
    def warnings(self) -> list[str]:
        """The first lines of the log's warnings and errors. Of those that differ in ids and numbers alone, the last."""
        lines = (line.text.partition("\n")[0] for line in self.log if line.level in ("WARNING", "ERROR", "CRITICAL"))
        return list({VARYING.sub("#", line): line for line in lines}.values())[-_WARNINGS:]

    @cached_property
    def lost_calls(self) -> dict[str, list[str]]:
        """The rollouts of the sample whose last model call failed, by the call's error. Agents often go on after it."""
        lost: dict[str, list[str]] = {}
        for each in (*self.failed, *self.succeeded):
            calls = [span for span in each.spans if GEN_AI_REQUEST_MODEL in span.attributes]
            last = max(calls, key=lambda span: span.start_time or 0.0, default=None)
            if last is not None and last.status.status_code == "ERROR":
                text = one_line(last.status.description or "it failed")[:300]
                lost.setdefault(text, []).append(each.rollout.rollout_id)
        return lost

    def share_of_rollouts(self, n: int) -> float:
        """Return which share of the run's finished rollouts so many are: of those in its metrics, or in its store."""
        total = metrics_of(self.rows).rollouts or (0 if self.counts is None else self.counts.finished)
        return min(1.0, n / max(total, n, 1))

    # ---- what the store has ----------------------------------------------------------------------

    @cached_property
    def counts(self) -> RolloutSummary | None:
        """Counts and measures of all rollouts; None without a store."""
        return self.query("its rollouts", lambda store: store.summarise_rollouts(run_id=self._run_id))

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

        return self.query("its tasks", read) or {}

    @cached_property
    def workers(self) -> list[Worker]:
        """The workers that were heard of since the run began."""
        found = self.query("its workers", lambda store: store.query_workers()) or []
        return [each for each in found if (each.last_heartbeat_time or 0.0) >= self.run.record.start_time]

    @cached_property
    def working(self) -> list[AttemptedRollout]:
        """The rollouts of which an attempt is under way: up to 200, the oldest first."""

        async def read(store: LightningStore) -> list[AttemptedRollout]:
            found = await store.query_rollouts(
                status_in=["preparing", "running"], run_id=self._run_id, sort_by="start_time", limit=200
            )
            return [each for each in found if isinstance(each, AttemptedRollout)]

        return self.query("its rollouts", read) or []

    @cached_property
    def now(self) -> float:
        """The time by the store's clock, in Unix seconds."""
        return self.query("its clock", _time_of) or time.time()

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
                if sum(len(one.spans) for one in sampled) >= _ALL_SPANS:
                    break
                if isinstance(each, AttemptedRollout) and each.group_id != own:
                    spans = await store.query_spans(each.rollout_id, each.attempt.attempt_id, limit=_SPANS)
                    sampled.append(SampledRollout(each, list(spans)))
            return sampled

        return self.query("its rollouts", read) or []

    def query(self, what: str, query: Callable[[LightningStore], Awaitable[T]]) -> T | None:
        """Return what a query of the store finds; None if the run has no store, or it cannot or must not be read."""
        if self._last_bytes is not None:
            return None
        if self.run.directory is not None and not self.config.get("store") and not has_the_store_for_itself(self.run):
            return None
        if self.store_trouble is not None:
            return None

        async def in_time(store: LightningStore) -> T:
            async with asyncio.timeout(_STORE_SECONDS if "://" in str(self.config.get("store")) else None):
                return await query(store)

        n_unread = len(self.unread)
        found = self._read(what, lambda: self.run.read_store(in_time))
        if len(self.unread) > n_unread:
            self.store_trouble = self.unread[-1]
        return found

    def _read(self, what: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (LeydenError, TimeoutError) as error:
            self.unread.append(f"{what} cannot be read: {str(error) or 'the store does not answer'}")
            return None


async def _time_of(store: LightningStore) -> float:
    return (await store.statistics())["time"]


def _is_finite(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and math.isfinite(value)
