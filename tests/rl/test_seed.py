"""Seeds: each once in each pass, whatever happens to them."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.errors import CheckpointError, ConfigError
from leyden.rl.data_queue import DataQueue
from leyden.rl.seed import NO_ITEM, Seed, SeedPlan, as_seed_source


@settings(max_examples=200)
@given(
    size=st.integers(0, 7),
    repeat=st.integers(0, 3),
    shuffle=st.booleans(),
    events=st.lists(st.sampled_from(["take", "take", "finish", "give_back", "save"]), max_size=60),
)
def test_any_order_of_events_finishes_every_item_once_in_each_pass(
    size: int, repeat: int, shuffle: bool, events: list[str]
) -> None:
    def make() -> SeedPlan[int]:
        return SeedPlan(range(100, 100 + size), repeat=repeat, shuffle=shuffle, seed=3)

    plan, under_way, finished = make(), list[Seed[int]](), list[Seed[int]]()
    for event in [*events, *["take"] * 30, *["finish"] * 60]:
        if event == "take" and (seed := plan.take()) is not None:
            under_way.append(seed)
        elif event == "finish" and under_way:
            finished.append(under_way.pop(0))
            plan.finish(finished[-1])
        elif event == "give_back" and under_way:
            plan.give_back(under_way.pop())
        elif event == "save":
            saved, plan = json.loads(json.dumps(plan.state_dict())), make()
            plan.load_state_dict(saved)
            under_way = []
    while (seed := plan.take()) is not None:
        finished.append(seed)
        plan.finish(seed)
    finished += under_way
    assert plan.exhausted
    assert Counter(seed.index for seed in finished) == Counter({index: repeat for index in range(size) if repeat})
    assert sorted(seed.number for seed in finished) == list(range(size * repeat))
    assert all(seed.item == 100 + seed.index for seed in finished)


def taken(plan: SeedPlan[Any], n: int) -> list[int]:
    seeds = [plan.take() for _ in range(n)]
    return [seed.index for seed in seeds if seed is not None]


def test_shuffled_passes_differ_and_are_the_same_for_the_same_seed() -> None:
    first, again, other = (SeedPlan(range(20), repeat=-1, shuffle=True, seed=seed) for seed in (5, 5, 6))
    passes = [taken(first, 20) for _ in range(3)]
    assert all(sorted(one) == list(range(20)) for one in passes)
    assert passes[0] != passes[1] != passes[2]
    assert passes == [taken(again, 20) for _ in range(3)]
    assert passes[0] != taken(other, 20)


def test_what_is_given_back_comes_first() -> None:
    plan = SeedPlan("abcd")
    one, two, _ = plan.take(), plan.take(), plan.take()
    assert one is not None and two is not None
    plan.give_back(two)
    plan.give_back(one)
    assert taken(plan, 9) == [0, 1, 3]
    assert plan.take() is None


def test_a_seed_cannot_be_finished_twice() -> None:
    plan = SeedPlan("ab")
    seed = plan.take()
    assert seed is not None
    plan.finish(seed)
    for again in (plan.finish, plan.give_back):
        with pytest.raises(ConfigError, match="not under way"):
            again(seed)


def test_an_item_that_cannot_be_read_is_not_lost() -> None:
    class Files:
        broken = True

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: Any) -> str:
            if index == 1 and self.broken:
                raise OSError("disk")
            return "ab"[index]

    files = Files()
    plan = SeedPlan(files)
    plan.take()
    with pytest.raises(OSError, match="disk"):
        plan.take()
    files.broken = False
    assert taken(plan, 5) == [1]


def test_a_plan_over_other_items_is_refused() -> None:
    saved = SeedPlan(range(3)).state_dict()
    for other in (SeedPlan(range(4)), SeedPlan(range(3), shuffle=True), SeedPlan(range(3), seed=1)):
        with pytest.raises(CheckpointError, match="its seeds would be others"):
            other.load_state_dict(saved)


def test_an_empty_data_set_is_exhausted_even_when_it_is_repeated_for_ever() -> None:
    assert SeedPlan([], repeat=-1).take() is None
    assert list(DataQueue([], repeat=-1)) == []


def test_a_plan_needs_a_length_and_a_sensible_repeat() -> None:
    with pytest.raises(ConfigError, match="make a list"):
        SeedPlan(iter("ab"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="repeat is -2"):
        SeedPlan("ab", repeat=-2)


def test_a_data_queue_yields_its_items_and_needs_no_cleaning_up() -> None:
    with DataQueue("abc", repeat=2, shuffle=False) as queue:
        assert "".join(queue) == "abcabc"
    with DataQueue(range(9)) as queue:
        assert sorted(queue) == list(range(9))


def test_anything_iterable_is_a_source() -> None:
    plan = SeedPlan("ab")
    assert as_seed_source(plan) is plan
    assert as_seed_source(DataQueue("ab")).take() is not None
    source = as_seed_source(item for item in "ab")
    first = source.take()
    assert first is not None and (first.item, first.index) == ("a", 0)
    assert not source.exhausted
    source.give_back(first)
    assert [seed.item for seed in (source.take(), source.take()) if seed] == ["a", "b"]
    assert source.exhausted and source.take() is None
    endless = as_seed_source(None).take()
    assert endless is not None and endless.item is NO_ITEM
    with pytest.raises(ConfigError, match="seeds=3"):
        as_seed_source(3)  # type: ignore[call-overload]
