"""Capture and restore the process-wide random states: Python's, and NumPy's and torch's if loaded.

Generators that a policy owns belong to the policy's state. torch is imported only if the saved run had loaded it.
"""

from __future__ import annotations

import importlib
import logging
import random
import sys
from typing import Any

logger = logging.getLogger(__name__)


def capture_rng() -> dict[str, Any]:
    """Return the states of the global random generators of Python, NumPy and torch, as JSON.

    NumPy and torch (with the CUDA devices in use) are included if they are imported.
    """
    version, internal, gauss = random.getstate()
    states: dict[str, Any] = {"python": [version, list(internal), gauss]}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)
        states["numpy"] = {**state, "state": {**state["state"], "key": state["state"]["key"].tolist()}}
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "get_rng_state"):  # it lacks this while another thread is still importing it
        cuda: list[Any] = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        states["torch"] = {"cpu": _as_text(torch.get_rng_state()), "cuda": [_as_text(state) for state in cuda]}
    return states


def restore_rng(states: dict[str, Any]) -> None:
    """Restore the random states that `capture_rng` returned.

    NumPy and torch are imported if their states were captured.
    """
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if "numpy" in states:
        np: Any = importlib.import_module("numpy")  # installed, since the saved run had it
        state = states["numpy"]
        key = np.array(state["state"]["key"], dtype=np.uint32)
        np.random.set_state({**state, "state": {**state["state"], "key": key}})
    if "torch" in states:
        _restore_torch(states["torch"])


def _restore_torch(states: dict[str, Any]) -> None:
    """Set the states of torch's generators. Log a warning for those that are lost, without torch or with fewer devices.

    states: "cpu" as hex, "cuda" as a list of hex, one for each device in order.
    """
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        logger.warning(
            "the saved run had loaded torch, which cannot be imported here (%s): its random state is lost", error
        )
        return

    def tensor(text: str) -> Any:
        return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)

    torch.set_rng_state(tensor(states["cpu"]))
    saved = states["cuda"]
    devices = torch.cuda.device_count() if saved else 0
    if devices < len(saved):
        logger.warning(
            "the saved run had %d CUDA devices, here are %d: the others' random states are lost", len(saved), devices
        )
    for device, state in enumerate(saved[:devices]):
        torch.cuda.set_rng_state(tensor(state), device)


def _as_text(state: Any) -> str:
    return bytes(state.tolist()).hex()
