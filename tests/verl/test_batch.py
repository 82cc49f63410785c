"""Tensors of a verl batch, exact, and verl's own advantages and losses on them equal Leyden's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import compute_response_mask
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.workers.config import ActorConfig

from leyden.algorithm.policy_gradient.step_data import build_step, estimate_advantages, weighted
from leyden.algorithm.verl.rows import (
    Aggregation,
    SequenceRow,
    data_proto,
    make_rows,
    score_rollouts,
    truncate_rows,
)
from leyden.objectives.advantages import DrGRPOAdvantages, GRPOAdvantages
from leyden.objectives.losses import PPOLoss, TokenBatch, find_loss
from tests.verl.made import make_groups

pytestmark = [pytest.mark.verl, pytest.mark.merge]

LEVELS = pytest.mark.parametrize("level", ["trajectory", "transition"])
SEEDS = pytest.mark.parametrize("seed", range(3))


def rows_of(seed: int, level: Aggregation) -> list[SequenceRow]:
    scored, report = score_rollouts(make_groups(seed))
    return truncate_rows(make_rows(scored, level), scored, report, max_prompt_length=64, max_response_length=64)


def session_keys(rows: list[SequenceRow]) -> list[str]:
    """Return verl's key of each row: uid, session and index."""
    seen: dict[str, int] = {}
    keys: list[str] = []
    for row in rows:
        index = seen[row.rollout_id] = seen.get(row.rollout_id, -1) + 1
        keys.append(f"{row.group}_{row.rollout_id.rpartition('-')[2]}_{index}")
    return keys


def with_advantages(rows: list[SequenceRow], *, by_std: bool = False, estimator: str = "grpo") -> Any:
    data = data_proto(rows, pad_id=0)
    data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    return compute_advantage_for_multi_trajectories(
        data,
        batch_keys=session_keys(rows),
        adv_estimator=estimator,
        norm_adv_by_std_in_grpo=by_std,
    )


@SEEDS
@LEVELS
def test_every_token_is_where_verl_looks_for_it(level: Aggregation, seed: int) -> None:
    rows = rows_of(seed, level)
    data = data_proto(rows, pad_id=0)
    width = data.batch["prompts"].shape[1]
    assert torch.equal(compute_response_mask(data), data.batch["attention_mask"][:, width:])
    for place, row in enumerate(rows):
        on = data.batch["attention_mask"][place].bool()
        assert data.batch["input_ids"][place][on].tolist() == row.prompt_ids + row.response_ids
        assert data.batch["position_ids"][place][on].tolist() == list(
            range(len(row.prompt_ids) + len(row.response_ids))
        )
        sampled = data.batch["response_mask"][place].bool()
        assert data.batch["responses"][place][sampled].tolist() == [
            token for token, mask in zip(row.response_ids, row.response_mask, strict=True) if mask
        ]
        wanted = [value for value, mask in zip(row.logprobs, row.response_mask, strict=True) if mask]
        assert torch.equal(data.batch["rollout_log_probs"][place][sampled], torch.tensor(wanted))
    assert data.non_tensor_batch["uid"].tolist() == [row.group for row in rows]


@SEEDS
@LEVELS
@pytest.mark.parametrize("by_std", [True, False])
def test_verls_advantages_are_those_of_the_rollouts(level: Aggregation, seed: int, by_std: bool) -> None:
    constants = GRPOAdvantages(epsilon=1e-6) if by_std else DrGRPOAdvantages()
    step = build_step(make_groups(seed), constants, keep_flat=True)
    estimate_advantages(step, constants)
    wanted = {rollout.data.rollout_id: rollout.advantages[0] for rollout in step.trained}
    rows = rows_of(seed, level)
    data = with_advantages(rows, by_std=by_std)
    for place, row in enumerate(rows):
        mask = data.batch["response_mask"][place].bool()
        got = data.batch["advantages"][place][mask]
        torch.testing.assert_close(got, torch.full_like(got, wanted.get(row.rollout_id, 0.0)), rtol=1e-5, atol=1e-6)
        assert not data.batch["advantages"][place][~mask].any()


@SEEDS
@LEVELS
def test_another_estimator_takes_each_row_with_the_reward_of_its_rollout(level: Aggregation, seed: int) -> None:
    rows = rows_of(seed, level)
    data = with_advantages(rows, estimator="rloo")
    for place, row in enumerate(rows):
        others = [other.reward for other in rows if other.group == row.group and other is not row]
        wanted = row.reward - sum(others) / len(others)
        got = data.batch["advantages"][place][data.batch["response_mask"][place].bool()]
        torch.testing.assert_close(got, torch.full_like(got, wanted), rtol=1e-5, atol=1e-5)


@SEEDS
@LEVELS
def test_verls_loss_on_scaled_advantages_weighs_each_rollout_the_same(level: Aggregation, seed: int) -> None:
    rows = rows_of(seed, level)
    data = with_advantages(rows, by_std=False)
    mask_RS, old_RS = data.batch["response_mask"], data.batch["rollout_log_probs"]
    new_RS = old_RS + 0.5 * torch.randn(old_RS.shape, generator=torch.Generator().manual_seed(seed))
    loss, _ = core_algos.get_policy_loss_fn("vanilla")(
        old_log_prob=old_RS,
        log_prob=new_RS,
        advantages=data.batch["advantages"] * data.batch["rollout_scales"][:, None],
        response_mask=mask_RS,
        loss_agg_mode="seq-mean-token-sum",
        config=_actor(len(rows)),
        rollout_is_weights=None,
    )
    shares = {row.rollout_id: 0 for row in rows if row.n_trained}
    n_tokens = {name: sum(row.n_trained for row in rows if row.rollout_id == name) for name in shares}
    weights_RS = torch.stack(
        [mask_RS[place] / max(1, n_tokens.get(row.rollout_id, 1)) / len(shares) for place, row in enumerate(rows)]
    )
    on = mask_RS.bool()
    constants = PPOLoss(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    batch = TokenBatch(
        new_RS[on],
        {"logprobs": old_RS[on], "advantages": data.batch["advantages"][on]},
        weights_RS[on],
        torch.zeros(int(on.sum()), dtype=torch.int64),
    )
    wanted = -(weights_RS[on] * find_loss(constants).function(batch, constants).objective_N).sum()
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-7)
    step = build_step(make_groups(seed), DrGRPOAdvantages(), keep_flat=True)
    of_policy_gradient = sorted(w for s in weighted(step.trained, "rollout") for w in s.weights if w)
    np.testing.assert_allclose(sorted(weights_RS[on].tolist()), of_policy_gradient, rtol=1e-6)


def _actor(n_rows: int) -> ActorConfig:
    actor = ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=n_rows,
        ppo_micro_batch_size_per_gpu=n_rows,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=3.0,
    )
    actor.global_batch_info.update(dp_size=1, batch_num_tokens=None, global_batch_size=n_rows, loss_scale_factor=None)
    return actor
