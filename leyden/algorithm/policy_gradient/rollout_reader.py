"""Convert finished rollouts to training data, and count which calls cannot be trained on and why rollouts failed.

The module knows spans and triplets, no groups, advantages or engine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from leyden.adapter import (
    ROLES,
    SplitTurn,
    TraceAdapter,
    TraceTree,
    call_roles,
    count_roles,
    merge_triplets,
    turn_merges,
)
from leyden.adapter.calls import model_calls
from leyden.adapter.selection import select_calls
from leyden.adapter.trajectory import refusal
from leyden.algorithm.collector import CollectedRollout
from leyden.algorithm.own_metrics import own_metrics
from leyden.algorithm.policy_gradient.signal import Answers, Example
from leyden.algorithm.policy_gradient.step_data import RolloutData
from leyden.dialects import dump
from leyden.errors import ConfigError
from leyden.types import Span, Trajectory, Triplet, failure_reason, find_final_reward, semconv

_SHOWN_REASONS = 5
"""How many reasons a message shows."""


@dataclass(slots=True)
class RolloutCounts:
    """Counts over the rollouts of one stage."""

    rollouts: int = 0
    rewards: list[float] = field(default_factory=list[float])
    """Rewards of succeeded rollouts, and of failed rollouts unless `failed_reward` is None."""
    own: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    """The agent's own numbers of each succeeded rollout, by the metric's name."""
    model_calls: int = 0
    other_calls: Counter[str] = field(default_factory=Counter[str])
    """Calls that are not the agent's, by their roles, and the agent's in doubt."""
    other_tokens: Counter[str] = field(default_factory=Counter[str])
    """The tokens that the model wrote in them, by their roles."""
    call_seconds: float = 0.0
    """The sum of the durations of all model calls."""
    response_tokens: int = 0
    refused_calls: Counter[str] = field(default_factory=Counter[str])
    """Calls that cannot be trained on, by reason."""
    failures: Counter[str] = field(default_factory=Counter[str])
    """Failed rollouts, by reason."""
    cancelled: int = 0
    continued_turns: int = 0
    """Calls that continue an earlier one by their messages."""
    merged_turns: int = 0
    """Continued turns whose tokens continue the earlier call, too, so that both are one sequence."""
    split_turn: SplitTurn | None = None
    """The first continued turn whose tokens do not continue the earlier call; None if all do."""
    answers: Answers = field(default_factory=Answers)


@dataclass(slots=True)
class RolloutReader:
    """Converts collected rollouts to rewards and trajectories to train on.

    adapter: makes triplets of spans.
    temperature: the sampling temperature of the trained policy. Calls at another temperature, and calls with other
        parameters that change the distribution (`leyden.dialects.sampling`), are refused. None: every call is accepted.
    failed_reward: the reward of a failed rollout in its group; None leaves it out.
    agent_match: only calls of agents whose name contains a match are trained on; None: all calls.
    """

    adapter: TraceAdapter[Any]
    temperature: float | None
    failed_reward: float | None
    agent_match: re.Pattern[str] | None = None

    def read(self, result: CollectedRollout, counts: RolloutCounts) -> RolloutData | None:
        """Return the reward and the trajectories of a rollout, and count it in `counts`. Return None if it does not
        count in its group.

        If one of its calls cannot be trained on, a rollout keeps its reward but has no trajectory, because training on
        the other calls alone would credit them with what that call did.
        """
        triplets = self._triplets(result.spans)
        counts.rollouts += 1
        counts.model_calls += len(triplets)
        calls = [span for span in result.spans if span.name == semconv.MODEL_CALL]
        counts.call_seconds += sum(
            span.end_time - span.start_time for span in calls if span.start_time and span.end_time
        )
        views = model_calls(result.spans)
        roles = call_roles(views, result.spans)
        counts.other_calls.update(count_roles(roles))
        for view, each in zip(views, roles, strict=True):
            if each.role != "agent" and view.tokens is not None:
                counts.other_tokens[each.role] += len(view.tokens.response_ids)
        counts.response_tokens += sum(len(triplet.response.token_ids) for triplet in triplets)
        reward = find_final_reward(result.spans)
        if result.status != "succeeded" or reward is None:
            return self._failed(result, counts)
        counts.rewards.append(reward)
        counts.own.append(own_metrics(result.spans))
        _note_answers(counts.answers, result, triplets, reward)
        chosen = self._chosen(triplets, result.spans, counts)
        trajectories = self._merged(chosen, result.spans, reward, counts)
        return RolloutData(result.rollout_id, reward, trajectories, _call_indices(trajectories, chosen, result.spans))

    def trajectories(self, spans: Sequence[Span], counts: RolloutCounts) -> list[Trajectory]:
        """Return the trajectories of an attempt; an empty list if one of its calls cannot be trained on."""
        return self._merged(self._chosen(self._triplets(spans), spans, counts), spans, None, counts)

    def _chosen(self, triplets: list[Triplet], spans: Sequence[Span], counts: RolloutCounts) -> list[Triplet]:
        """Return the calls whose nearest agent is trained: all, or those whose name matches."""
        if self.agent_match is None or not triplets:
            return triplets
        calls = select_calls(
            spans,
            TraceTree.from_spans(spans),
            agent_match=self.agent_match.pattern,
            repair_hierarchy=True,
            roles=ROLES,  # the adapter has chosen among them
        )
        span_ids = {span.span_id for call in calls for span in call.view.spans}
        chosen = [triplet for triplet in triplets if triplet.metadata.get("span_id") in span_ids]
        if not chosen:
            why = "no agent's call"
            if calls:
                why = "only calls that the adapter leaves out; subagents need adapter=TraceToTriplet(roles=['agent', 'subagent'])"
            counts.refused_calls[f"agent_match={self.agent_match.pattern!r} finds {why}"] += 1
        return chosen

    def _merged(
        self, triplets: list[Triplet], spans: Sequence[Span], reward: float | None, counts: RolloutCounts
    ) -> list[Trajectory]:
        """Return the trajectories of a rollout; none if a call cannot be trained on. Count the refused calls, and the
        calls that continue an earlier one.
        """
        refused = [reason for triplet in triplets if (reason := self._refusal(triplet)) is not None]
        counts.refused_calls.update(refused)
        if refused:
            return []
        merged = [trajectory for trajectory in merge_triplets(triplets, reward=reward) if trajectory.n_trained]
        _count_turns(counts, spans, merged)
        return merged

    def _failed(self, result: CollectedRollout, counts: RolloutCounts) -> RolloutData | None:
        """Count a rollout that failed or was cancelled. Return a failed one with `failed_reward`, and None if it was
        cancelled or `failed_reward` is None.
        """
        if result.status == "cancelled":
            counts.cancelled += 1
            return None
        counts.failures[failure_reason(result.rollout)] += 1
        if self.failed_reward is None:
            return None
        counts.rewards.append(self.failed_reward)
        return RolloutData(result.rollout_id, self.failed_reward)

    def _triplets(self, spans: Sequence[Span]) -> list[Triplet]:
        triplets: list[Any] = self.adapter.adapt(spans)
        for item in triplets:
            if not isinstance(item, Triplet):
                raise ConfigError(
                    f"PolicyGradient trains on Triplets, but adapter={type(self.adapter).__name__} gave a "
                    f"{type(item).__name__}; use TraceToTriplet, which is the default"
                )
        return triplets

    def _refusal(self, triplet: Triplet) -> str | None:
        temperature = triplet.metadata.get("temperature", 1.0)  # the default of every OpenAI-compatible server
        if self.temperature is not None and abs(temperature - self.temperature) > 1e-6:
            return (
                f"the agent sampled at temperature {temperature:g}, the policy is trained at {self.temperature:g}: "
                "use llm.sampling_parameters['temperature'] in the agent, or PolicyGradient(temperature=...)"
            )
        if self.temperature is not None and (changed := triplet.metadata.get("sampling")):
            shown = ", ".join(f"{name} {dump(value).decode():.40}" for name, value in changed.items())
            return (
                f"the agent sampled with {shown}, the policy is trained on its whole distribution: leave that out of the "
                "agent's requests and of the gateway's sampling_overrides"
            )
        return refusal(triplet)


def explanation(counts: RolloutCounts) -> str:
    """Return a message with the most frequent reasons of failures and refusals, and their counts."""
    kinds = {"Failed rollouts": counts.failures, "Model calls that cannot be trained on": counts.refused_calls}
    found = [f"{kind}: {_by_count(reasons)}" for kind, reasons in kinds.items() if reasons]
    if counts.cancelled:
        found.append(f"{counts.cancelled} rollouts were cancelled")
    return ". ".join(found) or "No rollout has a model call that was sampled in it"


def _by_count(reasons: Counter[str]) -> str:
    shown = [f"{count} x {reason:.300}" for reason, count in reasons.most_common(_SHOWN_REASONS)]
    rest = reasons.total() - sum(count for _, count in reasons.most_common(_SHOWN_REASONS))
    return "; ".join(shown + [f"{rest} x something else"] * (rest > 0))


def _call_indices(trajectories: Sequence[Trajectory], triplets: Sequence[Triplet], spans: Sequence[Span]) -> list[int]:
    """Return the gateway's number of each trained call, in order; empty unless each has one."""
    number_of = {span.span_id: span.attributes.get(semconv.CALL_INDEX) for span in spans}
    trained = sorted(number for trajectory in trajectories for number in trajectory.call_numbers)
    found = [number_of.get(str(triplets[number].metadata.get("span_id"))) for number in trained]
    indices = [number for number in found if isinstance(number, int)]
    return indices if len(indices) == len(found) else []


def _note_answers(answers: Answers, result: CollectedRollout, triplets: Sequence[Triplet], reward: float) -> None:
    reasons = {span.span_id: span.attributes.get(semconv.GEN_AI_FINISH_REASONS) for span in result.spans}
    cut = {span_id for span_id, found in reasons.items() if isinstance(found, list | tuple) and "length" in found}
    for triplet in triplets:
        answers.add(triplet.response.token_ids, cut=triplet.metadata.get("span_id") in cut)
    if triplets and answers.example is None:
        answers.example = Example(result.rollout.input, triplets[-1].response.raw_content, reward)


def _count_turns(counts: RolloutCounts, spans: Sequence[Span], trajectories: Sequence[Trajectory]) -> None:
    """Count the turns of an attempt that continue an earlier one, and those of them that merged."""
    if len(trajectories) == 1:  # all turns have merged, so there are no messages to compare
        counts.continued_turns += len(trajectories[0].call_spans) - 1
        counts.merged_turns += len(trajectories[0].call_spans) - 1
        return
    turns = turn_merges(spans)
    counts.continued_turns += turns.continued
    counts.merged_turns += turns.merged
    if turns.splits and counts.split_turn is None:
        counts.split_turn = turns.splits[0]
