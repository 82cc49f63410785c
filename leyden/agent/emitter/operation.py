"""Record a function call or a block as one step: its input, its output, how long it took, how it failed.

Spans that are recorded during the step, by emitters or by OpenTelemetry, are its children. Outside a trace the code
runs unrecorded, so that a decorated function works in the user's own tests and scripts. Emitters need a trace inside an
operation too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec, TypeVar, cast, overload

from leyden._lib.text import as_json
from leyden.errors import ConfigError
from leyden.tracing import OpenSpan, current_trace
from leyden.types import semconv

P = ParamSpec("P")
R = TypeVar("R")


class OperationStep:
    """The step of a `with operation(...) as step` block, which records its input and output."""

    def __init__(self, span: OpenSpan) -> None:
        self._span = span

    def set_input(self, value: Any) -> None:
        """Record the operation's input; a value that is not JSON is recorded as its `repr`."""
        self._span.set({semconv.OPERATION_INPUT: as_json(value)})

    def set_output(self, value: Any) -> None:
        """Record the operation's output; a value that is not JSON is recorded as its `repr`."""
        self._span.set({semconv.OPERATION_OUTPUT: as_json(value)})

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes to the step's span. Raise InvalidEmission for a value that has no attribute form."""
        self._span.set(attributes)


class Operation(AbstractContextManager[OperationStep]):
    """An operation of an agent, recorded as a span: a context manager for a block, and a decorator for sync and async
    functions. `operation` makes it.
    """

    def __init__(self, name: str | None, attributes: Mapping[str, Any] | None) -> None:
        self._name = name
        self._attributes = dict(attributes or {})
        self._open: AbstractContextManager[OperationStep] | None = None

    def __enter__(self) -> OperationStep:
        if self._name is None:
            raise ConfigError("`with operation()` needs a name: operation(name='...')")
        if self._open is not None:
            raise ConfigError(
                f"the operation {self._name!r} is open already; make another operation(...) for each block"
            )
        self._open = self._step(self._name)
        return self._open.__enter__()

    def __exit__(self, *raised: Any) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(*raised)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that records each call of `function`: its arguments by name, its result or its exception.

        Raise ConfigError for a generator function, because its work happens after it has returned. Use `with
        operation(...)` inside it.
        """
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(
                f"{function.__qualname__!r} is a generator; use `with operation(name=...)` inside it instead"
            )
        name, signature = self._name or function.__qualname__, inspect.signature(function)

        @contextmanager
        def called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator[OperationStep]:
            with self._step(name) as step:
                try:
                    arguments = dict(signature.bind(*args, **kwargs).arguments)
                except TypeError:  # wrong arguments: the call itself will raise the same error
                    arguments = {"args": args, "kwargs": kwargs}
                step.set_input(arguments)
                yield step

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def recorded_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                with called(args, kwargs) as step:
                    result = await cast("Awaitable[Any]", function(*args, **kwargs))
                    step.set_output(result)
                    return result

            return cast("Callable[P, R]", recorded_async)  # R is the coroutine's type

        @functools.wraps(function)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
            with called(args, kwargs) as step:
                result = function(*args, **kwargs)
                step.set_output(result)
                return result

        return recorded

    @contextmanager
    def _step(self, name: str) -> Generator[OperationStep]:
        """Record the block as one step of the current trace. Without a trace, record nothing."""
        trace = current_trace()
        attributes = {**self._attributes, semconv.OPERATION_NAME: name}
        if trace is None:
            yield OperationStep(OpenSpan(name, attributes))
            return
        with trace.operation(semconv.OPERATION, attributes) as span:
            yield OperationStep(span)


@overload
def operation(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def operation(*, name: str | None = None, attributes: Mapping[str, Any] | None = None) -> Operation: ...
def operation(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    attributes: Mapping[str, Any] | None = None,
) -> Any:
    """Record a call or a block: `@operation`, `@operation(name=...)`, or `with operation(name="search") as step:`.

    name: the step's name. A decorator may leave it out: the function's qualified name.
    Raise ConfigError for a block without a name, and for a generator function.
    """
    recorder = Operation(name, attributes)
    return recorder if function is None else recorder(function)
