"""Request the forks of a group's rollouts, and add the forks' returns to the rollouts.

An estimator that values the states between calls chooses the calls at which a rollout is forked
(`Advantages.fork_places`). Forks are not trained on: only their rewards are used, as estimates of a state's value. The
module knows rollouts and their forks, no engine, and no estimator by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from leyden.adapter import replayed_calls
from leyden.algorithm.collector import CollectedRollout
from leyden.algorithm.forks import fork_requests, fork_returns
from leyden.algorithm.policy_gradient.step_data import Group, has_signal
from leyden.objectives.advantages import Advantages
from leyden.training import Metrics
from leyden.types import EnqueueRolloutRequest


@dataclass(slots=True)
class ForkCounts:
    """Counts over the forks of one step."""

    forks: int = 0
    live_calls: int = 0
    """Model calls of the forks that the model answered, not the record."""
    diverged: list[str] = field(default_factory=list[str])
    """For each fork that differed from the record, how, in one line. Such forks have no return."""
    unnumbered: int = 0
    """The number of rollouts of several calls that cannot be forked, because the gateway has not
    numbered their calls."""

    def metrics(self) -> Metrics:
        return {"forks": self.forks, "fork_calls": self.live_calls, "diverged_forks": len(self.diverged)}


def requests_of_forks(
    group: Group, results: Iterable[CollectedRollout], advantages: Advantages, *, resources_id: str
) -> list[EnqueueRolloutRequest]:
    """Return the requests of a group's forks. A group without signal has none, because it is not trained on."""
    if not has_signal(group, advantages):
        return []
    rollouts = {rollout.rollout_id: rollout for rollout in group.rollouts}
    return [
        request
        for result in results
        if (data := rollouts.get(result.rollout_id)) is not None
        for place in advantages.fork_places(len(data.call_indices))
        for request in fork_requests(
            result.rollout, at_call=data.call_indices[place], n=advantages.forks_per_call, resources_id=resources_id
        )
    ]


def add_returns(
    group: Group, forks: Sequence[CollectedRollout], counts: ForkCounts, *, failed_reward: float | None
) -> None:
    """Add the forks' returns to the rollouts of their group, and count the forks in `counts`.

    failed_reward: the return of a fork that failed; None leaves it out.
    """
    finished = [fork for fork in forks if fork.status != "cancelled"]
    counts.forks += len(finished)
    counts.live_calls += sum(call.state != "replayed" for fork in finished for call in replayed_calls(fork.spans))
    returns = {
        rollout_id: found for (rollout_id, _), found in fork_returns(finished, failure_reward=failed_reward).items()
    }
    for rollout in group.rollouts:
        counts.unnumbered += not rollout.call_indices and sum(len(each.call_spans) for each in rollout.trajectories) > 1
        if (found := returns.get(rollout.rollout_id)) is None:
            continue
        counts.diverged += found.diverged
        place_of = {index: place for place, index in enumerate(rollout.call_indices)}
        rollout.forked_returns = {place_of[index]: values for index, values in found.by_call.items()}
