"""The filters of rollouts, which pages and summaries share, and their SQL."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from leyden.errors import ConfigError
from leyden.store.sql.pages import Filters
from leyden.types import FilterLogic, Measure, Range, RolloutMode, RolloutStatus

MEASURES: tuple[Measure, ...] = get_args(Measure)


@dataclass(slots=True, kw_only=True)  # `frozen` would take five times as long, for every query
class RolloutFilter:
    """The filters of `LightningStore.query_rollouts`, where each is described. `summarise_rollouts` takes a part."""

    status_in: Sequence[RolloutStatus] | None = None
    rollout_id_in: Sequence[str] | None = None
    rollout_id_contains: str | None = None
    mode_in: Sequence[RolloutMode] | None = None
    run_id: str | None = None
    group_id: str | None = None
    replay_from: str | None = None
    arm_in: Sequence[str] | None = None
    resources_id: str | None = None
    resources_version: int | None = None
    failure_in: Sequence[str] | None = None
    between: Mapping[Measure, Range] | None = None
    filter_logic: FilterLogic = "and"

    def conditions(self) -> tuple[Filters, Filters]:
        """Return the conditions that `filter_logic` joins: all but the status, and all. The run, the group and
        `replay_from` are not among them, because they always hold.

        Raise ConfigError for an impossible value, an unknown measure and NaN.
        """
        others = Filters(self.filter_logic)
        others.among("r.rollout_id", self.rollout_id_in)
        others.contains("r.rollout_id", self.rollout_id_contains)
        others.among("r.mode", self.mode_in, get_args(RolloutMode))
        others.among("r.arm", self.arm_in)
        others.equal("r.resources_id", self.resources_id)
        others.equal("r.resources_version", self.resources_version)
        others.among("r.failure", self.failure_in)
        for measure, ends in (self.between or {}).items():
            check_measure("between", measure)
            column, parts, values = f"r.{measure}", list[str](), list[float]()
            for sign, end in zip((">=", "<"), ends, strict=True):
                if end is None:
                    continue
                if math.isnan(end):
                    raise ConfigError(
                        f"between: the range {ends!r} of {measure!r} holds nothing; give numbers, or None"
                    )
                parts.append(f"{column} {sign} {{}}")
                values.append(end)
            # A range that is open at both ends keeps every rollout that has the measure.
            others.condition(f"({' AND '.join(parts or [f'{column} IS NOT NULL'])})", *values)
        if self.status_in is None:
            return others, others
        every = Filters(self.filter_logic, list(others.conditions), others.parameters)
        every.among("r.status", self.status_in, get_args(RolloutStatus))
        return others, every


def check_measure(parameter: str, measure: str) -> None:
    """Raise ConfigError unless the measure exists."""
    if measure not in MEASURES:
        raise ConfigError(f"{parameter}: no measure {measure!r}; there are {', '.join(MEASURES)}")
