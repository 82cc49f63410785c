"""Environment variables of Agent Lightning, and readers of their values."""

from __future__ import annotations

import os
from enum import Enum


class LightningEnvVar(Enum):
    """The environment variables that Agent Lightning reads."""

    AGL_EMITTER_DEBUG = "AGL_EMITTER_DEBUG"
    AGL_MANAGED_STORE = "AGL_MANAGED_STORE"
    AGL_CURRENT_ROLE = "AGL_CURRENT_ROLE"
    AGL_SERVER_HOST = "AGL_SERVER_HOST"
    AGL_SERVER_PORT = "AGL_SERVER_PORT"


_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def resolve_bool_env_var(
    env_var: LightningEnvVar, override: bool | None = None, fallback: bool | None = None
) -> bool | None:
    """Return the override, else the variable's value, else the fallback.

    Raise ValueError for a value that is no word for true or false.
    """
    if override is not None:
        return override
    text = os.environ.get(env_var.value)
    if text is None:
        return fallback
    word = text.strip().lower()
    if word not in (*_TRUE, *_FALSE):
        raise ValueError(f"{env_var.value} is {text!r}; possible: {', '.join((*_TRUE, *_FALSE))}")
    return word in _TRUE


def resolve_int_env_var(
    env_var: LightningEnvVar, override: int | None = None, fallback: int | None = None
) -> int | None:
    """Return the override, else the variable's value, else the fallback.

    Raise ValueError for a value that is no integer.
    """
    if override is not None:
        return override
    text = os.environ.get(env_var.value)
    if text is None:
        return fallback
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{env_var.value} is {text!r}; it must be an integer") from None


def resolve_str_env_var(
    env_var: LightningEnvVar, override: str | None = None, fallback: str | None = None
) -> str | None:
    """Return the override, else the variable's value, else the fallback."""
    return override if override is not None else os.environ.get(env_var.value, fallback)
