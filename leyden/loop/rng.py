"""The process-wide random states, as JSON: Python's, and NumPy's where something has loaded it.

A policy's own generators (torch, CUDA) are part of the policy's state and are saved by its backend.
"""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

__all__ = ["capture_rng", "restore_rng"]


def capture_rng() -> dict[str, Any]:
    """The states now."""
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {"python": [version, list(internal), gauss]}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)
        states["numpy"] = {**state, "state": {**state["state"], "key": state["state"]["key"].tolist()}}
    return states


def restore_rng(states: dict[str, Any]) -> None:
    """Continue from what `capture_rng` answered. NumPy is loaded if its state was captured."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if "numpy" in states:
        np: Any = importlib.import_module("numpy")  # there, since the saved run had it
        state = states["numpy"]
        key = np.array(state["state"]["key"], dtype=np.uint32)
        np.random.set_state({**state, "state": {**state["state"], "key": key}})
