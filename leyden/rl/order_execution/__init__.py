"""Order execution: trade an amount of one asset within some time, at a better price than its average.

Lives here: a simulator on bars of the past (`SingleAssetOrderExecutionSimple`), what a policy sees and may do (interpreters), what that is
worth (rewards), a recurrent network, where bars and orders come from, and runs from configuration files. The trainer and the policies are
`leyden.rl`'s, which knows nothing of this package. Only `Recurrent` needs torch, and it is loaded when it is named.
To add a component, subclass the class of its kind, and name yours in a configuration by its `module_path`.
"""

from leyden.extras import lazy_package

__getattr__, __dir__, __all__ = lazy_package(__name__, __file__, extra="rl")
