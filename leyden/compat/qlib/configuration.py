"""Make objects that a configuration of Qlib describes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from leyden.components import load_class
from leyden.errors import ConfigError


def init_instance_by_config(
    config: Any,
    default_module: Any = None,
    accept_types: Any = (),
    try_kwargs: Mapping[str, Any] = MappingProxyType({}),
    **kwargs: Any,
) -> Any:
    """Return the object that `{class, module_path, kwargs}` or an import path describes.

    Raise ConfigError for a class that cannot be imported.

    default_module: the module of a class without `module_path`, or the module's name.
    accept_types: an instance of these is returned as it is.
    try_kwargs: arguments that are left out if the class does not take them.
    """
    if isinstance(config, accept_types):
        return config
    cls, module = config, default_module
    if isinstance(config, Mapping):
        described = cast("Mapping[str, Any]", config)
        cls, module = described.get("class"), described.get("module_path") or default_module
        kwargs = {**(described.get("kwargs") or {}), **kwargs}
    if isinstance(cls, str):
        where = module if module is None or isinstance(module, str) else module.__name__
        cls = load_class(cls if where is None or "." in cls else f"{where}.{cls}")
    if not callable(cls):
        raise ConfigError(f"{config!r} describes no object; write {{class, module_path, kwargs}}")
    try:
        return cls(**kwargs, **try_kwargs)
    except TypeError:
        if not try_kwargs:
            raise
        return cls(**kwargs)
