"""Read the options of recorded runs: which of them differ, what tells runs apart, and one value by its name.

A run records its options that are not defaults. What a run of an earlier version does not say is `UNKNOWN` here, and
never taken for a default.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from leyden._lib.formatting import one_line
from leyden._lib.json import is_object, object_or_empty
from leyden._lib.options import nearest
from leyden.errors import ConfigError
from leyden.training.runs.opening import EARLIER_CODE
from leyden.training.runs.recorded_runs import RecordedRun
from leyden.training.runs.run_description import NOT_DEFAULT
from leyden.types import Spending
from leyden.types.run_record import RunRecord

DEFAULT: Final = "(default)"
"""The value of an option that a run left at the default of its version."""
UNKNOWN: Final = "-"
"""The value of an option that a run does not have, or did not record."""
_CLASS = re.compile(r"\w+(?:\.\w+)*\.([A-Z]\w*)")
GENERATED_NAME = re.compile(r"\d{8}-\d{6}-")
"""The beginning of a folder's name that Leyden has made."""


def changed_of(record: RunRecord) -> Mapping[str, Any]:
    """Return the options of a run that are not defaults, by dotted path; empty for a run that did not record them."""
    return object_or_empty(record.config.get(NOT_DEFAULT))


def facts_of(record: RunRecord) -> dict[str, Any]:
    """Return what a run is about beside its options: its agent, algorithm, model, data and code."""
    config, facts = record.config, dict[str, Any]()
    parts = {name: config.get(name) for name in ("agent", "algorithm", "model")} | object_or_empty(config.get("data"))
    if code := object_or_empty(config.get("code")).get("digest"):
        facts["code"] = ", then ".join([*config.get(EARLIER_CODE, []), code])
    facts |= {
        f"agent.{name}": value
        for name, value in object_or_empty(object_or_empty(parts["agent"]).get("options")).items()
    }
    for name, part in ((name, object_or_empty(part)) for name, part in parts.items()):
        digest = f" ({part['digest']})" if part.get("digest") else ""
        if "length" in part:
            facts[name] = f"{part['length']} tasks{digest}"
        elif part.get("name"):
            facts[name] = f"{Path(str(part['name'])).name}{digest}" if digest else part["name"]
    return facts


def differing(records: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Return the options and facts that differ between runs by dotted path, each with one value for each run."""
    facts, changed = [facts_of(record) for record in records], [changed_of(record) for record in records]
    found: dict[str, list[Any]] = {}
    for path in dict.fromkeys(path for each in (*facts, *changed) for path in each):
        givers = [i for i, each in enumerate(changed) if path in each]
        values: list[Any] = []
        for i, record in enumerate(records):
            is_known = NOT_DEFAULT in record.config and any(_has_option(record, path, as_in=records[j]) for j in givers)
            values.append({**changed[i], **facts[i]}.get(path, DEFAULT if is_known else UNKNOWN))
        if len({json.dumps(value, sort_keys=True) for value in values if value is not UNKNOWN}) > 1:
            found[path] = values
    return found


def _has_option(record: RunRecord, path: str, *, as_in: RunRecord) -> bool:
    """Return whether a run has an option that another one has set: its components are of the same classes."""
    own, other = changed_of(record), changed_of(as_in)
    if (record.kind == "rl") != (as_in.kind == "rl"):
        return False
    if path.startswith("algorithm.") and facts_of(record).get("algorithm") != facts_of(as_in).get("algorithm"):
        return False
    names = path.split(".")
    parents = [f"{'.'.join(names[:end])}{kind}" for end in range(2, len(names)) for kind in ("", ".type")]
    return all(own.get(each) in (None, other.get(each)) for each in parents)


def value_text(value: Any) -> str:
    """Return the value of an option or a metric in one line, a class by its name alone."""
    if isinstance(value, float):
        return f"{value:g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    named = _CLASS.fullmatch(text)
    return named[1] if named else one_line(text) or '""'


def short_names(paths: Collection[str]) -> dict[str, str]:
    """Return for each path the shortest end of it that no other one has: `learning_rate`, or `optim.learning_rate`."""
    shown = dict[str, str]()
    for path in paths:
        ends = [path.split(".", n)[n] for n in range(path.count("."), -1, -1)]
        shown[path] = next((end for end in ends if sum(f".{each}".endswith(f".{end}") for each in paths) == 1), path)
    return shown


def without_classes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without the classes of components whose own options are among them."""
    return {path: value for path, value in options.items() if not any(each.startswith(f"{path}.") for each in options)}


def labels_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Return what tells runs apart: their names, unless Leyden has made them, and the options that differ. A made name
    is used only where nothing else tells two runs apart.
    """
    records = [run.record for run in runs]
    differ, labels = without_classes(differing(records)), list[str]()
    if len(differ) > 1:  # a digest tells a reader the least
        differ.pop("code", None)
    names = short_names(differ)
    for i, record in enumerate(records):
        own = ", ".join(f"{names[path]} {value_text(of[i])}" for path, of in differ.items() if of[i] is not UNKNOWN)
        name = "" if own and GENERATED_NAME.match(record.name) else one_line(record.name)
        labels.append(": ".join(filter(None, (name, own))))
    ids = {
        label: {record.run_id for record, own in zip(records, labels, strict=True) if own == label} for label in labels
    }
    return [
        f"{label}, {record.name} {record.run_id}" if len(ids[label]) > 1 else label
        for label, record in zip(labels, records, strict=True)
    ]


def spending_of(run: RecordedRun) -> Spending | None:
    """Return what a run has spent, as its folder says: at its end, or after its last step; None if it does not."""
    if is_object(recorded := run.record.config.get("spending")):
        return Spending.model_validate(recorded)
    for row in reversed(run.metrics()):
        if isinstance(cost := row.metrics.get("total_cost"), int | float):
            unpriced = int(row.metrics.get("unpriced_calls", 0))
            return Spending(attempts=0, prompt_tokens=0, response_tokens=0, cost=cost, unpriced_calls=unpriced)
    return None


def cost_of(run: RecordedRun) -> str | None:
    """Return the cost of a run for people, with its currency; None if it is not known."""
    spent = spending_of(run)
    return None if spent is None else spent.in_words(str(run.record.config.get("currency", "")))


def column_of(runs: Sequence[RecordedRun], name: str) -> list[Any]:
    """Return one value for each run of an option or a metric.

    name: the end of an option's dotted path, such as `learning_rate`, or a metric, such as `loss` or `val/reward`: its
        value in the last row that has it.
    `cost` is that of the whole run, with its currency.
    Raise ConfigError if no run has it, and if it fits several options.
    """
    if name == "cost":
        return [cost or UNKNOWN for cost in map(cost_of, runs)]
    given = list[dict[str, Any]]()
    for record in (run.record for run in runs):
        algorithm = object_or_empty(record.config.get("algorithm"))
        all_options = object_or_empty(algorithm.get("options"))  # with those left at a default
        plain = {f"algorithm.{each}": value for each, value in all_options.items() if not isinstance(value, dict)}
        given.append({**plain, **changed_of(record), **facts_of(record)})
    fits = sorted({path for each in given for path in each if f".{path}".endswith(f".{name}")})
    if len(fits) > 1 and name not in fits:
        raise ConfigError(f"the column {name!r} fits several options: {', '.join(fits)}; give a longer end of one")
    if fits:
        path = name if name in fits else fits[0]
        return [
            each.get(path, DEFAULT if NOT_DEFAULT in run.record.config else UNKNOWN)
            for each, run in zip(given, runs, strict=True)
        ]
    rows = [
        [(row.stage, metric, value) for row in run.metrics() for metric, value in row.metrics.items()] for run in runs
    ]
    newest = [{key: value for stage, metric, value in each for key in (metric, f"{stage}/{metric}")} for each in rows]
    if not any(name in each for each in newest):
        known = {path.rpartition(".")[2] for each in (*given, *newest) for path in each}
        raise ConfigError(f"no run has an option or a metric {name!r}; {nearest(name, sorted(known))}")
    return [each.get(name, UNKNOWN) for each in newest]
