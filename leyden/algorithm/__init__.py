"""Algorithms, which improve resources (prompts, models) by what agents did with them.

The package holds `Algorithm` and the two ways to write one (`@algo` for a function with its own
loop, `IterativeAlgorithm` for steps on the shared `TrainLoop`), `RolloutCollector`, which runs
their rollouts, `Evaluator`, which measures resources on tasks, and the algorithms that ship. An
algorithm knows the store and an adapter, and possibly a policy backend and the gateway. It never
knows who runs its rollouts. To add one, add a module here and a name to `trainer/registry.py`.
"""

from leyden._lib.extras import lazy_package

__getattr__, __dir__, __all__ = lazy_package(__name__, __file__)
