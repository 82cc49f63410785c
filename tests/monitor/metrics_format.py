"""Prometheus's text format, version 0.0.4, read strictly: what its documentation demands and no more.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["Family", "read_metrics"]

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_COMMENT = re.compile(rf"# (HELP|TYPE) ({_NAME}) (.+)")
_LINE = re.compile(rf"({_NAME})(?:\{{(.*)\}})? (\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')

Labels = frozenset[tuple[str, str]]


@dataclass
class Family:
    """The metrics of one name."""

    about: str
    kind: str = ""
    values: dict[tuple[str, Labels], float] = field(default_factory=dict)
    """By suffix and labels."""

    def __getitem__(self, labels: dict[str, str]) -> float:
        return self.values["", frozenset(labels.items())]


def read_metrics(text: str) -> dict[str, Family]:
    """The families of a page. Raises AssertionError for anything that the format does not have."""
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    name = ""
    for line in text.splitlines():
        comment = _COMMENT.fullmatch(line)
        if comment and comment[1] == "HELP":
            name = comment[2]
            assert name not in families, f"{name} begins twice"
            families[name] = Family(comment[3])
        elif comment:
            assert comment[2] == name and not families[name].values, f"the type of {name} belongs below its help"
            assert comment[3] in ("counter", "gauge", "histogram")
            families[name].kind = comment[3]
        else:
            _read_line(line, name, families[name])
    for name, family in families.items():
        assert family.kind, f"{name} has no type"
        assert family.kind != "counter" or name.endswith("_total")
        if family.kind == "histogram":
            _check_histogram(name, family)
    return families


def _read_line(line: str, name: str, family: Family) -> None:
    found = _LINE.fullmatch(line)
    assert found, f"no metric: {line!r}"
    suffix = found[1].removeprefix(name)
    assert found[1].startswith(name) and suffix in (
        ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
    )
    key = suffix, frozenset(_labels(found[2] or ""))
    assert key not in family.values, f"twice: {line!r}"
    family.values[key] = float(found[3])


def _labels(text: str) -> Iterator[tuple[str, str]]:
    end = 0
    while end < len(text):
        found = _LABEL.match(text, end)
        assert found, f"no labels: {text!r}"
        end = found.end()
        yield found[1], re.sub(r'\\(["\\n])', lambda m: "\n" if m[1] == "n" else m[1], found[2])


def _check_histogram(name: str, family: Family) -> None:
    counts = {labels: value for (suffix, labels), value in family.values.items() if suffix == "_count"}
    assert {labels for (suffix, labels) in family.values if suffix == "_sum"} == counts.keys()
    for labels, count in counts.items():
        buckets = {
            float(dict(own)["le"]): value
            for (suffix, own), value in family.values.items()
            if suffix == "_bucket" and {pair for pair in own if pair[0] != "le"} == labels
        }
        ordered = [buckets[bound] for bound in sorted(buckets)]
        assert ordered == sorted(ordered), f"{name} falls"
        assert buckets[float("inf")] == count
