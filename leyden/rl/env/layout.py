"""The memory layout of the observations or actions of many environments.

A batch has one array for each part of the space, with a row for each environment. A layout is made for a space and
knows neither environments nor processes. Box, Discrete, MultiDiscrete and MultiBinary are numbers of a fixed size; Dict
and Tuple consist of other spaces. Samples of any other space are kept as objects, which processes cannot share.
Functions that need no space, such as a copy of a batch, are in `leyden.rl.batch`.

`gymnasium.vector.utils` is not used: it fills whole batches, and looks its function up at each call. A layout writes
one row at a time, into memory that workers share, and makes its functions once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from leyden.errors import ConfigError
from leyden.rl.spaces import AnySpace, checker

Array: TypeAlias = NDArray[Any]
Batch: TypeAlias = Any
"""An array (N, ...), or a dict or tuple of batches, in the structure of the space."""
_ALIGNED = 64
"""Arrays in shared memory begin at multiples of so many bytes, the length of a cache line."""


def layout_of(space: AnySpace) -> Layout:
    """Return the layout of a space."""
    if isinstance(space, spaces.Dict):
        parts = cast("dict[str, AnySpace]", space.spaces)
        return _DictLayout(cast(AnySpace, space), {name: layout_of(part) for name, part in parts.items()})
    if isinstance(space, spaces.Tuple):
        members = cast("tuple[AnySpace, ...]", space.spaces)
        return _TupleLayout(cast(AnySpace, space), [layout_of(part) for part in members])
    if isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        return _NumberLayout(cast(AnySpace, space))
    return _ObjectLayout(space)


class Layout(ABC):
    """The memory layout of batches of one space."""

    def __init__(self, space: AnySpace) -> None:
        self.space = space

    @property
    @abstractmethod
    def unshared(self) -> AnySpace | None:
        """The first part of the space whose samples processes cannot share; None if there is none."""

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """Return the bytes that n samples take in shared memory. Raise ConfigError for objects."""

    @abstractmethod
    def allocate(self, n: int, memory: Any = None, offset: int = 0) -> Batch:
        """Return a batch of n samples.

        memory: a buffer in which it lies, from `offset` on; None: new memory, with zeros.
        """

    @abstractmethod
    def writer(self, batch: Batch) -> Callable[[int, Any], None]:
        """Return a function `write(row, sample)` that copies a sample into a row of the batch.

        It is made once, because writing a row must be quick.
        """

    @abstractmethod
    def reader(self, batch: Batch) -> Callable[[int], Any]:
        """Return a function `read(row)` that returns the sample in a row of the batch, as a view."""

    @abstractmethod
    def conform(self, batch: Any, n: int) -> Batch:
        """Return n samples that a caller gives as a batch of the space.

        Raise ConfigError for another number, structure, shape or dtype.
        """

    def check(self, batch: Batch, among: NDArray[np.bool_]) -> None:
        """Raise GymSpaceValidationError for the first sample that is not in the space.

        among: (rows,), which rows are checked.
        """
        check, read = checker(self.space), self.reader(batch)
        for row in np.flatnonzero(among):
            check(read(int(row)))


class _NumberLayout(Layout):
    """One array of the space's dtype."""

    def __init__(self, space: AnySpace) -> None:
        super().__init__(space)
        self._shape = tuple(cast("tuple[int, ...]", space.shape))
        self._dtype: np.dtype[Any] = np.dtype(cast(Any, space.dtype))

    @property
    def unshared(self) -> AnySpace | None:
        return None

    def nbytes(self, n: int) -> int:
        size = n * int(np.prod(self._shape, dtype=np.int64)) * self._dtype.itemsize
        return -(-size // _ALIGNED) * _ALIGNED

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

    def reader(self, batch: Batch) -> Callable[[int], Any]:
        return batch.__getitem__

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

    def check(self, batch: Batch, among: NDArray[np.bool_]) -> None:
        """Raise GymSpaceValidationError for the first sample that is not in the space.

        The rows of a Box are compared all at once.
        batch: (rows, *space.shape).
        among: (rows,), which rows are checked.
        """
        space, array = self.space, cast(Array, batch)
        if type(space) is not spaces.Box or array.shape[1:] != self._shape or not np.can_cast(array.dtype, self._dtype):
            super().check(batch, among)
            return
        inside = array >= space.low
        inside &= array <= space.high
        if np.count_nonzero(inside) == array.size:
            return
        bad = np.flatnonzero(~inside.reshape(len(array), -1).all(axis=1) & among)
        if bad.size:
            checker(space)(array[bad[0]].copy())


class _ObjectLayout(Layout):
    """An array of objects."""

    @property
    def unshared(self) -> AnySpace | None:
        return self.space

    def nbytes(self, n: int) -> int:
        raise ConfigError(
            f"{self.space} cannot lie in shared memory; use another kind of environment, such as 'subproc'"
        )

    def allocate(self, n: int, memory: Any = None, offset: int = 0) -> Batch:
        if memory is not None:
            self.nbytes(n)
        return np.full(n, None, dtype=object)

    def writer(self, batch: Batch) -> Callable[[int, Any], None]:
        return batch.__setitem__

    def reader(self, batch: Batch) -> Callable[[int], Any]:
        return batch.__getitem__

    def conform(self, batch: Any, n: int) -> Batch:
        if len(batch) != n:
            raise ConfigError(f"a batch for {n} environments of {self.space} must have {n} samples, not {len(batch)}")
        array = np.empty(n, dtype=object)
        for row, sample in enumerate(batch):
            array[row] = sample
        return array


class _CompoundLayout(Layout):
    """The base of layouts of Dict and Tuple, whose parts lie one after another."""

    def __init__(self, space: AnySpace, parts: Sequence[Layout]) -> None:
        super().__init__(space)
        self._members = parts

    @property
    def unshared(self) -> AnySpace | None:
        return next((found for part in self._members if (found := part.unshared) is not None), None)

    def nbytes(self, n: int) -> int:
        return sum(part.nbytes(n) for part in self._members)

    def _allocate_members(self, n: int, memory: Any, offset: int) -> list[Batch]:
        batches: list[Batch] = []
        for part in self._members:
            batches.append(part.allocate(n, memory, offset))
            offset += 0 if memory is None else part.nbytes(n)
        return batches


class _DictLayout(_CompoundLayout):
    """A dict of the batches of the parts."""

    def __init__(self, space: AnySpace, parts: Mapping[str, Layout]) -> None:
        super().__init__(space, list(parts.values()))
        self._parts = parts

    def allocate(self, n: int, memory: Any = None, offset: int = 0) -> Batch:
        return dict(zip(self._parts, self._allocate_members(n, memory, offset), strict=True))

    def writer(self, batch: Batch) -> Callable[[int, Any], None]:
        writers = [(name, part.writer(batch[name])) for name, part in self._parts.items()]

        def write(row: int, sample: Any) -> None:
            for name, put in writers:
                put(row, sample[name])

        return write

    def reader(self, batch: Batch) -> Callable[[int], Any]:
        readers = {name: part.reader(batch[name]) for name, part in self._parts.items()}
        return lambda row: {name: read(row) for name, read in readers.items()}

    def conform(self, batch: Any, n: int) -> Batch:
        if not isinstance(batch, dict) or batch.keys() != self._parts.keys():
            raise ConfigError(f"a batch of {self.space} must be a dict with the keys {list(self._parts)}")
        return {name: part.conform(batch[name], n) for name, part in self._parts.items()}


class _TupleLayout(_CompoundLayout):
    """A tuple of the batches of the parts."""

    def allocate(self, n: int, memory: Any = None, offset: int = 0) -> Batch:
        return tuple(self._allocate_members(n, memory, offset))

    def writer(self, batch: Batch) -> Callable[[int, Any], None]:
        writers = [part.writer(one) for part, one in zip(self._members, batch, strict=True)]

        def write(row: int, sample: Any) -> None:
            for put, one in zip(writers, sample, strict=True):
                put(row, one)

        return write

    def reader(self, batch: Batch) -> Callable[[int], Any]:
        readers = [part.reader(one) for part, one in zip(self._members, batch, strict=True)]
        return lambda row: tuple(read(row) for read in readers)

    def conform(self, batch: Any, n: int) -> Batch:
        members = cast("list[Any]", batch) if isinstance(batch, tuple | list) else []
        if not isinstance(batch, tuple | list) or len(members) != len(self._members):
            raise ConfigError(f"a batch of {self.space} must be a tuple of {len(self._members)} parts")
        return tuple(part.conform(one, n) for part, one in zip(self._members, members, strict=True))
