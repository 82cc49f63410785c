"""Losses of policy optimisation on torch tensors, for language models and simulator policies alike.

They know no model, buffer or optimizer. This package does not load torch, so a process that only
configures a loss does not pay for it.

To add a loss of language-model policies, write a frozen dataclass with its constants and, beside
it, a function decorated with `register_loss`, its source and a test against the formula in double
precision. Every engine then takes it, in this process or in another one: a loss travels as its name
and its constants, and its inputs as named columns. Each constant is a JSON value.

Shapes: N samples (tokens of a language model, transitions of a simulator).
"""

from leyden.maths.losses.base import (
    LOSSES,
    Loss,
    LossTerms,
    RegisteredLoss,
    TokenBatch,
    find_loss,
    make_loss,
    register_loss,
)
from leyden.maths.losses.clipped import PPOLoss, ppo
from leyden.maths.losses.critic import ValueLoss, clipped_value_loss, value
from leyden.maths.losses.kl import KL_ESTIMATORS, k1, k2, k3, reward_penalty
from leyden.maths.losses.likelihood import CISPOLoss, CrossEntropyLoss, ReinforceLoss, cispo, cross_entropy, reinforce
from leyden.maths.losses.policy import (
    PolicyLoss,
    Surrogate,
    clipped_surrogate,
    importance_weights,
    policy_terms,
    token_entropies,
)
from leyden.maths.losses.preference import DPOLoss, DPOWeights, dpo, dpo_weights
from leyden.maths.losses.sequence import GSPOLoss, gspo

__all__ = [
    "KL_ESTIMATORS",
    "LOSSES",
    "CISPOLoss",
    "CrossEntropyLoss",
    "DPOLoss",
    "DPOWeights",
    "GSPOLoss",
    "Loss",
    "LossTerms",
    "PPOLoss",
    "PolicyLoss",
    "RegisteredLoss",
    "ReinforceLoss",
    "Surrogate",
    "TokenBatch",
    "ValueLoss",
    "cispo",
    "clipped_surrogate",
    "clipped_value_loss",
    "cross_entropy",
    "dpo",
    "dpo_weights",
    "find_loss",
    "gspo",
    "importance_weights",
    "k1",
    "k2",
    "k3",
    "make_loss",
    "policy_terms",
    "ppo",
    "register_loss",
    "reinforce",
    "reward_penalty",
    "token_entropies",
    "value",
]
