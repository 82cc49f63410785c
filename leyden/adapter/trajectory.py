"""Triplets to trajectories: calls of one conversation become one sequence, each token trained once.

A call is merged only where its prompt's ids begin with the ids of the trajectory so far, exactly. A prompt that was rewritten, or that
came back tokenised otherwise, starts a new trajectory; so do parallel conversations. Merging changes no loss: every sampled token keeps
its context (to the last id), its log-probability and its place.
"""

from __future__ import annotations

from collections.abc import Sequence

from leyden.adapter.base import Adapter, TraceAdapter
from leyden.adapter.triplet import LlmProxyTraceToTriplet
from leyden.types import Span, Trajectory, Triplet, find_final_reward

__all__ = ["TraceToTrajectory", "merge_triplets", "refusal"]


def refusal(triplet: Triplet) -> str | None:
    """Why a call cannot be trained on; None when it can."""
    if "refused" in triplet.metadata:
        return str(triplet.metadata["refused"])
    n_tokens, logprobs = len(triplet.response.token_ids), triplet.response.logprobs
    if not triplet.prompt.token_ids or n_tokens == 0:
        return "the prompt or the response has no tokens"
    if logprobs is None:
        return "the response has no log-probabilities"
    if len(logprobs) != n_tokens:
        return f"the response has {n_tokens} tokens and {len(logprobs)} log-probabilities"
    return None


def merge_triplets(triplets: Sequence[Triplet], *, reward: float | None = None) -> list[Trajectory]:
    """The calls of one attempt, in order, as trajectories that carry the attempt's final `reward`; refused calls are left out."""
    merged: list[Trajectory] = []
    for triplet in triplets:
        if refusal(triplet) is not None:
            continue
        trajectory = _extended_by(merged, triplet.prompt.token_ids)
        if trajectory is None:
            trajectory = Trajectory(token_ids=[], loss_mask=[], logprobs=[], reward=reward)
            merged.append(trajectory)
        _append_call(trajectory, triplet)
    return merged


def _extended_by(trajectories: Sequence[Trajectory], prompt_ids: list[int]) -> Trajectory | None:
    for trajectory in reversed(trajectories):
        length = len(trajectory.token_ids)
        if length <= len(prompt_ids) and prompt_ids[:length] == trajectory.token_ids:
            return trajectory
    return None


def _append_call(trajectory: Trajectory, triplet: Triplet) -> None:
    observed = triplet.prompt.token_ids[len(trajectory.token_ids) :]
    response, logprobs = triplet.response.token_ids, triplet.response.logprobs or []
    trajectory.token_ids += observed + response
    trajectory.loss_mask += [0] * len(observed) + [1] * len(response)
    trajectory.logprobs += [0.0] * len(observed) + logprobs
    end = len(trajectory.token_ids)
    trajectory.call_spans.append((end - len(response), end))
    trajectory.call_rewards.append(triplet.reward)
    if versions := triplet.response.policy_versions:
        low, high = trajectory.policy_versions or (versions[0], versions[0])
        trajectory.policy_versions = (min(low, *versions), max(high, *versions))


class TraceToTrajectory(TraceAdapter[list[Trajectory]]):
    """Spans of one attempt to trajectories; the reward of each is the attempt's final one."""

    def __init__(self, triplets: Adapter[Sequence[Span], list[Triplet]] | None = None) -> None:
        self._triplets = triplets or LlmProxyTraceToTriplet()

    def adapt(self, source: Sequence[Span]) -> list[Trajectory]:
        """The trajectories of one attempt, in the order in which they began."""
        spans = sorted(source, key=lambda span: span.sequence_id)
        trajectories = merge_triplets(self._triplets.adapt(spans), reward=find_final_reward(spans))
        for trajectory in trajectories:
            trajectory.rollout_id, trajectory.attempt_id = spans[0].rollout_id, spans[0].attempt_id
        return trajectories
