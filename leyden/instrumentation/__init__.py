"""Instrument the libraries with which agents call models: one context manager each, installed only
when its library is.

`instrument("httpx", "openai")` opens several; a tracer keeps them open while a trace is. `route.py`
says where a model call goes, and `registry.py` which instrumentations there are. None of them knows
a tracer, a runner or a gateway.
"""

from leyden.instrumentation.base import Instrumentation as Instrumentation
from leyden.instrumentation.registry import HTTP_CLIENTS as HTTP_CLIENTS
from leyden.instrumentation.registry import in_use as in_use
from leyden.instrumentation.registry import instrument as instrument
from leyden.instrumentation.registry import instrumentation_class as instrumentation_class
from leyden.instrumentation.registry import names as names
from leyden.instrumentation.route import MODEL_HOSTS as MODEL_HOSTS
from leyden.instrumentation.route import CallRoute as CallRoute
from leyden.instrumentation.route import current_route as current_route
