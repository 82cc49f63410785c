"""Instrument `aiohttp`'s client: its requests to a model go to the attempt's gateway, with the trace context in their
headers.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar

from leyden._lib.patching import Patch
from leyden.tracing.instrumentation.instrumentation import Patches
from leyden.tracing.instrumentation.route import current_route


class AiohttpInstrumentation(Patches):
    """Instruments every `aiohttp.ClientSession`."""

    modules: ClassVar[tuple[str, ...]] = ("aiohttp",)

    def patches(self) -> Sequence[Patch]:
        """Return the patch of the one method that every request goes through."""
        import aiohttp

        return (Patch(aiohttp.ClientSession, "_request", _routed),)


def _routed(original: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """Return a replacement of `ClientSession._request` that follows the current route."""

    async def _request(self: Any, method: str, str_or_url: Any, **kwargs: Any) -> Any:
        route = current_route()
        if route is not None:
            str_or_url, kwargs = _redirected(self, route, str_or_url, kwargs)
        return await original(self, method, str_or_url, **kwargs)

    return _request


def _redirected(session: Any, route: Any, given: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the URL and the arguments of a request as the route wants them; unchanged for a request that is no model
    call.
    """
    url = session._build_url(given)
    own = session._prepare_headers(kwargs.get("headers"))  # the session's and the request's
    redirection = route.redirect(str(url), {name.lower(): value for name, value in own.items()})
    if redirection is None:
        return given, kwargs
    own.update(redirection.headers)
    return type(url)(redirection.url, encoded=True), {**kwargs, "headers": own}
