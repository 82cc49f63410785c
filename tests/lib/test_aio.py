"""Reference cycles are looked for rarely, and still found."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from leyden._lib.aio import look_for_cycles_rarely


class Node:
    """One that holds itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # an earlier test may have called look_for_cycles_rarely
    yield
    gc.set_threshold(*before)


def looks_during(n_objects: int) -> int:
    before = gc.get_stats()[0]["collections"]
    kept = [[n] for n in range(n_objects)]
    del kept
    return gc.get_stats()[0]["collections"] - before


def test_twenty_answers_are_made_without_a_look():
    gc.collect()
    assert looks_during(10_000) >= 4
    look_for_cycles_rarely()
    gc.collect()
    assert looks_during(10_000) == 0


def test_what_holds_itself_goes_in_the_end():
    look_for_cycles_rarely()
    gc.collect()
    left = weakref.ref(Node())
    for _ in range(100_000):
        if left() is None:
            return
        Node()
    pytest.fail("a cycle outlived 100,000 others")
