"""Training data: triplets of one model call, trajectories of whole rollouts, and sequences with advantages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, Field


class TripletPrompt(BaseModel):
    """The prompt of a model call."""

    token_ids: list[int] = Field(default_factory=list[int])
    raw_content: Any = None
    """The messages, as the request had them."""
    image_urls: list[str] = Field(default_factory=list[str])


class TripletResponse(BaseModel):
    """The response of a model call."""

    token_ids: list[int] = Field(default_factory=list[int])
    raw_content: Any = None
    """The message, as the response had it."""
    logprobs: list[float] | None = None
    policy_versions: list[int] | None = None
    loss_mask: list[int] | None = None
    """1 for each response token that the policy sampled, 0 for the others. None: it sampled all."""


class Triplet(BaseModel):
    """One model call: prompt, response, and the reward that followed it (None: no reward did)."""

    prompt: TripletPrompt
    response: TripletResponse
    reward: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])
    """`response_id`, `sequence_id`, `span_id`, `refused` (why the tokens cannot be trained on), `goes_on_from` (the
    `span_id` of the earlier call with whose ids the prompt begins) and `known_prefix` (how many these are)."""


@dataclass(slots=True)
class Trajectory:
    """A token sequence ready to train on: one or more calls of one attempt, each extending the one before. T tokens."""

    token_ids: list[int]
    """Shape (T,): prompts, responses and the tokens between them."""
    loss_mask: list[int]
    """Shape (T,): 1 where the policy sampled the token, 0 elsewhere."""
    logprobs: list[float]
    """Shape (T,): log-probability under the sampling policy; 0.0 where the mask is 0."""
    reward: float | None
    """The attempt's final reward."""
    rollout_id: str = ""
    attempt_id: str = ""
    call_spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """The half-open range of sampled tokens of each call, in order."""
    call_rewards: list[float | None] = field(default_factory=list[float | None])
    """The reward that followed each call."""
    call_numbers: list[int] = field(default_factory=list[int])
    """The index of each call among all calls of the attempt that were merged, from 0."""
    policy_versions: tuple[int, int] | None = None
    """The smallest and the largest version of the policy that sampled a token."""

    @property
    def n_trained(self) -> int:
        """The number of tokens that the policy sampled."""
        return sum(self.loss_mask)


@dataclass(slots=True)
class TrainingSequence:
    """A sequence that a policy backend computes a gradient from. T tokens."""

    token_ids: list[int]
    """Shape (T,)."""
    weights: list[float]
    """Shape (T,): the share of each token in the loss, `loss = sum over all tokens of weight * token loss`; 0 for
    tokens that are not trained on."""
    columns: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Further values of each token by name, each of shape (T,), such as `logprobs` (of the policy that sampled the
    token) and `advantages`. A loss declares the columns that it needs; values of tokens with weight 0 are not read."""
