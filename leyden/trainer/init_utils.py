"""Specs to instances, at the edge: an instance, a class, a factory, an import path, a registry name, a dict, or nothing.

Inside Leyden only instances exist. Every refusal says what was given and what is possible.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar, cast

from leyden.errors import ConfigError

__all__ = ["build_component", "instantiate_component", "load_class"]

T = TypeVar("T")


class ComponentTypeError(ConfigError, TypeError):
    """A component is not of the kind that its place needs."""


def build_component(
    spec: Any,
    *,
    expected_type: type[T],
    spec_name: str,
    registry: Mapping[str, str] | None = None,
    default_factory: Callable[[], T | None] | None = None,
    optional_defaults: Mapping[str, Any] | None = None,
) -> T | None:
    """The instance that `spec` means.

    spec: an instance of `expected_type`; a class; a factory without arguments; a registry name; an import path (`package.module.Class`
        or `package.module:Class`); a dict with `type` (a path or a registry name; `name` says the same) and the constructor's
        arguments; or None, which means `default_factory()` (None without one).
    spec_name: the option's name, for messages.
    optional_defaults: constructor arguments that are passed where the class accepts them and the spec does not set them.
    Raises ConfigError for what cannot be resolved, ComponentTypeError (a TypeError too) for a thing of another kind.
    """
    if spec is None:
        return default_factory() if default_factory else None
    if isinstance(spec, expected_type):
        return spec
    arguments: dict[str, Any] = {}
    target: Any = spec
    if isinstance(spec, Mapping):
        target, arguments = _split_mapping(cast(Mapping[str, Any], spec), spec_name, registry)
    if isinstance(target, str):
        target = _resolve_name(target, spec_name, registry)
    if not callable(target):
        raise ConfigError(f"{spec_name}={spec!r} is no component; {_possible(expected_type, registry)}")
    instance = instantiate_component(target, arguments, optional_defaults, spec_name=spec_name)
    if not isinstance(instance, expected_type):
        raise ComponentTypeError(
            f"{spec_name}={spec!r} made a {type(instance).__name__}, not a {expected_type.__name__}; "
            f"{_possible(expected_type, registry)}"
        )
    return instance


def instantiate_component(
    target: Callable[..., Any],
    arguments: Mapping[str, Any] | None = None,
    optional_defaults: Mapping[str, Any] | None = None,
    *,
    spec_name: str = "component",
) -> Any:
    """Call a class or factory with `arguments`, and with those of `optional_defaults` that it accepts and that are not set."""
    accepted = inspect.signature(target).parameters
    given = dict(arguments or {})
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    for name in given:
        if name not in accepted and not takes_any:
            close = get_close_matches(name, accepted, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(
                f"{spec_name}: {_name(target)} has no option {name!r}; {hint}possible: {', '.join(accepted) or 'none'}"
            )
    for name, value in (optional_defaults or {}).items():
        if name in accepted:
            given.setdefault(name, value)
    required = [
        parameter.name
        for parameter in accepted.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.name not in given
    ]
    if required:
        raise ConfigError(
            f"{spec_name}: {_name(target)} needs {', '.join(required)}; "
            "pass an instance, or a dict with 'type' and the arguments"
        )
    return target(**given)


def load_class(path: str) -> Any:
    """Import `package.module.Name` or `package.module:Name`. Raises ConfigError, with the import's own error as its cause."""
    module_name, _, name = path.replace(":", ".").rpartition(".")
    if not module_name:
        raise ConfigError(f"{path!r} is no import path; write package.module.Class")
    try:
        return getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise ConfigError(f"cannot import {path!r}: {error}") from error
    except AttributeError as error:
        raise ConfigError(f"module {module_name!r} has no {name!r}") from error


def _split_mapping(
    spec: Mapping[str, Any], spec_name: str, registry: Mapping[str, str] | None
) -> tuple[Any, dict[str, Any]]:
    arguments = dict(spec)
    target = arguments.pop("type", None) or (arguments.pop("name", None) if registry else None)
    if target is None:
        raise ConfigError(
            f"{spec_name}={dict(spec)!r} does not say which component: add 'type' (an import path or a name)"
        )
    return target, arguments


def _resolve_name(name: str, spec_name: str, registry: Mapping[str, str] | None) -> Any:
    if registry and name in registry:
        return load_class(registry[name])
    if "." in name or ":" in name:
        return load_class(name)
    close = get_close_matches(name, registry or (), n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(
        f"{spec_name}={name!r} is not known; {hint}names: {', '.join(sorted(registry or ())) or 'none'}; "
        "or an import path (package.module.Class)"
    )


def _possible(expected_type: type, registry: Mapping[str, str] | None) -> str:
    names = f"one of the names {', '.join(sorted(registry))}, " if registry else ""
    return f"give {names}a {expected_type.__name__}, its class, a factory, an import path, or a dict with 'type'"


def _name(target: Any) -> str:
    return getattr(target, "__qualname__", repr(target))
