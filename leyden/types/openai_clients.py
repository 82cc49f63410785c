"""Clients of the official `openai` package that share their connections, for `LLM.openai` and `LLM.openai_sync`.

A client with its own connection pool takes about 20 ms of CPU to make, more than a small agent's whole rollout. A
client on an existing pool takes 0.05 ms. So each event loop has one pool, and each process has one for synchronous
agents. `openai` is imported at the first call, because Leyden's core does not need it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from leyden._lib.extras import import_optional
from leyden._lib.per_loop import PerLoop
from leyden.errors import ConfigError

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


def async_client(base_url: str, api_key: str | None) -> AsyncOpenAI:
    """Return an asynchronous client for `base_url`, which shares the running loop's connections.

    api_key: None: the variable OPENAI_API_KEY, or "EMPTY" if it is not set.
    Raise ConfigError without a running loop, or if the package `openai` is not installed.
    """
    shared, _ = _client_classes()
    try:
        pool = _POOLS.get_now()
    except RuntimeError as error:
        raise ConfigError(
            "LLM.openai() needs a running event loop, which an `async def` agent has; call LLM.openai_sync() in synchronous code"
        ) from error
    return shared(base_url=base_url, api_key=_key(api_key), http_client=pool)


def sync_client(base_url: str, api_key: str | None) -> OpenAI:
    """Return a synchronous client for `base_url`, which shares this process's connections.

    api_key: None: the variable OPENAI_API_KEY, or "EMPTY" if it is not set.
    Raise ConfigError if the package `openai` is not installed.
    """
    _, shared = _client_classes()
    return shared(base_url=base_url, api_key=_key(api_key), http_client=_sync_pool(os.getpid()))


def import_ahead() -> None:
    """Import ahead what the first client needs, which takes a second. Do nothing without the package."""
    with contextlib.suppress(ConfigError):
        _, client_class = _client_classes()
        client = client_class(base_url="http://unused", api_key="unused", http_client=_sync_pool(os.getpid()))
        _ = client.chat.completions, client.responses  # the client imports these modules at first use


def _key(api_key: str | None) -> str:
    return api_key or os.environ.get("OPENAI_API_KEY") or "EMPTY"


@functools.cache
def _client_classes() -> tuple[type[AsyncOpenAI], type[OpenAI]]:
    """Return the classes of clients whose `close`, and so whose `with` block, leaves the shared connections open."""
    import_optional("openai", extra="openai", needed_by="LLM.openai()")
    from openai import AsyncOpenAI, OpenAI

    class SharedAsyncOpenAI(AsyncOpenAI):
        """An asynchronous client whose `close` leaves the loop's connections open."""

        async def close(self) -> None:
            """Do nothing: other rollouts use the connections, which the end of the event loop closes."""

    class SharedOpenAI(OpenAI):
        """A synchronous client whose `close` leaves the process's connections open."""

        def close(self) -> None:
            """Do nothing: other rollouts use the connections, which end with the process."""

    return SharedAsyncOpenAI, SharedOpenAI


_POOLS: PerLoop[Any] = PerLoop(lambda: aclosing(importlib.import_module("openai").DefaultAsyncHttpxClient()))


@functools.cache
def _sync_pool(pid: int) -> Any:
    """Return the pool of process `pid`, because a child must not use its parent's connections."""
    pool = importlib.import_module("openai").DefaultHttpxClient()
    atexit.register(pool.close)
    return pool
