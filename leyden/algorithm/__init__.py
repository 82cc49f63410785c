"""Turn what agents did into better resources.

Lives here: `Algorithm` and the two ways to write one (`@algo` for a function that owns its loop,
`IterativeAlgorithm` for steps on the shared `TrainLoop`), `RolloutCollector`, which runs their
rollouts, `Evaluator`, which measures resources on tasks, and the algorithms that ship. An algorithm
knows the store, an adapter, and where it has one a policy backend and the gateway; it never knows
who runs its rollouts. To add one, add a module here and a name to `trainer/registry.py`.
"""

from leyden.algorithm.apo import APO
from leyden.algorithm.base import Algorithm, Dataset, Run
from leyden.algorithm.budget import Budget
from leyden.algorithm.collector import CollectedRollout, RolloutCollector, rollout_id_at, rollout_id_of
from leyden.algorithm.decorator import FunctionalAlgorithm, algo
from leyden.algorithm.evaluator import Evaluator, Score, Scores
from leyden.algorithm.fast import Baseline, FastAlgorithm
from leyden.algorithm.few_shot import FewShot, FewShotResult
from leyden.algorithm.forks import CallAdvantage, ForkReturns, call_advantages, fork_requests, fork_returns
from leyden.algorithm.gepa import GEPA
from leyden.algorithm.iterative import IterativeAlgorithm
from leyden.algorithm.policy_gradient import (
    DPO,
    GRPO,
    PPO,
    RLOO,
    SFT,
    DrGRPO,
    PolicyAlgorithm,
    PolicyGradient,
    REINFORCEpp,
    ReMax,
    VinePPO,
)
from leyden.algorithm.verl.algorithm import VERL

__all__ = [
    "APO",
    "DPO",
    "GEPA",
    "GRPO",
    "PPO",
    "RLOO",
    "SFT",
    "VERL",
    "Algorithm",
    "Baseline",
    "Budget",
    "CallAdvantage",
    "CollectedRollout",
    "Dataset",
    "DrGRPO",
    "Evaluator",
    "FastAlgorithm",
    "FewShot",
    "FewShotResult",
    "ForkReturns",
    "FunctionalAlgorithm",
    "IterativeAlgorithm",
    "PolicyAlgorithm",
    "PolicyGradient",
    "REINFORCEpp",
    "ReMax",
    "RolloutCollector",
    "Run",
    "Score",
    "Scores",
    "VinePPO",
    "algo",
    "call_advantages",
    "fork_requests",
    "fork_returns",
    "rollout_id_at",
    "rollout_id_of",
]
