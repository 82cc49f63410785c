"""Turn what agents did into better resources.

Lives here: `Algorithm` and the two ways to write one (`@algo` for a function that owns its loop,
`IterativeAlgorithm` for steps on the shared `TrainLoop`), `RolloutCollector`, which runs their
rollouts, and the algorithms that ship. An algorithm knows the store, an adapter, and where it has
one a policy backend and the gateway; it never knows who runs its rollouts. To add one, add a module
here and a name to `trainer/registry.py`.
"""

from leyden.algorithm.base import Algorithm, Dataset, Run
from leyden.algorithm.collector import Budget, CollectedRollout, RolloutCollector, rollout_id_at, rollout_id_of
from leyden.algorithm.decorator import FunctionalAlgorithm, algo
from leyden.algorithm.fast import Baseline, FastAlgorithm
from leyden.algorithm.iterative import IterativeAlgorithm
from leyden.algorithm.policy_gradient import PolicyGradient

__all__ = [
    "Algorithm",
    "Baseline",
    "Budget",
    "CollectedRollout",
    "Dataset",
    "FastAlgorithm",
    "FunctionalAlgorithm",
    "IterativeAlgorithm",
    "PolicyGradient",
    "RolloutCollector",
    "Run",
    "algo",
    "rollout_id_at",
    "rollout_id_of",
]
