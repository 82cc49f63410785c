"""verl's `core_algos` on rollouts of one row: with equal constants, the same advantages, losses and gradients.

Where verl's formula differs on purpose, the test names the constant that makes them equal. verl counts
tokens where Leyden counts rollouts: in the variance of whitened advantages, N - 1 of N tokens is R - ddof
of R rollouts with ddof = R / N.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig

from leyden.objectives.advantages import (
    AdvantageEstimate,
    Advantages,
    DrGRPOAdvantages,
    GAEAdvantages,
    GRPOAdvantages,
    ReinforcePPAdvantages,
    ReMaxAdvantages,
    RLOOAdvantages,
    RolloutRewards,
    find_estimator,
)
from leyden.objectives.losses import (
    KL_ESTIMATORS,
    CISPOLoss,
    GSPOLoss,
    Loss,
    PPOLoss,
    ReinforceLoss,
    TokenBatch,
    ValueLoss,
    find_loss,
    token_entropies,
)

R, T = 12, 5
GROUPS = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]
SEEDS = pytest.mark.parametrize("seed", range(3))


def close(got: Any, wanted: Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(got, dtype=torch.float64), wanted.detach(), rtol=1e-6, atol=1e-6)


def rewards_of(seed: int, *, tokens: int = T) -> Tensor:
    """Final rewards, each on the last token of its row: shape (R, tokens)."""
    rewards_RT = torch.zeros(R, tokens, dtype=torch.float64)
    rewards_RT[:, -1] = torch.randn(R, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rewards_RT


def estimated(rewards_RT: Tensor, constants: Advantages, baselines: list[float] | None = None) -> list[float]:
    """One advantage for each rollout, which made one call."""
    rollouts = [
        RolloutRewards(group, reward, [reward], baseline=baselines and baselines[group])
        for group, reward in zip(GROUPS, rewards_RT.sum(-1).tolist(), strict=True)
    ]
    return [row[0] for row in find_estimator(constants).function(rollouts, constants).advantages]


def of_verl(name: str, rewards_RT: Tensor, **options: Any) -> Tensor:
    mask_RT = torch.ones_like(rewards_RT)
    advantages_RT, _ = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=rewards_RT.clone(), response_mask=mask_RT, **options
    )
    assert (advantages_RT == advantages_RT[:, :1]).all()
    return advantages_RT[:, 0]


@SEEDS
@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized"])
def test_grpo_and_dr_grpo(name: str, seed: int) -> None:
    rewards_RT = rewards_of(seed)
    index = np.array(GROUPS)
    close(estimated(rewards_RT, GRPOAdvantages(epsilon=1e-6)), of_verl(name, rewards_RT, index=index, epsilon=1e-6))
    centred = of_verl(name, rewards_RT, index=index, norm_adv_by_std_in_grpo=False)
    close(estimated(rewards_RT, DrGRPOAdvantages()), centred)


@SEEDS
@pytest.mark.parametrize("name", ["rloo", "rloo_vectorized"])
def test_rloo(name: str, seed: int) -> None:
    rewards_RT = rewards_of(seed)
    close(estimated(rewards_RT, RLOOAdvantages()), of_verl(name, rewards_RT, index=np.array(GROUPS)))


@SEEDS
@pytest.mark.parametrize("tokens", [1, T])
def test_reinforce_pp(tokens: int, seed: int) -> None:
    rewards_RT = rewards_of(seed, tokens=tokens)
    plain = ReinforcePPAdvantages(ddof=1 / tokens)  # of R rollouts with equally many tokens
    config = AlgoConfig(gamma=1.0)
    close(estimated(rewards_RT, plain), of_verl("reinforce_plus_plus", rewards_RT, config=config))
    grouped = ReinforcePPAdvantages(group_baseline=True, ddof=1 / tokens)
    baseline = of_verl("reinforce_plus_plus_baseline", rewards_RT, index=np.array(GROUPS))
    close(estimated(rewards_RT, grouped), baseline)


@SEEDS
def test_remax(seed: int) -> None:
    rewards_RT, baselines = rewards_of(seed), [0.5, -0.25, 1.0]
    greedy_R = torch.tensor([baselines[group] for group in GROUPS], dtype=torch.float64)
    close(estimated(rewards_RT, ReMaxAdvantages(), baselines), of_verl("remax", rewards_RT, reward_baselines=greedy_R))


@SEEDS
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0)])
def test_gae_over_calls_is_gae_over_tokens_of_one_call_each(gamma: float, lam: float, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    rewards_RT, values_RT = (torch.randn(R, T, generator=made, dtype=torch.float64) for _ in range(2))
    rollouts = [
        RolloutRewards(group, sum(rewards), rewards, values)
        for group, rewards, values in zip(GROUPS, rewards_RT.tolist(), values_RT.tolist(), strict=True)
    ]
    constants = GAEAdvantages(gamma=gamma, lam=lam, epsilon=1e-8, ddof=1 / T)
    got: AdvantageEstimate = find_estimator(constants).function(rollouts, constants)
    advantages_RT, returns_RT = core_algos.compute_gae_advantage_return(
        rewards_RT, values_RT, torch.ones_like(rewards_RT), gamma, lam
    )
    close(got.advantages, advantages_RT)
    close(got.returns, returns_RT)


# ---- losses ----------------------------------------------------------------------------------------------------------


class Rows:
    """Log-probabilities of R rows of up to T tokens, far enough apart that every bound decides somewhere."""

    def __init__(self, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        lengths_R = torch.randint(1, T + 1, (R,), generator=made)
        self.mask_RT = (torch.arange(T) < lengths_R[:, None]).double()

        def normal(scale: float = 1.0, mean: float = 0.0) -> Tensor:
            return mean + scale * torch.randn(R, T, generator=made, dtype=torch.float64)

        self.logp_RT = normal(0.7, -2.0).requires_grad_()
        self.learner_RT = self.logp_RT.detach() + normal(0.7)
        self.sampler_RT = self.learner_RT + normal(0.7)
        self.advantages_RT = normal().mean(1, keepdim=True).expand(R, T).contiguous()
        self.values_RT, self.before_RT, self.returns_RT = normal().requires_grad_(), normal(), normal()

    def loss(self, loss: Loss, *, mode: str, importance: bool = False) -> Tensor:
        """Leyden's loss, in which the weights of the tokens are those of one of verl's modes."""
        at = self.mask_RT > 0
        total = self.mask_RT.sum()
        lengths_RT = self.mask_RT.sum(1, keepdim=True).expand(R, T)
        weights_RT = {"token-mean": 1 / total, "seq-mean-token-mean": 1 / (R * lengths_RT)}[mode] * self.mask_RT
        columns = {
            "logprobs": self.sampler_RT if importance else self.learner_RT,
            "learner_logprobs": self.learner_RT,
            "advantages": self.advantages_RT,
            "calls": torch.zeros_like(self.logp_RT),
            "values": self.before_RT,
            "returns": self.returns_RT,
        }
        batch = TokenBatch(
            self.logp_RT[at],
            {name: columns[name][at] for name in find_loss(loss).columns_of(loss)},
            weights_RT[at],
            torch.arange(R)[:, None].expand(R, T)[at],
            values_N=self.values_RT[at],
        )
        return -(batch.weights_N * find_loss(loss).function(batch, loss).objective_N).sum()

    def check(self, ours: Tensor, theirs: Tensor, of: Tensor) -> None:
        close(ours.detach(), theirs)
        close(torch.autograd.grad(ours, of)[0], torch.autograd.grad(theirs, of)[0])


def config_of(**options: Any) -> ActorConfig:
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)


LOSSES: list[tuple[str, Callable[..., Loss], dict[str, float], dict[str, Any]]] = [
    # name in verl, our loss, constants of both, constants of ours alone
    ("vanilla", PPOLoss, {"clip_low": 0.2, "clip_high": 0.28}, {"dual_clip": 3.0}),
    ("vanilla", PPOLoss, {"clip_low": 0.1, "clip_high": 0.4}, {"dual_clip": 3.0}),
    ("gspo", GSPOLoss, {"clip_low": 0.05, "clip_high": 0.1}, {}),
    ("gspo", GSPOLoss, {"clip_low": 3e-4, "clip_high": 4e-4}, {}),
    ("cispo", CISPOLoss, {"clip_low": 0.2, "clip_high": 0.28}, {}),
]


@SEEDS
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize(("name", "kind", "clips", "more"), LOSSES)
def test_policy_losses_and_their_gradients(
    name: str, kind: Callable[..., Loss], clips: dict[str, float], more: dict[str, Any], mode: str, seed: int
) -> None:
    rows = Rows(seed)
    config = config_of(clip_ratio_low=clips["clip_low"], clip_ratio_high=clips["clip_high"], clip_ratio_c=3.0)
    theirs, _ = core_algos.get_policy_loss_fn(name)(
        rows.learner_RT, rows.logp_RT, rows.advantages_RT, rows.mask_RT, mode, config
    )
    rows.check(rows.loss(kind(**clips, **more), mode=mode), theirs, rows.logp_RT)


@SEEDS
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize(("name", "kind", "clips", "more"), LOSSES)
def test_truncated_importance_sampling(
    name: str, kind: Callable[..., Loss], clips: dict[str, float], more: dict[str, Any], mode: str, seed: int
) -> None:
    rows = Rows(seed)
    config = config_of(clip_ratio_low=clips["clip_low"], clip_ratio_high=clips["clip_high"], clip_ratio_c=3.0)
    weights_RT, _ = compute_rollout_correction_weights(
        rows.learner_RT - rows.sampler_RT, rows.mask_RT, "token", rollout_is_threshold=1.5
    )
    theirs, _ = core_algos.get_policy_loss_fn(name)(
        rows.learner_RT, rows.logp_RT, rows.advantages_RT, rows.mask_RT, mode, config, weights_RT
    )
    ours = rows.loss(kind(**clips, **more, importance_cap=1.5), mode=mode, importance=True)
    rows.check(ours, theirs, rows.logp_RT)


@SEEDS
def test_reinforce(seed: int) -> None:
    rows = Rows(seed)
    theirs, _ = core_algos.compute_policy_loss_reinforce(
        rows.learner_RT, rows.logp_RT, rows.advantages_RT, rows.mask_RT, "token-mean", config_of()
    )
    rows.check(rows.loss(ReinforceLoss(), mode="token-mean"), theirs, rows.logp_RT)


@SEEDS
def test_the_loss_of_a_critic_is_half_the_clipped_squared_error(seed: int) -> None:
    rows = Rows(seed)
    theirs, _ = core_algos.compute_value_loss(
        rows.values_RT, rows.returns_RT, rows.before_RT, rows.mask_RT, cliprange_value=0.3
    )
    ours = rows.loss(ValueLoss(value_coefficient=0.5, value_clip=0.3), mode="token-mean")
    rows.check(ours, theirs, rows.values_RT)


@SEEDS
@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_estimates_and_their_gradients(name: str, seed: int) -> None:
    rows = Rows(seed)
    theirs_RT = core_algos.kl_penalty(rows.logp_RT, rows.learner_RT, name)
    ours_RT: Tensor = KL_ESTIMATORS[name](rows.logp_RT - rows.learner_RT)
    close(ours_RT.detach(), theirs_RT)
    rows.check(ours_RT.sum(), theirs_RT.sum(), rows.logp_RT)


@SEEDS
def test_entropy(seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    logits_RTV = torch.randn(R, T, 7, generator=made, dtype=torch.float64, requires_grad=True)
    mask_RT = torch.ones(R, T, dtype=torch.float64)
    theirs = core_algos.compute_entropy_loss(logits_RTV, mask_RT)
    ours = token_entropies(logits_RTV.log_softmax(-1)).mean()
    close(ours.detach(), theirs)
    close(torch.autograd.grad(ours, logits_RTV)[0], torch.autograd.grad(theirs, logits_RTV)[0])
