"""The error of a module whose packages are not installed; it names the extra that brings them."""

from __future__ import annotations

from leyden.errors import MissingExtra
from leyden.utils.extras import install_extra

_PACKAGES = {"rl": ("gymnasium", "numpy", "safetensors", "torch"), "torch": ("safetensors", "torch", "transformers")}
"""The packages that Leyden's modules import at their top, by extra."""


def missing_extra(error: ImportError, *, extra: str, needed_by: str) -> ImportError:
    """Return the error to raise for a module of Leyden's that cannot be imported.

    It is a MissingExtra if a package of the extra is not installed, and otherwise `error` itself.
    """
    package = (error.name or "").partition(".")[0]
    if package not in _PACKAGES[extra]:
        return error
    missing = MissingExtra(f"{needed_by} needs {package}, which is not installed; {install_extra(extra)}")
    missing.name = package  # so that a caller can raise it anew in its own name
    return missing
