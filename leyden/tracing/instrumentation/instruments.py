"""The table of instrumentations. To add one, add a line here."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final

from leyden.errors import ConfigError
from leyden.tracing.instrumentation.instrumentation import Instrumentation

_CLASSES: Final[Mapping[str, str]] = {
    "httpx": "leyden.tracing.instrumentation.http_clients:HttpxInstrumentation",
    "httpx2": "leyden.tracing.instrumentation.http_clients:Httpx2Instrumentation",
    "aiohttp": "leyden.tracing.instrumentation.http_clients:AiohttpInstrumentation",
    "openai": "leyden.tracing.instrumentation.packaged:OpenAIInstrumentation",
    "anthropic": "leyden.tracing.instrumentation.packaged:AnthropicInstrumentation",
    "langchain": "leyden.tracing.instrumentation.packaged:LangChainInstrumentation",
    "openai-agents": "leyden.tracing.instrumentation.frameworks:OpenAIAgentsInstrumentation",
    "autogen": "leyden.tracing.instrumentation.frameworks:AutoGenInstrumentation",
    "agent-framework": "leyden.tracing.instrumentation.frameworks:AgentFrameworkInstrumentation",
    "crewai": "leyden.tracing.instrumentation.frameworks:CrewAIInstrumentation",
}

HTTP_CLIENTS: Final = ("httpx", "httpx2", "aiohttp")
"""The instrumentations that redirect requests."""


def names() -> tuple[str, ...]:
    """Return the names that `instrument` takes, whether or not their libraries are installed."""
    return tuple(_CLASSES)


def in_use() -> tuple[str, ...]:
    """Return all HTTP clients, and the other libraries that this process has imported.

    The HTTP clients are instrumented in any case, because model calls must be redirected.
    """
    return tuple(name for name in _CLASSES if name in HTTP_CLIENTS or instrumentation_class(name).imported())


@functools.cache
def instrumentation_class(name: str) -> type[Instrumentation]:
    """Return the class for a name. Raise ConfigError for a name that is not among `names()`."""
    try:
        module, _, attribute = _CLASSES[name].partition(":")
    except KeyError:
        raise ConfigError(
            f"instrumentation {name!r} is not known; possible: {', '.join(map(repr, _CLASSES))}"
        ) from None
    return getattr(importlib.import_module(module), attribute)


def instrument(*wanted: str) -> AbstractContextManager[None]:
    """Return a context manager that instruments libraries during its block.

    wanted: names out of `names()`; one whose library is not installed has no effect.
    Blocks may be nested, in any threads.
    Raise ConfigError for an unknown name.
    """
    return _Together([instrumentation_class(name)() for name in wanted])


class _Together(AbstractContextManager[None]):
    """Enters several context managers as one. It is entered with every trace, so it does not pay for an ExitStack."""

    def __init__(self, blocks: Sequence[Instrumentation]) -> None:
        self._blocks = blocks
        self._entered = 0

    def __enter__(self) -> None:
        try:
            for block in self._blocks:
                block.__enter__()
                self._entered += 1
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *raised: object) -> None:
        while self._entered:
            self._entered -= 1
            self._blocks[self._entered].__exit__(*raised)
