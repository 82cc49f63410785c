"""Check that a sample is in a space: a fast `space.contains`, whose error names the wrong part.

`checker(space)` returns a check that accepts exactly the samples that `space.contains` accepts. For Dict and Tuple it
checks part by part, as Qlib does. Arrays and integers of the space's own dtype take a fraction of the time. The check
is compiled for Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple; for other spaces, subclasses and unusual
samples it calls `space.contains`. To make another space fast, add a line to `_COMPILERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from leyden.errors import LeydenError
from leyden.rl.batch import is_space

AnySpace: TypeAlias = gymnasium.Space[Any]
Check: TypeAlias = Callable[[Any], None]


class GymSpaceValidationError(LeydenError, ValueError):
    """A sample is not in its space.

    For a part of a Dict or Tuple, `__cause__` is the error about the part itself.
    """

    def __init__(self, message: str, space: AnySpace, sample: Any) -> None:
        """Keep all three arguments as attributes.

        sample: what is not in `space`.
        """
        super().__init__(message, space, sample)
        self.message = message
        self.space = space
        self.sample = sample

    def __str__(self) -> str:
        return f"{self.message}\n  Space: {self.space}\n  Sample: {_shown(self.sample)}"


def checker(space: AnySpace) -> Check:
    """Return a function that raises GymSpaceValidationError for a sample that is not in `space`.

    The space must not change afterwards.
    """
    return _COMPILERS.get(type(space), _contained)(space)


class Conformer:
    """A lenient check for other packages' environments. It casts samples to the space's dtype, and lets them leave the
    bounds of a Box.

    `note` describes the first sample that left the bounds. Other shapes, NaN, and numbers that the cast would change by
    more than the precision of floats raise GymSpaceValidationError.
    """

    def __init__(self, space: AnySpace) -> None:
        self.space = space
        self.note: str | None = None
        """A description of the first sample outside the bounds, until the reader sets it to None."""
        self._check = checker(space)

    def __call__(self, sample: Any) -> Any:
        """Return the sample as an element of the space.

        Raise GymSpaceValidationError if it cannot be one.
        """
        self._check(sample)
        return sample


def conformer(space: AnySpace) -> Conformer:
    """Return a lenient check of a space, which casts samples and lets them leave the bounds."""
    if isinstance(space, spaces.Dict):
        return _DictConformer(cast(AnySpace, space))
    if isinstance(space, spaces.Tuple):
        return _TupleConformer(cast(AnySpace, space))
    if type(space) in (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary):
        return _NumberConformer(space)
    return Conformer(space)


class _NumberConformer(Conformer):
    """The lenient check of a space of numbers: Box, Discrete, MultiDiscrete or MultiBinary."""

    def __init__(self, space: AnySpace) -> None:
        super().__init__(space)
        self._dtype: np.dtype[Any] = np.dtype(cast(Any, space.dtype))
        self._floating = bool(np.issubdtype(self._dtype, np.floating))

    def __call__(self, sample: Any) -> Any:
        if type(sample) is not np.ndarray or sample.dtype is not self._dtype:
            sample = self._cast(sample)
        try:
            self._check(sample)
        except GymSpaceValidationError:
            self._leave_bounds(sample)
        return sample

    def _cast(self, sample: Any) -> Any:
        """Return a number or an array in the space's dtype.

        Raise GymSpaceValidationError for anything else, and for integers that the cast would change.
        """
        array = np.asarray(sample)
        if array.dtype.kind not in "biuf":
            raise _refuse(self.space, sample)
        cast_array = array.astype(self._dtype, copy=False)
        if not self._floating and not np.array_equal(cast_array, array):
            raise _refuse(self.space, array)
        # a sample of a Discrete space is a scalar, and no array of shape ()
        return cast_array if type(self.space) is not spaces.Discrete or array.shape else self._dtype.type(cast_array)

    def _leave_bounds(self, sample: NDArray[Any]) -> None:
        """Note a sample that is outside the bounds of a Box, and ignore the bounds from now on.

        Raise GymSpaceValidationError if the sample is wrong in another way.
        """
        space = self.space
        if type(space) is not spaces.Box:
            raise _refuse(space, sample)
        if self._floating:
            unbounded = cast(AnySpace, spaces.Box(-np.inf, np.inf, space.shape, self._dtype.type))
        else:
            info = np.iinfo(self._dtype)
            unbounded = cast(AnySpace, spaces.Box(info.min, info.max, space.shape, self._dtype.type))
        check = checker(unbounded)
        try:
            check(sample)
        except GymSpaceValidationError:
            raise _refuse(space, sample) from None
        self._check = check
        low, high = np.broadcast_to(space.low, sample.shape), np.broadcast_to(space.high, sample.shape)
        at = tuple(int(place) for place in np.argwhere((sample < low) | (sample > high))[0])
        place = f"element {list(at)} is {sample[at]:g}, not in {low[at]:g} to {high[at]:g}"
        self.note = f"an observation is out of the bounds of its space: {place}"


class _DictConformer(Conformer):
    """The lenient check of a Dict, part by part."""

    def __init__(self, space: AnySpace) -> None:
        super().__init__(space)
        self._parts = {name: conformer(part) for name, part in cast(spaces.Dict, space).spaces.items()}

    def __call__(self, sample: Any) -> Any:
        if not isinstance(sample, dict) or cast("dict[Any, Any]", sample).keys() != self._parts.keys():
            self._check(sample)
        return {name: _part(part, sample[name], self, f"key {name!r}") for name, part in self._parts.items()}


class _TupleConformer(Conformer):
    """The lenient check of a Tuple, part by part. A list counts as a tuple."""

    def __init__(self, space: AnySpace) -> None:
        super().__init__(space)
        self._parts = [conformer(part) for part in cast("spaces.Tuple[Any]", space).spaces]

    def __call__(self, sample: Any) -> Any:
        if not isinstance(sample, tuple | list) or len(cast("tuple[Any, ...]", sample)) != len(self._parts):
            self._check(sample)
        values = enumerate(zip(self._parts, cast("tuple[Any, ...]", sample), strict=True))
        return tuple(_part(part, value, self, f"index {at}") for at, (part, value) in values)


def _part(part: Conformer, value: Any, whole: Conformer, name: str) -> Any:
    """Return one part of a sample, checked and cast.

    A note about the part becomes a note about the whole, unless there is an earlier one.
    """
    try:
        value = part(value)
    except GymSpaceValidationError as error:
        raise GymSpaceValidationError(f"Subspace of {name}: {error.message}", whole.space, value) from error
    if part.note is not None:
        whole.note, part.note = whole.note or f"{name}: {part.note}", None
    return value


def _shown(sample: Any) -> str:
    shown, kind = repr(sample), f"({type(sample).__name__})"
    if isinstance(sample, np.ndarray):
        array = cast("NDArray[Any]", sample)
        kind = f"({array.dtype}, shape {array.shape})"
    return f"{shown if len(shown) <= 500 else f'{shown[:500]}...'} {kind}"


def _refuse(space: AnySpace, sample: Any) -> GymSpaceValidationError:
    return GymSpaceValidationError(
        f"The {type(space).__name__} space does not contain it.{_why(space, sample)}", space, sample
    )


def _why(space: AnySpace, sample: Any) -> str:
    """Return a sentence that says why an array is not in a space; empty for other samples."""
    if not isinstance(sample, np.ndarray) or space.shape is None or space.dtype is None:
        return ""
    array = cast("NDArray[Any]", sample)
    if array.shape != space.shape:
        return f" Its shape is {array.shape}, not {space.shape}."
    if not np.can_cast(array.dtype, space.dtype):
        return f" Its dtype is {array.dtype}, which does not go into {space.dtype} without loss."
    if np.issubdtype(array.dtype, np.floating) and np.isnan(array).any():
        return f" It has {int(np.isnan(array).sum())} NaN."
    return " It is out of bounds."


def _contained(space: AnySpace) -> Check:
    contains = space.contains

    def check(x: Any) -> None:
        if not contains(x):
            raise _refuse(space, x)

    return check


def _array_check(space: AnySpace, ok: Callable[[NDArray[Any]], bool]) -> Check:
    """Return a check that calls `ok` for an array of the right shape and dtype.

    A scalar counts as an array of shape (). For any other sample the space itself decides.
    """
    shape, dtype, ask = space.shape, cast("np.dtype[Any]", space.dtype), _contained(space)

    def check(x: Any) -> None:
        """Raise GymSpaceValidationError unless the space contains the sample `x`."""
        if type(x) is not np.ndarray:
            if shape != () or not isinstance(x, np.generic | float | int):
                ask(x)
                return
            try:
                x = np.asarray(x, dtype)  # as Gymnasium does, with a warning
            except OverflowError:
                raise _refuse(space, x) from None
        kind = x.dtype
        if x.shape != shape or not (kind is dtype or np.can_cast(kind, dtype)) or not ok(x):
            raise _refuse(space, x)

    return check


def _box(space: AnySpace) -> Check:
    """Return the check of a Box. Without bounds, only NaN is not in it.

    `x == x` is False for NaN alone. `np.count_nonzero` is quicker than `all` for small arrays.
    """
    box = cast(spaces.Box, space)
    low, high = box.low, box.high
    size, floating = low.size, np.issubdtype(low.dtype, np.floating)
    if floating and size and bool(np.all(low == -np.inf) and np.all(high == np.inf)):
        own = low.dtype
        if low.ndim == 1 and own.itemsize in (4, 8):

            def no_nan_1d(x: NDArray[Any]) -> bool:
                # one call: a sum of squares has no infinities of opposite signs, so only NaN makes
                # it NaN
                if x.dtype is own:
                    square: Any = x.dot(x)
                    return bool(square == square)
                return np.count_nonzero(x == x) == size

            return _array_check(space, no_nan_1d)
        return _array_check(space, lambda x: np.count_nonzero(x == x) == size)
    return _array_check(space, lambda x: np.count_nonzero(x >= low) == size and np.count_nonzero(x <= high) == size)


def _multi_discrete(space: AnySpace) -> Check:
    multi = cast("spaces.MultiDiscrete[Any]", space)
    low, high = multi.start, multi.start + (multi.nvec - 1)
    size = low.size
    return _array_check(space, lambda x: np.count_nonzero(x >= low) == size and np.count_nonzero(x <= high) == size)


def _multi_binary(space: AnySpace) -> Check:
    """Return the check of a MultiBinary, quick for arrays of int8, which its own `sample` returns."""
    shape, ask = space.shape, _contained(space)

    def check(x: Any) -> None:
        if type(x) is np.ndarray and x.shape == shape and x.dtype == np.int8:
            if x.size and (x.max() > 1 or x.min() < 0):
                raise _refuse(space, x)
        else:
            ask(x)

    return check


def _discrete(space: AnySpace) -> Check:
    """Return the check of a Discrete space, quick for Python's and the space's own integers."""
    discrete = cast("spaces.Discrete[Any]", space)
    kind, ask = np.dtype(discrete.dtype).type, _contained(space)
    info = np.iinfo(discrete.dtype)
    low, high = int(discrete.start), min(int(discrete.start) + int(discrete.n) - 1, int(info.max))

    def check(x: Any) -> None:
        if type(x) is int or type(x) is kind:
            if not low <= x <= high:
                raise _refuse(space, x)
        else:
            ask(x)

    return check


def _dict(space: AnySpace) -> Check:
    """Return the check of a Dict. Its error names the key of the wrong part."""
    parts = {name: checker(part) for name, part in cast(spaces.Dict, space).spaces.items()}
    items, size = list(parts.items()), len(parts)

    def check(x: Any) -> None:
        if not isinstance(x, dict) or len(cast("dict[Any, Any]", x)) != size:
            raise GymSpaceValidationError(f"The sample must be a dict with the keys {list(parts)}.", space, x)
        for name, part in items:
            if name not in x:
                raise GymSpaceValidationError(f"Key {name!r} is missing in the sample.", space, x)
            try:
                part(x[name])
            except GymSpaceValidationError as error:
                raise GymSpaceValidationError(f"Subspace of key {name!r}: {error.message}", space, x) from error

    return check


def _tuple(space: AnySpace) -> Check:
    """Return the check of a Tuple. Its error names the index of the wrong part.

    Lists and arrays count as tuples, as in Gymnasium.
    """
    parts = [checker(part) for part in cast("spaces.Tuple[Any]", space).spaces]

    def check(x: Any) -> None:
        values: Any = x
        if isinstance(x, list) or (isinstance(x, np.ndarray) and x.ndim):
            values = tuple(cast("list[Any]", x))
        if not isinstance(values, tuple) or len(cast("tuple[Any, ...]", values)) != len(parts):
            raise GymSpaceValidationError(f"The sample must be a tuple of {len(parts)}.", space, x)
        for position, part in enumerate(parts):
            try:
                part(values[position])
            except GymSpaceValidationError as error:
                raise GymSpaceValidationError(f"Subspace of index {position}: {error.message}", space, x) from error

    return check


_COMPILERS: Final[dict[type[Any], Callable[[AnySpace], Check]]] = {
    spaces.Box: _box,
    spaces.Discrete: _discrete,
    spaces.MultiDiscrete: _multi_discrete,
    spaces.MultiBinary: _multi_binary,
    spaces.Dict: _dict,
    spaces.Tuple: _tuple,
}


def difference(one: Any, other: Any) -> str | None:
    """Return how the samples of two spaces differ in kind, parts or shape; None if they do not.

    Bounds and dtypes are not compared.
    """
    for kind in (spaces.Dict, spaces.Tuple, spaces.Discrete, spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary):
        if is_space(one, kind) != is_space(other, kind):
            return f"{type(one).__name__} is not {type(other).__name__}"
    parts, others = _parts(one), _parts(other)
    if parts.keys() != others.keys():
        return f"the parts {sorted(parts)} are not {sorted(others)}"
    for name, part in parts.items():
        if differs := difference(part, others[name]):
            return f"in {name!r}, {differs}"
    for name in ("shape", "n", "start", "nvec"):
        here, there = getattr(one, name, 0), getattr(other, name, 0)
        if not np.array_equal(here, there):
            return f"{name} {here} is not {there}"
    return None


def _parts(space: Any) -> dict[Any, Any]:
    if is_space(space, spaces.Dict):
        return dict(space.spaces)
    return dict(enumerate(cast("tuple[Any, ...]", space.spaces))) if is_space(space, spaces.Tuple) else {}
