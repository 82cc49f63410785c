"""Build objects from plain data (a configuration file's), by the annotations of their constructors.

An option that is annotated with a dataclass or a pydantic model is built from a mapping of its fields, one annotated
with a class from a mapping with `type` and the class's own options, a function from its import path. Other values are
checked against the annotation. The module knows no component: the caller gives it the registries and the loader of
names.
"""

from __future__ import annotations

import builtins
import collections.abc
import dataclasses
import enum
import functools
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, ForwardRef, Literal, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from typing_extensions import TypeIs

from leyden._lib.components import Registry, component_names, find_component, load_class
from leyden._lib.options import nearest
from leyden._lib.text import fault_reason, text_of
from leyden.errors import ConfigError, LeydenError

OptionPath = tuple[str, ...]
_LISTS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Collection, collections.abc.Iterable)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_CALLABLE: Any = collections.abc.Callable
_OFFERED = 12
"""How many options a message names."""
_EXACT = 2**53
"""Beyond it, a float may stand for several whole numbers."""
_PLAIN = (bool, int, float, str, bytes, type(None), Path, Any, object)


@dataclass(frozen=True, slots=True)
class Option:
    """An argument of a constructor."""

    annotation: Any
    default: Any
    """`inspect.Parameter.empty` if it must be given."""


def options_of(target: Callable[..., Any]) -> tuple[dict[str, Option], bool]:
    """Return the named options of a class or function, and whether it takes others too.

    `**kwargs` of a constructor are followed to the next base class with a constructor, where they are passed on, or to
    `further_options` of the class: another class, and the names of its options that are meant.
    """
    found: dict[str, Option] = {}
    for index, construct in enumerate(_constructors(target)):
        try:
            parameters = list(inspect.signature(construct).parameters.values())
        except (TypeError, ValueError):  # a class written in C may describe none
            return found, True
        hints = _Names(inspect.unwrap(construct))
        for each in parameters[1:] if isinstance(target, type) else parameters:
            if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) and each.name not in found:
                default = None if index and each.default is each.empty else each.default  # a subclass gives it
                found[each.name] = Option(hints.resolve(each.annotation), default)
        if all(each.kind is not each.VAR_KEYWORD for each in parameters):
            return found, False
    if (further := getattr(target, "further_options", None)) is None:
        return found, True
    others, _ = options_of(further[0])
    return {**found, **{name: others[name] for name in further[1] if name not in found}}, False


def _constructors(target: Callable[..., Any]) -> Iterable[Callable[..., Any]]:
    if not isinstance(target, type):
        return [target]
    found: list[Callable[..., Any]] = [vars(kind)["__init__"] for kind in target.__mro__ if "__init__" in vars(kind)]
    return found[:-1] or [_without_options]  # `object` has one, too


def _without_options(self: object) -> None: ...


class _Names(dict[str, Any]):
    """The names that annotations of one function may use. One that is imported for type checkers alone means Any."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(getattr(function, "__globals__", {}))

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Any)

    def resolve(self, annotation: Any) -> Any:
        if isinstance(annotation, ForwardRef):
            annotation = annotation.__forward_arg__
        if annotation is inspect.Parameter.empty:
            return Any
        if not isinstance(annotation, str):
            return annotation
        try:
            return self.resolve(eval(annotation, {}, self))
        except Exception:  # noqa: BLE001 -- such as `Any[int]`, of a name that type checkers alone have
            return Any


def members_of(annotation: Any) -> list[Any]:
    """Return the types of a union, without `Annotated` and names of types; of another annotation, that one."""
    if isinstance(annotation, str | ForwardRef):
        return [Any]
    origin = get_origin(annotation)
    if origin is Annotated:
        return [annotation] if _is_discriminated(annotation) else members_of(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [each for member in get_args(annotation) for each in members_of(member)]
    if isinstance(value := getattr(annotation, "__value__", None), object) and value is not None and origin is None:
        return members_of(value)
    if (supertype := getattr(annotation, "__supertype__", None)) is not None:
        return members_of(supertype)
    return [type(None) if annotation is None else Any if isinstance(annotation, TypeVar) else annotation]


def _is_discriminated(annotation: Any) -> bool:
    return any(hasattr(each, "discriminator") and each.discriminator for each in get_args(annotation)[1:])


def is_mapping(value: object) -> TypeIs[Mapping[str, Any]]:
    return isinstance(value, Mapping)


def is_data(kind: Any) -> bool:
    """Return whether a class is a dataclass or a pydantic model."""
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, BaseModel))


def as_option(target: Callable[..., Any], name: str, value: Any) -> Any:
    """Return a plain value as an option of a class or function has it, by the option's annotation: 2 for 2.0 where it
    is a whole number. Raise ConfigError for a value of another type.
    """
    known, _ = options_of(target)
    builder = Builder(
        registry_of=lambda _: None,
        load=load_class,
        where=lambda _: "",
        show=lambda _, given: text_of(repr, given)[:200],
    )
    return builder.value(known[name].annotation, value, (name,)) if name in known else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """Builds values by annotations."""

    registry_of: Callable[[type], Registry | None]
    """Returns the components of a class by their short names, or None."""
    load: Callable[[str], Any]
    """Returns the object at an import path that has a colon or a dot."""
    where: Callable[[OptionPath], str]
    """Returns where a value stands, for messages."""
    show: Callable[[OptionPath, Any], str]
    """Returns a value as a message may show it."""
    deferred: Collection[OptionPath] = ()
    """The options whose components get further options from the constructor, which therefore gets a spec."""
    supplied: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values of options that components take and are not given."""

    def options(
        self, target: Callable[..., Any], given: Mapping[str, Any], path: OptionPath, *, partly: bool = False
    ) -> dict[str, Any]:
        """Return the arguments of a class or function, each built by its annotation.

        partly: further arguments are given when it is called, so none is missing.
        Raise ConfigError for one that is unknown, with the nearest known one, for one that is missing and for one of
        another type.
        """
        known, is_open = options_of(target)
        name = getattr(target, "__name__", str(target))
        for option in given:
            if option not in known and not is_open:
                raise self.error((*path, option), f"{name} has no option {option!r}; {_nearest(option, known)}")
        added = {each: value for each, value in self.supplied.items() if each in known and each not in given}
        given = {**added, **given}
        missing = [each for each in known if known[each].default is inspect.Parameter.empty and each not in given]
        if missing and not partly:
            raise self.error(path, f"{name} needs {', '.join(missing)}")
        return {
            option: self.value(known[option].annotation if option in known else Any, value, (*path, option))
            for option, value in given.items()
        }

    def made(self, target: Callable[..., Any], given: Mapping[str, Any], path: OptionPath) -> Any:
        """Call a class or function with options, which are built by their annotations first."""
        return self.called(target, self.options(target, given, path), path)

    def called(self, target: Callable[..., Any], options: Mapping[str, Any], path: OptionPath) -> Any:
        """Call a class or function. An error about its options becomes a ConfigError that says where they stand."""
        try:
            return target(**options)
        except LeydenError as error:
            raise self._placed(error, path) from error
        except (TypeError, ValueError) as error:
            raise self.error(path, f"{getattr(target, '__name__', target)} refuses its options: {error}") from error

    def object_of(self, registry: Registry, given: Mapping[str, Any], path: OptionPath) -> Any:
        """Return what a mapping with `type` makes, whatever that is."""
        options = dict(given)
        if "type" not in options:
            raise self.error(path, f"there is no `type`; {_names(registry)}")
        return self.made(self._named(options.pop("type"), registry, (*path, "type")), options, path)

    def component(self, kind: type, given: Any, path: OptionPath) -> tuple[Callable[..., Any], dict[str, Any]] | Any:
        """Return the class and the options, not built yet, of a component that is a name or a mapping with `type`.

        An import path may name an instance of the class, which is returned as it is.
        """
        options: dict[str, Any] = dict(given) if is_mapping(given) else {"type": given}
        registry = self.registry_of(kind) or {}
        if "type" not in options:
            if registry or inspect.isabstract(kind):
                raise self.error(path, f"there is no `type`, which says which {kind.__name__}; {_names(registry)}")
            return kind, options
        named = options.pop("type")
        found = self._named(named, registry, (*path, "type") if is_mapping(given) else path)
        if isinstance(found, kind) and not options:
            return found
        if not callable(found):
            raise self.error(path, f"{named} is a {type(found).__name__}, not a {kind.__name__}")
        return found, options

    def _named(self, named: Any, registry: Registry, path: OptionPath) -> Any:
        if not isinstance(named, str):
            if callable(named):  # live objects, of a function
                return named
            raise self.error(path, f"`type` is {self.show(path, named)}; {_names(registry)}")
        try:
            if (found := find_component(named, registry)) is not None:
                return found
            if any(mark in named for mark in ".:"):
                return self.load(named)
        except LeydenError as error:
            raise self._placed(error, path) from error
        raise self.error(path, f"{named!r} is not known; {_names(registry, near=named)}")

    def value(self, annotation: Any, given: Any, path: OptionPath) -> Any:
        """Return a value as its annotation wants it. Raise ConfigError for one of another type."""
        members = members_of(annotation)
        takes_specs = any(map(_is_mapping, members))
        for kind in sorted(members, key=lambda each: each in (Any, object)):
            if takes_specs and _is_component(kind) and (is_mapping(given) or _is_name(given)):
                return self._spec(kind, given, path)
            if self._fits(kind, given, has_text=str in members):
                return self._built(kind, given, path)
        wanted = " or ".join(dict.fromkeys(self._words(kind) for kind in members))
        raise self.error(path, f"{path[-1] if path else 'it'} is {self.show(path, given)}; it must be {wanted}")

    def _spec(self, kind: type, given: Any, path: OptionPath) -> Any:
        """Return a component, or a spec for `build_component` that has no type or is deferred."""
        kind = get_origin(kind) or kind
        if is_mapping(given) and "type" not in given and self.registry_of(kind):
            return dict(given)  # options of the constructor's own default
        if path not in self.deferred:
            return self._built(kind, given, path)
        found = self.component(kind, given, path)
        if not isinstance(found, tuple):
            return found
        target, options = cast("tuple[Callable[..., Any], dict[str, Any]]", found)
        return {"type": target, **self.options(target, options, path)}

    def _fits(self, kind: Any, given: Any, *, has_text: bool) -> bool:
        """Return whether a value may be of a type, by its outermost form."""
        origin = get_origin(kind) or kind
        if kind in (Any, object):
            return True
        if origin is Literal:
            return any(given == each and type(given) is type(each) for each in get_args(kind))
        if origin is Annotated:
            return True
        if kind is float:
            is_number = isinstance(given, int | float) and not isinstance(given, bool)
            return (is_number and not (isinstance(given, int) and abs(given) > sys.float_info.max)) or given in (
                *(".inf", "-.inf", ".nan"),
            )
        if kind is int:
            is_whole = isinstance(given, float) and given.is_integer() and abs(given) <= _EXACT
            return is_whole or (isinstance(given, int) and not isinstance(given, bool))
        if isinstance(given, bool) or kind in (bool, str, bytes, type(None)):
            return type(given) is kind
        if kind is Path:
            return isinstance(given, str | Path)
        if origin in _LISTS:
            return isinstance(given, list | tuple)
        if origin in _MAPPINGS:
            return is_mapping(given)
        if origin in (_CALLABLE, type):
            return callable(given) or _is_path(given) or (is_mapping(given) and "type" in given)
        if not isinstance(origin, type):
            return True
        if _is_protocol(origin):  # whether an object follows it is seen when it is used
            return given is not None
        if isinstance(given, origin) or is_mapping(given):
            return True
        if issubclass(origin, enum.Enum):
            return isinstance(given, str)
        return isinstance(given, str) and not is_data(origin) and not has_text

    def _built(self, kind: Any, given: Any, path: OptionPath) -> Any:
        origin, arguments = get_origin(kind) or kind, get_args(kind)
        if origin is Annotated or (isinstance(origin, type) and issubclass(origin, BaseModel)):
            return self._validated(kind, given, path)
        if kind is float:
            return float(given.replace(".", "")) if isinstance(given, str) else float(given)
        if kind is int:
            return int(given)
        if origin is Path:
            return Path(given)
        if kind in _PLAIN or origin is Literal:
            return given
        if origin in _LISTS:
            of_each = arguments[0] if arguments else Any
            fixed = origin is tuple and arguments and arguments[-1] is not Ellipsis
            if fixed and len(arguments) != len(given):
                raise self.error(path, f"{path[-1]} has {len(given)} values; it must have {len(arguments)}")
            kinds = arguments if fixed else [of_each] * len(given)
            items = [
                self.value(each, item, (*path, str(n))) for n, (each, item) in enumerate(zip(kinds, given, strict=True))
            ]
            make = cast("Callable[[list[Any]], Any]", origin if origin in (tuple, set, frozenset) else list)
            return make(items)
        if origin in _MAPPINGS:
            of_value = arguments[1] if len(arguments) > 1 else Any
            return {name: self.value(of_value, each, (*path, str(name))) for name, each in given.items()}
        if origin in (_CALLABLE, type):
            return self._function(given, path)
        if _is_protocol(origin):
            if is_mapping(given) and "type" in given:
                return self.object_of({}, given, path)
            return self._named(given, {}, path) if _is_path(given) else given
        if not isinstance(origin, type) or isinstance(given, origin):
            return given
        if issubclass(origin, enum.Enum):
            return self._member(origin, given, path)
        found = self.component(cast("type[Any]", origin), given, path)
        if not isinstance(found, tuple):
            return found
        made = self.made(*cast("tuple[Callable[..., Any], dict[str, Any]]", found), path)
        if not isinstance(made, origin):
            raise self.error(path, f"that makes a {type(made).__name__}, not a {origin.__name__}")
        return made

    def _function(self, given: Any, path: OptionPath) -> Any:
        if callable(given):
            return given
        options: dict[str, Any] = dict(given) if is_mapping(given) else {"type": given}
        found = self._named(options.pop("type"), {}, path)
        if not callable(found):
            raise self.error(path, f"{given} is a {type(found).__name__}, and no function")
        return functools.partial(found, **self.options(found, options, path, partly=True)) if options else found

    def _member(self, kind: type[enum.Enum], given: Any, path: OptionPath) -> enum.Enum:
        for each in kind:
            if given in (each.value, each.name) or str(given).lower() == each.name.lower():
                return each
        raise self.error(path, f"{path[-1]} is {given!r}; {nearest(str(given), [str(each.value) for each in kind])}")

    def _validated(self, kind: Any, given: Any, path: OptionPath) -> Any:
        try:
            return TypeAdapter(kind).validate_python(given)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            inner = tuple(map(str, first["loc"]))
            raise self.error((*path, *inner), f"{'.'.join(inner) or path[-1]}: {fault_reason(first)}") from None
        except LeydenError as error:
            raise self._placed(error, path) from error

    def _words(self, kind: Any) -> str:
        """Return what a type is called in a message."""
        origin = get_origin(kind) or kind
        if origin is Literal:
            return "one of " + ", ".join(map(str, get_args(kind)))
        if origin in _LISTS:
            return "a list"
        if origin in _MAPPINGS:
            return "a mapping"
        if origin in (_CALLABLE, type):
            return "an import path (module:name)"
        plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
        if origin in plain:
            return plain[origin]
        if kind is type(None):
            return "null"
        if isinstance(origin, type):
            names = self.registry_of(origin)
            of = f" ({', '.join(component_names(names))})" if names else ""
            whose = "a mapping of the options of" if is_data(origin) else "the name of a component or its options:"
            return f"{whose} {origin.__name__}{'' if is_data(origin) else of}"
        return str(kind)

    def error(self, path: OptionPath, message: str) -> ConfigError:
        """Return a ConfigError that says where the value stands, and what is wrong."""
        place = self.where(path)
        return ConfigError(f"{place}: {message}" if place else message)

    def _placed(self, error: LeydenError, path: OptionPath) -> LeydenError:
        """Return an error of the same kind, with the place of the option that it is about."""
        try:
            return type(error)(f"{self.where(path)}: {error}")
        except TypeError:
            return error


def _is_component(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and origin not in (*_PLAIN, *_LISTS, *_MAPPINGS) and not is_data(origin)


def _is_protocol(kind: Any) -> bool:
    return bool(getattr(kind, "_is_protocol", False))


def _is_mapping(kind: Any) -> bool:
    return (get_origin(kind) or kind) in _MAPPINGS


def _is_name(given: Any) -> bool:
    """Return whether a text is the name or the import path of a component, and no address or path of a file."""
    return isinstance(given, str) and ("/" not in given or ".py:" in given)


def _is_path(given: Any) -> bool:
    return isinstance(given, str) and any(mark in given for mark in ".:")


def _nearest(name: str, known: Collection[str]) -> str:
    hint = nearest(name, list(known)[:_OFFERED])
    close = get_close_matches(name, known, n=1)
    more = f" and {len(known) - _OFFERED} more" if len(known) > _OFFERED else ""
    return f"did you mean {close[0]!r}?" if close else f"{hint}{more}"


def _names(registry: Registry, *, near: str = "") -> str:
    names = component_names(registry)
    return f"{nearest(near, names)} or an import path (module:name)" if names else "give an import path (module:name)"
