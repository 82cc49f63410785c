"""Batches of observations: arrays whose first dimensions count samples, in the shape of their space.

A batch of a Dict space is a dict of batches, one of a Tuple space a tuple of batches (structs of arrays, never arrays of structs). It knows
no environment and no policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Batch: TypeAlias = "Array | dict[str, Batch] | tuple[Batch, ...]"


def mapped(batch: Batch, change: Callable[[Array], Array]) -> Batch:
    """The batch with `change` applied to each of its arrays."""
    if isinstance(batch, dict):
        return {name: mapped(part, change) for name, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(mapped(part, change) for part in batch)
    return change(batch)


def leaves(batch: Batch) -> Iterator[Array]:
    """Its arrays, in order."""
    if isinstance(batch, dict):
        for part in batch.values():
            yield from leaves(part)
    elif isinstance(batch, tuple):
        for part in batch:
            yield from leaves(part)
    else:
        yield batch


def copied(batch: Batch) -> Batch:
    """A copy of all its arrays."""
    return mapped(batch, np.copy)


def allocate(like: Batch, leading: tuple[int, ...], *, drop: int = 1) -> Batch:
    """Zeros of shape (*leading, ...): the types of `like` without its first `drop` dimensions."""
    return mapped(like, lambda array: np.zeros((*leading, *array.shape[drop:]), array.dtype))


def write(target: Batch, where: Any, source: Batch) -> None:
    """`target[where] = source` in each array; `where` is anything that indexes NumPy's arrays."""
    if isinstance(target, dict):
        assert isinstance(source, dict)
        for name, part in target.items():
            write(part, where, source[name])
    elif isinstance(target, tuple):
        assert isinstance(source, tuple)
        for part, given in zip(target, source, strict=True):
            write(part, where, given)
    else:
        target[where] = source


def stacked(samples: list[Batch]) -> Batch:
    """One batch (n, ...) of n single observations of one structure."""
    first = samples[0]
    if isinstance(first, dict):
        dicts = cast("list[dict[str, Batch]]", samples)
        return {name: stacked([sample[name] for sample in dicts]) for name in first}
    if isinstance(first, tuple):
        tuples = cast("list[tuple[Batch, ...]]", samples)
        return tuple(stacked([sample[at] for sample in tuples]) for at in range(len(first)))
    return np.stack(cast("list[Array]", samples))


def same_shape(one: Batch, other: Batch) -> bool:
    """Whether structure, shapes and dtypes agree."""
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same_shape(one[k], other[k]) for k in one)
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(same_shape, one, other))
    return not isinstance(other, dict | tuple) and one.shape == other.shape and one.dtype == other.dtype


def is_space(space: Any, *kinds: type) -> bool:
    """isinstance, without a type checker's narrowing: the parameters of Gymnasium's generic spaces would be unknown."""
    return isinstance(space, kinds)
