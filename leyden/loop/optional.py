"""Packages that only some users need: imported when something is made that needs them, or refused with what to install."""

from __future__ import annotations

import importlib
from typing import Any

from leyden.errors import MissingExtra
from leyden.utils.extras import install_extra

__all__ = ["import_optional", "missing_extra"]

_PACKAGES = {"rl": ("gymnasium", "numpy", "safetensors", "torch"), "torch": ("safetensors", "torch", "transformers")}
"""The packages that Leyden's modules import at their top, by extra."""


def import_optional(module: str, *, extra: str, needed_by: str) -> Any:
    """The module. Raises MissingExtra, which names the extra to install, if it or something that it needs is not there."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{needed_by} needs {module.partition('.')[0]}, which cannot be imported ({error}); {install_extra(extra)}"
        ) from error


def missing_extra(error: ImportError, *, extra: str, needed_by: str) -> ImportError:
    """Return the error to raise for a module of Leyden's that cannot be imported.

    That is a MissingExtra if a package of the extra is not there, and otherwise the error itself.
    """
    package = (error.name or "").partition(".")[0]
    if package not in _PACKAGES[extra]:
        return error
    return MissingExtra(f"{needed_by} needs {package}, which is not installed; {install_extra(extra)}")
