"""Check options where they are given, so that a wrong one is refused by its name and not by what it breaks later.

This module knows no option. For another kind of option, add a function that raises ConfigError with the name, the value
and what is possible.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar, cast

from leyden._lib.text import shown, text_of
from leyden.errors import ConfigError, InvalidArgument

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_LAST_PORT = 65_535
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_number(
    name: str,
    value: object,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    whole: bool = False,
    or_none: str | None = None,
) -> None:
    """Raise ConfigError unless `value` is a finite number in this range. A bool is no number.

    whole: it must be an int.
    or_none: what None means, where None is possible.
    """
    if value is None and or_none is not None:
        return
    kind = Integral if whole else Real  # NumPy's numbers are of these kinds too
    right = not isinstance(value, bool) and isinstance(cast(Any, value), kind) and _is_finite(cast(float, value))
    number = cast(float, value)
    if (
        right
        and (at_least is None or number >= at_least)
        and (above is None or number > above)
        and (at_most is None or number <= at_most)
    ):
        return
    limits = {"at least": at_least, "above": above, "at most": at_most}
    bounds = " and ".join(f"{words} {limit:g}" for words, limit in limits.items() if limit is not None)
    wanted = "a whole number" if whole else "a number"
    none = "" if or_none is None else f", or None for {or_none}"
    written = text_of(repr, value)[:200]
    raise ConfigError(f"{name} is {written}; it must be {f'{wanted}, {bounds}' if bounds else wanted}{none}")


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number that no float can hold
        return False


def check_port(name: str, value: object) -> None:
    """Raise ConfigError unless `value` is a TCP port, 0 for any free port, or None."""
    check_number(name, value, at_least=0, at_most=_LAST_PORT, whole=True, or_none="the usual one")


def check_flag(name: str, value: Any) -> None:
    """Raise ConfigError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; possible: True, False")


def check_choice(name: str, value: object, possible: Collection[str]) -> None:
    """Raise ConfigError, with the nearest possible name, unless `value` is one of the possible ones."""
    if not isinstance(value, str) or value not in possible:
        raise ConfigError(f"{name} is {value!r}; {nearest(str(value), possible)}")


def check_path(name: str, value: object, *, example: str) -> None:
    """Raise InvalidArgument unless `value` is a path; `example` is one."""
    if not isinstance(value, str | os.PathLike):
        raise InvalidArgument(f"{name} is {shown(value)}; give a path such as {example!r}")


def check_several(name: str, value: object, kind: type | None = None, *, wanted: str = "") -> None:
    """Raise InvalidArgument if `value` is a single object where a list is needed, and ConfigError for an item that is
    of another kind.

    wanted: what to give, for the message about an item.
    """
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise InvalidArgument(f"{name} is {shown(value)}; give a list: {name}=[...]")
    for item in () if kind is None else cast("Iterable[object]", value):
        if not isinstance(item, cast(type, kind)):
            raise ConfigError(f"{name} has {shown(item)}; give {wanted}")


def nearest(name: str, possible: Collection[str]) -> str:
    """Return a hint for a name that is not among the possible ones: the nearest of them, or all."""
    close = get_close_matches(name, possible, n=1)
    return f"did you mean {close[0]!r}?" if close else f"possible: {', '.join(possible) or 'none'}"


def check_names(caller: str, given: Collection[str], possible: Collection[str]) -> None:
    """Raise InvalidArgument, with the nearest possible name, if `caller` was given an option that it does not have."""
    for name in given:
        if name not in possible:
            raise InvalidArgument(f"{caller} has no option {name!r}; {nearest(name, possible)}")


class NamedOptions:
    """A base class whose subclasses refuse an unknown or a missing argument by its name.

    The error for an unknown option gives the nearest known name. It is an InvalidArgument (a TypeError) in place of
    Python's TypeError, which names a base class and no remedy. For a class that another decorator completes (a
    dataclass), use `named_options`; for a function or method, `named_arguments`.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            named_options(cls)


def named_options(kind: type[T]) -> type[T]:
    """Make a class refuse unknown and missing arguments as `NamedOptions` does."""
    construct: Callable[..., None] = vars(kind)["__init__"]
    _, *parameters = inspect.signature(construct).parameters.values()

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **options: Any) -> None:
        _check_call(
            type(self).__name__,
            parameters,
            args,
            options,
            lambda: list(dict.fromkeys(option_names(cast("type[Any]", type(self))))),
        )
        construct(self, *args, **options)

    wrapper: Any = init
    wrapper.__code__ = wrapper.__code__.replace(co_name="__init__")  # the name that a traceback shows
    cast(Any, kind).__init__ = wrapper
    return kind


def named_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function or method, sync or async, refuse unknown and missing arguments as `NamedOptions` does."""
    parameters = list(inspect.signature(function).parameters.values())
    name, _, method = function.__qualname__.rpartition(".")
    is_method = bool(name) and not name.endswith("<locals>")
    caller = f"{name}.{method}" if is_method else method
    visible = parameters[1:] if is_method else parameters

    def check(args: Sequence[object], options: Mapping[str, object]) -> None:
        possible = [each.name for each in visible if each.kind in _BY_NAME]
        _check_call(caller, visible, args[1:] if is_method else args, options, lambda: possible)

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        check(args, options)
        return function(*args, **options)

    @functools.wraps(function)
    async def wait(*args: P.args, **options: P.kwargs) -> Any:
        check(args, options)
        return await cast("Callable[..., Awaitable[Any]]", function)(*args, **options)

    wrapper: Any = wait if inspect.iscoroutinefunction(function) else call
    wrapper.__code__ = wrapper.__code__.replace(co_name=function.__name__)  # the name that a traceback shows
    return wrapper


def _check_call(
    caller: str,
    parameters: Sequence[inspect.Parameter],
    args: Sequence[object],
    options: Mapping[str, object],
    possible: Callable[[], Collection[str]],
) -> None:
    """Raise InvalidArgument for an option that no parameter takes, and for a parameter without a value.

    parameters: without `self`.
    possible: returns the names to suggest; called only for an error.
    """
    kinds = {each.kind for each in parameters}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    names = {each.name for each in parameters}
    if not takes_any and any(name not in names for name in options):
        check_names(caller, [name for name in options if name not in names], possible())
    by_place = [each.name for each in parameters if each.kind in _BY_PLACE][: len(args)]
    required = [each for each in parameters if each.default is each.empty and each.kind in (*_BY_PLACE, *_BY_NAME)]
    missing = [each.name for each in required if each.name not in options and each.name not in by_place]
    if missing:
        places = [each.name if each.kind in _BY_PLACE else f"{each.name}=..." for each in required]
        raise InvalidArgument(f"{caller} needs {', '.join(missing)}; write {caller}({', '.join(places)}, ...)")


def option_names(kind: type) -> Iterator[str]:
    """Yield the names of the keyword arguments that the constructor takes. `**kwargs` are followed to the next base
    class with an `__init__`, where they are passed on.
    """
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        _, *parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        kinds = {parameter.kind for parameter in parameters}
        yield from (each.name for each in parameters if each.kind in _BY_NAME)
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            return
