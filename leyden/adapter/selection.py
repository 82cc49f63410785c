"""Select model calls of a trace, find the agent of each, and assign rewards to calls."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from leyden.adapter.calls import model_calls
from leyden.adapter.normalise import ModelCallView, read_model_call
from leyden.adapter.order import in_order
from leyden.adapter.roles import chosen_roles, with_roles
from leyden.adapter.tree import TraceTree
from leyden.types import Span, get_reward_value, is_reward_span, semconv


@dataclass(frozen=True, slots=True)
class SelectedCall:
    """A call that succeeded, and the agent that made it."""

    view: ModelCallView
    agent: str | None
    """The name of the nearest agent above the call; None if there is none."""


class RewardMatchPolicy(StrEnum):
    """The rule by which a reward is assigned to a call. A reward that is linked to a call (by attributes
    `leyden.link.N.*`) belongs to that call under either rule.
    """

    FIRST_OCCURRENCE = "first_occurrence"
    """A reward belongs to the latest call that had ended when the reward was emitted and has no reward yet."""
    FIRST_SIBLING = "first_sibling"
    """As `FIRST_OCCURRENCE`, but only calls with the same parent as the reward count."""


def select_calls(
    spans: Sequence[Span],
    tree: TraceTree,
    *,
    agent_match: str | None = None,
    llm_call_match: str | None = None,
    exclude_llm_call_in_reward: bool = False,
    repair_hierarchy: bool = False,
    roles: Collection[str] | None = None,
) -> list[SelectedCall]:
    """Return the successful calls of an attempt that match all conditions, in order.

    tree: the tree of the same spans.
    agent_match: a regular expression that the name of the nearest agent above must contain.
    llm_call_match: a regular expression that the name of one of the call's spans must contain.
    exclude_llm_call_in_reward: leave out calls below a reward (a judge).
    repair_hierarchy: repair `tree` in place. An agent that only the repair finds counts for calls that have none
        without it.
    roles: the roles (`roles.CallRole`) of the calls that are wanted; None: as of `roles.chosen_roles`.
    """
    trees = [(tree.agents(), tree.within_rewards())]
    if repair_hierarchy:
        tree.repair_hierarchy()
        trees.append((tree.agents(), tree.within_rewards()))
    selected: list[SelectedCall] = []
    calls = model_calls(spans)
    for call in with_roles(calls, spans, chosen_roles(roles, agent_match)):
        ids = [span.span_id for span in call.spans]
        # The recorded tree is asked first, then the repaired one.
        agent = next((name for agents, _ in trees for id in ids if (name := agents.get(id)) is not None), None)
        wanted = (
            not call.failed
            and (agent_match is None or (agent is not None and re.search(agent_match, agent) is not None))
            and (llm_call_match is None or any(re.search(llm_call_match, span.name) for span in call.spans))
            and not (exclude_llm_call_in_reward and any(id in judged for _, judged in trees for id in ids))
        )
        if wanted:
            selected.append(SelectedCall(call, agent))
    return selected


def match_rewards(
    calls: Sequence[ModelCallView],
    spans: Sequence[Span],
    policy: RewardMatchPolicy = RewardMatchPolicy.FIRST_OCCURRENCE,
    tree: TraceTree | None = None,
) -> list[float | None]:
    """Return the reward of each call; None for a call without one.

    Rewards are assigned in the order in which they were emitted. A reward that fits no call, or that is linked to a
    model call that is not one of `calls`, is skipped here; it still counts for `find_final_reward`.
    policy: the rule for rewards without a link.
    tree: the tree of the same spans. `FIRST_SIBLING` needs it.
    """
    rewards: list[float | None] = [None] * len(calls)
    emitted = in_order([span for span in spans if is_reward_span(span)])
    if not emitted:
        return rewards
    parents = {} if tree is None else {child.id: node.id for node in tree.traverse() for child in node.children}
    by_time = policy is RewardMatchPolicy.FIRST_OCCURRENCE
    ended: list[float] = []
    for call in calls:
        # The agent's own spans decide if there are any, because the agent's clock also times the rewards.
        own = [span for span in call.spans if span.name != semconv.MODEL_CALL] or list(call.spans)
        ended.append(min((span.start_time or 0.0) if span.end_time is None else span.end_time for span in own))
    for span in emitted:
        links = _links(span)
        index = next((index for index, call in enumerate(calls) if links and _is_linked(links, call.spans)), None)
        if index is None and links and _is_linked(links, [each for each in spans if read_model_call(each) is not None]):
            continue  # the reward of a call that was not chosen
        parent = parents.get(span.span_id)
        for earlier in reversed(range(len(calls))) if index is None else ():
            call = calls[earlier]
            if rewards[earlier] is not None or ended[earlier] > (span.start_time or 0.0):
                continue
            if by_time or (parent is not None and any(parents.get(each.span_id) == parent for each in call.spans)):
                index = earlier
                break
        if index is not None:
            rewards[index] = get_reward_value(span)
    return rewards


def _links(reward: Span) -> list[tuple[str, Any]]:
    """Return what a reward is linked to: pairs of an attribute's name (or span_id) and its value."""
    found: list[tuple[str, Any]] = []
    for prefix in (semconv.LINK_PREFIX, semconv.AGL_LINK_PREFIX):
        number = 0
        while isinstance(key := reward.attributes.get(f"{prefix}.{number}.key_match"), str):
            found.append((key, reward.attributes.get(f"{prefix}.{number}.value_match")))
            number += 1
    return found


def _is_linked(links: Sequence[tuple[str, Any]], spans: Sequence[Span]) -> bool:
    return any(
        (span.span_id if key == "span_id" else span.attributes.get(key)) == value
        for key, value in links
        for span in spans
    )
