"""Convert model calls to triplets: one for each call, with the reward that followed it.

`TraceToTriplet` reads the gateway's record if an attempt has one, and the tracer's spans otherwise.
`TracerTraceToTriplet` reads the calls of every source, and `LlmProxyTraceToTriplet` those of the gateway alone. Token
ids are exact or missing: a call whose tokens could not be proven keeps its text and gives the reason in
`metadata["refused"]`, and no algorithm trains on it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from leyden.adapter.calls import model_calls
from leyden.adapter.chat_messages import image_urls
from leyden.adapter.normalise import ModelCallView
from leyden.adapter.order import in_order
from leyden.adapter.roles import chosen_roles, with_roles
from leyden.adapter.selection import RewardMatchPolicy, SelectedCall, match_rewards, select_calls
from leyden.adapter.trace_adapter import TraceAdapter, log_result
from leyden.adapter.tree import TraceTree
from leyden.dialects.sampling import changes
from leyden.types import Span, Triplet, TripletPrompt, TripletResponse, get_known_prefix, semconv

_PROXY_SPANS = (semconv.MODEL_CALL, "raw_gen_ai_request", "litellm_request")
"""The names of a gateway's spans: Leyden's, and those of Agent Lightning's proxy (litellm)."""


class TracerTraceToTriplet(TraceAdapter[list[Triplet]]):
    """Converts every successful call of an attempt, from any source, to a triplet, in order. A call that several
    sources recorded is one triplet.

    The `metadata` of a triplet has `span_id`, `sequence_id`, `response_id`, `agent_name` (None: no agent), `model` and
    `temperature`, and `refused`, why the call cannot be trained on. `sampling` has the other parameters that changed
    the distribution, such as `top_p`. `replayed` (True) marks a call that was answered from the record of another
    attempt: its response is context, with a loss mask of zeros. `goes_on_from` is the span id of the earlier call that
    the prompt continues, as the gateway found it, and `known_prefix` is the number of ids that both have in common.
    """

    def __init__(
        self,
        repair_hierarchy: bool = True,
        llm_call_match: str | None = None,
        agent_match: str | None = None,
        exclude_llm_call_in_reward: bool = True,
        reward_match: RewardMatchPolicy = RewardMatchPolicy.FIRST_OCCURRENCE,
        roles: Collection[str] | None = None,
        _skip_empty_token_spans: bool = False,
    ) -> None:
        """
        repair_hierarchy: move calls that instrumentation left beside their agent's step below it
            (`TraceTree.repair_hierarchy`).
        llm_call_match: a regular expression; only calls with a span whose name contains a match.
            None: every model call.
        agent_match: a regular expression; only calls whose nearest agent has a name that contains a
            match. None: calls of any or no agent.
        exclude_llm_call_in_reward: leave out calls below a reward, a judge's for instance.
        reward_match: the rule by which a reward is assigned to a call.
        roles: the roles of the calls that become triplets (`leyden.adapter.roles`): "agent", "subagent", "compaction",
            "auxiliary", "discarded". With "subagent" the turns of its subagents get the same reward. None: the agent's,
            and with `agent_match` those of subagents of that name too.
        _skip_empty_token_spans: leave out calls without token ids, and train on the rollout without
            them. Otherwise such a call is a triplet with `refused`.
        """
        self.repair_hierarchy = repair_hierarchy
        self.llm_call_match = llm_call_match
        self.agent_match = agent_match
        self.exclude_llm_call_in_reward = exclude_llm_call_in_reward
        self.reward_match = RewardMatchPolicy(reward_match)
        self.roles = chosen_roles(roles, agent_match)
        self._skip_empty_token_spans = _skip_empty_token_spans

    def adapt(self, source: Sequence[Span]) -> list[Triplet]:
        if not source:
            return []
        tree = TraceTree.from_spans(source)
        selected = select_calls(
            source,
            tree,
            agent_match=self.agent_match,
            llm_call_match=self.llm_call_match,
            exclude_llm_call_in_reward=self.exclude_llm_call_in_reward,
            repair_hierarchy=self.repair_hierarchy,
            roles=self.roles,
        )
        selected = self._chosen(source, selected)
        if self._skip_empty_token_spans:
            selected = [call for call in selected if call.view.tokens is not None]
        rewards = match_rewards([call.view for call in selected], source, self.reward_match, tree)
        triplets = [
            _triplet(call.view, reward, agent_name=call.agent) for call, reward in zip(selected, rewards, strict=True)
        ]
        _log_triplets(self, source, triplets)
        return triplets

    def _chosen(self, source: Sequence[Span], selected: list[SelectedCall]) -> list[SelectedCall]:
        """Return the selected calls that become triplets. Override it to leave out some."""
        return selected

    def visualize(
        self,
        source: Sequence[Span],
        filename: str | Path = "trace_tree",
        interested_span_match: str | None = None,
    ) -> TraceTree:
        """Write the tree of spans from which calls are selected for Graphviz. Return the tree.

        filename: the file; `.dot` is added to a name without it, and `dot -Tsvg FILE` draws it.
        interested_span_match: a regular expression; only spans whose name contains a match, and the spans above them,
            are drawn.
        """
        tree = TraceTree.from_spans(source)
        if self.repair_hierarchy:
            tree.repair_hierarchy()
        tree.visualize(filename, interested_span_match)
        return tree


class TraceToTriplet(TracerTraceToTriplet):
    """Converts the calls in the gateway's record to triplets, or those in the tracer's spans if there is no such
    record. This is the trainer's default adapter.

    In an attempt with a gateway's record, calls that the gateway did not record are left out, because they went to
    another model. A call that the gateway and the tracer both recorded becomes one triplet, with the gateway's tokens
    and the tracer's agent. Options and metadata are those of `TracerTraceToTriplet`.
    """

    def _chosen(self, source: Sequence[Span], selected: list[SelectedCall]) -> list[SelectedCall]:
        if not any(span.name in _PROXY_SPANS for span in source):
            return selected
        return [call for call in selected if any(span.name in _PROXY_SPANS for span in call.view.spans)]


class LlmProxyTraceToTriplet(TraceAdapter[list[Triplet]]):
    """Converts the calls that a gateway recorded (Leyden's, or Agent Lightning's proxy) to triplets, in the order in
    which they reached it.

    Records with the same response id and the same answer are one call. A reward belongs to the latest call that had
    ended when the reward was emitted and has no reward yet. Failed calls (status ERROR) are left out.
    """

    def __init__(self, roles: Collection[str] | None = None) -> None:
        """roles: the roles of the calls that become triplets (`leyden.adapter.roles`); None: the agent's."""
        self.roles = chosen_roles(roles)

    def adapt(self, source: Sequence[Span]) -> list[Triplet]:
        spans = in_order(source)
        recorded = model_calls([span for span in spans if span.name in _PROXY_SPANS])
        calls = [call for call in with_roles(recorded, spans, self.roles) if not call.failed]
        triplets = [_triplet(call, reward) for call, reward in zip(calls, match_rewards(calls, spans), strict=True)]
        _log_triplets(self, source, triplets)
        return triplets


def _log_triplets(adapter: TraceAdapter[list[Triplet]], source: Sequence[Span], triplets: Sequence[Triplet]) -> None:
    refused = [str(triplet.metadata["refused"]) for triplet in triplets if "refused" in triplet.metadata]
    log_result(adapter, source, "triplets", triplets, refused)


def _triplet(call: ModelCallView, reward: float | None, **metadata: Any) -> Triplet:
    """Return a model call as a triplet, with further `metadata`. A replayed call has a loss mask of zeros."""
    known = {
        "span_id": call.span.span_id,
        "sequence_id": call.span.sequence_id,
        "response_id": call.response_id,
        "model": call.model,
        "temperature": call.settings.get("temperature"),
        "sampling": changes(call.settings) or None,
        "refused": call.refused,
    }
    if (known_prefix := get_known_prefix(call.span)) is not None:
        known["goes_on_from"], known["known_prefix"] = known_prefix
    tokens = call.tokens
    loss_mask = None if tokens is None else tokens.loss_mask
    if tokens is not None and call.replayed:
        known["replayed"], loss_mask = True, [0] * len(tokens.response_ids)
    return Triplet(
        prompt=TripletPrompt(
            token_ids=[] if tokens is None else tokens.prompt_ids,
            raw_content=call.input_messages,
            image_urls=image_urls(call.input_messages),
        ),
        response=TripletResponse(
            token_ids=[] if tokens is None else tokens.response_ids,
            raw_content=call.output_messages,
            logprobs=None if tokens is None else tokens.logprobs,
            policy_versions=None if tokens is None else tokens.policy_versions,
            loss_mask=loss_mask,
        ),
        reward=reward,
        metadata={name: value for name, value in known.items() if value is not None} | metadata,
    )
