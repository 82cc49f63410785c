"""Options that are checked where they are given, so that a wrong one is refused by its name and not by what it breaks later.

It knows no option. For another kind of option, add a function that raises ConfigError with the name, the value and what is possible.
"""

from __future__ import annotations

import math
from typing import Any, cast

from leyden.errors import ConfigError
from leyden.utils.listening import is_loopback

__all__ = ["check_flag", "check_number", "check_port", "check_token"]

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
