"""Fork recorded rollouts, and estimate the advantages of single model calls from the forks.

A fork repeats the first k model calls of a rollout from its record, and samples the rest again. The mean return of such
forks estimates the value of the state before call k, and the difference of two values is an advantage (VinePPO,
arXiv:2410.01679, section 4). The environment needs no support for that, but the agent's own code, including its tools,
must be deterministic: a fork whose requests differ from the record is left out, and counted.

All functions are pure; `RolloutCollector` runs the requests. N: number of forks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from leyden._lib import ids
from leyden._lib.numbers import mean_of
from leyden._lib.options import check_number
from leyden.adapter import divergence, replayed_calls
from leyden.algorithm.collector import CollectedRollout, rollout_id_of
from leyden.algorithm.evaluation import wilson_interval
from leyden.errors import ConfigError
from leyden.types import AttemptedRollout, EnqueueRolloutRequest, ReplayFrom, Rollout, read_replay_from, semconv

_Z = statistics.NormalDist().inv_cdf(0.975)
"""The 0.975 quantile of the normal distribution, for 95 % intervals."""


def fork_requests(
    rollout: Rollout, *, at_call: int, n: int, resources_id: str | None = None
) -> list[EnqueueRolloutRequest]:
    """Return the requests of one group of forks: `n` rollouts that repeat the first `at_call` calls of a recorded one.

    The ids are derived from rollout and call, so that the results of forks that were run before are read from the
    store. In a deterministic run, each fork samples other live calls. Everything else is taken from the original
    rollout. Keep the original pinned until the forks have ended, because the gateway reads its record.

    rollout: a rollout with its latest attempt, as the store and the collector return it.
    at_call: a `leyden.call_index`: the first call that is live.
    resources_id: the resources of the forks; None: those of the original.
    Raise ConfigError for a rollout whose attempt has not ended.
    """
    check_number("at_call", at_call, at_least=0, whole=True)
    check_number("n", n, at_least=1, whole=True)
    if not isinstance(rollout, AttemptedRollout) or not rollout.attempt.finished:
        raise ConfigError(f"rollout {rollout.rollout_id!r} is {rollout.status}; fork it when its attempt has ended")
    attempt_id, resources_id = rollout.attempt.attempt_id, resources_id or rollout.resources_id
    source = ReplayFrom(rollout_id=rollout.rollout_id, attempt_id=attempt_id, n_calls=at_call)
    key = rollout.metadata.get(semconv.SAMPLING_KEY, rollout.rollout_id)
    place = (rollout.rollout_id, attempt_id, at_call)
    return [
        EnqueueRolloutRequest(
            rollout_id=rollout_id_of("fork", *place, index, resources_id),
            group_id=ids.derived_id("gr", "fork", *place, resources_id or ""),
            input=rollout.input,
            mode=rollout.mode,
            resources_id=resources_id,
            config=rollout.config,
            priority=rollout.priority,
            arm=rollout.arm,
            metadata={
                **rollout.metadata,
                **source.as_metadata(),
                semconv.SAMPLING_KEY: f"{key}/fork/{at_call}/{index}",
            },
        )
        for index in range(n)
    ]


@dataclass(slots=True)
class ForkReturns:
    """The returns of one rollout's forks."""

    by_call: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """Returns by the number of calls that the forks repeated."""
    diverged: list[str] = field(default_factory=list[str])
    """A line for each fork that differed from the record, which says how. Such a fork has no return in `by_call`."""
    without_reward: int = 0
    """Forks without a reward."""


def fork_returns(
    results: Iterable[CollectedRollout], *, failure_reward: float | None = None
) -> dict[tuple[str, str], ForkReturns]:
    """Return the returns of forks, by the ids of the rollout and the attempt that they fork. Other rollouts are left
    out.

    failure_reward: the return of a fork that has no reward. None leaves such forks out, which overestimates the value
        of states after which the agent fails.
    """
    found: dict[tuple[str, str], ForkReturns] = {}
    for result in results:
        if (source := read_replay_from(result.rollout.metadata)) is None:
            continue
        returns = found.setdefault((source.rollout_id, source.attempt_id), ForkReturns())
        if (difference := divergence(result.spans) or _unrepeated(result, source.n_calls)) is not None:
            returns.diverged.append(difference)
            continue
        returns.without_reward += result.reward is None
        reward = failure_reward if result.reward is None else result.reward
        if reward is not None:
            returns.by_call.setdefault(source.n_calls, []).append(reward)
    return found


def _unrepeated(result: CollectedRollout, n_calls: int) -> str | None:
    """Return one line about recorded calls that a fork did not repeat before it ended; None if it repeated all."""
    calls = replayed_calls(result.spans)
    repeated = [call.call_index for call in calls if call.state == "replayed"]
    is_live = any(call.state == "live" for call in calls)
    if n_calls == 0 or is_live or max(repeated, default=-1) >= n_calls - 1:
        return None
    return (
        f"it ended after {len(repeated)} recorded calls, before call {n_calls}: {result.reason or 'the agent returned'}"
    )


@dataclass(frozen=True, slots=True)
class CallAdvantage:
    """The advantage of one model call, with its 95 % confidence interval."""

    call: int
    """The `leyden.call_index` of the call."""
    advantage: float
    low: float | None
    """Lower end of the interval; None with too few forks for one."""
    high: float | None
    method: str
    """How the interval was computed: `Newcombe`, `Welch`, or `none`."""


def call_advantages(
    returns: Mapping[int, Sequence[float]], *, n_calls: int | None = None, own_return: float | None = None
) -> list[CallAdvantage]:
    """Estimate the advantage of each call k from the returns of forks (VinePPO):

        A(k) = mean(returns of forks that repeat k + 1 calls)
             - mean(returns of forks that repeat k calls)

    Calls without forks of both kinds are left out. Earlier rewards are part of the return, and nothing is discounted.

    returns: for each k, the returns of the forks that repeat the first k calls (`ForkReturns.by_call`).
    n_calls: the number of calls of the original rollout, if `own_return` is given.
    own_return: the original's return, which is exact for the state after its last call.

    If all returns are 0 or 1, the interval is Newcombe's of a difference of proportions (Statistics in Medicine 17,
    1998, method 10), which also holds for small groups. Otherwise it is Welch's, which needs three returns on each
    side. Welch's interval has the width 0 if the returns of each side are all equal; then more forks are needed. Raise
    ConfigError for `n_calls` without `own_return`, or the other way round.
    """
    if (n_calls is None) != (own_return is None):
        raise ConfigError(f"give n_calls and own_return together, got n_calls={n_calls} and own_return={own_return}")
    sides = {k: _Side(list(values), exact=False) for k, values in returns.items() if values}
    if n_calls is not None and own_return is not None:
        sides[n_calls] = _Side([own_return], exact=True)
    return [_advantage(k, sides[k], sides[k + 1]) for k in sorted(sides) if k + 1 in sides]


@dataclass(frozen=True, slots=True)
class _Side:
    """The returns of forks from one state: the state before a call, or the one after it."""

    returns_N: list[float]
    exact: bool
    """Whether the value is known exactly, because the rollout has ended there."""

    @property
    def mean(self) -> float:
        return mean_of(self.returns_N)

    @property
    def squared_error(self) -> float:
        """The squared standard error of the mean return; 0 if the value is exact."""
        return 0.0 if self.exact else statistics.variance(self.returns_N) / len(self.returns_N)

    def proportion(self) -> tuple[float, float]:
        """Return the 95 % interval of the mean of returns that are all 0 or 1."""
        return (self.mean, self.mean) if self.exact else wilson_interval(self.mean, len(self.returns_N))


def _advantage(call: int, before: _Side, after: _Side) -> CallAdvantage:
    """Estimate one call's advantage with its interval: Newcombe's for returns of 0 and 1, else Welch's, which needs
    three returns on each side.

    before, after: the returns from the states before and after the call.
    """
    difference = after.mean - before.mean
    if all(value in (0.0, 1.0) for side in (before, after) for value in side.returns_N):
        (low_0, high_0), (low_1, high_1) = before.proportion(), after.proportion()
        low = difference - math.hypot(after.mean - low_1, high_0 - before.mean)
        high = difference + math.hypot(high_1 - after.mean, before.mean - low_0)
        return CallAdvantage(call, difference, low, high, "Newcombe")
    if any(len(side.returns_N) < 3 and not side.exact for side in (before, after)):
        return CallAdvantage(call, difference, None, None, "none")
    half = _welch_half_width(before, after)
    return CallAdvantage(call, difference, difference - half, difference + half, "Welch")


def _welch_half_width(before: _Side, after: _Side) -> float:
    """Return half the width of Welch's 95 % interval of the difference of two means (Welch 1947). The degrees of
    freedom are Satterthwaite's; a side whose mean is exact adds no variance.
    """
    variance = before.squared_error + after.squared_error
    if variance == 0.0:
        return 0.0
    freedom = variance**2 / sum(
        side.squared_error**2 / (len(side.returns_N) - 1) for side in (before, after) if not side.exact
    )
    return _t_quantile(freedom) * math.sqrt(variance)


def _t_quantile(freedom: float) -> float:
    """Return the 0.975 quantile of Student's t distribution (Abramowitz and Stegun, 26.7.5).

    freedom: the degrees of freedom. The result is 0.7 % too small for 2, and 0.1 % for 3.
    """
    z, v = _Z, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )
