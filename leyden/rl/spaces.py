"""The samples of a space: check one, coerce one, and lay out batches of them in memory.

`layout_of(space)` makes the one description of a space. It knows neither environments nor processes.

- `check` accepts exactly the samples that `space.contains` accepts. For Dict and Tuple it checks part by part, as Qlib
  does, so its error names the wrong part. Arrays and integers of the space's own dtype take a fraction of the time.
- `coerce` is the lenient check for other packages' environments.
- A batch has one array for each part of the space, with a row for each environment. Box, Discrete, MultiDiscrete and
  MultiBinary are numbers of a fixed size; Dict and Tuple consist of other spaces. Samples of any other space are kept
  as objects, which processes cannot share.

`gymnasium.vector.utils` is not used: it fills whole batches, and looks its function up at each call. A layout writes
one row at a time, into memory that workers share, and makes its functions once. Functions that need no space, such as a
copy of a batch, are in `leyden.rl.batch`. To make the check of another space of numbers fast, add a line to `_CHECKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from leyden.errors import ConfigError, LeydenError
from leyden.rl.batch import is_space

AnySpace: TypeAlias = gymnasium.Space[Any]
Check: TypeAlias = Callable[[Any], None]
Array: TypeAlias = NDArray[Any]
Batch: TypeAlias = Any
"""An array (N, ...), or a dict or tuple of batches, in the structure of the space."""
_ALIGNMENT = 64
"""Arrays in shared memory begin at multiples of this many bytes, the length of a cache line."""


class GymSpaceValidationError(LeydenError, ValueError):
    """A sample is not in its space. For a part of a Dict or Tuple, `__cause__` is the error about the part itself."""

    def __init__(self, message: str, space: AnySpace, sample: Any) -> None:
        super().__init__(message, space, sample)
        self.message = message
        self.space = space
        self.sample = sample

    def __str__(self) -> str:
        shown, kind = repr(self.sample), f"({type(self.sample).__name__})"
        if isinstance(self.sample, np.ndarray):
            array = cast(Array, self.sample)
            kind = f"({array.dtype}, shape {array.shape})"
        shown = shown if len(shown) <= 500 else f"{shown[:500]}..."
        return f"{self.message}\n  Space: {self.space}\n  Sample: {shown} {kind}"


def layout_of(space: AnySpace) -> Layout:
    """Return the layout of a space, which must not be changed afterwards."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return _CompoundLayout(cast(AnySpace, space))
    if isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        return _NumberLayout(cast(AnySpace, space))
    return Layout(space)


class Layout:
    """The samples of one space, alone and in batches. This class serves any space, and keeps samples as objects."""

    def __init__(self, space: AnySpace) -> None:
        self.space = space
        self.check: Check = _CHECKS.get(type(space), _contained)(space)
        """Raises GymSpaceValidationError for a sample that is not in the space."""
        self.note: str | None = None
        """A description of the first coerced sample outside the bounds, until the reader sets it to None."""

    def coerce(self, sample: Any) -> Any:
        """Return the sample as an element of the space, except that it may leave the bounds of a Box.

        Numbers are cast to the space's dtype. The first sample out of bounds is described by `note`. Raise
        GymSpaceValidationError for other shapes, NaN, and numbers that the cast would change by more than the precision
        of floats.
        """
        self.check(sample)
        return sample

    @property
    def unshared(self) -> AnySpace | None:
        """The first part of the space whose samples processes cannot share; None if there is none."""
        return self.space

    def nbytes(self, n: int) -> int:
        """Return the bytes that n samples take in shared memory. Raise ConfigError for objects."""
        raise ConfigError(
            f"{self.space} cannot lie in shared memory; use another kind of environment, such as 'subproc'"
        )

    def allocate(self, n: int, memory: Any = None, offset: int = 0) -> Batch:
        """Return a batch of n samples.

        memory: a buffer in which it lies, from `offset` on; None: new memory, with zeros.
        """
        if memory is not None:
            self.nbytes(n)
        return np.full(n, None, dtype=object)

    def writer(self, batch: Batch) -> Callable[[int, Any], None]:
        """Return a function `write(row, sample)` that copies a sample into a row of the batch.

        It is made once, because writing a row must be quick.
        """
        return batch.__setitem__

    def reader(self, batch: Batch) -> Callable[[int], Any]:
        """Return a function `read(row)` that returns the sample in a row of the batch, as a view."""
        return batch.__getitem__

    def conform(self, batch: Any, n: int) -> Batch:
        """Return a caller's n samples as a batch. Raise ConfigError for another number, structure, shape or dtype."""
        if len(batch) != n:
            raise ConfigError(f"a batch for {n} environments of {self.space} must have {n} samples, not {len(batch)}")
        array = np.empty(n, dtype=object)
        for row, sample in enumerate(batch):
            array[row] = sample
        return array

    def check_rows(self, batch: Batch, among: NDArray[np.bool_]) -> None:
        """Raise GymSpaceValidationError for the first sample that is not in the space.

        among: (rows,), which rows are checked.
        """
        read = self.reader(batch)
        for row in np.flatnonzero(among):
            self.check(read(int(row)))


class _NumberLayout(Layout):
    """One array of the space's dtype."""

    def __init__(self, space: AnySpace) -> None:
        super().__init__(space)
        self._shape = tuple(cast("tuple[int, ...]", space.shape))
        self._dtype: np.dtype[Any] = np.dtype(cast(Any, space.dtype))
        self._check_coerced = self.check
        """The check of `coerce`, which ignores the bounds after the first sample outside."""

    def coerce(self, sample: Any) -> Any:
        if type(sample) is not np.ndarray or sample.dtype is not self._dtype:
            sample = self._cast(sample)
        try:
            self._check_coerced(sample)
        except GymSpaceValidationError:
            self._leave_bounds(sample)
        return sample

    def _cast(self, sample: Any) -> Any:
        """Return a number or an array in the space's dtype. Raise GymSpaceValidationError for anything else, and for
        integers that the cast would change.
        """
        if type(self.space) not in _CHECKS:
            return sample  # a subclass decides by itself what it contains
        array = np.asarray(sample)
        if array.dtype.kind not in "biuf":
            raise _refuse(self.space, sample)
        cast_array = array.astype(self._dtype, copy=False)
        if self._dtype.kind != "f" and not np.array_equal(cast_array, array):
            raise _refuse(self.space, array)
        # a sample of a Discrete space is a scalar, and no array of shape ()
        return cast_array if type(self.space) is not spaces.Discrete or array.shape else self._dtype.type(cast_array)

    def _leave_bounds(self, sample: Array) -> None:
        """Note a sample that is outside the bounds of a Box, and ignore the bounds from now on. Raise
        GymSpaceValidationError if the sample is wrong in another way.
        """
        space = self.space
        if type(space) is not spaces.Box:
            raise _refuse(space, sample)
        ends = (-np.inf, np.inf) if self._dtype.kind == "f" else (np.iinfo(self._dtype).min, np.iinfo(self._dtype).max)
        check = _box(cast(AnySpace, spaces.Box(*ends, space.shape, self._dtype.type)))
        try:
            check(sample)
        except GymSpaceValidationError:
            raise _refuse(space, sample) from None
        self._check_coerced = check
        low, high = np.broadcast_to(space.low, sample.shape), np.broadcast_to(space.high, sample.shape)
        at = tuple(int(index) for index in np.argwhere((sample < low) | (sample > high))[0])
        element = f"element {list(at)} is {sample[at]:g}, not in {low[at]:g} to {high[at]:g}"
        self.note = f"an observation is out of the bounds of its space: {element}"

    @property
    def unshared(self) -> AnySpace | None:
        return None

    def nbytes(self, n: int) -> int:
        size = n * int(np.prod(self._shape, dtype=np.int64)) * self._dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def allocate(self, n: int, memory: Any = None, offset: int = 0) -> Batch:
        if memory is None:
            return np.zeros((n, *self._shape), self._dtype)
        return np.ndarray((n, *self._shape), self._dtype, memory, offset)

    def writer(self, batch: Batch) -> Callable[[int, Any], None]:
        if not self._shape:
            return batch.__setitem__
        views = list(batch)  # a view of each row: assigning to it is quicker than indexing the batch

        def write(row: int, sample: Any) -> None:
            views[row][...] = sample

        return write

    def conform(self, batch: Any, n: int) -> Batch:
        array: Array = batch if type(batch) is np.ndarray else np.asarray(batch)
        if array.shape != (n, *self._shape):
            raise ConfigError(
                f"a batch for {n} environments of {self.space} must have the shape {(n, *self._shape)}, not {array.shape}"
            )
        if array.dtype is not self._dtype and not np.can_cast(array.dtype, self._dtype):
            if array.dtype.kind in "iu" and self._dtype.kind in "iu":  # whole numbers count by their values
                cast_array = array.astype(self._dtype)
                if (cast_array == array).all():
                    return cast_array
            raise ConfigError(
                f"a batch of {self.space} must be {self._dtype}; {array.dtype} cannot become that without loss, so cast it first"
            )
        return array

    def check_rows(self, batch: Batch, among: NDArray[np.bool_]) -> None:
        """Compare the rows of a Box all at once."""
        space, array = self.space, cast(Array, batch)
        if type(space) is not spaces.Box or array.shape[1:] != self._shape or not np.can_cast(array.dtype, self._dtype):
            super().check_rows(batch, among)
            return
        inside = array >= space.low
        inside &= array <= space.high
        if np.count_nonzero(inside) == array.size:
            return
        bad = np.flatnonzero(~inside.reshape(len(array), -1).all(axis=1) & among)
        if bad.size:
            self.check(array[bad[0]].copy())


class _CompoundLayout(Layout):
    """A dict or tuple of the batches of the parts, which lie one after another."""

    def __init__(self, space: AnySpace) -> None:
        super().__init__(space)
        self._named = isinstance(space, spaces.Dict)
        self._parts = {key: layout_of(part) for key, part in _parts(space).items()}
        if type(space) in (spaces.Dict, spaces.Tuple):
            self.check = self._check_parts()

    def _check_parts(self) -> Check:
        """Return a check whose error names the wrong part's key or index. Lists and arrays count as tuples."""
        space, named, size = self.space, self._named, len(self._parts)
        parts = [(key, part.check) for key, part in self._parts.items()]

        def check(x: Any) -> None:
            values: Any = x
            if named:
                if not isinstance(x, dict) or len(cast("dict[Any, Any]", x)) != size:
                    raise GymSpaceValidationError(
                        f"The sample must be a dict with the keys {list(self._parts)}.", space, x
                    )
            else:
                if isinstance(x, list) or (isinstance(x, np.ndarray) and x.ndim):
                    values = tuple(cast("list[Any]", x))
                if not isinstance(values, tuple) or len(cast("tuple[Any, ...]", values)) != size:
                    raise GymSpaceValidationError(f"The sample must be a tuple of {size}.", space, x)
            for key, check_part in parts:
                if named and key not in values:
                    raise GymSpaceValidationError(f"Key {key!r} is missing in the sample.", space, x)
                try:
                    check_part(values[key])
                except GymSpaceValidationError as error:
                    raise self._wrong_part(key, x, error) from error

        return check

    def _part_name(self, key: Any) -> str:
        return f"key {key!r}" if self._named else f"index {key}"

    def _wrong_part(self, key: Any, sample: Any, error: GymSpaceValidationError) -> GymSpaceValidationError:
        return GymSpaceValidationError(f"Subspace of {self._part_name(key)}: {error.message}", self.space, sample)

    def _fits(self, value: Any) -> bool:
        """Return whether a sample or a batch has the parts of the space. A list counts as a tuple."""
        if self._named:
            return isinstance(value, dict) and cast("dict[Any, Any]", value).keys() == self._parts.keys()
        return isinstance(value, tuple | list) and len(cast("list[Any]", value)) == len(self._parts)

    def _built(self, values: Iterable[Any]) -> Any:
        return dict(zip(self._parts, values, strict=True)) if self._named else tuple(values)

    def coerce(self, sample: Any) -> Any:
        if not self._fits(sample):
            self.check(sample)
        values: list[Any] = []
        for key, part in self._parts.items():
            try:
                values.append(part.coerce(sample[key]))
            except GymSpaceValidationError as error:
                raise self._wrong_part(key, sample[key], error) from error
            if part.note is not None:
                self.note, part.note = self.note or f"{self._part_name(key)}: {part.note}", None
        return self._built(values)

    @property
    def unshared(self) -> AnySpace | None:
        return next((found for part in self._parts.values() if (found := part.unshared) is not None), None)

    def nbytes(self, n: int) -> int:
        return sum(part.nbytes(n) for part in self._parts.values())

    def allocate(self, n: int, memory: Any = None, offset: int = 0) -> Batch:
        batches: list[Batch] = []
        for part in self._parts.values():
            batches.append(part.allocate(n, memory, offset))
            offset += 0 if memory is None else part.nbytes(n)
        return self._built(batches)

    def writer(self, batch: Batch) -> Callable[[int, Any], None]:
        writers = [(key, part.writer(batch[key])) for key, part in self._parts.items()]

        def write(row: int, sample: Any) -> None:
            for key, put in writers:
                put(row, sample[key])

        return write

    def reader(self, batch: Batch) -> Callable[[int], Any]:
        readers = [(key, part.reader(batch[key])) for key, part in self._parts.items()]
        if self._named:
            return lambda row: {key: read(row) for key, read in readers}
        return lambda row: tuple([read(row) for _, read in readers])

    def conform(self, batch: Any, n: int) -> Batch:
        if not self._fits(batch):
            kind = f"dict with the keys {list(self._parts)}" if self._named else f"tuple of {len(self._parts)} parts"
            raise ConfigError(f"a batch of {self.space} must be a {kind}")
        return self._built(part.conform(batch[key], n) for key, part in self._parts.items())


def _refuse(space: AnySpace, sample: Any) -> GymSpaceValidationError:
    """Return the error for a sample, which says why an array is not in the space."""
    why = ""
    if isinstance(sample, np.ndarray) and space.shape is not None and space.dtype is not None:
        array = cast(Array, sample)
        if array.shape != space.shape:
            why = f" Its shape is {array.shape}, not {space.shape}."
        elif not np.can_cast(array.dtype, space.dtype):
            why = f" Its dtype is {array.dtype}, which does not go into {space.dtype} without loss."
        elif np.issubdtype(array.dtype, np.floating) and np.isnan(array).any():
            why = f" It has {int(np.isnan(array).sum())} NaN."
        else:
            why = " It is out of bounds."
    return GymSpaceValidationError(f"The {type(space).__name__} space does not contain it.{why}", space, sample)


def _contained(space: AnySpace) -> Check:
    contains = space.contains

    def check(x: Any) -> None:
        if not contains(x):
            raise _refuse(space, x)

    return check


def _array_check(space: AnySpace, ok: Callable[[Array], bool]) -> Check:
    """Return a check that calls `ok` for an array of the right shape and dtype. A scalar counts as an array of shape
    (). For any other sample the space itself decides.
    """
    shape, dtype, ask = space.shape, cast("np.dtype[Any]", space.dtype), _contained(space)

    def check(x: Any) -> None:
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
    """Return the check of a Box. Without bounds, only NaN is not in it. `x == x` is False for NaN alone.
    `np.count_nonzero` is quicker than `all` for small arrays.
    """
    box = cast(spaces.Box, space)
    low, own, size = box.low, box.low.dtype, box.low.size
    if own.kind == "f" and size and bool(np.all(low == -np.inf) and np.all(box.high == np.inf)):
        if low.ndim == 1 and own.itemsize in (4, 8):

            def no_nan_1d(x: Array) -> bool:
                # one call: a sum of squares has no infinities of opposite signs, so only NaN makes it NaN
                if x.dtype is own:
                    square: Any = x.dot(x)
                    return bool(square == square)
                return np.count_nonzero(x == x) == size

            return _array_check(space, no_nan_1d)
        return _array_check(space, lambda x: np.count_nonzero(x == x) == size)
    return _between(space, low, box.high)


def _between(space: AnySpace, low: Array, high: Array) -> Check:
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


_CHECKS: Final[dict[type[Any], Callable[[AnySpace], Check]]] = {
    spaces.Box: _box,
    spaces.Discrete: _discrete,
    spaces.MultiDiscrete: lambda space: _between(
        space, cast(Any, space).start, cast(Any, space).start + cast(Any, space).nvec - 1
    ),
    spaces.MultiBinary: _multi_binary,
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
