"""Rows of a verl batch, as properties: the same tokens, contexts and log-probabilities as `PolicyGradient` trains on, and
nothing dropped that is not counted."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leyden.adapter import merge_triplets
from leyden.algorithm.policy_gradient.step_data import Group, RolloutData, build_step
from leyden.algorithm.verl.rows import (
    Aggregation,
    SequenceRow,
    make_rows,
    rollout_scales,
    row_tensors,
    score_rollouts,
    truncate_rows,
)
from leyden.errors import ConfigError, NoTrainingData
from leyden.objectives.advantages import GRPOAdvantages
from leyden.types import TrainingSequence, Triplet, TripletPrompt, TripletResponse

TOKENS = st.lists(st.integers(1, 50), min_size=1, max_size=4)
LEVELS: list[Aggregation] = ["trajectory", "transition"]
Trained = Counter[tuple[tuple[int, ...], int, float]]
"""The context of each trained token, the token, and its log-probability."""


@st.composite
def conversations(draw: st.DrawFn) -> list[Triplet]:
    """Calls of one attempt; each prompt extends the last answer, or starts anew."""
    calls: list[Triplet] = []
    seen: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(TOKENS) if draw(st.booleans()) else seen + draw(TOKENS)
        answer = draw(TOKENS)
        logprobs = [-draw(st.floats(0.0, 5.0, width=32)) for _ in answer]
        response = TripletResponse(token_ids=answer, logprobs=logprobs)
        calls.append(Triplet(prompt=TripletPrompt(token_ids=prompt), response=response))
        seen = prompt + answer
    return calls


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    """Groups of which some rollouts have failed, and so have a reward and nothing to train on."""
    rewards = st.sampled_from([0.0, 0.25, 1.0])
    calls = st.one_of(st.just([]), conversations(), conversations())
    return [
        Group(
            [
                RolloutData(f"ro-{group}-{place}", draw(rewards), merge_triplets(draw(calls)))
                for place in range(draw(st.integers(2, 4)))
            ]
        )
        for group in range(draw(st.integers(1, 3)))
    ]


def of_sequences(sequences: list[TrainingSequence]) -> Trained:
    return Counter(
        (tuple(sequence.token_ids[:place]), sequence.token_ids[place], sequence.columns["logprobs"][place])
        for sequence in sequences
        for place, weight in enumerate(sequence.weights)
        if weight
    )


def of_rows(rows: list[SequenceRow]) -> Trained:
    return Counter(
        (tuple(row.prompt_ids + row.response_ids[:place]), row.response_ids[place], row.logprobs[place])
        for row in rows
        for place, mask in enumerate(row.response_mask)
        if mask
    )


def has_tokens(batch: list[Group]) -> bool:
    return any(rollout.trajectories for group in batch for rollout in group.rollouts)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(groups(), st.sampled_from(LEVELS))
def test_rows_train_on_what_policy_gradient_trains_on(batch: list[Group], level: Aggregation) -> None:
    usable = [group for group in batch if any(rollout.trajectories for rollout in group.rollouts)]
    step = build_step(usable, GRPOAdvantages(), keep_flat=True)
    scored, report = score_rollouts(usable)
    rows = make_rows(scored, level)
    assert of_rows(rows) == of_sequences([sequence for rollout in step.rollouts for sequence in rollout.sequences])
    assert report.rollouts == len(step.rollouts)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(groups(), st.sampled_from(LEVELS))
def test_every_row_carries_the_reward_of_its_rollout(batch: list[Group], level: Aggregation) -> None:
    if not has_tokens(batch):
        return
    scored, report = score_rollouts(batch)
    rows = truncate_rows(make_rows(scored, level), scored, report, max_prompt_length=99, max_response_length=99)
    tensors: dict[str, Any] = row_tensors(rows, pad_id=0)
    rewards = {rollout.rollout_id: rollout.reward for group in batch for rollout in group.rollouts}
    assert {row.rollout_id for row in rows} == set(rewards)
    for row, scores in zip(rows, tensors["token_level_scores"].tolist(), strict=True):
        last = len(row.response_ids) - 1
        assert scores == [rewards[row.rollout_id] * (place == last) for place in range(len(scores))]
    failed = sum(not rollout.trajectories for group in batch for rollout in group.rollouts)
    assert report.placeholders == failed and not report.dropped


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(groups(), st.sampled_from(LEVELS), st.integers(1, 8), st.integers(1, 8), st.sampled_from(["drop", "cut"]))
def test_what_does_not_fit_is_dropped_and_counted(
    batch: list[Group], level: Aggregation, max_prompt: int, max_response: int, overlong: str
) -> None:
    scored, report = score_rollouts(batch)
    rows = make_rows(scored, level)
    limits = {"max_prompt_length": max_prompt, "max_response_length": max_response}
    try:
        kept = truncate_rows(rows, scored, report, **limits, overlong=overlong)  # pyright: ignore[reportArgumentType]
    except NoTrainingData:
        kept = []
    real = [row for row in kept if row.n_calls]
    assert of_rows(real) <= of_rows(rows)
    assert all(len(row.prompt_ids) <= max_prompt and len(row.response_ids) <= max_response for row in kept)
    if kept:
        assert len(real) + report.dropped.total() == len(rows)
        lost = sum(row.n_trained for row in rows) - sum(row.n_trained for row in real)
        assert lost >= report.cut_tokens if overlong == "cut" else report.cut_tokens == 0
        assert {row.rollout_id for row in kept} == {rollout.rollout_id for rollout in scored}


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(groups(), st.sampled_from(LEVELS), st.booleans())
def test_padding_can_be_taken_off_again(batch: list[Group], level: Aggregation, wide: bool) -> None:
    if not has_tokens(batch):
        return
    scored, report = score_rollouts(batch)
    rows = truncate_rows(make_rows(scored, level), scored, report, max_prompt_length=99, max_response_length=99)
    widths = {"prompt_length": 99, "response_length": 98} if wide else {}
    tensors: dict[str, Any] = row_tensors(rows, pad_id=77, **widths)
    n_prompt = tensors["prompts"].shape[1]
    assert not wide or (n_prompt, tensors["responses"].shape[1]) == (99, 98)
    for place, row in enumerate(rows):
        on = tensors["attention_mask"][place].bool()
        prompt, response = on[:n_prompt].tolist(), on[n_prompt:].tolist()
        assert tensors["prompts"][place][on[:n_prompt]].tolist() == row.prompt_ids
        assert tensors["responses"][place][on[n_prompt:]].tolist() == row.response_ids
        assert set(tensors["input_ids"][place][~on].tolist()) <= {77}
        assert prompt == sorted(prompt) and response == sorted(response, reverse=True)
        assert tensors["response_mask"][place][: len(row.response_mask)].tolist() == row.response_mask
    scales = rollout_scales([(row.rollout_id, row.n_trained) for row in rows])
    shares = dict.fromkeys([row.rollout_id for row in rows if row.n_trained], 0.0)
    for row, scale in zip(rows, scales, strict=True):
        if row.n_trained:
            shares[row.rollout_id] += scale * row.n_trained / len(rows)
    assert all(math.isclose(share, 1 / len(shares)) for share in shares.values())


def test_a_reward_that_is_not_finite_leaves_its_group() -> None:
    scored, report = score_rollouts([Group([RolloutData("ro-1", math.nan), RolloutData("ro-2", 1.0)])], ["task-1"])
    assert [(rollout.group, rollout.rollout_id) for rollout in scored] == [("task-1", "ro-2")]
    assert report.dropped == {"the reward is nan": 1}


def test_a_batch_without_a_valid_row_is_an_error_that_names_the_limits() -> None:
    scored, report = score_rollouts([Group([RolloutData("ro-1", 0.0)])])
    with pytest.raises(NoTrainingData, match=r"no row of 1 rollouts can be trained on.*data\.max_prompt_length"):
        truncate_rows([], scored, report, max_prompt_length=8, max_response_length=8)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="level is 'turn'; possible: trajectory, transition"):
        make_rows([], "turn")  # pyright: ignore[reportArgumentType]
