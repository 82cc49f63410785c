"""Advantage estimators: compute an advantage for each model call from the rewards of one step's rollouts.

They know no tokens, tasks or optimizer. Statistics are over rollouts: a rollout counts once, however many calls it
made. To add an estimator, write a frozen dataclass with its constants and, beside it, a function decorated with
`register_estimator`. Name its source in the docstring, and test it against an independent formula. Every algorithm that
takes `advantages="NAME"`, or the constants, can then use it.

Shapes: R rollouts of a step, G rollouts of one group (one task), C_r calls of rollout r.
"""

from leyden.objectives.advantages.estimator import ESTIMATORS as ESTIMATORS
from leyden.objectives.advantages.estimator import AdvantageEstimate as AdvantageEstimate
from leyden.objectives.advantages.estimator import Advantages as Advantages
from leyden.objectives.advantages.estimator import GroupAdvantages as GroupAdvantages
from leyden.objectives.advantages.estimator import RegisteredEstimator as RegisteredEstimator
from leyden.objectives.advantages.estimator import RolloutRewards as RolloutRewards
from leyden.objectives.advantages.estimator import find_estimator as find_estimator
from leyden.objectives.advantages.estimator import make_advantages as make_advantages
from leyden.objectives.advantages.estimator import members as members
from leyden.objectives.advantages.estimator import register_estimator as register_estimator
from leyden.objectives.advantages.estimator import repeated as repeated
from leyden.objectives.advantages.forked import VinePPOAdvantages as VinePPOAdvantages
from leyden.objectives.advantages.forked import vineppo as vineppo
from leyden.objectives.advantages.outcome import DrGRPOAdvantages as DrGRPOAdvantages
from leyden.objectives.advantages.outcome import GRPOAdvantages as GRPOAdvantages
from leyden.objectives.advantages.outcome import ReinforcePPAdvantages as ReinforcePPAdvantages
from leyden.objectives.advantages.outcome import ReMaxAdvantages as ReMaxAdvantages
from leyden.objectives.advantages.outcome import RLOOAdvantages as RLOOAdvantages
from leyden.objectives.advantages.outcome import dr_grpo as dr_grpo
from leyden.objectives.advantages.outcome import grpo as grpo
from leyden.objectives.advantages.outcome import reinforce_pp as reinforce_pp
from leyden.objectives.advantages.outcome import remax as remax
from leyden.objectives.advantages.outcome import rloo as rloo
from leyden.objectives.advantages.per_call import GAEAdvantages as GAEAdvantages
from leyden.objectives.advantages.per_call import ProcessAdvantages as ProcessAdvantages
from leyden.objectives.advantages.per_call import gae as gae
from leyden.objectives.advantages.per_call import process as process
