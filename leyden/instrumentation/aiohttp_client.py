"""`aiohttp`'s client: requests to a model bring the trace context along, and go to the attempt's
gateway.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar

from leyden.instrumentation.base import Patches
from leyden.instrumentation.route import current_route
from leyden.utils.patching import Patch


class AiohttpInstrumentation(Patches):
    """Instruments every `aiohttp.ClientSession`."""

    modules: ClassVar[tuple[str, ...]] = ("aiohttp",)

    def patches(self) -> Sequence[Patch]:
        """Return the patch of the one method that every request goes through."""
        import aiohttp

        return (Patch(aiohttp.ClientSession, "_request", _routed),)


def _routed(original: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    async def _request(self: Any, method: str, str_or_url: Any, **kwargs: Any) -> Any:
        route = current_route()
        if route is not None:
            str_or_url, kwargs = _redirected(self, route, str_or_url, kwargs)
        return await original(self, method, str_or_url, **kwargs)

    return _request


def _redirected(session: Any, route: Any, given: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    url = session._build_url(given)
    own = session._prepare_headers(kwargs.get("headers"))  # the session's and the request's
    redirection = route.redirect(str(url), {name.lower(): value for name, value in own.items()})
    if redirection is None:
        return given, kwargs
    own.update(redirection.headers)
    return type(url)(redirection.url, encoded=True), {**kwargs, "headers": own}
