"""Turn what agents did into better resources.

Lives here: `Algorithm` and the two ways to write one (`@algo` for a function that owns its loop,
`IterativeAlgorithm` for steps on the shared `TrainLoop`), `RolloutCollector`, which runs their
rollouts, `Evaluator`, which measures resources on tasks, and the algorithms that ship. An algorithm
knows the store, an adapter, and where it has one a policy backend and the gateway; it never knows
who runs its rollouts. To add one, add a module here and a name to `trainer/registry.py`.
"""

from leyden.extras import lazy_package

__getattr__, __dir__, __all__ = lazy_package(__name__, __file__)
