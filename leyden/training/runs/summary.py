"""`RunSummary`: what `fit` returns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from leyden.store.base import LightningStore
from leyden.training import MetricValue
from leyden.training.runs.display import closing_summary, summary_html
from leyden.training.runs.recorded_runs import failure_of
from leyden.training.runs.rollouts import group_failures
from leyden.training.runs.run_metrics import RewardMetrics
from leyden.types import RolloutStatus, Spending


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The outcome of a run: its rollouts, failures, rewards and result.

    `rollouts` and `failures` count the run's rollouts that the store still has. In a process that has runners and no
    algorithm, they count every rollout in the store.
    """

    run_dir: Path | None
    """The run's folder; None if it has none."""
    rollouts: dict[str, int] = field(default_factory=dict[str, int])
    """The number of rollouts by status; a status without rollouts has 0."""
    failures: dict[str, int] = field(default_factory=dict[str, int])
    """The number of failed rollouts by reason, the most frequent first."""
    forgotten: int = 0
    """Rollouts that retention removed from the store while `fit` ran."""
    stopped: str | None = None
    """Why the run ended before the algorithm was done; None if the algorithm has ended by itself."""
    reward: RewardMetrics | None = None
    """The rewards of the training stages, or of the validations if no training stage has a reward; None if neither has
    one."""
    val_reward: RewardMetrics | None = None
    """The rewards of the validations; None if no validation has a reward."""
    metrics: dict[str, MetricValue] = field(default_factory=dict[str, MetricValue])
    """The metrics of the last row that was reported."""
    result: Any = None
    """The value that the algorithm's `run` returned."""
    reflection_calls: int = 0
    """How often the algorithm asked a reflection model; these calls are not among the rollouts."""
    seconds: float = 0.0
    """The seconds that this `fit` took."""
    spending: Spending | None = None
    """The tokens and the cost of the model calls of the whole run, in all its processes."""
    currency: str = ""
    """The unit of the prices; empty if they name none."""
    run_id: str = ""
    """The run's id; empty if no run was recorded."""

    def __str__(self) -> str:
        return closing_summary(self)

    def _repr_html_(self) -> str:
        return summary_html(self)


async def count_rollouts(store: LightningStore, run_id: str | None) -> tuple[dict[str, int], dict[str, int]]:
    """Return the number of rollouts by status, and of failed ones by reason, the most frequent reason first.

    run_id: count the rollouts of this run alone; None counts every rollout in the store.
    """
    failed = await store.query_rollouts(status_in=["failed"], run_id=run_id)
    reasons = Counter[str]()
    for group in group_failures(failure_of(rollout) for rollout in failed):
        reasons[group.reason] += group.count
    if run_id is None:
        found = (await store.statistics())["rollouts_by_status"]
        by_status = {status: found.get(status, 0) for status in get_args(RolloutStatus)}
    else:
        by_status = {status: await _count(store, run_id, status) for status in get_args(RolloutStatus)}
    return by_status, dict(reasons.most_common())


async def _count(store: LightningStore, run_id: str, status: RolloutStatus) -> int:
    counted = 0
    while True:  # `total` may be a lower bound; counting goes on from there until it is exact
        page = await store.query_rollouts(run_id=run_id, status_in=[status], limit=1, offset=counted)
        if page.exact or page.total <= counted:
            return page.total
        counted = page.total
