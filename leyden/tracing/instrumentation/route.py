"""Routes: the target of an attempt's model calls, and the headers that they carry.

A `CallRoute` is a value in OpenTelemetry's context, so it follows that context into tasks and threads. A tracer puts a
route there for each trace, the runner sets the attempt's gateway, and an instrumentation calls `redirect` for each
request. The module knows URLs and headers, and neither an HTTP client nor a tracer.

To route the calls of a service that is not in MODEL_HOSTS, give its host to `OtelTracer(model_hosts=...)`, with the
path before `/v1` if there is one (`openrouter.ai/api`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlsplit

from opentelemetry import context as otel_context
from opentelemetry import trace as otel_trace

from leyden.types import semconv

MODEL_HOSTS: Final = ("api.openai.com", "api.anthropic.com")
ROUTE_KEY: Final = otel_context.create_key("leyden-route")
SENT_HEADER: Final = "x-leyden-sent"
"""The header in which the agent's process says when it sent a call: Unix seconds by its own clock."""
_KEY_HEADERS: Final = ("x-api-key", "api-key")


@dataclass(frozen=True, slots=True)
class Redirection:
    """The changes to one request to a model."""

    url: str
    headers: Mapping[str, str]
    """Headers to set, in lower case; they replace the request's headers of the same name."""


@dataclass(slots=True)
class CallRoute:
    """The address to which the model calls of one attempt go, and the headers that they carry."""

    rollout_id: str
    attempt_id: str
    model_hosts: Sequence[str] = MODEL_HOSTS
    """Which requests are model calls: by host, or host and the beginning of the path."""
    base_url: str | None = None
    """The attempt's own address at the gateway; it ends in `/v1`. None: calls go where the agent sends them."""
    api_key: str | None = None
    """The key for the gateway, in place of the agent's own key."""

    def redirect(self, url: str, headers: Mapping[str, str]) -> Redirection | None:
        """Return the changes to a request, or None for a request that is no model call.

        headers: the request's headers, by names in lower case. A trace context that is among them is kept.
        """
        parts = urlsplit(url)
        root = self._root()
        host, path = parts.netloc.rpartition("@")[2].lower(), parts.path
        own = root and urlsplit(root)
        if own and host == own.netloc:  # the gateway itself; without ids in the path, its general address
            path = path if path.startswith("/rollout/") else f"{own.path}{path}"
            target = f"{parts.scheme}://{host}{path}"
        else:
            prefix = self._matching(host, path)
            if prefix is None:
                return None
            target = url.partition("?")[0].partition("#")[0] if root is None else root + path[len(prefix) :]
        changed = {name: value for name, value in self.headers().items() if name not in headers}
        if root is not None:  # the gateway must not see the agent's own key, which is for the model's server
            key = self.api_key or "EMPTY"
            changed[SENT_HEADER] = repr(time.time())
            changed |= {name: key for name in _KEY_HEADERS if name in headers} | {"authorization": f"Bearer {key}"}
        return Redirection(f"{target}?{parts.query}" if parts.query else target, changed)

    def headers(self) -> dict[str, str]:
        """Return the trace context of a call: W3C's `baggage`, and `traceparent` within a span."""
        step = traceparent()
        return {"baggage": self.baggage()} | ({"traceparent": step} if step else {})

    def baggage(self) -> str:
        ids = {semconv.ROLLOUT_ID: self.rollout_id, semconv.ATTEMPT_ID: self.attempt_id}
        return ",".join(f"{name}={quote(value, safe='')}" for name, value in ids.items())

    def environment(self) -> dict[str, str]:
        """Return the environment variables with which model clients find the attempt's gateway; empty without one."""
        if self.base_url is None:
            return {}
        key = self.api_key or "EMPTY"  # clients insist on some key
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": self._root() or "",  # Anthropic's clients add the /v1 themselves
            "ANTHROPIC_API_KEY": key,
        }

    def _root(self) -> str | None:
        """Return the attempt's address at the gateway without the `/v1`; None without a gateway."""
        return self.base_url and self.base_url.rstrip("/").removesuffix("/v1")

    def _matching(self, host: str, path: str) -> str | None:
        """Return the path prefix, perhaps "", of the model host that an address matches; None if it matches none."""
        for known in self.model_hosts:
            name, slash, prefix = known.lower().rstrip("/").partition("/")
            if host in (name, f"{name}:443", f"{name}:80") and path.startswith(slash + prefix):
                return slash + prefix
        return None


def current_route() -> CallRoute | None:
    """Return the route of the running code, or None outside a trace."""
    route = otel_context.get_value(ROUTE_KEY)
    return route if isinstance(route, CallRoute) else None


def traceparent() -> str | None:
    """Return the current span as the value of W3C's `traceparent` header; None outside a span."""
    step = otel_trace.get_current_span().get_span_context()
    return f"00-{step.trace_id:032x}-{step.span_id:016x}-{step.trace_flags:02x}" if step.is_valid else None
