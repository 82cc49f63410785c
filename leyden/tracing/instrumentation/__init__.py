"""Instrument the libraries with which agents call models: one context manager for each library, which does nothing if
the library is not installed.

`instrument("httpx", "openai")` enters several of them; a tracer keeps them entered while a trace is open. `route.py`
says where a model call goes, and `instruments.py` lists the instrumentations. None of them knows a tracer, a runner or
a gateway.
"""

from leyden.tracing.instrumentation.instrumentation import Instrumentation as Instrumentation
from leyden.tracing.instrumentation.instruments import HTTP_CLIENTS as HTTP_CLIENTS
from leyden.tracing.instrumentation.instruments import in_use as in_use
from leyden.tracing.instrumentation.instruments import instrument as instrument
from leyden.tracing.instrumentation.instruments import instrumentation_class as instrumentation_class
from leyden.tracing.instrumentation.instruments import names as names
from leyden.tracing.instrumentation.route import MODEL_HOSTS as MODEL_HOSTS
from leyden.tracing.instrumentation.route import CallRoute as CallRoute
from leyden.tracing.instrumentation.route import current_route as current_route
