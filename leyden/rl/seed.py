"""Seeds: the beginnings of episodes, each of which is taken exactly once.

A `SeedPlan` is an order over the items of a data set and a position in it. It lives in the process
that gives seeds out; workers are sent an item and take none themselves. So processes share nothing,
the end of the plan is known at once, the seed of a lost worker is taken again, and a checkpoint
needs only a few numbers. For consumers in other processes see `leyden.rl.data_queue`. This module
knows no environment. To draw seeds from elsewhere, implement `SeedSource`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Generic, Literal, Protocol, SupportsIndex, TypeAlias, TypeVar, cast, overload

import numpy as np
from numpy.typing import NDArray

from leyden.errors import CheckpointError, ConfigError
from leyden.options import check_number

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class NoItem(Enum):
    """The item of a seed if no seeds were given: the simulator is made without an argument."""

    NO_ITEM = "no item"


NO_ITEM: Final = NoItem.NO_ITEM


@dataclass(frozen=True, slots=True)
class Seed(Generic[T]):
    """The beginning of one episode."""

    index: int
    """The item's index in the data set."""
    item: T
    number: int
    """The number of seeds that were taken before, over all passes."""
    entropy: int = 0
    """The seed of the source.

    The random numbers of the episode derive from it and from `number`.
    """


class Items(Protocol[T_co]):
    """A data set with a length and items by index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: SupportsIndex, /) -> T_co: ...


class SeedSource(Protocol):
    """A source of seeds. A seed that was taken is either finished or given back."""

    @property
    def exhausted(self) -> bool:
        """Whether `take` would return None now. A seed that is given back changes that."""
        ...

    def take(self) -> Seed[Any] | None:
        """Return the next seed, or None if there is none."""
        ...

    def give_back(self, seed: Seed[Any]) -> None:
        """Return a seed whose episode was lost. It is taken again before any other."""
        ...

    def finish(self, seed: Seed[Any]) -> None:
        """Mark the episode of a seed as finished."""
        ...


class SeedPlan(Generic[T]):
    """The items of a data set, each once in each pass."""

    def __init__(self, items: Items[T], *, repeat: int = 1, shuffle: bool = False, seed: int = 0) -> None:
        """Raise ConfigError for a `repeat` below -1, and for items without a length.

        repeat: the number of passes; -1: for ever.
        shuffle: whether each pass has an order of its own, which `seed` and the number of the pass
            decide.
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
        self._returned: list[tuple[int, int]] = []  # a heap of (number, index)
        self._in_flight: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of items in one pass."""
        return self._size

    @property
    def exhausted(self) -> bool:
        """Whether `take` would return None now."""
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
        return self._returned[0] if self._returned else (self._taken, self._index())

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
        """Return the seed of a lost episode, which is taken again first.

        Raise ConfigError for a seed that is not under way.
        """
        heapq.heappush(self._returned, (seed.number, self._land(seed)))

    def finish(self, seed: Seed[T]) -> None:
        """Mark the episode of a seed as finished.

        Raise ConfigError for a seed that is not under way, which would count twice.
        """
        self._land(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the plan's position, as JSON.

        After it is loaded, episodes that were under way begin again.
        """
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
        """Continue from the position of another plan.

        Raise CheckpointError if it had other items or another order.
        """
        for name, mine in (("items", self._size), ("shuffle", self._shuffle), ("seed", self._seed)):
            if state.get(name) != mine:
                raise CheckpointError(
                    f"the saved seed plan has {name}={state.get(name)!r}, this one {mine!r}; its seeds would be others"
                )
        self._pass, self._cursor, self._taken = int(state["pass"]), int(state["cursor"]), int(state["taken"])
        self._in_flight = {}
        self._returned = [(int(number), int(index)) for number, index in state["in_flight"]]
        heapq.heapify(self._returned)

    def _land(self, seed: Seed[T]) -> int:
        if (index := self._in_flight.pop(seed.number, None)) is None:
            raise ConfigError(
                f"seed {seed.index} (number {seed.number}) is not under way; it was finished or given back before"
            )
        return index

    def _index(self) -> int:
        if not self._shuffle:
            return self._cursor
        if self._order is None or self._order[0] != self._pass:
            self._order = self._pass, np.random.default_rng((self._seed, self._pass)).permutation(self._size)
        return int(self._order[1][self._cursor])


class _IteratorSeeds:
    """A source over an iterator, which fetches an item when it is taken."""

    def __init__(self, items: Iterator[Any], entropy: int) -> None:
        self._items = items
        self._entropy = entropy
        self._taken = 0
        self._next: list[Any] = []
        self._returned: list[Seed[Any]] = []
        self._ended = False

    @property
    def exhausted(self) -> bool:
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


def _for_ever() -> Iterator[Literal[NoItem.NO_ITEM]]:
    while True:
        yield NO_ITEM


SeedsLike: TypeAlias = "SeedSource | Items[Any] | Iterable[Any] | None"


@overload
def as_seed_source(seeds: SeedPlan[T], *, entropy: int = 0) -> SeedPlan[T]: ...
@overload
def as_seed_source(seeds: SeedsLike, *, entropy: int = 0) -> SeedSource: ...
def as_seed_source(seeds: SeedsLike, *, entropy: int = 0) -> SeedSource:
    """Return a source of `seeds`: a plan, a queue, a sequence (one pass, in order), any iterable,
    or None for endless seeds without an item.

    entropy: of the seeds of an iterable and of None. A plan, a queue and a sequence do not use it.
    """
    if seeds is None:
        return _IteratorSeeds(_for_ever(), entropy)
    if hasattr(seeds, "take") and hasattr(seeds, "give_back"):
        return cast(SeedSource, seeds)
    if isinstance(seeds, Sequence) or (hasattr(seeds, "__len__") and hasattr(seeds, "__getitem__")):
        return SeedPlan(cast("Items[Any]", seeds))
    if isinstance(seeds, Iterable):
        return _IteratorSeeds(iter(seeds), entropy)
    raise ConfigError(f"seeds={seeds!r}: give a SeedPlan, a DataQueue, a sequence, an iterator, or None")
