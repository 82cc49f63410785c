"""`lightning_cli`: make objects with the arguments that a command line gives for their classes."""

from __future__ import annotations

import argparse
import inspect
import types
from collections.abc import Callable
from typing import Any, Union, get_args, get_origin, get_type_hints

CliConfigurable = Any
"""Agent Lightning's type of a class that `lightning_cli` takes."""

_NOTHING = ("none", "null", "~", "nil")
_YES, _NO = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")


def nullable_str(value: str) -> str | None:
    """Return `value`, or None if it is `none`, `null`, `~` or `nil`."""
    return None if value.lower() in _NOTHING else value


def nullable_int(value: str) -> int | None:
    """Return a whole number; None for `none`, `null`, `~` and `nil`."""
    return _nullable(value, int)


def nullable_float(value: str) -> float | None:
    """Return a number; None for `none`, `null`, `~` and `nil`."""
    return _nullable(value, float)


def _nullable(value: str, kind: Callable[[str], Any]) -> Any:
    """Return the text as `kind`, or None. Raise argparse's error for another text."""
    if value.lower() in _NOTHING:
        return None
    try:
        return kind(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is neither {kind.__name__} nor 'none'") from None


def _boolean(value: str) -> bool:
    """Return the text as a bool. Raise argparse's error for another word."""
    if value.lower() in (*_YES, *_NO):
        return value.lower() in _YES
    raise argparse.ArgumentTypeError(f"{value!r} is neither 'true' nor 'false'")


def lightning_cli(*classes: type[Any]) -> Any:
    """Make an object of each class, with arguments from this program's command line, such as
    `--trainer.n-runners 4`.

    Return the object, or a tuple of the objects for several classes.
    """
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for kind in classes:
        hints = get_type_hints(kind.__init__)
        for name, parameter in _parameters(kind).items():
            required = parameter.default is parameter.empty
            options: dict[str, Any] = {"required": True} if required else {"default": parameter.default}
            flag = f"--{kind.__name__.lower()}.{name.replace('_', '-')}"
            shown = hints.get(name, "text")
            help_text = f"{kind.__name__}: {name} ({getattr(shown, '__name__', shown)})".replace("%", "%%")
            parser.add_argument(flag, dest=_place(kind, name), help=help_text, **options, **_reader(hints.get(name)))
    given = vars(parser.parse_args())
    made = tuple(kind(**{name: given[_place(kind, name)] for name in _parameters(kind)}) for kind in classes)
    return made[0] if len(made) == 1 else made


def _parameters(kind: type[Any]) -> dict[str, inspect.Parameter]:
    """Return the constructor's parameters that have names."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = inspect.signature(kind).parameters
    return {name: parameter for name, parameter in found.items() if parameter.kind in by_name}


def _place(kind: type[Any], name: str) -> str:
    """Return the name under which argparse keeps an option's value."""
    return f"{kind.__name__.lower()}_{name}"


def _reader(hint: Any) -> dict[str, Any]:
    """Return the arguments with which argparse reads an option of this type."""
    kinds = [kind for kind in get_args(hint) if kind is not types.NoneType]
    optional = get_origin(hint) in (Union, types.UnionType) and len(kinds) < len(get_args(hint))
    core = kinds[0] if optional and len(kinds) == 1 else hint
    if get_origin(core) is list:
        return {"nargs": "*", **_reader(next(iter(get_args(core)), str))}
    plain: dict[Any, Any] = {bool: _boolean, int: int, float: float}
    nullable: dict[Any, Any] = {bool: _boolean, int: nullable_int, float: nullable_float}
    return {"type": nullable.get(core, nullable_str) if optional else plain.get(core, str)}
