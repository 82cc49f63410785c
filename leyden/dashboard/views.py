"""The views of the dashboard as JSON: functions of a source and of what a page asks for.

Each is a GET of `/api/NAME`. A run's own parts are those of `leyden.report`, so that report and dashboard say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final, Literal, cast, get_args

from leyden import __version__
from leyden._lib.json import Json
from leyden._lib.logs import Preview
from leyden.adapter.transcript import answer_of
from leyden.dashboard.review import Order, answered, queue
from leyden.dashboard.source import Source
from leyden.doctor import Evidence, diagnose
from leyden.errors import ConfigError, LeydenError
from leyden.report import run_data
from leyden.report.credit import recorded_credit
from leyden.report.prompts import text_changes
from leyden.report.rollouts import RolloutViews
from leyden.report.tokens import Texts, token_texts
from leyden.store.base import LightningStore
from leyden.training.runs import RecordedRun
from leyden.training.runs.comparison import compare_runs
from leyden.training.runs.overview import as_data
from leyden.training.runs.recorded_runs import iteration_of
from leyden.training.runs.rollouts import has_the_store_for_itself
from leyden.types import (
    AttemptedRollout,
    PromptTemplate,
    ResourcesUpdate,
    Rollout,
    RolloutMode,
    RolloutStatus,
    RolloutSummary,
    Span,
    failure_reason,
)

_PAGE, _MAX_PAGE = 50, 500
_MAX_COMPARED = 4
_MAX_SPANS = 500
_MAX_MEMBERS = 16
_SORTS: Final = ("start_time", "end_time", "reward", "tokens", "seconds", "cost")


class Query:
    """The parameters of a request. Each value is checked, and a parameter that its view does not read is refused."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given
        self._read: set[str] = set()

    def text(self, name: str, default: str | None = None) -> str | None:
        self._read.add(name)
        return self._given.get(name, default)

    def required(self, name: str) -> str:
        if not (value := self.text(name)):
            raise ConfigError(f"{name} is missing; give ?{name}=")
        return value

    def one_of(self, name: str, possible: tuple[str, ...]) -> str | None:
        value = self.text(name) or None
        if value is not None and value not in possible:
            raise ConfigError(f"{name} is {value!r}; possible: {', '.join(possible)}")
        return value

    def number(self, name: str) -> float | None:
        value = self.text(name) or None
        try:
            return None if value is None else float(value)
        except ValueError:
            raise ConfigError(f"{name} is {value!r}; give a number") from None

    def whole(self, name: str, default: int, *, at_most: int) -> int:
        value = self.number(name)
        if value is not None and not (value.is_integer() and 0 <= value <= at_most):
            raise ConfigError(f"{name} is {value:g}; give a whole number from 0 to {at_most:,}")
        return default if value is None else int(value)

    def check(self) -> None:
        """Raise ConfigError for a parameter that the view does not read."""
        if unknown := sorted(self._given.keys() - self._read):
            raise ConfigError(f"{unknown[0]!r} is no parameter of this view; possible: {', '.join(sorted(self._read))}")


View = Callable[[Source, Query], Any]


def runs(source: Source, query: Query) -> Json:
    """All runs: their heads, the newest first, and the reasons why others are left out."""
    query.check()
    found, damaged = source.runs()
    heads: list[Json] = []
    for run in found:
        try:
            heads.append(as_data(run))
        except LeydenError as error:
            damaged.append(str(error))
    return {"source": source.name, "version": __version__, "runs": heads, "damaged": damaged}


def run(source: Source, query: Query) -> Json:
    """One run, as in its report, without whole rollouts."""
    opened = source.run(query.required("run"))
    query.check()
    return run_data(opened)


def metric(source: Source, query: Query) -> Json:
    """All values of some metrics of some runs: `name` and `run`, each several, separated by commas."""
    names, run_ids = query.required("name").split(","), query.required("run").split(",")
    query.check()
    curves: list[Json] = []
    for run_id in run_ids[:_MAX_COMPARED]:
        rows = source.run(run_id).metrics()
        curves += [
            {
                "run": run_id,
                "name": name,
                "stage": stage,
                "points": [
                    [row.iteration, row.metrics[name]] for row in rows if row.stage == stage and name in row.metrics
                ],
            }
            for name in names
            for stage in ("train", "val")
        ]
    return {"curves": [each for each in curves if each["points"]]}


def rollouts(source: Source, query: Query) -> Json:
    """A page of a run's rollouts that fit some filters, their number, and the histogram of their rewards."""
    opened = source.run(query.required("run"))
    sort = query.one_of("sort", _SORTS) or "start_time"
    order: Literal["asc", "desc"] = "asc" if query.one_of("order", ("asc", "desc")) == "asc" else "desc"
    status, mode = query.one_of("status", get_args(RolloutStatus)), query.one_of("mode", get_args(RolloutMode))
    least, greatest = query.number("min_reward"), query.number("max_reward")
    offset, limit = query.whole("offset", 0, at_most=10**9), query.whole("limit", _PAGE, at_most=_MAX_PAGE)
    failure, group, contains = query.text("failure") or None, query.text("group") or None, query.text("id") or None
    query.check()
    filters: dict[str, Any] = {
        "run_id": None if has_the_store_for_itself(opened) else opened.record.run_id,
        "status_in": None if status is None else [status],
        "mode_in": None if mode is None else [mode],
        "failure_in": None if failure is None else [failure],
        "between": None if least is None and greatest is None else {"reward": (least, greatest)},
    }

    async def read(store: LightningStore) -> Json:
        page = await store.query_rollouts(
            **filters,
            group_id=group,
            rollout_id_contains=contains,
            sort_by=None if sort == "start_time" else sort,
            sort_order=order,
            limit=limit,
            offset=offset,
        )
        # the store counts by these filters alone
        summary = RolloutSummary(finished=0)
        if group is None and contains is None:
            summary = await store.summarise_rollouts(**filters, measures=("reward",))
        reward = summary.measures.get("reward")
        answers = await store.query_spans_of([each.rollout_id for each in page]) if limit <= _PAGE else {}
        return {
            "total": page.total,
            "by_status": summary.by_status,
            "by_failure": summary.by_failure,
            "reward": None if reward is None else reward.model_dump(mode="json"),
            "rollouts": [
                {**_row(each), "answer": _short(answer_of(answers.get(each.rollout_id, [])))} for each in page
            ],
        }

    return opened.read_store(read)


def rollout(source: Source, query: Query) -> Json:
    """One rollout: its attempts, its spans in time, and its conversation with tokens."""
    opened, rollout_id = source.run(query.required("run")), query.required("id")
    query.check()
    texts, no_texts = _texts(opened)

    async def read(store: LightningStore) -> Json:
        run_id = None if has_the_store_for_itself(opened) else opened.record.run_id
        (found,) = await store.query_rollouts(rollout_id_in=[rollout_id], run_id=run_id) or [None]
        if found is None:
            raise ConfigError(f"run {opened.record.name} has no rollout {rollout_id!r}")
        attempts = await store.query_attempts(rollout_id)
        spans, n_spans = list[Span](), 0
        if attempts:
            page = await store.query_spans(rollout_id, attempts[-1].attempt_id, limit=_MAX_SPANS)
            spans, n_spans = list(page), page.total
        return {
            **_row(found),
            "input": found.input,
            "all_attempts": [each.model_dump(mode="json") for each in attempts],
            "spans": [_span(each) for each in spans],
            "n_spans": n_spans,
            "no_texts": no_texts,
            "rollout": await _views(opened, store, texts).view(found),
        }

    return opened.read_store(read)


def group(source: Source, query: Query) -> Json:
    """The rollouts of one task of a step, side by side, with their advantages."""
    opened, group_id = source.run(query.required("run")), query.required("group")
    query.check()
    texts, _ = _texts(opened)

    async def read(store: LightningStore) -> tuple[list[Json], int]:
        views = _views(opened, store, texts)
        page = await store.query_rollouts(group_id=group_id, run_id=views.run_id, limit=_MAX_MEMBERS)
        return [await views.view(each) for each in page], page.total

    found, size = opened.read_store(read)
    if not found:
        raise ConfigError(f"there is no group {group_id!r} in run {opened.record.name}")
    estimator = recorded_credit(opened).get("advantages")
    return {"group_id": group_id, "size": size, "estimator": estimator, "rollouts": found}


def compare(source: Source, query: Query) -> Json:
    """The comparison of the first of two to four runs with each of the others."""
    ids = query.required("run").split(",")
    query.check()
    if not 2 <= len(ids) <= _MAX_COMPARED:
        raise ConfigError(
            f"a comparison needs 2 to {_MAX_COMPARED} runs, and {len(ids)} are given; choose them in the list of runs"
        )
    opened = [source.run(run_id) for run_id in ids]
    return {"runs": [as_data(each) for each in opened], **compare_runs(opened)}


def doctor(source: Source, query: Query) -> Json:
    """The findings of the doctor about a run."""
    opened = source.run(query.required("run"))
    query.check()
    found = diagnose(Evidence(opened))
    return {
        "findings": [{"rule": name, **asdict(each)} for name, each in found.findings.items()],
        "unread": found.unread,
    }


def workers(source: Source, query: Query) -> Json:
    """The workers of a run's store, and the newest value of each series of its monitors."""
    opened = source.run(query.required("run"))
    query.check()

    async def read(store: LightningStore) -> Json:
        samples = await store.query_samples(sort_order="desc", limit=2000)
        return {
            "workers": [each.model_dump(mode="json") for each in await store.query_workers()],
            "samples": [each.model_dump(mode="json") for each in samples],
        }

    return opened.read_store(read)


def resources(source: Source, query: Query) -> Json:
    """The newest versions of a store's resources with their labels, and what each prompt changed in its parent's."""
    opened = source.run(query.required("run"))
    query.check()

    async def read(store: LightningStore) -> Json:
        found = list(await store.query_resources(sort_by="create_time", sort_order="desc", limit=_PAGE))
        labels = await store.get_labels()
        known = {(each.resources_id, each.version): each for each in found}
        return {
            "versions": [_version(each, known.get(each.parent or ("", 0))) for each in found],
            "labels": [each.model_dump(mode="json") for each in labels],
        }

    return opened.read_store(read)


def releases(source: Source, query: Query) -> Json:
    """The releases of a store with their evidence, and the newest changes of labels with who and why."""
    opened = source.run(query.required("run"))
    query.check()

    async def read(store: LightningStore) -> Json:
        return {
            "releases": [each.model_dump(mode="json") for each in await store.query_releases()],
            "audit": [each.model_dump(mode="json") for each in await store.query_audit(limit=_MAX_PAGE)][::-1],
        }

    return opened.read_store(read)


def review(source: Source, query: Query) -> Json:
    """The queue of a person who judges a run's rollouts."""
    opened, who = source.run(query.required("run")), query.required("who")
    order = query.one_of("order", get_args(Order)) or "random"
    seed = query.whole("seed", 0, at_most=10**9)
    query.check()
    return queue(opened, cast("Order", order), who, seed)


def feedback(source: Source, query: Query) -> Any:
    """The feedback of people and judges about a rollout."""
    opened, rollout_id = source.run(query.required("run")), query.required("id")
    query.check()
    return answered(opened, [rollout_id])


def _version(update: ResourcesUpdate, parent: ResourcesUpdate | None) -> Json:
    before = {} if parent is None else parent.resources
    texts = {name: each.template for name, each in update.resources.items() if isinstance(each, PromptTemplate)}
    return {
        "resources_id": update.resources_id,
        "version": update.version,
        "create_time": update.create_time,
        "parent": update.parent,
        "resources": {name: each.resource_type for name, each in update.resources.items()},
        "prompts": [
            {"name": name, "version": update.version, "changes": text_changes(old.template, text)}
            if isinstance(old := before.get(name), PromptTemplate)
            else {"name": name, "version": update.version, "changes": [["same", text]]}
            for name, text in texts.items()
        ],
    }


def _row(rollout: Rollout) -> Json:
    attempt = rollout.attempt if isinstance(rollout, AttemptedRollout) else None
    ended = rollout.end_time
    return {
        "rollout_id": rollout.rollout_id,
        "status": rollout.status,
        "mode": rollout.mode,
        "iteration": iteration_of(rollout),
        "group_id": rollout.group_id,
        "reward": None if attempt is None else attempt.reward,
        "tokens": None if attempt is None else attempt.prompt_tokens + attempt.response_tokens,
        "seconds": None if ended is None else ended - rollout.start_time,
        "start_time": rollout.start_time,
        "attempts": 0 if attempt is None else attempt.sequence_id,
        "reason": failure_reason(rollout) if rollout.status == "failed" else None,
        "task": _short(rollout.input),
    }


def _short(value: Any) -> str | None:
    return None if value is None else str(Preview(value))


def _views(run: RecordedRun, store: LightningStore, texts: Texts | None) -> RolloutViews:
    return RolloutViews(run, store, None if has_the_store_for_itself(run) else run.record.run_id, texts)


def _texts(run: RecordedRun) -> tuple[Texts | None, str | None]:
    """Return what shows the run's tokens, or why they are shown as ids."""
    try:
        return token_texts(run, max_bytes=None), None
    except ConfigError as error:
        return None, str(error)


def _span(span: Span) -> Json:
    return {
        "id": span.span_id,
        "parent": span.parent_id,
        "name": span.name,
        "start": span.start_time,
        "end": span.end_time,
        "error": (span.status.description or "failed") if span.status.status_code == "ERROR" else None,
        "attributes": {name: _short(value) for name, value in span.attributes.items()},
    }


VIEWS: Final[Mapping[str, View]] = {
    "runs": runs,
    "run": run,
    "metric": metric,
    "rollouts": rollouts,
    "rollout": rollout,
    "group": group,
    "compare": compare,
    "doctor": doctor,
    "workers": workers,
    "resources": resources,
    "releases": releases,
    "review": review,
    "feedback": feedback,
}
