"""How to install an extra, in the words that every error about a missing package uses."""

from __future__ import annotations


def install_extra(extra: str) -> str:
    """Return the remedy for a missing package of `extra`.

    Leyden is on no package index, so a clone is needed.
    """
    return f"install the extra '{extra}' (in a clone of Leyden: pip install -e '.[{extra}]')"
