"""Seeds: the initial states of episodes, each of which is taken exactly once.

A `SeedPlan` is an order over the items of a data set and a position in it. It lives in the process that hands out seeds
and sends items to workers. So processes share nothing, the end of the plan is known at once, the seed of a lost worker
is taken again, and a checkpoint needs only a few numbers. `leyden.rl.data_queue` serves consumers in other processes.
This module knows no environment. To draw seeds from elsewhere, implement `SeedSource`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Generic, Protocol, SupportsIndex, TypeAlias, TypeVar, cast, overload

import numpy as np
from numpy.typing import NDArray

from leyden._lib.options import check_number
from leyden.errors import CheckpointError, ConfigError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class NoItem(Enum):
    """The item of a seed if no seeds were given: the simulator is made without an argument."""

    NO_ITEM = "no item"


NO_ITEM: Final = NoItem.NO_ITEM


@dataclass(frozen=True, slots=True)
class Seed(Generic[T]):
    """The initial state of one episode: an item of a data set, and its position in the order."""

    index: int
    """The item's index in the data set."""
    item: T
    number: int
    """The number of seeds that were taken before, over all passes."""
    entropy: int = 0
    """The random seed of the source. The episode's random numbers derive from it and `number`."""


class Items(Protocol[T_co]):
    """A data set with a length and items by index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: SupportsIndex, /) -> T_co: ...


class SeedSource(Protocol):
    """A source of seeds. The taker of a seed must call either `finish` or `give_back` with it."""

    @property
    def exhausted(self) -> bool:
        """Whether `take` would return None now. A seed that is given back makes it False again."""
        ...

    def take(self) -> Seed[Any] | None:
        """Return the next seed, or None if no seed is left."""
        ...

    def give_back(self, seed: Seed[Any]) -> None:
        """Hand a seed back because its episode was lost. It is taken again before any other."""
        ...

    def finish(self, seed: Seed[Any]) -> None:
        """Mark the episode of a seed as finished."""
        ...


class SeedPlan(Generic[T]):
    """The items of a data set, each once in each pass."""

    def __init__(self, items: Items[T], *, repeat: int = 1, shuffle: bool = False, seed: int = 0) -> None:
        """Begin before the first item.

        repeat: the number of passes; -1: without end.
        shuffle: give each pass its own order, which `seed` and the number of the pass decide.
        Raise ConfigError for a `repeat` below -1, and for items without a length.
        """
        check_number("repeat", repeat, at_least=-1, whole=True)
        check_number("seed", seed, whole=True)
        if not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
            raise ConfigError(
                f"a SeedPlan needs a length and items by index, {type(items).__name__} has not both; make a list of it"
            )
        self._items = items
        self._size = len(items)
        self._repeat = repeat if self._size else 0
        self._shuffle = shuffle
        self._seed = seed
        self._pass = 0
        self._cursor = 0
        self._taken = 0
        self._order: tuple[int, NDArray[np.int64]] | None = None
        self._returned: list[tuple[int, int]] = []
        """A heap of the seeds that were given back, as (number, index)."""
        self._in_flight: dict[int, int] = {}
        """The seeds that were taken and neither finished nor given back: index by number."""

    def __len__(self) -> int:
        return self._size

    @property
    def exhausted(self) -> bool:
        return not self._returned and self._repeat != -1 and self._pass >= self._repeat

    def take(self) -> Seed[T] | None:
        """Return the next seed, or None at the end.

        Seeds that were given back come first, in the order of their numbers.
        """
        if self.exhausted:
            return None
        number, index = self._next()
        item = self._item(index)  # a data set that raises leaves the plan where it is
        self._advance(number, index)
        return Seed(index, item, number, self._seed)

    def take_index(self) -> Seed[None] | None:
        """Return the next seed without its item, which the caller reads; None at the end."""
        if self.exhausted:
            return None
        number, index = self._next()
        self._advance(number, index)
        return Seed(index, None, number, self._seed)

    def _next(self) -> tuple[int, int]:
        if self._returned:
            return self._returned[0]
        if not self._shuffle:
            return self._taken, self._cursor
        if self._order is None or self._order[0] != self._pass:
            self._order = self._pass, np.random.default_rng((self._seed, self._pass)).permutation(self._size)
        return self._taken, int(self._order[1][self._cursor])

    def _advance(self, number: int, index: int) -> None:
        if self._returned:
            heapq.heappop(self._returned)
        else:
            self._taken += 1
            self._cursor += 1
            if self._cursor == self._size:
                self._pass, self._cursor = self._pass + 1, 0
        self._in_flight[number] = index

    def _item(self, index: int) -> T:
        try:
            return self._items[index]
        except KeyError as error:
            raise ConfigError(
                f"the data set is a {type(self._items).__name__}, which has no item {error}: items are read by number, from 0. "
                "Give a list of them (of a table, its rows)"
            ) from error

    def give_back(self, seed: Seed[T]) -> None:
        """Hand back a lost episode's seed, to be taken next. Raise ConfigError for a seed that is not in use."""
        heapq.heappush(self._returned, (seed.number, self._end_flight(seed)))

    def finish(self, seed: Seed[T]) -> None:
        """Mark a seed's episode as finished. Raise ConfigError for a seed not in use, because it would count twice."""
        self._end_flight(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the plan's position, as JSON. Seeds in use count as given back."""
        waiting = sorted([*self._in_flight.items(), *self._returned])
        return {
            "items": self._size,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "pass": self._pass,
            "cursor": self._cursor,
            "taken": self._taken,
            "in_flight": [[number, index] for number, index in waiting],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. Raise CheckpointError if that plan had another number of items or order."""
        for name, mine in (("items", self._size), ("shuffle", self._shuffle), ("seed", self._seed)):
            if state.get(name) != mine:
                raise CheckpointError(
                    f"the saved seed plan has {name}={state.get(name)!r}, this one {mine!r}; its seeds would be others"
                )
        self._pass, self._cursor, self._taken = int(state["pass"]), int(state["cursor"]), int(state["taken"])
        self._in_flight = {}
        self._returned = [(int(number), int(index)) for number, index in state["in_flight"]]
        heapq.heapify(self._returned)

    def _end_flight(self, seed: Seed[T]) -> int:
        if (index := self._in_flight.pop(seed.number, None)) is None:
            raise ConfigError(
                f"seed {seed.index} (number {seed.number}) is not under way; it was finished or given back before"
            )
        return index


class _IteratorSeeds:
    """A source over an iterator. It reads an item when a seed is taken, or to know `exhausted`."""

    def __init__(self, items: Iterator[Any], entropy: int) -> None:
        self._items = items
        self._entropy = entropy
        self._taken = 0
        self._next: list[Any] = []
        self._returned: list[Seed[Any]] = []
        self._ended = False

    @property
    def exhausted(self) -> bool:
        """Whether `take` would return None now. To know it, read one item ahead."""
        if not self._returned and not self._next and not self._ended:
            try:
                self._next.append(next(self._items))
            except StopIteration:
                self._ended = True
        return not self._returned and not self._next

    def take(self) -> Seed[Any] | None:
        if self.exhausted:
            return None
        if self._returned:
            return self._returned.pop(0)
        seed = Seed(self._taken, self._next.pop(), self._taken, self._entropy)
        self._taken += 1
        return seed

    def give_back(self, seed: Seed[Any]) -> None:
        self._returned = sorted([*self._returned, seed], key=lambda one: one.number)

    def finish(self, seed: Seed[Any]) -> None:
        pass


SeedsLike: TypeAlias = "SeedSource | Items[Any] | Iterable[Any] | None"


@overload
def as_seed_source(seeds: SeedPlan[T], *, entropy: int = 0) -> SeedPlan[T]: ...
@overload
def as_seed_source(seeds: SeedsLike, *, entropy: int = 0) -> SeedSource: ...
def as_seed_source(seeds: SeedsLike, *, entropy: int = 0) -> SeedSource:
    """Return a source of seeds.

    seeds: a `SeedPlan` or `DataQueue`, which is returned itself; a sequence, for one pass in order; any other iterable;
        or None, for an endless source of seeds without an item.
    entropy: the `Seed.entropy` of an iterable's and an endless source's seeds. It is not used for a plan, a queue and a
        sequence.
    Raise ConfigError for any other object.
    """
    if seeds is None:
        return _IteratorSeeds(itertools.repeat(NO_ITEM), entropy)
    if hasattr(seeds, "take") and hasattr(seeds, "give_back"):
        return cast(SeedSource, seeds)
    if isinstance(seeds, Sequence) or (hasattr(seeds, "__len__") and hasattr(seeds, "__getitem__")):
        return SeedPlan(cast("Items[Any]", seeds))
    if isinstance(seeds, Iterable):
        return _IteratorSeeds(iter(seeds), entropy)
    raise ConfigError(f"seeds={seeds!r}: give a SeedPlan, a DataQueue, a sequence, an iterator, or None")
