"""Fork recorded rollouts, and estimate the advantages of single model calls from the forks.

A fork repeats the first k model calls of a rollout from its record, and samples the rest again. The mean return of such
forks estimates the value of the state before call k, and the difference of two values is an advantage (VinePPO,
arXiv:2410.01679, section 4). The environment needs no support for that, but the agent's own code, including its tools,
must be deterministic: a fork whose requests differ from the record is left out, and counted.

All functions are pure; `RolloutCollector` runs the requests. N: number of forks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from leyden._lib import ids
from leyden._lib.options import check_number
from leyden.adapter import divergence, replayed_calls
from leyden.algorithm.collector import CollectedRollout, rollout_id_of
from leyden.errors import ConfigError
from leyden.statistics import Sample, unpaired_difference
from leyden.types import AttemptedRollout, EnqueueRolloutRequest, ReplayFrom, Rollout, read_replay_from, semconv


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
    sides = {k: Sample(list(values)) for k, values in returns.items() if values}
    if n_calls is not None and own_return is not None:
        sides[n_calls] = Sample([own_return], exact=True)
    found = {k: unpaired_difference(sides[k], sides[k + 1]) for k in sorted(sides) if k + 1 in sides}
    return [CallAdvantage(k, each.mean, each.low, each.high, each.method) for k, each in found.items()]
