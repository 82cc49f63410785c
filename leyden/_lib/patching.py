"""Replace a method for a while, and restore it.

The module knows no method, and a `Patch` is not thread-safe: its owner calls `apply` and `undo` under a lock, and
counts who needs the patch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Patch:
    """One method of a class or function of a module, replaced and put back.

    owner, name: the class or module, and the name of its attribute that is replaced.
    replace: returns the replacement, given the original.
    """

    def __init__(self, owner: Any, name: str, replace: Callable[[Any], Any]) -> None:
        self._owner, self._name, self._replace = owner, name, replace
        self._original: Any = None
        self._replacement: Any = None
        self._inherited = False

    def apply(self) -> None:
        """Replace the original. Safe to repeat."""
        if self._replacement is None:
            self._original = getattr(self._owner, self._name)
            self._inherited = self._name not in vars(self._owner)
            self._replacement = self._replace(self._original)
            setattr(self._owner, self._name, self._replacement)

    def undo(self) -> None:
        """Restore the original. Do nothing if another patch was put over this one since."""
        # The other patch calls this replacement, so it has to stay. The next `apply` uses it again.
        if self._replacement is None or getattr(self._owner, self._name) is not self._replacement:
            return
        if self._inherited:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._original)
        self._replacement = None
