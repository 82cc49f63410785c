"""Convert spaces of the old `gym`, and make the observation by which Qlib's environments say that they have no seed
left.
"""

from __future__ import annotations

from typing import Any, cast

import gymnasium
import numpy as np

from leyden.errors import ConfigError


def as_gymnasium(space: Any) -> Any:
    """Convert a space of the old `gym` to a space of Gymnasium. Any other object is returned as it is.

    Raise ConfigError for a kind of space that Gymnasium lacks.
    """
    if not type(space).__module__.startswith("gym."):
        return space
    kind, spaces = type(space).__name__, gymnasium.spaces
    if kind == "Discrete":
        return spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0)))
    if kind == "Box":
        return spaces.Box(space.low, space.high, space.shape, space.dtype)
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(space.nvec)
    if kind == "MultiBinary":
        return spaces.MultiBinary(space.n)
    if kind == "Dict":
        return spaces.Dict({name: as_gymnasium(part) for name, part in space.spaces.items()})
    if kind == "Tuple":
        return spaces.Tuple([as_gymnasium(part) for part in space.spaces])
    raise ConfigError(f"gym.spaces.{kind} has no counterpart here; use a space of gymnasium.spaces")


def fill_invalid(obj: Any) -> Any:
    """Return `obj` with NaN for every float, and the largest value for every integer.

    Raise ConfigError (a ValueError) for any value but numbers, arrays and containers of them.
    """
    if isinstance(obj, dict):
        return {name: fill_invalid(part) for name, part in cast("dict[Any, Any]", obj).items()}
    if isinstance(obj, list | tuple):
        parts = [fill_invalid(part) for part in cast("list[Any]", obj)]
        return parts if isinstance(obj, list) else tuple(parts)
    if isinstance(obj, bool | int | float) or hasattr(obj, "dtype"):
        array = np.asarray(obj)
        return np.full_like(array, _invalid(array.dtype))
    raise ConfigError(f"{obj!r} cannot be filled with an invalid value; an observation is made of numbers and arrays")


def is_invalid(obj: Any) -> bool:
    """Return whether every number in `obj` is one that `fill_invalid` fills in.

    An object without any number counts as invalid, as in Qlib.
    """
    if isinstance(obj, dict):
        return all(is_invalid(part) for part in cast("dict[Any, Any]", obj).values())
    if isinstance(obj, list | tuple):
        return all(is_invalid(part) for part in cast("list[Any]", obj))
    if not isinstance(obj, bool | int | float | np.number | np.ndarray):
        return True
    array = np.asarray(cast(Any, obj))
    if np.issubdtype(array.dtype, np.floating):
        return bool(np.isnan(array).all())
    return bool((array == _invalid(array.dtype)).all())


def generate_nan_observation(obs_space: Any) -> Any:
    """Return the observation of an environment that has no seed left."""
    return fill_invalid(obs_space.sample())


def check_nan_observation(obs: Any) -> bool:
    """Return whether an observation is one of `generate_nan_observation`."""
    return is_invalid(obs)


def _invalid(dtype: np.dtype[Any]) -> Any:
    """Return the invalid value of a type: NaN, True or the largest integer."""
    if np.issubdtype(dtype, np.floating):
        return np.nan
    return True if dtype == np.bool_ else np.iinfo(dtype).max
