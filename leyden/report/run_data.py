"""The data of a run's report. `leyden.report` describes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TypeVar

from leyden import __version__
from leyden._lib.json import Json
from leyden.doctor import Evidence, diagnose
from leyden.errors import ConfigError, LeydenError
from leyden.report.curves import Validations, curve, learned, read_validations
from leyden.report.prompts import prompt_versions
from leyden.report.rollouts import RolloutViews
from leyden.report.tokens import Texts, token_texts
from leyden.store.base import LightningStore
from leyden.training import MetricsRow
from leyden.training.runs import RecordedRun
from leyden.training.runs.comparison import compare_runs, query_store
from leyden.training.runs.overview import as_data, control_of, paused_of
from leyden.training.runs.rollouts import has_the_store_for_itself
from leyden.types.run_record import algorithm_group

T = TypeVar("T")

_CURVES, _FAILURES, _CONTROL = 40, 20, 100


def report_data(
    runs: Sequence[RecordedRun], *, sources: Sequence[str] = (), max_tokenizer_bytes: int | None = None
) -> Json:
    """Return the data of a report on one or more runs; of several, with their comparison with the first.

    sources: the runs as the user names them, for commands; their recorded names by default.
    max_tokenizer_bytes: a larger tokenizer is not loaded, and tokens are shown as ids; None: of any size.
    """
    names = sources or [run.record.name for run in runs]
    found = [run_data(run, name, max_tokenizer_bytes) for run, name in zip(runs, names, strict=True)]
    comparison = compare_runs(runs) if len(runs) > 1 else None
    return {"version": __version__, "written": time.time(), "runs": found, "comparison": comparison}


def run_data(run: RecordedRun, source: str | None = None, max_tokenizer_bytes: int | None = None) -> Json:
    """Return the data of one run, with the options of `report_data`. What cannot be read is empty."""
    left_out: list[str] = []

    def read(what: str, query: Callable[[], T], otherwise: T) -> T:
        try:
            return query()
        except LeydenError as error:
            left_out.append(f"{what}: {error}")
            return otherwise

    record, evidence = run.record, Evidence(run, source)
    bare = {**record.model_dump(mode="json", exclude={"config"}), "state": run.state}
    diagnosis, rows = diagnose(evidence), evidence.rows
    texts, no_texts = None, None
    try:
        texts = token_texts(run, max_bytes=max_tokenizer_bytes)
    except ConfigError as error:
        no_texts = str(error)
    stored, reason = None, evidence.store_trouble  # a server that is away is waited for once, and briefly
    if reason is None:
        stored, reason = query_store(run, lambda store: _of_store(run, store, rows, texts))
    validations: Validations = {} if stored is None else stored.pop("validations")
    if reason is not None and record.config.get("store"):  # a run in a simulator has no store that could be missing
        left_out.append(f"rollouts and prompts: {reason}")
    if no_texts is not None and stored is not None and any(of["sequences"] for of in stored["samples"]["best"]):
        left_out.append(f"the texts of tokens: {no_texts}")
    groups = [asdict(each) for each in evidence.failure_groups[:_FAILURES]]
    return {
        "head": read("the summary", lambda: as_data(run), bare),
        "paused_seconds": read("the pauses", lambda: paused_of(run)[1], 0.0),
        "configuration": {name: record.config.get(name) for name in ("versions", "git", "data", "seed")},
        "learned": learned(rows, validations),
        "findings": [{"rule": name, **asdict(each)} for name, each in diagnosis.findings.items()],
        "curves": _curves(rows, validations),
        "failures": {"count": len(evidence.failures), "groups": groups},
        **(stored or {"outcomes": None, "samples": {}, "group": None, "prompts": []}),
        "control": [asdict(line) for line in read("the control", lambda: control_of(run), [])[-_CONTROL:]],
        "left_out": list(dict.fromkeys([*left_out, *diagnosis.unread])),
    }


def _curves(rows: Sequence[MetricsRow], validations: Validations) -> list[Json]:
    """Return the curves of the metrics that changed, the reward first."""
    names = dict.fromkeys(["reward", *(name for row in rows if row.stage != "test" for name in row.metrics)])
    found = [curve(name, rows, validations if name == "reward" else {}) for name in names]
    return [
        each
        for each in found
        if len({value for _, value, *_ in (*each["train"], *each["val"])}) > 1
        or each["not_finite"]
        or (each["name"] == "reward" and each["points"])
    ][:_CURVES]


async def _of_store(run: RecordedRun, store: LightningStore, rows: Sequence[MetricsRow], texts: Texts | None) -> Json:
    """Return what only the store has. Few rollouts are read, however many there are; the store counts the others."""
    run_id = None if has_the_store_for_itself(run) else run.record.run_id
    found = await store.summarise_rollouts(run_id=run_id, measures=("reward", "tokens", "cost", "seconds"))
    own = await store.query_rollouts(group_id=algorithm_group(run.record.run_id), limit=1)
    by_mode = {mode: await store.summarise_rollouts(run_id=run_id, mode_in=[mode]) for mode in ("train", "val")}
    rewards = {mode: each.measures["reward"] for mode, each in by_mode.items() if "reward" in each.measures}
    if not rewards and "reward" in found.measures:
        rewards = {"all": found.measures["reward"]}
    views = RolloutViews(run, store, run_id, texts)
    return {
        "validations": await read_validations(store, run_id, rows),
        "outcomes": {
            "finished": found.finished - own.total,
            "failed": found.by_status.get("failed", 0),
            "rewards": {mode: each.model_dump(mode="json") for mode, each in rewards.items()},
            **{name: each.model_dump(mode="json") for name, each in found.measures.items() if name != "reward"},
        },
        "samples": await views.samples(),
        "group": await views.group(),
        "prompts": await prompt_versions(run, store),
    }
