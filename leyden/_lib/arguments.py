"""Remember the arguments of a constructor, so that a run can record its configuration."""

from __future__ import annotations

import inspect
from typing import Any


class KeepsArguments:
    """A base class whose instances, of any subclass, remember their constructor's arguments."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        made.__dict__["_arguments"] = (args, kwargs)
        return made


def arguments_of(made: object) -> dict[str, Any]:
    """Return the constructor's arguments by name, defaults included; empty for an object that does not remember
    them.
    """
    args, kwargs = getattr(made, "__dict__", {}).get("_arguments", ((), {}))
    try:
        bound = inspect.signature(type(made)).bind(*args, **kwargs)
    except (TypeError, ValueError):  # a constructor without a signature, or a copy made without arguments
        return dict(kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    for parameter in inspect.signature(type(made)).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:  # list the options of `**kwargs` by their own names
            given.update(given.pop(parameter.name))
    return given
