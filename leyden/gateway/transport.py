"""How a model's server is asked, and what its answer looks like to those who pass it on.

To reach servers in another way, write a `Transport`. It knows neither attempts nor records.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import aiohttp

from leyden.dialects import Passage
from leyden.gateway.asgi import Headers, Scope, downstream_headers, upstream_headers
from leyden.gateway.upstream import UpstreamModel

_IS_UP_SECONDS = 5.0


class Answer(Protocol):
    """A server's answer, whose head is there."""

    status: int
    content_type: str
    """In lower case, without parameters."""

    @property
    def headers(self) -> Headers:
        """As the agent gets them."""
        ...

    async def read(self) -> bytes:
        """The body, when it is whole."""
        ...

    def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes, cut anywhere."""
        ...


class Transport(Protocol):
    """A way to servers."""

    def ask(
        self, model: UpstreamModel, passage: Passage, body: bytes, scope: Scope
    ) -> AbstractAsyncContextManager[Answer]:
        """Send `body` to the server. scope: the agent's request.

        Raises ServerGone, and TimeoutError, also while the answer is read.
        """
        ...

    async def is_up(self, model: UpstreamModel) -> bool:
        """Return whether the server accepts requests. It is called after a connection was lost."""
        ...


class ServerGone(Exception):
    """A server could not be reached, or went away in the middle of its answer; the message says what happened."""

    def __init__(self, error: Exception, *, began: bool) -> None:
        """began: it had begun to answer."""
        super().__init__(f"{type(error).__name__}: {error}".rstrip(": "))
        self.began = began
        self.timed_out = isinstance(error, TimeoutError)


class HttpTransport:
    """Over HTTP, with connections that are kept."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    @asynccontextmanager
    async def ask(self, model: UpstreamModel, passage: Passage, body: bytes, scope: Scope) -> AsyncGenerator[Answer]:
        """See Transport.ask."""
        began = False
        try:
            async with self._session.post(
                model.url(passage.upstream.path),
                data=body,
                headers=upstream_headers(scope, model.api_key, passage.upstream),
                auth=model.login and aiohttp.BasicAuth(*model.login, encoding="utf-8"),
                allow_redirects=False,
            ) as response:
                began = True
                yield _HttpAnswer(response, model)
        except aiohttp.ClientError as error:
            raise ServerGone(error, began=began) from error
        except TimeoutError:
            raise
        except OSError as error:
            raise ServerGone(error, began=began) from error

    async def is_up(self, model: UpstreamModel) -> bool:
        """Return whether the server accepts requests.

        Any reply counts, and a silent server counts as busy.
        """
        try:
            async with self._session.get(model.url("models"), timeout=aiohttp.ClientTimeout(total=_IS_UP_SECONDS)):
                return True
        except TimeoutError:
            return True
        except (aiohttp.ClientError, OSError):
            return False


class _HttpAnswer:
    def __init__(self, response: aiohttp.ClientResponse, model: UpstreamModel) -> None:
        self._response = response
        self._model = model
        self.status = response.status
        self.content_type = response.content_type

    @property
    def headers(self) -> Headers:
        return downstream_headers(self._response)

    async def read(self) -> bytes:
        """Return the body.

        A quoted key of the server is removed from an error, because agents read errors.
        """
        body = await self._response.read()
        return body if self.status < 300 else self._model.without_key(body)

    def pieces(self) -> AsyncIterator[bytes]:
        return self._response.content.iter_any()
