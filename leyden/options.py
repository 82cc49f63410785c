"""Options that are checked where they are given, so that a wrong one is refused by its name and not by what it breaks later.

It knows no option. For another kind of option, add a function that raises ConfigError with the name, the value and what is possible.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator
from difflib import get_close_matches
from typing import Any, TypeVar, cast

from leyden.errors import ConfigError, InvalidArgument
from leyden.utils.listening import is_loopback

__all__ = ["NamedOptions", "check_flag", "check_number", "check_port", "check_token", "named_options", "nearest"]

T = TypeVar("T")

_LAST_PORT = 65_535


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
    """Raises ConfigError unless `value` is a finite number in this range; for a bool too.

    whole: it must be an int. or_none: what None means, where None is possible.
    """
    if value is None and or_none is not None:
        return
    kinds = int if whole else int | float
    right = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(cast(float, value))
    number = cast(float, value)
    if (
        right
        and (at_least is None or number >= at_least)
        and (above is None or number > above)
        and (at_most is None or number <= at_most)
    ):
        return
    limits = {"at least": at_least, "above": above, "at most": at_most}
    said = " and ".join(f"{words} {limit:g}" for words, limit in limits.items() if limit is not None)
    kind = "a whole number" if whole else "a number"
    none = "" if or_none is None else f", or None for {or_none}"
    raise ConfigError(f"{name} is {value!r}; it must be {f'{kind}, {said}' if said else kind}{none}")


def check_port(name: str, value: object) -> None:
    """Raises ConfigError unless `value` is a TCP port, 0 for any that is free, or None."""
    check_number(name, value, at_least=0, at_most=_LAST_PORT, whole=True, or_none="the usual one")


def check_flag(name: str, value: Any) -> None:
    """Raises ConfigError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; possible: True, False")


def check_token(name: str, token: object, *, host: str, or_say: str | None = None, insecure: bool = False) -> None:
    """Raise ConfigError unless a server that is bound to `host` may run with this token.

    An empty token is refused on every address, because it usually comes from an unset variable and
    would admit any client. Without a token (None) a server may be bound to a loopback address only,
    unless it is `insecure`. or_say: the option for that, if there is one.
    """
    if token is not None and not isinstance(token, str):
        raise ConfigError(f"{name} is {type(token).__name__}; it must be a string, or None")
    if token is not None and not token.strip():
        raise ConfigError(f"{name} is empty; leave it out, or choose one that is hard to guess")
    if token is None and not insecure and not is_loopback(host):
        other = "" if or_say is None else f", or say {or_say}"
        raise ConfigError(f"host {host!r} can be reached from other machines: give {name}, or bind to 127.0.0.1{other}")


def nearest(name: str, possible: Collection[str]) -> str:
    """Return a hint for a name that is not among the possible ones: the nearest of them, or all."""
    close = get_close_matches(name, possible, n=1)
    return f"did you mean {close[0]!r}?" if close else f"possible: {', '.join(possible) or 'none'}"


class NamedOptions:
    """A base class whose subclasses refuse an unknown keyword argument with the nearest known name.

    Raises InvalidArgument (a TypeError) in place of Python's TypeError, which names a base class and
    no remedy. For a class that another decorator completes (a dataclass), use `named_options`.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            named_options(cls)


def named_options(kind: type[T]) -> type[T]:
    """Make a class refuse an unknown keyword argument as `NamedOptions` does."""
    construct: Callable[..., None] = vars(kind)["__init__"]
    parameters = inspect.signature(construct).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **options: Any) -> None:
        for name in options:
            if not takes_any and name not in parameters:
                raise InvalidArgument(f"{type(self).__name__} has no option {name!r}; {nearest(name, _options(self))}")
        construct(self, *args, **options)

    wrapper: Any = init
    wrapper.__code__ = wrapper.__code__.replace(co_name="__init__")  # the name that a traceback shows
    setattr(kind, "__init__", wrapper)  # noqa: B010 -- type checkers refuse the plain assignment
    return kind


def _options(made: object) -> list[str]:
    """Return the names that the object's constructor takes, and those that it passes on to its bases'."""
    return list(dict.fromkeys(_names(type(made))))


def _names(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        _, *parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        kinds = {parameter.kind for parameter in parameters}
        yield from (each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            return
