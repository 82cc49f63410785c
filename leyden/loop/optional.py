"""Packages that only some users need: imported when something is made that needs them, or refused
with what to install.
"""

from __future__ import annotations

import importlib
from typing import Any

from leyden.errors import MissingExtra
from leyden.utils.extras import install_extra


def import_optional(module: str, *, extra: str, needed_by: str) -> Any:
    """Import and return a module of an optional package.

    Raise MissingExtra, which names the extra to install, if the import fails.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{needed_by} needs {module.partition('.')[0]}, which cannot be imported ({error}); {install_extra(extra)}"
        ) from error
