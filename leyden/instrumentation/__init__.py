"""Instrument the libraries with which agents call models: one context manager for each library,
which does nothing if the library is not installed.

`instrument("httpx", "openai")` enters several of them; a tracer keeps them entered while a trace is
open. `route.py` says where a model call goes, and `registry.py` lists the instrumentations. None of
them knows a tracer, a runner or a gateway.
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
