"""Merge triplets to trajectories: calls of one conversation become one sequence, in which each token is trained on
once.

A call continues a trajectory only if the ids of its prompt begin with all ids of the trajectory. A prompt that was
rewritten, or that was tokenised differently when it came back, starts a new trajectory, and so does a parallel
conversation. Merging changes no loss: every sampled token keeps its context (to the last id), its log-probability and
its position. `TokenGraph` does the merging.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from leyden.adapter.token_graph import TokenGraph
from leyden.adapter.trace_adapter import Adapter, TraceAdapter, log_result
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
    """Return the trajectories of one attempt's calls.

    triplets: the calls in order. Those that cannot be trained on (`refusal`) are left out.
    reward: the attempt's final reward, for each trajectory.
    """
    graph = TokenGraph()
    for triplet in triplets:
        if refusal(triplet) is None:
            graph.add(triplet)
    return graph.trajectories(reward=reward)


class TraceToTrajectory(TraceAdapter[list[Trajectory]]):
    """Converts the spans of one attempt to trajectories. Each has the attempt's final reward."""

    def __init__(
        self,
        triplets: Adapter[Sequence[Span], list[Triplet]] | None = None,
        *,
        agent_match: str | None = None,
        roles: Collection[str] | None = None,
    ) -> None:
        """
        triplets: the adapter that chooses the calls. None: the calls that the gateway recorded.
        agent_match: a regular expression, in place of `triplets`. Only calls of agents whose name
            contains a match are trained on; the other agents' messages are context.
        roles: the roles of the calls that are trained on (`leyden.adapter.roles`), in place of `triplets`; None: the
            agent's, and with `agent_match` those of subagents of that name too.
        Raise ConfigError if `triplets` and another are given.
        """
        if triplets is not None and roles is not None:
            raise ConfigError(
                f"triplets={type(triplets).__name__} chooses the calls, so roles={roles!r} has no effect; give it the roles"
            )
        if triplets is not None and agent_match is not None:
            raise ConfigError(
                f"triplets={type(triplets).__name__} chooses the calls, so agent_match={agent_match!r} has no effect; "
                "use TraceToTrajectory(TracerTraceToTriplet(agent_match=...))"
            )
        if agent_match is not None:
            triplets = TracerTraceToTriplet(agent_match=agent_match, roles=roles)
        self._triplets = triplets or LlmProxyTraceToTriplet(roles)

    def adapt(self, source: Sequence[Span]) -> list[Trajectory]:
        spans = sorted(source, key=lambda span: span.sequence_id)
        trajectories = merge_triplets(self._triplets.adapt(spans), reward=find_final_reward(spans))
        for trajectory in trajectories:
            trajectory.rollout_id, trajectory.attempt_id = spans[0].rollout_id, spans[0].attempt_id
        log_result(self, source, "trajectories", trajectories)
        return trajectories
