"""`operation`: a span around a piece of the agent's work, as a decorator or a context manager."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Generator
from typing import Any, TypeVar, overload

from leyden import semconv
from leyden.tracer import current_trace
from leyden.types import Attributes

__all__ = ["operation"]

F = TypeVar("F", bound=Callable[..., Any])


@overload
def operation(target: F) -> F: ...
@overload
def operation(target: str, **attributes: Any) -> contextlib.AbstractContextManager[Attributes]: ...
def operation(target: Callable[..., Any] | str, **attributes: Any) -> Any:
    """Record a step with its input, output and exception: `@operation` on a function (sync or async), or `with operation("name"):`.

    The context manager yields a dict whose entries become attributes. Outside a trace nothing is recorded and the code runs as it is.
    """
    if isinstance(target, str):
        return _recorded(target, dict(attributes))
    name = target.__qualname__

    def described(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Attributes:
        return {semconv.OPERATION_INPUT: _text({"args": args, "kwargs": kwargs})}

    if inspect.iscoroutinefunction(target):

        @functools.wraps(target)
        async def run_async(*args: Any, **kwargs: Any) -> Any:
            with _recorded(name, described(args, kwargs)) as recorded:
                result = await target(*args, **kwargs)
                recorded[semconv.OPERATION_OUTPUT] = _text(result)
                return result

        return run_async

    @functools.wraps(target)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _recorded(name, described(args, kwargs)) as recorded:
            result = target(*args, **kwargs)
            recorded[semconv.OPERATION_OUTPUT] = _text(result)
            return result

    return run


@contextlib.contextmanager
def _recorded(name: str, attributes: Attributes) -> Generator[Attributes]:
    trace = current_trace.get()
    if trace is None:
        yield {}
        return
    with trace.tracer.operation_context(semconv.OPERATION, {semconv.OPERATION_NAME: name} | attributes) as recorded:
        yield recorded


def _text(value: Any) -> str:
    return json.dumps(value, default=repr)
