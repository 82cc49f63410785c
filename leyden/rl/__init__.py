"""Reinforcement learning from simulators: a policy, a simulator, what lies between them, and the trainer that runs them.

Lives here: the parts that a user writes (`Simulator`, `StateInterpreter`, `ActionInterpreter`, `Reward`), seeds handed out exactly once
(`SeedPlan`, `DataQueue`), environments over them (`env/`), policies (`policy/`), `Collector` and buffers, vessels and the trainer
(`trainer/`), and order execution as a worked domain (`order_execution/`). The loop, callbacks, writers and checkpoints are `leyden.loop`'s.
It knows no language model, no store and no agent.

Names are loaded when they are first used: NumPy and Gymnasium with the first of them, torch with the first policy that learns. To add a
public name, put it into `_WHERE`.
"""

from leyden.extras import lazy_package

__getattr__, __dir__, __all__ = lazy_package(__name__, __file__, extra="rl")
