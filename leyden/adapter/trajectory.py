"""Triplets to trajectories: calls of one conversation become one sequence, each token trained once.

A call continues a trajectory only if its prompt's ids begin with all ids of it, exactly. A prompt
that was rewritten, or that was tokenised differently when it came back, starts a new trajectory; so
do parallel conversations. Merging changes no loss: every sampled token keeps its context (to the
last id), its log-probability and its place. `TokenGraph` does the merging.
"""

from __future__ import annotations

from collections.abc import Sequence

from leyden.adapter.base import Adapter, TraceAdapter, log_result
from leyden.adapter.token_graph import TokenGraph
from leyden.adapter.triplet import LlmProxyTraceToTriplet, TracerTraceToTriplet
from leyden.errors import ConfigError
from leyden.types import Span, Trajectory, Triplet, find_final_reward


def refusal(triplet: Triplet) -> str | None:
    """Return why a call cannot be trained on; None if it can."""
    if "refused" in triplet.metadata:
        return str(triplet.metadata["refused"])
    n_tokens, logprobs, mask = len(triplet.response.token_ids), triplet.response.logprobs, triplet.response.loss_mask
    if not triplet.prompt.token_ids or n_tokens == 0:
        return "the prompt or the response has no tokens"
    if logprobs is None:
        return "the response has no log-probabilities"
    if len(logprobs) != n_tokens:
        return f"the response has {n_tokens} tokens and {len(logprobs)} log-probabilities"
    if mask is not None and len(mask) != n_tokens:
        return f"the response has {n_tokens} tokens and a loss mask of {len(mask)}"
    return None


def merge_triplets(triplets: Sequence[Triplet], *, reward: float | None = None) -> list[Trajectory]:
    """Merge the calls of one attempt, in order, to trajectories that carry the attempt's final
    `reward`. Refused calls are left out.
    """
    graph = TokenGraph()
    for triplet in triplets:
        if refusal(triplet) is None:
            graph.add(triplet)
    return graph.trajectories(reward=reward)


class TraceToTrajectory(TraceAdapter[list[Trajectory]]):
    """Convert the spans of one attempt to trajectories. The reward of each is the attempt's final
    one.
    """

    def __init__(
        self, triplets: Adapter[Sequence[Span], list[Triplet]] | None = None, *, agent_match: str | None = None
    ) -> None:
        """Choose the calls.

        triplets: the adapter that chooses them; by default the calls that the gateway recorded.
        agent_match: instead of `triplets`, a regular expression: only calls of agents whose name
            contains a match. The other agents' messages are context.
        Raise ConfigError if both are given.
        """
        if triplets is not None and agent_match is not None:
            raise ConfigError(
                f"triplets={type(triplets).__name__} chooses the calls, so agent_match={agent_match!r} has no say; "
                "use TraceToTrajectory(TracerTraceToTriplet(agent_match=...))"
            )
        if agent_match is not None:
            triplets = TracerTraceToTriplet(agent_match=agent_match)
        self._triplets = triplets or LlmProxyTraceToTriplet()

    def adapt(self, source: Sequence[Span]) -> list[Trajectory]:
        """Return the trajectories of one attempt, in the order in which they began."""
        spans = sorted(source, key=lambda span: span.sequence_id)
        trajectories = merge_triplets(self._triplets.adapt(spans), reward=find_final_reward(spans))
        for trajectory in trajectories:
            trajectory.rollout_id, trajectory.attempt_id = spans[0].rollout_id, spans[0].attempt_id
        log_result(self, source, "trajectories", trajectories)
        return trajectories
