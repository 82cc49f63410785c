"""Turn specs into instances, where they enter Leyden. Inside Leyden only instances exist.

A spec is an instance, a class, a factory, an import path, a registered name, or a dict with a type and arguments. This
module knows no component and no registry of them. To make components known by short names, keep a `ComponentRegistry`
(or a `dict[str, Component]`), hand it to `build_component`, and let `register_name` add to it.

An instance of a `KeepsArguments` remembers its constructor's arguments, so that a run can record its configuration.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast, overload

from leyden.errors import ConfigError, InvalidArgument

T = TypeVar("T")

Component: TypeAlias = str | Callable[..., Any]
"""An import path, a class or a factory."""
Spec: TypeAlias = str | Mapping[str, Any] | Callable[..., Any]
"""What `build_component` takes in place of an instance."""
Registry: TypeAlias = Mapping[str, Component]
"""Components by their short names."""


class ComponentRegistry(dict[str, Component]):
    """Components by their short names, of Leyden and of this process.

    Installed distributions add names by entry points of a group, such as `leyden.algorithms`. An entry point is loaded
    when it is asked for by its name, and never takes the place of a name that is here.
    """

    def __init__(self, group: str, components: Mapping[str, Component]) -> None:
        super().__init__(components)
        self.group = group


def component_names(registry: Registry | None) -> list[str]:
    """Return all names of a registry, with those of installed distributions."""
    return sorted({*(registry or ()), *(installed(registry.group) if isinstance(registry, ComponentRegistry) else ())})


def find_component(name: str, registry: Registry | None) -> Any:
    """Return the class or factory with this name, or None if no component has it.

    Raise ConfigError for one that cannot be imported; the message names the distribution that brings it.
    """
    if registry and name in registry:
        known = registry[name]
        return load_class(known) if isinstance(known, str) else known
    return load_installed(registry.group, name) if isinstance(registry, ComponentRegistry) else None


def installed(group: str) -> dict[str, list[Any]]:
    """Return the entry points of a group by their names. None is loaded."""
    from importlib.metadata import entry_points  # takes a tenth of `import leyden`

    found: dict[str, list[Any]] = {}
    for each in entry_points(group=group):
        others = found.setdefault(each.name, [])
        if all(each.value != other.value for other in others):  # a distribution can be found twice
            others.append(each)
    return found


def load_installed(group: str, name: str) -> Any:
    """Return what the entry point of this name is, or None without one. Raise ConfigError, which names the
    distribution, for one that cannot be loaded, and for a name that two distributions give to different things.
    """
    found = installed(group).get(name, [])
    brought_by = [f"{each.dist.name} {each.dist.version}" if each.dist else each.value for each in found]
    if len(found) > 1:
        raise ConfigError(
            f"{name!r} of {group} is brought by {' and by '.join(brought_by)}; uninstall one, or give an import path: "
            f"{', '.join(each.value for each in found)}"
        )
    try:
        return found[0].load() if found else None
    except Exception as error:
        raise ConfigError(
            f"{name!r} of {group} cannot be loaded: {type(error).__name__}: {error}. The distribution {brought_by[0]} brings "
            f"it, as {found[0].value}; update or uninstall it"
        ) from error


@overload
def build_component(
    spec: Any,
    *,
    expected_type: type[T],
    spec_name: str,
    default_factory: Callable[[], T] | None = None,
    allow_none: Literal[False] = False,
    optional_defaults: Mapping[str, Any] | None = None,
    dict_requires_type: bool = True,
    dict_default_cls: Callable[..., Any] | None = None,
    registry: Registry | None = None,
) -> T: ...
@overload
def build_component(
    spec: Any,
    *,
    expected_type: type[T],
    spec_name: str,
    default_factory: Callable[[], T] | None = None,
    allow_none: bool,
    optional_defaults: Mapping[str, Any] | None = None,
    dict_requires_type: bool = True,
    dict_default_cls: Callable[..., Any] | None = None,
    registry: Registry | None = None,
) -> T | None: ...
def build_component(
    spec: Any,
    *,
    expected_type: type[T],
    spec_name: str,
    default_factory: Callable[[], T] | None = None,
    allow_none: bool = False,
    optional_defaults: Mapping[str, Any] | None = None,
    dict_requires_type: bool = True,
    dict_default_cls: Callable[..., Any] | None = None,
    registry: Registry | None = None,
) -> T | None:
    """Return the instance that `spec` means.

    spec: an instance of `expected_type`; a class; a factory without arguments; a registered name; an import path
        (`package.module.Class` or `package.module:Class`); a dict with `type` (a path, a registered name or a class;
        with a registry, `name` means the same) and the constructor's arguments; or None.
    spec_name: the option's name, for messages.
    default_factory: makes the instance for a spec of None.
    allow_none: return None for a spec of None if there is no `default_factory`. Otherwise such a spec is refused.
    optional_defaults: constructor arguments that are passed if the class accepts them and the spec leaves them open. A
        function or a class is called for the argument, without arguments.
    dict_requires_type, dict_default_cls: a dict without `type` is refused, or holds the arguments of
        `dict_default_cls`.
    Raise ConfigError for a spec that cannot be resolved, and InvalidArgument (a TypeError too) for an instance of
    another kind.
    """
    if isinstance(spec, expected_type):
        return spec
    if spec is None:
        if default_factory is None and allow_none:
            return None
        if default_factory is None:
            raise ConfigError(f"{spec_name} is missing; {_possible(expected_type, registry)}")
        instance = default_factory()
    elif isinstance(spec, str | Mapping):
        instance = instantiate_from_spec(
            cast("str | Mapping[str, Any]", spec),
            spec_name=spec_name,
            optional_defaults=optional_defaults,
            dict_requires_type=dict_requires_type,
            dict_default_cls=dict_default_cls,
            registry=registry,
        )
    elif callable(spec):
        instance = instantiate_component(spec, None, optional_defaults, spec_name=spec_name)
    else:
        raise ConfigError(f"{spec_name}={spec!r} is no component; {_possible(expected_type, registry)}")
    if not isinstance(instance, expected_type):
        raise InvalidArgument(
            f"{spec_name}={spec!r} made a {type(instance).__name__}, not a {expected_type.__name__}; "
            f"{_possible(expected_type, registry)}"
        )
    return instance


def instantiate_from_spec(
    spec: str | Mapping[str, Any],
    *,
    spec_name: str,
    optional_defaults: Mapping[str, Any] | None = None,
    dict_requires_type: bool = True,
    dict_default_cls: Callable[..., Any] | None = None,
    registry: Registry | None = None,
) -> Any:
    """Build the component that a name, an import path or a dict means, without a check of its type. The options are
    those of `build_component`.
    """
    target: Any = spec
    arguments: dict[str, Any] = {}
    if not isinstance(spec, str):
        arguments = dict(spec)
        target = arguments.pop("type", None) or (arguments.pop("name", None) if registry else None)
        if target is None and not dict_requires_type:
            target = dict_default_cls
        if target is None:
            raise ConfigError(
                f"{spec_name}={dict(spec)!r} does not say which component: add 'type' (an import path or a name)"
            )
    if isinstance(target, str):
        target = resolve_name(target, spec_name=spec_name, registry=registry)
    if not callable(target):
        raise ConfigError(f"{spec_name}={spec!r}: {target!r} is no class; give a class, its import path or its name")
    return instantiate_component(target, arguments, optional_defaults, spec_name=spec_name)


def instantiate_component(
    target: Callable[..., Any],
    arguments: Mapping[str, Any] | None = None,
    optional_defaults: Mapping[str, Any] | None = None,
    *,
    spec_name: str = "component",
) -> Any:
    """Call a class or factory with `arguments`, and with the `optional_defaults` that it accepts.

    spec_name: what messages call the component, such as "runner". Raise ConfigError, before the call, for an argument
    that is unknown or missing.
    """
    given = dict(arguments or {})
    for name, default in (optional_defaults or {}).items():
        if name in (_parameters(target) or ()) and name not in given:
            makes = inspect.isroutine(default) or isinstance(default, type | functools.partial)
            given[name] = cast("Callable[[], Any]", default)() if makes else default
    check_arguments(target, given, spec_name=spec_name)
    return target(**given)


def check_arguments(
    target: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    spec_name: str,
    remedy: str = "pass an instance, or a dict with 'type' and the arguments",
) -> None:
    """Raise ConfigError for an argument that a class or factory does not accept, or that is missing. A class written in
    C that describes no signature is not checked.

    remedy: how to give a missing argument, for the message.
    """
    if (accepted := _parameters(target)) is None:
        return
    for name in arguments:
        if not accepts(target, name):
            close = get_close_matches(name, accepted, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(
                f"{spec_name}: {_name(target)} has no option {name!r}; {hint}possible: {', '.join(accepted) or 'none'}"
            )
    required = [
        parameter.name
        for parameter in accepted.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.name not in arguments
    ]
    if required:
        raise ConfigError(f"{spec_name}: {_name(target)} needs {', '.join(required)}; {remedy}")


def accepts(target: Callable[..., Any], name: str) -> bool:
    """Return whether a class or factory takes an argument of this name, possibly by `**options`."""
    accepted = _parameters(target)
    return (
        accepted is None
        or name in accepted
        or any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    )


def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):  # a class written in C may describe none
        return None


def load_class(path: str) -> Any:
    """Import `package.module.Name` or `package.module:Name`. A ConfigError has the import's own error as its cause."""
    module_name, _, name = path.replace(":", ".").rpartition(".")
    if not module_name:
        raise ConfigError(f"{path!r} is no import path; write package.module.Class")
    try:
        return getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise ConfigError(f"cannot import {path!r}: {error}") from error
    except AttributeError as error:
        raise ConfigError(f"module {module_name!r} has no {name!r}") from error


def resolve_name(name: str, *, spec_name: str, registry: Registry | None) -> Any:
    """Return the class or factory with this registered name or import path. Raise ConfigError for an unknown one."""
    if (found := find_component(name, registry)) is not None:
        return found
    if "." in name or ":" in name:
        return load_class(name)
    names = component_names(registry)
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(
        f"{spec_name}={name!r} is not known; {hint}names: {', '.join(names) or 'none'}; "
        "or an import path (package.module.Class)"
    )


def register_name(registry: dict[str, Component], name: str, component: Component, *, kind: str) -> None:
    """Add a component to a registry. Safe to repeat with the same component.

    kind: what the registry's components are, for messages.
    Raise ConfigError for a name that could be an import path or an address, and for one that means another component.
    """
    if not name or any(character in name for character in ".:/"):
        raise ConfigError(f"{name!r} cannot name a component; choose a name without dots, colons and slashes")
    if registry.get(name, component) != component:
        raise ConfigError(f"the {kind} {name!r} is {registry[name]!r} already; choose another name")
    registry[name] = component


def _possible(expected_type: type, registry: Registry | None) -> str:
    """Return the end of an error message: the specs that would be accepted."""
    names = f"one of the names {', '.join(component_names(registry))}, " if registry else ""
    return f"give {names}an instance of {expected_type.__name__}, its class, a factory, an import path, or a dict with 'type'"


def _name(target: Any) -> str:
    return getattr(target, "__qualname__", repr(target))


class KeepsArguments:
    """A base class whose instances, of any subclass, remember their constructor's arguments."""

    if not TYPE_CHECKING:  # a type checker is to see the parameters of the constructor

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            made = super().__new__(cls)
            made.__dict__["_arguments"] = (args, kwargs)
            return made


def arguments_of(made: object) -> dict[str, Any]:
    """Return the constructor's arguments by name, with defaults; empty for an object that does not remember them."""
    if (remembered := getattr(made, "__dict__", {}).get("_arguments")) is None:
        return {}
    args, kwargs = remembered
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
