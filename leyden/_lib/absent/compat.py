"""`leyden.compat` is the distribution leyden-compat, if that is installed. It runs programs that
were written for Agent Lightning or qlib.rl on Leyden, under their own imports.
"""

import sys
from importlib import import_module

from leyden._lib.extras import extension
from leyden.errors import MissingExtra

try:
    package = extension("packages", "compat", needed_by="leyden.compat")
except MissingExtra as missing:
    if __name__ == "__main__":
        sys.exit(str(missing))
    raise
if __name__ == "__main__":
    import_module(f"{package.__name__}.__main__").main(sys.argv[1:])
else:
    sys.modules[__name__] = package  # its modules are found as `leyden.compat.importing` and so on, too
