"""How the observations or actions of many environments lie in memory: one array for each leaf of the space, a row for each environment.

A layout is made of a space and knows neither environments nor processes. Box, Discrete, MultiDiscrete and MultiBinary are numbers of a
fixed size, Dict and Tuple are made of others; everything else is kept as objects, which cannot lie in memory that processes share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from leyden.errors import ConfigError
from leyden.rl.spaces import AnySpace, checker

Array: TypeAlias = NDArray[Any]
Batch: TypeAlias = Any
"""An array (N, ...), or a dict or tuple of batches, as the space is."""
_ALIGNED = 64


def layout_of(space: AnySpace) -> Layout:
    """The layout of many samples of a space."""
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
    """How samples of one space lie in memory."""

    def __init__(self, space: AnySpace) -> None:
        self.space = space

    @property
    @abstractmethod
    def unshared(self) -> AnySpace | None:
        """A part whose samples are objects, which processes cannot share; None where there is none."""

    @abstractmethod
    def nbytes(self, n: int) -> int:
        """The memory that n samples need."""

    @abstractmethod
    def allocate(self, n: int, memory: Any = None, offset: int = 0) -> Batch:
        """Room for n samples: of its own, or within `memory` from `offset` on."""

    @abstractmethod
    def rows(self, batch: Batch, rows: slice) -> Batch:
        """A view of some samples."""

    @abstractmethod
    def writer(self, batch: Batch) -> Callable[[int, Any], None]:
        """A function that puts a sample into a row."""

    @abstractmethod
    def reader(self, batch: Batch) -> Callable[[int], Any]:
        """A function that answers the sample in a row, as a view."""

    @abstractmethod
    def copy(self, batch: Batch) -> Batch:
        """A batch of its own memory."""

    @abstractmethod
    def assign(self, target: Batch, source: Batch) -> None:
        """Copy all samples."""

    @abstractmethod
    def conform(self, batch: Any, n: int) -> Batch:
        """What a caller gives for n samples, as a batch. Raises ConfigError for another shape or dtype than the space's."""

    def check(self, batch: Batch, among: NDArray[np.bool_]) -> None:
        """Raises GymSpaceValidationError with the first sample, of the rows that are `among`, which is not in the space."""
        check, read = checker(self.space), self.reader(batch)
        for row in np.flatnonzero(among):
            check(read(int(row)))


class _NumberLayout(Layout):
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

    def rows(self, batch: Batch, rows: slice) -> Batch:
        return batch[rows]

    def writer(self, batch: Batch) -> Callable[[int, Any], None]:
        if not self._shape:
            return batch.__setitem__
        views = list(batch)

        def write(row: int, sample: Any) -> None:
            views[row][...] = sample

        return write

    def reader(self, batch: Batch) -> Callable[[int], Any]:
        return batch.__getitem__

    def copy(self, batch: Batch) -> Batch:
        return batch.copy()

    def assign(self, target: Batch, source: Batch) -> None:
        target[...] = source

    def conform(self, batch: Any, n: int) -> Batch:
        array: Array = batch if type(batch) is np.ndarray else np.asarray(batch)
        if array.shape != (n, *self._shape):
            raise ConfigError(
                f"a batch for {n} environments of {self.space} has the shape {(n, *self._shape)}, not {array.shape}"
            )
        if array.dtype is not self._dtype and not np.can_cast(array.dtype, self._dtype):
            raise ConfigError(
                f"a batch of {self.space} is {self._dtype}, {array.dtype} does not go into that without loss; cast it"
            )
        return array

    def check(self, batch: Batch, among: NDArray[np.bool_]) -> None:
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

    def rows(self, batch: Batch, rows: slice) -> Batch:
        return batch[rows]

    def writer(self, batch: Batch) -> Callable[[int, Any], None]:
        return batch.__setitem__

    def reader(self, batch: Batch) -> Callable[[int], Any]:
        return batch.__getitem__

    def copy(self, batch: Batch) -> Batch:
        return batch.copy()

    def assign(self, target: Batch, source: Batch) -> None:
        target[...] = source

    def conform(self, batch: Any, n: int) -> Batch:
        if len(batch) != n:
            raise ConfigError(f"a batch for {n} environments of {self.space} has {n} samples, not {len(batch)}")
        array = np.empty(n, dtype=object)
        for row, sample in enumerate(batch):
            array[row] = sample
        return array


class _DictLayout(Layout):
    def __init__(self, space: AnySpace, parts: dict[str, Layout]) -> None:
        super().__init__(space)
        self._parts = parts

    @property
    def unshared(self) -> AnySpace | None:
        return next((found for part in self._parts.values() if (found := part.unshared) is not None), None)

    def nbytes(self, n: int) -> int:
        return sum(part.nbytes(n) for part in self._parts.values())

    def allocate(self, n: int, memory: Any = None, offset: int = 0) -> Batch:
        batch: dict[str, Batch] = {}
        for name, part in self._parts.items():
            batch[name] = part.allocate(n, memory, offset)
            offset += 0 if memory is None else part.nbytes(n)
        return batch

    def rows(self, batch: Batch, rows: slice) -> Batch:
        return {name: part.rows(batch[name], rows) for name, part in self._parts.items()}

    def writer(self, batch: Batch) -> Callable[[int, Any], None]:
        writers = [(name, part.writer(batch[name])) for name, part in self._parts.items()]

        def write(row: int, sample: Any) -> None:
            for name, put in writers:
                put(row, sample[name])

        return write

    def reader(self, batch: Batch) -> Callable[[int], Any]:
        readers = {name: part.reader(batch[name]) for name, part in self._parts.items()}
        return lambda row: {name: read(row) for name, read in readers.items()}

    def copy(self, batch: Batch) -> Batch:
        return {name: part.copy(batch[name]) for name, part in self._parts.items()}

    def assign(self, target: Batch, source: Batch) -> None:
        for name, part in self._parts.items():
            part.assign(target[name], source[name])

    def conform(self, batch: Any, n: int) -> Batch:
        if not isinstance(batch, dict) or batch.keys() != self._parts.keys():
            raise ConfigError(f"a batch of {self.space} is a dict with the keys {list(self._parts)}")
        return {name: part.conform(batch[name], n) for name, part in self._parts.items()}


class _TupleLayout(Layout):
    def __init__(self, space: AnySpace, parts: list[Layout]) -> None:
        super().__init__(space)
        self._parts = parts

    @property
    def unshared(self) -> AnySpace | None:
        return next((found for part in self._parts if (found := part.unshared) is not None), None)

    def nbytes(self, n: int) -> int:
        return sum(part.nbytes(n) for part in self._parts)

    def allocate(self, n: int, memory: Any = None, offset: int = 0) -> Batch:
        batch: list[Batch] = []
        for part in self._parts:
            batch.append(part.allocate(n, memory, offset))
            offset += 0 if memory is None else part.nbytes(n)
        return tuple(batch)

    def rows(self, batch: Batch, rows: slice) -> Batch:
        return tuple(part.rows(one, rows) for part, one in zip(self._parts, batch, strict=True))

    def writer(self, batch: Batch) -> Callable[[int, Any], None]:
        writers = [part.writer(one) for part, one in zip(self._parts, batch, strict=True)]

        def write(row: int, sample: Any) -> None:
            for put, one in zip(writers, sample, strict=True):
                put(row, one)

        return write

    def reader(self, batch: Batch) -> Callable[[int], Any]:
        readers = [part.reader(one) for part, one in zip(self._parts, batch, strict=True)]
        return lambda row: tuple(read(row) for read in readers)

    def copy(self, batch: Batch) -> Batch:
        return tuple(part.copy(one) for part, one in zip(self._parts, batch, strict=True))

    def assign(self, target: Batch, source: Batch) -> None:
        for part, mine, other in zip(self._parts, target, source, strict=True):
            part.assign(mine, other)

    def conform(self, batch: Any, n: int) -> Batch:
        if not isinstance(batch, tuple | list) or len(cast("list[Any]", batch)) != len(self._parts):
            raise ConfigError(f"a batch of {self.space} is a tuple of {len(self._parts)}")
        return tuple(part.conform(one, n) for part, one in zip(self._parts, cast("list[Any]", batch), strict=True))
