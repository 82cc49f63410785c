"""Make objects that a configuration of Qlib describes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from leyden._lib.components import load_class
from leyden.errors import ConfigError


def init_instance_by_config(
    config: Any,
    default_module: Any = None,
    accept_types: Any = (),
    try_kwargs: Mapping[str, Any] = MappingProxyType({}),
    **kwargs: Any,
) -> Any:
    """Return the object that `{class, module_path, kwargs}` or an import path describes.

    default_module: the module, or its name, of a class without `module_path`.
    accept_types: an instance of these is returned as it is.
    try_kwargs: further arguments. If the class raises TypeError, it is called without them.
    kwargs: further arguments, which override those of `config`.
    Raise ConfigError for a class that cannot be imported.
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
