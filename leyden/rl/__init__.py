"""Reinforcement learning from simulators: simulator, interpreters and reward, policies, and the
trainer that runs them.

Lives here: the parts that a user writes (`parts`), seeds that are given out exactly once
(`SeedPlan`, `DataQueue`), environments over them (`env/`), policies (`policy/`), `Collector` and
buffers, vessels and the trainer (`trainer/`), and order execution as a worked domain
(`order_execution/`). The loop, callbacks, writers and checkpoints are those of `leyden.training`.
Nothing here knows a language model, a store or an agent.

Modules are imported when a name of theirs is first used, so that torch is imported only with a
policy that learns. To add a public name, add a line to `__init__.pyi`.
"""

from leyden._lib.extras import lazy_package

__getattr__, __dir__, __all__ = lazy_package(__name__, __file__, extra="rl")
