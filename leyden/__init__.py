"""Leyden trains agents.

It records what an agent does, keeps the record in a durable store, and turns it into better agents.

Public names are resolved when they are first used, so that `import leyden` loads no torch, no web
framework and no model library.
"""

from leyden._lib.extras import lazy_package

__version__ = "0.1.0.dev0"
__path__.append(f"{__path__[0]}/_lib/absent")  # modules of other distributions, and what to install for them
__getattr__, __dir__, __all__ = lazy_package(__name__, __file__)
