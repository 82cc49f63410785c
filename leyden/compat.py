"""`leyden.compat` is the distribution leyden-compat, if that is installed. It runs programs that were written for Agent
Lightning or qlib.rl on Leyden, under their own imports.

Each of its modules has two names, `leyden.compat.x` and `leyden_compat.x`, and is loaded once.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, cast

from leyden._lib.extras import extension
from leyden.errors import MissingExtra

if TYPE_CHECKING:  # for programs that are checked where leyden-compat is installed
    from leyden_compat import ForeignModule as ForeignModule
    from leyden_compat import ForeignNameError as ForeignNameError
    from leyden_compat import MissingName as MissingName
    from leyden_compat import install as install


class _Modules(MetaPathFinder, Loader):
    """Finds `leyden.compat.x` as `leyden_compat.x`, because a second copy would have classes of its own."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module below `leyden.compat`; None for any other one, or if there is no such module."""
        if not fullname.startswith("leyden.compat."):
            return None
        found = find_spec(self._real(fullname))
        if found is None:
            return None
        return ModuleSpec(fullname, self, origin=found.origin, is_package=found.submodule_search_locations is not None)

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(self._real(module.__name__))

    def get_code(self, fullname: str) -> CodeType | None:
        found = find_spec(self._real(fullname))
        return None if found is None else cast(Any, found.loader).get_code(found.name)

    def _real(self, fullname: str) -> str:
        return self._package + fullname.removeprefix("leyden.compat")


try:
    _package = extension("packages", "compat", needed_by="leyden.compat")
except MissingExtra as missing:
    if __name__ == "__main__":
        sys.exit(str(missing))
    raise
if __name__ == "__main__":
    import_module(f"{_package.__name__}.__main__").main(sys.argv[1:])
else:
    sys.meta_path.insert(0, _Modules(_package.__name__))
    sys.modules[__name__] = _package
