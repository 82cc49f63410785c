"""Compute the metrics of a stage's rollouts from their counts, with pure functions.

Names are stable: dashboards, reports and early stopping read them. docs/metrics.md explains each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from leyden._lib.numbers import mean_of
from leyden.algorithm.own_metrics import means_of
from leyden.algorithm.policy_gradient.rollout_reader import RolloutCounts
from leyden.algorithm.policy_gradient.step_data import Group
from leyden.monitor.gpu import gpu_metrics
from leyden.training import Metrics


def rollout_metrics(counts: RolloutCounts, *, seconds: float, success_reward: float) -> Metrics:
    """Return the metrics of all rollouts of a stage. A mean without values is NaN.

    seconds: the duration of the stage.
    success_reward: a rollout with at least this reward counts as a success.
    """
    rewards = counts.rewards
    return {
        "reward": mean(rewards),
        "reward_std": _deviation(rewards),
        "reward_min": min(rewards, default=math.nan),
        "reward_max": max(rewards, default=math.nan),
        "success": mean([float(reward >= success_reward) for reward in rewards]),
        "rollouts": counts.rollouts,
        "failed": counts.failures.total(),
        "cancelled": counts.cancelled,
        "refused_calls": counts.refused_calls.total(),
        "model_calls": counts.model_calls,
        **{f"{role}_calls": number for role, number in counts.other_calls.items() if role != "agent"},
        **{f"{role}_tokens": number for role, number in counts.other_tokens.items()},
        "model_call_seconds": counts.call_seconds / counts.model_calls if counts.model_calls else math.nan,
        "merged_turns": counts.merged_turns / counts.continued_turns if counts.continued_turns else math.nan,
        "response_tokens": counts.response_tokens,
        "rollout_seconds": seconds,
        "rollouts_per_second": counts.rollouts / seconds,
        "tokens_per_second": counts.response_tokens / seconds,
        **means_of(counts.own),
    }


def group_metrics(groups: Sequence[Group], *, size: int, success_reward: float) -> Metrics:
    """Return the metric pass@k: the share of groups in which at least one rollout succeeds.

    size: k, the number of rollouts in a group. Cancelled rollouts have left their group and do not count.
    """
    passed = [any(each.reward >= success_reward for each in group.rollouts) for group in groups if group.rollouts]
    return {f"pass@{size}": mean([float(one) for one in passed])}


def gpu_use() -> Metrics:
    """Return how busy and how full the GPUs of this process were recently, in percent; an empty dict without a GPU.

    The driver averages over up to a second. Right after an update, the numbers describe the update.
    """
    metrics = gpu_metrics()
    return {name: metrics[name] for name in ("gpu_percent", "gpu_memory_percent") if name in metrics}


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN if there are no values."""
    return mean_of(values) if values else math.nan


def _deviation(values: Sequence[float]) -> float:
    centre = mean(values)
    return math.sqrt(mean([(value - centre) ** 2 for value in values])) if values else math.nan
