"""`lightning_cli`: make objects with the arguments that a command line gives for their classes."""

from __future__ import annotations

import argparse
import enum
import inspect
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

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
    """Make an object of each class, with arguments from this program's command line, such as `--trainer.n-runners 4`.

    An argument without a default is required unless its type allows None. Values of a `Literal` or an enum are given by
    their text, members of an enum also by their name.

    Return the object, or a tuple of the objects for several classes.
    """
    if not classes:
        return ()
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for kind in classes:
        hints = get_type_hints(kind.__init__)
        for name, parameter in _parameters(kind).items():
            required = parameter.default is parameter.empty and not _is_optional(hints.get(name))
            default = None if parameter.default is parameter.empty else parameter.default
            options: dict[str, Any] = {"required": True} if required else {"default": default}
            flag = f"--{kind.__name__.lower()}.{name.replace('_', '-')}"
            shown = hints.get(name, "text")
            help_text = f"{kind.__name__}: {name} ({getattr(shown, '__name__', shown)})".replace("%", "%%")
            parser.add_argument(flag, dest=_place(kind, name), help=help_text, **options, **_reader(hints.get(name)))
    given = vars(parser.parse_args())
    made = tuple(kind(**{name: given[_place(kind, name)] for name in _parameters(kind)}) for kind in classes)
    return made[0] if len(made) == 1 else made


def _parameters(kind: type[Any]) -> dict[str, inspect.Parameter]:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = inspect.signature(kind).parameters
    return {name: parameter for name, parameter in found.items() if parameter.kind in by_name}


def _place(kind: type[Any], name: str) -> str:
    return f"{kind.__name__.lower()}_{name}"


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType) and types.NoneType in get_args(hint)


def _reader(hint: Any) -> dict[str, Any]:
    """Return the arguments with which argparse reads an option of this type."""
    optional = _is_optional(hint)
    kinds = [kind for kind in get_args(hint) if kind is not types.NoneType] if optional else []
    core = kinds[0] if len(kinds) == 1 else hint
    if core is list or get_origin(core) is list:
        return {"nargs": "*", **_reader(next(iter(get_args(core)), str))}
    read = _one_of(core) or {bool: _boolean, int: int, float: float}.get(core, str)
    if not optional:
        return {"type": read}
    nullable: dict[Any, Any] = {int: nullable_int, float: nullable_float, str: nullable_str}

    def read_or_none(text: str) -> Any:
        return None if text.lower() in _NOTHING else read(text)

    return {"type": nullable.get(read, read_or_none)}


def _one_of(kind: Any) -> Callable[[str], Any] | None:
    """Return a function that reads a value of a `Literal` or a member of an enum; None for another type. It raises
    argparse's error for any other text.
    """
    if get_origin(kind) is Literal:
        possible: dict[str, Any] = {str(value): value for value in get_args(kind)}
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        possible = {str(member.value): member for member in kind} | {member.name: member for member in kind}
    else:
        return None

    def read(text: str) -> Any:
        if text in possible:
            return possible[text]
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(possible)}")

    return read
