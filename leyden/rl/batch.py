"""Batches of observations: arrays whose first dimensions count samples, in the structure of their space.

A batch of a Dict space is a dict of batches, a batch of a Tuple space a tuple of batches: structs of arrays, never
arrays of structs. This module knows no environment and no policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Batch: TypeAlias = "Array | dict[str, Batch] | tuple[Batch, ...]"


def mapped(batch: Batch, change: Callable[[Array], Array]) -> Batch:
    """Return the batch with `change` applied to each of its arrays."""
    if isinstance(batch, dict):
        return {name: mapped(part, change) for name, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(mapped(part, change) for part in batch)
    return change(batch)


def leaves(batch: Batch) -> Iterator[Array]:
    """Yield the arrays of a batch, in order."""
    if isinstance(batch, dict):
        for part in batch.values():
            yield from leaves(part)
    elif isinstance(batch, tuple):
        for part in batch:
            yield from leaves(part)
    else:
        yield batch


def copied(batch: Batch) -> Batch:
    return mapped(batch, np.ndarray.copy)


def select(batch: Batch, where: Any) -> Batch:
    """Return the samples at `where`, which indexes NumPy's arrays; a slice selects views."""
    return mapped(batch, lambda array: array[where])


def allocate(like: Batch, leading: tuple[int, ...], *, drop: int = 1) -> Batch:
    """Return arrays of zeros in the structure and dtypes of `like`, with other first dimensions.

    leading: the first dimensions of each array, in place of the first `drop` ones of `like`.
    """
    return mapped(like, lambda array: np.zeros((*leading, *array.shape[drop:]), array.dtype))


def write(target: Batch, where: Any, source: Batch) -> None:
    """Set `target[where] = source` in each array; a `where` of `...` sets everything."""
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
    """Return one batch (n, ...) of n single observations, which all have the same structure."""
    first = samples[0]
    if isinstance(first, dict):
        dicts = cast("list[dict[str, Batch]]", samples)
        return {name: stacked([sample[name] for sample in dicts]) for name in first}
    if isinstance(first, tuple):
        tuples = cast("list[tuple[Batch, ...]]", samples)
        return tuple(stacked([sample[at] for sample in tuples]) for at in range(len(first)))
    return np.stack(cast("list[Array]", samples))


def same_shape(one: Batch, other: Batch) -> bool:
    """Return whether two batches have the same structure, shapes and dtypes."""
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same_shape(one[k], other[k]) for k in one)
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(same_shape, one, other))
    return not isinstance(other, dict | tuple) and one.shape == other.shape and one.dtype == other.dtype


def is_space(space: Any, *kinds: type) -> bool:
    """Return `isinstance(space, kinds)`. A type checker does not narrow the space, which would be a generic class of
    Gymnasium with unknown parameters.
    """
    return isinstance(space, kinds)
