"""Agent Lightning's functions that install instrumentations, which have no effect here, and its helpers for ids and for
the load of the machine.
"""

from __future__ import annotations

import secrets
from typing import Any, Final

VERSION: Final = "0.3.0"
"""The version of Agent Lightning whose names are served."""


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing: a tracer instruments the installed libraries while a trace is open."""


instrument_all = uninstrument_all = _nothing
instrument_agentops = uninstrument_agentops = enable_agentops_service = _nothing
instrument_agentops_langchain = uninstrument_agentops_langchain = _nothing
instrument_litellm = uninstrument_litellm = _nothing


def generate_id(length: int) -> str:
    """Return `length` random hexadecimal digits."""
    return secrets.token_hex((length + 1) // 2)[:length]


def system_snapshot(include_gpu: bool = False) -> dict[str, Any]:
    """Return the load and memory of this machine and process.

    include_gpu: of no effect; `leyden.Monitor` reads the GPU.
    """
    from leyden.monitor import SystemProbe

    return dict(SystemProbe().read())
