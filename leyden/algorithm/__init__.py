"""Algorithms, which improve resources (prompts, models) by what agents did with them.

The package holds `Algorithm` and the two ways to write one (`@algo` for a function with its own loop,
`IterativeAlgorithm` for steps on the shared `TrainLoop`), `RolloutCollector`, which runs their rollouts, `Evaluator`,
which measures resources on tasks, and the algorithms that ship. An algorithm knows the store and an adapter, and
possibly a policy backend and the gateway. It never knows who runs its rollouts. To add one, add a module here and a
name to `trainer/component_registry.py`.
"""

from typing import TYPE_CHECKING

from leyden._lib.extras import lazy_package

if TYPE_CHECKING:
    from leyden.algorithm.algorithm import Algorithm as Algorithm
    from leyden.algorithm.algorithm import Dataset as Dataset
    from leyden.algorithm.algorithm import Run as Run
    from leyden.algorithm.apo import APO as APO
    from leyden.algorithm.budget import Budget as Budget
    from leyden.algorithm.collector import CollectedRollout as CollectedRollout
    from leyden.algorithm.collector import RolloutCollector as RolloutCollector
    from leyden.algorithm.collector import rollout_id_at as rollout_id_at
    from leyden.algorithm.collector import rollout_id_of as rollout_id_of
    from leyden.algorithm.decorator import FunctionalAlgorithm as FunctionalAlgorithm
    from leyden.algorithm.decorator import algo as algo
    from leyden.algorithm.evaluator import Evaluator as Evaluator
    from leyden.algorithm.evaluator import Score as Score
    from leyden.algorithm.evaluator import Scores as Scores
    from leyden.algorithm.fast import Baseline as Baseline
    from leyden.algorithm.fast import FastAlgorithm as FastAlgorithm
    from leyden.algorithm.few_shot import FewShot as FewShot
    from leyden.algorithm.forks import CallAdvantage as CallAdvantage
    from leyden.algorithm.forks import ForkReturns as ForkReturns
    from leyden.algorithm.forks import call_advantages as call_advantages
    from leyden.algorithm.forks import fork_requests as fork_requests
    from leyden.algorithm.forks import fork_returns as fork_returns
    from leyden.algorithm.gepa import GEPA as GEPA
    from leyden.algorithm.iterative import IterativeAlgorithm as IterativeAlgorithm
    from leyden.algorithm.policy_gradient import DPO as DPO
    from leyden.algorithm.policy_gradient import GRPO as GRPO
    from leyden.algorithm.policy_gradient import PPO as PPO
    from leyden.algorithm.policy_gradient import RLOO as RLOO
    from leyden.algorithm.policy_gradient import SFT as SFT
    from leyden.algorithm.policy_gradient import DrGRPO as DrGRPO
    from leyden.algorithm.policy_gradient import PolicyAlgorithm as PolicyAlgorithm
    from leyden.algorithm.policy_gradient import PolicyGradient as PolicyGradient
    from leyden.algorithm.policy_gradient import RateFinder as RateFinder
    from leyden.algorithm.policy_gradient import REINFORCEpp as REINFORCEpp
    from leyden.algorithm.policy_gradient import ReMax as ReMax
    from leyden.algorithm.policy_gradient import VinePPO as VinePPO
    from leyden.algorithm.verl.verl_algorithm import VERL as VERL
else:
    __getattr__, __dir__, __all__ = lazy_package(__name__)
