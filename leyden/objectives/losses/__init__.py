"""Losses of policy optimisation on torch tensors, for language models and simulator policies alike.

They know no model, buffer or optimizer. This package does not load torch, so a process that only configures a loss does
not pay for it.

To add a loss of language-model policies, write a frozen dataclass with its constants and, beside it, a function
decorated with `register_loss`. Name its source in the docstring, and test it against the formula in double precision.
Every engine can then use it, also in another process: a loss is sent as its name and its constants, which are JSON
values, and its inputs as named columns.

Shapes: N samples (tokens of a language model, transitions of a simulator).
"""

from leyden.objectives.losses.clipped import PPOLoss as PPOLoss
from leyden.objectives.losses.clipped import ppo as ppo
from leyden.objectives.losses.critic import ValueLoss as ValueLoss
from leyden.objectives.losses.critic import clipped_value_loss as clipped_value_loss
from leyden.objectives.losses.critic import value as value
from leyden.objectives.losses.kl import KL_ESTIMATORS as KL_ESTIMATORS
from leyden.objectives.losses.kl import k1 as k1
from leyden.objectives.losses.kl import k2 as k2
from leyden.objectives.losses.kl import k3 as k3
from leyden.objectives.losses.kl import reward_penalty as reward_penalty
from leyden.objectives.losses.likelihood import CISPOLoss as CISPOLoss
from leyden.objectives.losses.likelihood import CrossEntropyLoss as CrossEntropyLoss
from leyden.objectives.losses.likelihood import ReinforceLoss as ReinforceLoss
from leyden.objectives.losses.likelihood import cispo as cispo
from leyden.objectives.losses.likelihood import cross_entropy as cross_entropy
from leyden.objectives.losses.likelihood import reinforce as reinforce
from leyden.objectives.losses.loss import LOSSES as LOSSES
from leyden.objectives.losses.loss import Loss as Loss
from leyden.objectives.losses.loss import LossTerms as LossTerms
from leyden.objectives.losses.loss import RegisteredLoss as RegisteredLoss
from leyden.objectives.losses.loss import TokenBatch as TokenBatch
from leyden.objectives.losses.loss import find_loss as find_loss
from leyden.objectives.losses.loss import make_loss as make_loss
from leyden.objectives.losses.loss import register_loss as register_loss
from leyden.objectives.losses.policy import PolicyLoss as PolicyLoss
from leyden.objectives.losses.policy import Surrogate as Surrogate
from leyden.objectives.losses.policy import clipped_surrogate as clipped_surrogate
from leyden.objectives.losses.policy import importance_weights as importance_weights
from leyden.objectives.losses.policy import policy_terms as policy_terms
from leyden.objectives.losses.policy import token_entropies as token_entropies
from leyden.objectives.losses.preference import DPOLoss as DPOLoss
from leyden.objectives.losses.preference import DPOWeights as DPOWeights
from leyden.objectives.losses.preference import dpo as dpo
from leyden.objectives.losses.preference import dpo_weights as dpo_weights
from leyden.objectives.losses.sequence import GSPOLoss as GSPOLoss
from leyden.objectives.losses.sequence import gspo as gspo
