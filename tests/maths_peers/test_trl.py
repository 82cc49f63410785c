"""TRL's trainers on a tiny model: with equal constants, the same advantages, losses and gradients of the weights.

The trainers generate, score and compute their loss themselves; ours is computed from the log-probabilities
of the same model. The mean over tokens or rows that a `loss_type` of TRL takes is a choice of weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from leyden.objectives.advantages import (
    Advantages,
    DrGRPOAdvantages,
    GRPOAdvantages,
    RLOOAdvantages,
    RolloutRewards,
    find_estimator,
)
from leyden.objectives.losses import (
    CISPOLoss,
    CrossEntropyLoss,
    DPOLoss,
    GSPOLoss,
    Loss,
    PPOLoss,
    TokenBatch,
    dpo_weights,
    find_loss,
)
from tests.engine import tiny

PROMPTS = ["ab", "cde"]
GROUP = 4
LONGEST = 6


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The peers' own warnings are theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def options(path: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(path),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "per_device_train_batch_size": len(PROMPTS) * GROUP,
        "seed": 1,
        **more,
    }


def model() -> Any:
    return tiny.model(hidden=16, layers=1).double()


class Rewards:
    """A reward function that remembers: how many different tokens a completion has, and how long it is."""

    __name__ = "rewards"

    def __init__(self) -> None:
        self.given: list[float] = []

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.given = [len(set(ids)) + 0.37 * (sum(ids) % 11) for ids in completion_ids]
        return self.given


def trainer_of(kind: Any, config: Any) -> tuple[Any, Rewards, dict[str, Any]]:
    """A trainer that has generated and scored one batch, its rewards, and the inputs of its loss."""
    rewards = Rewards()
    folder = Path(config.output_dir) / "model"
    model().save_pretrained(folder)  # TRL loads its reference model from the folder that the model came from
    made = kind(
        model=AutoModelForCausalLM.from_pretrained(folder),
        processing_class=tiny.tokenizer(),
        args=config,
        reward_funcs=rewards,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
    )
    made.model.train()
    made.current_gradient_accumulation_steps = 1
    inputs = made._generate_and_score_completions([{"prompt": prompt} for prompt in PROMPTS for _ in range(GROUP)])
    return made, rewards, inputs


# ---- advantages ------------------------------------------------------------------------------------------------------

ADVANTAGES: list[tuple[Any, Any, dict[str, Any], Advantages]] = [
    (GRPOTrainer, GRPOConfig, {"scale_rewards": "group"}, GRPOAdvantages(epsilon=1e-4)),
    (GRPOTrainer, GRPOConfig, {"scale_rewards": "none"}, DrGRPOAdvantages()),
    (RLOOTrainer, RLOOConfig, {"beta": 0.0}, RLOOAdvantages()),
]


@pytest.mark.parametrize(("kind", "config", "more", "constants"), ADVANTAGES)
def test_advantages(kind: Any, config: Any, more: dict[str, Any], constants: Advantages, tmp_path: Path) -> None:
    _, rewards, inputs = trainer_of(
        kind, config(**options(tmp_path, num_generations=GROUP, max_completion_length=LONGEST, **more))
    )
    rollouts = [RolloutRewards(place // GROUP, reward, [reward]) for place, reward in enumerate(rewards.given)]
    got = [advantage for (advantage,) in find_estimator(constants).function(rollouts, constants).advantages]
    assert len(set(rewards.given)) > 2
    # TRL computes them in single precision, from rewards of about 5.
    assert got == pytest.approx(inputs["advantages"].tolist(), rel=1e-6, abs=1e-6)


# ---- losses ----------------------------------------------------------------------------------------------------------

ASYMMETRIC = {"epsilon": 0.2, "epsilon_high": 0.28}
LOSSES: list[tuple[dict[str, Any], Loss]] = [
    ({"loss_type": "grpo", **ASYMMETRIC}, PPOLoss(clip_low=0.2, clip_high=0.28)),
    ({"loss_type": "grpo", **ASYMMETRIC, "delta": 1.5}, PPOLoss(clip_low=0.2, clip_high=0.28, dual_clip=1.5)),
    (
        {"loss_type": "grpo", **ASYMMETRIC, "beta": 0.04, "use_bias_correction_kl": False},
        PPOLoss(clip_low=0.2, clip_high=0.28, kl_coefficient=0.04),
    ),
    ({"loss_type": "dr_grpo", **ASYMMETRIC}, PPOLoss(clip_low=0.2, clip_high=0.28)),
    ({"loss_type": "bnpo", **ASYMMETRIC}, PPOLoss(clip_low=0.2, clip_high=0.28)),
    ({"loss_type": "dapo", **ASYMMETRIC}, PPOLoss(clip_low=0.2, clip_high=0.28)),
    # TRL gives the largest weight itself, which is 1 + clip_high.
    ({"loss_type": "cispo", "epsilon_high": 1.3}, CISPOLoss(clip_high=0.3)),
    (
        {"loss_type": "grpo", **ASYMMETRIC, "importance_sampling_level": "sequence"},
        GSPOLoss(clip_low=0.2, clip_high=0.28),
    ),
]
NAMES = ["grpo", "dual_clip", "kl", "dr_grpo", "bnpo", "dapo", "cispo", "gspo"]


def token_weights(loss_type: str, mask_BT: Tensor) -> Tensor:
    """The share of each token in the loss, (B, T)."""
    n_rows = mask_BT.shape[0]
    if loss_type == "grpo":
        return mask_BT / mask_BT.sum(1, keepdim=True) / n_rows
    if loss_type == "dr_grpo":
        return mask_BT / (n_rows * LONGEST)
    return mask_BT / mask_BT.sum()


@pytest.mark.parametrize(("more", "loss"), LOSSES, ids=NAMES)
def test_policy_losses_and_the_gradient_of_the_weights(more: dict[str, Any], loss: Loss, tmp_path: Path) -> None:
    config = GRPOConfig(**options(tmp_path, num_generations=GROUP, max_completion_length=LONGEST, **more))
    trainer, _, inputs = trainer_of(GRPOTrainer, config)
    mask_BT = inputs["completion_mask"].double()
    noise = torch.Generator().manual_seed(0)
    logp_BT = logprobs_of(trainer, inputs)

    def nearby() -> Tensor:
        return logp_BT.detach() + 0.5 * torch.randn(logp_BT.shape, generator=noise, dtype=torch.float64)

    inputs["old_per_token_logps"], inputs["ref_per_token_logps"] = nearby(), nearby()
    inputs["advantages"] = inputs["advantages"].double()
    theirs = trainer._compute_loss(trainer.model, inputs)

    at = mask_BT > 0
    columns = {
        "logprobs": inputs["old_per_token_logps"],
        "reference_logprobs": inputs["ref_per_token_logps"],
        "advantages": inputs["advantages"][:, None].expand_as(mask_BT),
        "calls": torch.zeros_like(mask_BT),
    }
    batch = TokenBatch(
        logp_BT[at],
        {name: columns[name][at] for name in find_loss(loss).columns_of(loss)},
        token_weights(config.loss_type, mask_BT)[at],
        torch.arange(len(mask_BT))[:, None].expand_as(mask_BT)[at],
    )
    ours = -(batch.weights_N * find_loss(loss).function(batch, loss).objective_N).sum()
    same_loss_and_gradient(ours, theirs, trainer.model)


def logprobs_of(trainer: Any, inputs: dict[str, Any]) -> Tensor:
    ids_BT = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention_BT = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    logp_BT, *_ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids_BT, attention_BT, inputs["completion_ids"].shape[1]
    )
    return logp_BT


def same_loss_and_gradient(ours: Tensor, theirs: Tensor, trained: Any) -> None:
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-6, atol=1e-6, check_dtype=False)
    same_gradient(ours, theirs, trained)


def same_gradient(ours: Tensor, theirs: Tensor, trained: Any) -> None:
    weights = [each for each in trained.parameters() if each.requires_grad]
    found, wanted = (torch.autograd.grad(loss, weights) for loss in (ours, theirs))
    assert max(float(gradient.abs().max()) for gradient in wanted) > 1e-3
    # TRL's head computes log-probabilities in single precision, so elements near 0 have no digits to compare.
    difference = torch.cat([(mine - other).flatten() for mine, other in zip(found, wanted, strict=True)]).norm()
    assert float(difference / torch.cat([gradient.flatten() for gradient in wanted]).norm()) < 1e-6


# ---- supervised fine-tuning and preferences --------------------------------------------------------------------------


def trained_logprobs(trained: Any, inputs: dict[str, Tensor], mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens that the mask chooses, (N,), and the rows that they are in."""
    logits_BTV = trained(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    logp_BT = logits_BTV[:, :-1].log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
    at = mask_BT[:, 1:] > 0
    return logp_BT[at], torch.arange(len(at))[:, None].expand_as(at)[at]


def test_supervised_fine_tuning(tmp_path: Path) -> None:
    trainer = SFTTrainer(
        model=model(),
        processing_class=tiny.tokenizer(),
        args=SFTConfig(**options(tmp_path, loss_type="nll")),
        train_dataset=Dataset.from_dict({"prompt": ["ab", "c"], "completion": ["def", "hijkl"]}),
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    theirs = trainer.compute_loss(trainer.model, dict(inputs))
    logp_N, sequence_N = trained_logprobs(trainer.model, inputs, inputs["labels"] != -100)
    batch = TokenBatch(logp_N, {}, torch.full_like(logp_N, 1 / len(logp_N)), sequence_N)
    terms = find_loss(CrossEntropyLoss()).function(batch, CrossEntropyLoss())
    assert len(logp_N) >= len("defhijkl")
    same_loss_and_gradient(-(batch.weights_N * terms.objective_N).sum(), theirs, trainer.model)


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_direct_preference_optimisation(beta: float, tmp_path: Path) -> None:
    pairs = {"prompt": ["ab", "c"], "chosen": ["def", "hij"], "rejected": ["k", "lmno"]}
    reference = tiny.model(hidden=16, layers=1, seed=5).double()
    trainer = DPOTrainer(
        model=model(),
        ref_model=reference,
        processing_class=tiny.tokenizer(),
        args=DPOConfig(**options(tmp_path, beta=beta)),
        train_dataset=Dataset.from_dict(pairs),
    )
    inputs = next(iter(trainer.get_train_dataloader()))
    theirs = trainer._compute_loss(trainer.model, dict(inputs), return_outputs=False)

    logp_N, row_N = trained_logprobs(trainer.model, inputs, inputs["completion_mask"])
    with torch.no_grad():
        reference_N, _ = trained_logprobs(reference, inputs, inputs["completion_mask"])
    n_pairs = len(pairs["prompt"])

    def of_rows(values_N: Tensor) -> list[float]:
        return torch.zeros(2 * n_pairs, dtype=torch.float64).index_add_(0, row_N, values_N.detach()).tolist()

    sums, reference_sums = of_rows(logp_N), of_rows(reference_N)
    found = dpo_weights(sums[:n_pairs], sums[n_pairs:], reference_sums[:n_pairs], reference_sums[n_pairs:], beta=beta)
    assert found.loss == pytest.approx(float(theirs.detach()), rel=1e-6)
    signed = torch.tensor([*found.weights_P, *(-weight for weight in found.weights_P)], dtype=torch.float64)
    loss = DPOLoss(beta=beta)
    batch = TokenBatch(logp_N, {"coefficients": signed[row_N]}, torch.full_like(logp_N, 1 / n_pairs), row_N)
    objective_N = find_loss(loss).function(batch, loss).objective_N
    same_gradient(-(batch.weights_N * objective_N).sum(), theirs, trainer.model)
