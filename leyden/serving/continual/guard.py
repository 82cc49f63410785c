"""The verdict on a canary: pure functions from outcomes of requests to *continue*, *promote* or *roll back*.

Every guarded metric has an e-process against "the canary is not worse", and one against the hypothesis that a promotion
has to disprove (`leyden.statistics`).

- Roll back when the weighted mean of the first kind over all metrics reaches 1 / rollback_error.
  The mean of e-processes is one, so a canary that is worse in nothing is rolled back with at
  most that probability.
- Promote when *each* required metric reaches 1 / promotion_error. Each alone keeps the error, so
  all together keep it too (intersection-union test), without a correction for their number.
- A missing value is left out of its metric. A separate test checks whether the shares of missing
  values differ between the arms. Its alarm blocks a promotion, because the values that are left are
  then no fair sample.
- Another test checks whether the canary has the share of the requests that the comparison assumes.
  Its alarm blocks a promotion, too, because the comparison is exact for the true share only.

Outcomes must be observed in the order of the requests (`RequestOrder`), not of their feedback. This module knows no
store and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from leyden._lib.options import check_number
from leyden.serving.continual.decision_metrics import COST, FAILURE, LATENCY, REWARD, Metric, check_metrics
from leyden.statistics import Evidence, RankHistory, ShareEvidence, average_log_e, observe_difference, observe_share

Decision: TypeAlias = Literal["continue", "promote", "roll_back"]

_NONE, _UNRANKED, _ASSIGNED = Evidence(), RankHistory(), ShareEvidence()


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """The metrics of one live request, and which side served it."""

    canary: bool
    """Whether the canary answered it."""
    share: float
    """The probability with which the request was assigned to the canary, in (0, 1)."""
    values: Mapping[str, float | None]
    """The value of each metric by its name. None or absent: the value had not arrived when the
    waiting time was over."""


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """The metrics of a canary's test, and the largest probabilities of its errors.

    promotion_error: of promoting a canary that does not meet every requirement.
    rollback_error: of rolling back a canary that is worse in no metric.
    missing_error: of a false alarm on missing values.
    share_error: of a false alarm on the canary's share of the requests.
    """

    metrics: Sequence[Metric] = (REWARD, FAILURE, LATENCY, COST)
    promotion_error: float = 0.05
    rollback_error: float = 0.2
    missing_error: float = 0.05
    share_error: float = 0.01

    def __post_init__(self) -> None:
        check_metrics(self.metrics)
        for name in ("promotion_error", "rollback_error", "missing_error", "share_error"):
            check_number(name, getattr(self, name), above=0, at_most=0.5)


@dataclass(frozen=True, slots=True)
class MetricState:
    """The evidence so far on one metric of a release."""

    worse: Evidence = _NONE
    """Evidence against "the canary is not worse". Its arm means are those of 1 - the scaled value."""
    required: Evidence = _NONE
    """Evidence against the hypothesis that a promotion has to disprove. Its arm means are those of the scaled value."""
    missing_more: Evidence = _NONE
    """Evidence against "the canary's values are not missing more often"."""
    missing_less: Evidence = _NONE
    """Evidence against "the canary's values are not missing less often"."""
    ranks: RankHistory = _UNRANKED
    """The values so far, for metrics with the scale `Ranked`."""


@dataclass(frozen=True, slots=True)
class GuardState:
    """The evidence so far on all metrics of a release."""

    metrics: tuple[MetricState, ...]
    """The metrics in the order of `GuardSettings.metrics`."""
    canary_requests: int = 0
    control_requests: int = 0
    worse_peak: float = 0.0
    """The largest logarithm so far of the combined e-process for a rollback."""
    missing_peak: float = 0.0
    """The largest logarithm so far of the combined e-process for the alarm on missing values."""
    share: ShareEvidence = _ASSIGNED
    """Evidence that the canary has another share of the requests than assumed."""


@dataclass(frozen=True, slots=True)
class MetricReport:
    """A summary of one metric for people. Means are in [0, 1], where more is better, and None without values."""

    name: str
    canary_mean: float | None
    control_mean: float | None
    canary_missing: float | None
    """The share of the canary's requests without a value."""
    control_missing: float | None
    """The share of the control's requests without a value."""
    worse_p: float
    """The anytime-valid p-value of "the canary is not worse"."""
    required_p: float | None
    """The anytime-valid p-value of the hypothesis that a promotion has to disprove; None if the metric is not required
    for one."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision, and the evidence for it."""

    decision: Decision
    reason: str
    """The reason for the decision, in one sentence."""
    missing_alarm: bool
    """Whether values are missing more often in one arm than in the other."""
    share_alarm: bool
    """Whether the canary has another share of the requests than assumed."""
    canary_requests: int
    control_requests: int
    metrics: tuple[MetricReport, ...]


def start(settings: GuardSettings) -> GuardState:
    """Return the initial state, before the first request."""
    return GuardState(tuple(MetricState() for _ in settings.metrics))


def observe(settings: GuardSettings, state: GuardState, outcome: RequestOutcome) -> GuardState:
    """Return the state after one more request. Raise ConfigError for a share out of (0, 1) or a NaN value."""
    metrics = tuple(
        _observe_metric(metric, old, outcome) for metric, old in zip(settings.metrics, state.metrics, strict=True)
    )
    worse = average_log_e([each.worse.log_e for each in metrics], [metric.weight for metric in settings.metrics])
    missing = average_log_e([evidence.log_e for each in metrics for evidence in (each.missing_more, each.missing_less)])
    return GuardState(
        metrics,
        canary_requests=state.canary_requests + outcome.canary,
        control_requests=state.control_requests + (not outcome.canary),
        worse_peak=max(state.worse_peak, worse),
        missing_peak=max(state.missing_peak, missing),
        share=observe_share(state.share, treated=outcome.canary, share=outcome.share),
    )


def decide(settings: GuardSettings, state: GuardState) -> Verdict:
    """Return the verdict so far. A rollback precedes a promotion, which an alarm turns into "continue"."""
    missing_alarm = state.missing_peak >= -math.log(settings.missing_error)
    share_alarm = state.share.peak >= -math.log(settings.share_error)
    reports = tuple(_report(metric, each) for metric, each in zip(settings.metrics, state.metrics, strict=True))
    decision, reason = _decision(settings, state, reports)
    if decision == "promote" and missing_alarm:
        decision = "continue"
        reason = "values are missing more often in one arm than in the other, so nothing is promoted"
    elif decision == "promote" and share_alarm:
        decision = "continue"
        reason = "the canary has another share of the requests than assumed, so nothing is promoted"
    return Verdict(decision, reason, missing_alarm, share_alarm, state.canary_requests, state.control_requests, reports)


def _decision(settings: GuardSettings, state: GuardState, reports: Sequence[MetricReport]) -> tuple[Decision, str]:
    """Return the decision without regard to the alarms, and its reason. Rolling back has priority.

    A test's peak is the largest log wealth so far. By Ville's inequality it reaches -log(error) with at most the
    probability `error` if the hypothesis is true.
    """
    if state.worse_peak >= -math.log(settings.rollback_error):
        worst = min(reports, key=lambda report: report.worse_p)
        return "roll_back", f"{worst.name} is worse in the canary, at an error of {settings.rollback_error:g}"
    open_metrics = [
        metric.name
        for metric, each in zip(settings.metrics, state.metrics, strict=True)
        if metric.promotion and each.required.peak < -math.log(settings.promotion_error)
    ]
    if open_metrics:
        return "continue", f"no decision yet on {', '.join(open_metrics)}"
    required = ", ".join(f"{metric.name} is {metric.promotion}" for metric in settings.metrics if metric.promotion)
    return "promote", f"{required.replace('_', ' ')}, at an error of {settings.promotion_error:g}"


def _observe_metric(metric: Metric, state: MetricState, outcome: RequestOutcome) -> MetricState:
    """Return the metric's state after one request. A missing value is evidence: its rate is compared between arms."""
    value = outcome.values.get(metric.name)
    canary, share = outcome.canary, outcome.share
    missing = float(value is None)
    bets = bool(state.missing_more.treated.total or state.missing_more.control.total)  # not of this request
    state = replace(
        state,
        missing_more=_observe_missing(state.missing_more, canary, missing, share, bets=bets),
        missing_less=_observe_missing(state.missing_less, canary, 1 - missing, share, bets=bets),
    )
    if value is None:
        return state
    number, ranks = metric.scaled(value, state.ranks)
    return replace(
        state,
        worse=observe_difference(state.worse, treated=canary, value=1 - number, share=share),
        required=observe_difference(state.required, treated=canary, value=number, share=share, margin=metric.margin),
        ranks=ranks,
    )


def _observe_missing(evidence: Evidence, canary: bool, value: float, share: float, *, bets: bool) -> Evidence:
    """Return the evidence after one request, which the canary or the control served.

    value: 1 if the request's value is missing, else 0.
    bets: whether a value was missing in an earlier request; until then only the totals are counted.
    """
    if bets:
        return observe_difference(evidence, treated=canary, value=value, share=share)
    if canary:
        return replace(evidence, treated=evidence.treated.plus(value))
    return replace(evidence, control=evidence.control.plus(value))


def _report(metric: Metric, state: MetricState) -> MetricReport:
    """Return a metric's means in both arms and its p-values, exp(-peak of the log wealth), valid at any time."""
    return MetricReport(
        name=metric.name,
        canary_mean=state.required.treated.mean,
        control_mean=state.required.control.mean,
        canary_missing=state.missing_more.treated.mean,
        control_missing=state.missing_more.control.mean,
        worse_p=math.exp(-max(0.0, state.worse.peak)),
        required_p=math.exp(-max(0.0, state.required.peak)) if metric.promotion else None,
    )
