"""Order execution: trade an amount of one asset within a given time, at a better price than its
average.

Lives here: a simulator on historical bars (`SingleAssetOrderExecutionSimple`), interpreters,
rewards, a recurrent network, readers of bars and orders, and runs from configuration files. The
trainer and the policies are those of `leyden.rl`, which knows nothing of this package. Only
`Recurrent` needs torch, which is imported when the name is first used. To add a component, subclass
the class of its kind, and name your class and its `module_path` in a configuration file.
"""

from leyden._lib.extras import lazy_package

__getattr__, __dir__, __all__ = lazy_package(__name__, __file__, extra="rl")
