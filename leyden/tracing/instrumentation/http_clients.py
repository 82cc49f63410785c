"""Instrument `httpx`, `httpx2` and `aiohttp`'s client: their requests to a model go to the attempt's gateway, with the
trace context in their headers.

`httpx` and `httpx2` have one interface. The patched method, `send`, is below all request methods of a client and above
redirects, proxies and transports. So the patch also reaches clients that were made before it, and subclasses such as
OpenAI's and Anthropic's clients.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar

from leyden.tracing.instrumentation.instrumentation import Patch, Patches
from leyden.tracing.instrumentation.route import current_route


class HttpxInstrumentation(Patches):
    """Instruments `httpx`, sync and async."""

    modules: ClassVar[tuple[str, ...]] = ("httpx",)

    def patches(self) -> Sequence[Patch]:
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
    """Instruments `httpx2`, on which openai 3 and anthropic 2 are built."""

    modules: ClassVar[tuple[str, ...]] = ("httpx2",)


def _redirect(library: Any, request: Any) -> None:
    """Change a model call's URL and headers in place as the current route wants them."""
    route = current_route()
    redirection = route and route.redirect(str(request.url), request.headers)
    if redirection is None:
        return
    request.headers.update(redirection.headers)
    url = library.URL(redirection.url)
    if url != request.url:
        request.url = url
        request.headers["host"] = url.netloc.decode("ascii")


class AiohttpInstrumentation(Patches):
    """Instruments every `aiohttp.ClientSession`."""

    modules: ClassVar[tuple[str, ...]] = ("aiohttp",)

    def patches(self) -> Sequence[Patch]:
        import aiohttp

        def routed(original: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
            async def _request(self: Any, method: str, str_or_url: Any, **kwargs: Any) -> Any:
                route = current_route()
                if route is not None:
                    url = self._build_url(str_or_url)
                    own = self._prepare_headers(kwargs.get("headers"))  # the session's and the request's
                    redirection = route.redirect(str(url), {name.lower(): value for name, value in own.items()})
                    if redirection is not None:
                        own.update(redirection.headers)
                        str_or_url, kwargs["headers"] = type(url)(redirection.url, encoded=True), own
                return await original(self, method, str_or_url, **kwargs)

            return _request

        return (Patch(aiohttp.ClientSession, "_request", routed),)  # every request goes through it
