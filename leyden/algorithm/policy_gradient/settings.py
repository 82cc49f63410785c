"""Named settings of `PolicyGradient`: published algorithms, each with its source.

A setting is `PolicyGradient` with other defaults, and takes the same options. To add one, add a class with its
defaults, a line to `AlgorithmRegistry` and a page to docs/algorithm-zoo/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from leyden.algorithm.policy_gradient.policy_gradient import PolicyGradient
from leyden.engine.policy_backend import PolicyBackend
from leyden.objectives.advantages import GAEAdvantages
from leyden.objectives.losses import PPOLoss, ReinforceLoss

_SYMMETRIC = PPOLoss(clip_low=0.2, clip_high=0.2)


class _Preset(PolicyGradient):
    """A `PolicyGradient` with other defaults, which a subclass sets."""

    defaults: ClassVar[dict[str, Any]] = {}
    """The options whose defaults differ from those of `PolicyGradient`."""

    def __init__(self, backend: PolicyBackend | Mapping[str, Any], **options: Any) -> None:
        super().__init__(backend, **{**self.defaults, **options})


class GRPO(_Preset):
    """Group relative policy optimisation (arXiv:2402.03300).

    Rewards are standardised within the rollouts of one task; each rollout weighs the same. The paper's KL term is off,
    as in most recent recipes. To use it, give `loss=PPOLoss(clip_high=0.2, kl_coefficient=0.04)`.
    """

    defaults: ClassVar[dict[str, Any]] = {"advantages": "grpo", "loss": _SYMMETRIC}


class DrGRPO(_Preset):
    """GRPO without its two biases (Dr. GRPO, arXiv:2503.20783).

    Rewards are centred and not divided by the deviation, so that tasks which are nearly always or nearly never solved
    weigh no more than others. Each token weighs the same, so that the tokens of a long failure do not weigh less. To
    use the paper's constant divisor L, give `weighting=L`.
    """

    defaults: ClassVar[dict[str, Any]] = {"advantages": "dr_grpo", "loss": _SYMMETRIC, "weighting": "token"}


class RLOO(_Preset):
    """REINFORCE with a leave-one-out baseline (RLOO, arXiv:2402.14740).

    Each reward is compared with the mean of the other rollouts of its task. There is no clipping: use one optimizer
    step for each batch of rollouts, which is the default.
    """

    defaults: ClassVar[dict[str, Any]] = {"advantages": "rloo", "loss": ReinforceLoss()}


class REINFORCEpp(_Preset):
    """REINFORCE++ (arXiv:2501.03262): rewards are standardised over all rollouts of the step, without groups.

    The paper's KL penalty in the reward is off. To use it, give `kl_in_reward=0.01`.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "advantages": "reinforce_pp",
        "loss": _SYMMETRIC,
        "tasks_per_step": 32,
        "rollouts_per_task": 4,
    }


class ReMax(_Preset):
    """REINFORCE with the reward of a greedy rollout as its baseline (ReMax, arXiv:2310.10505).

    Each task is run once more, at temperature 0, and that rollout is not trained on. The agent must pass
    `llm.sampling_parameters` to the model, because they hold that temperature.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "advantages": "remax",
        "loss": ReinforceLoss(),
        "tasks_per_step": 64,
        "rollouts_per_task": 1,
    }


class VinePPO(_Preset):
    """Proximal policy optimisation with Monte Carlo values in place of a critic (VinePPO, arXiv:2410.01679).

    Each rollout of a group with signal runs again from the states between its calls, as forks whose first calls are
    answered from the record. The advantage of a call is the difference of the mean returns after and before it. Forks
    are not trained on. The agent's own code must be deterministic.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "advantages": "vineppo",
        "loss": _SYMMETRIC,
        "rollouts_per_task": 8,
        "minibatch_size": 32,
    }


class PPO(_Preset):
    """Proximal policy optimisation with a critic (arXiv:1707.06347), and generalised advantages over model calls.

    Values are estimated before each call. A reward that an agent emits after a call is credited to this call and to
    those before it (GAE, arXiv:1506.02438).
    critic: a separate model that estimates values. None: a value head of the policy, for which the backend needs
        `value_head=True`.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "advantages": GAEAdvantages(gamma=1.0, lam=0.95),
        "tasks_per_step": 32,
        "rollouts_per_task": 4,
        "minibatch_size": 32,
        "epochs": 2,
    }

    def __init__(
        self, backend: PolicyBackend | Mapping[str, Any], *, critic: PolicyBackend | None = None, **options: Any
    ) -> None:
        value_coefficient = 0.5 if critic is None else 0.0
        loss = PPOLoss(clip_low=0.2, clip_high=0.2, value_coefficient=value_coefficient)
        super().__init__(backend, critic=critic, **{"loss": loss, **options})
