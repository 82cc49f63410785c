"""`httpx` and `httpx2`: requests to a model bring the trace context along, and go to the attempt's
gateway.

The two have one interface. The method that is replaced, `send`, is below everything that a client
offers and above redirects, proxies and transports, so a client of any age and any subclass
(OpenAI's and Anthropic's are such) is reached.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar

from leyden.instrumentation.base import Patches
from leyden.instrumentation.route import current_route
from leyden.utils.patching import Patch


class HttpxInstrumentation(Patches):
    """Plain `httpx`, sync and async."""

    modules: ClassVar[tuple[str, ...]] = ("httpx",)

    def patches(self) -> Sequence[Patch]:
        """Return the patches of the sync client and the async client."""
        library = importlib.import_module(self.modules[0])

        def sync(original: Callable[..., Any]) -> Callable[..., Any]:
            def send(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
                _redirect(library, request)
                return original(self, request, *args, **kwargs)

            return send

        def asynchronous(original: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
            async def send(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
                _redirect(library, request)
                return await original(self, request, *args, **kwargs)

            return send

        return Patch(library.Client, "send", sync), Patch(library.AsyncClient, "send", asynchronous)


class Httpx2Instrumentation(HttpxInstrumentation):
    """`httpx2`, on which openai 3 and anthropic 2 are built."""

    modules: ClassVar[tuple[str, ...]] = ("httpx2",)


def _redirect(library: Any, request: Any) -> None:
    route = current_route()
    redirection = route and route.redirect(str(request.url), request.headers)
    if redirection is None:
        return
    request.headers.update(redirection.headers)
    url = library.URL(redirection.url)
    if url != request.url:
        request.url = url
        request.headers["host"] = url.netloc.decode("ascii")
