"""Instrument the libraries with which agents call models: one context manager each, installed only
when its library is.

`instrument("httpx", "openai")` opens several; a tracer keeps them open while a trace is. `route.py`
says where a model call goes, and `registry.py` which instrumentations there are. None of them knows
a tracer, a runner or a gateway.
"""

from leyden.instrumentation.base import Instrumentation
from leyden.instrumentation.registry import HTTP_CLIENTS, in_use, instrument, instrumentation_class, names
from leyden.instrumentation.route import MODEL_HOSTS, Route, current_route

__all__ = [
    "HTTP_CLIENTS",
    "MODEL_HOSTS",
    "Instrumentation",
    "Route",
    "current_route",
    "in_use",
    "instrument",
    "instrumentation_class",
    "names",
]
