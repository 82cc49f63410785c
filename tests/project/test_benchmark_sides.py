"""Sides of a benchmark: processes that take commands, and slices in turn."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness import PeerFailed, Sample
from benchmarks.sides import Side, alternate, row
from benchmarks.store import SCRIPT, Contender

PYTHON = Path(sys.executable)


@pytest.fixture(params=["leyden", "sqlite3"])
def side(request: pytest.FixtureRequest) -> Iterator[Side]:
    with Side(request.param, PYTHON, SCRIPT, request.param) as started:
        started.ask("open", where="memory", warm_up=False)
        yield started


def test_the_store_program_does_the_same_calls_on_every_side(side: Side):
    one = side.ask("run", mode="one", rollouts=2)
    assert {name: len(taken) for name, taken in one["micros"].items()} == {
        "enqueue": 2,
        "claim": 2,
        "add_span": 20,
        "update_attempt": 2,
        "query_spans": 2,
    }
    bulk = side.ask("run", mode="bulk", rollouts=4, batch=2)
    assert len(bulk["micros"]["add_all_spans"]) == 2
    assert bulk["cpu_s"] > 0
    assert 0 < bulk["seconds"] < 30


@pytest.mark.slow
def test_a_contender_finds_the_size_of_its_slices_and_keeps_what_its_calls_took(side: Side):
    contender = Contender("it", [side])
    run = contender.slice("spans")
    first, second = run(), run()
    assert first.value > 10
    assert second.value > 10
    assert len(contender.micros["query_spans"]) > 10
    assert all(micros > 0 for micros in contender.cpu_micros["spans"])


def test_a_side_that_ends_says_why(tmp_path: Path):
    script = tmp_path / "side.py"
    script.write_text("input()\nraise SystemExit('the disk is full')")
    with Side("other 1.0", PYTHON, script) as side, pytest.raises(PeerFailed, match="the disk is full"):
        side.ask("open")


def test_slices_take_turns_and_nobody_always_runs_first():
    order: list[str] = []

    def side(name: str) -> Sample:
        order.append(name)
        return Sample(1.0, 0.0)

    samples = alternate([lambda: side("a"), lambda: side("b")], pairs=3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [len(taken) for taken in samples] == [3, 3]


def test_fewer_than_five_slices_are_refused():
    with pytest.raises(ValueError, match="4 pairs"):
        row("claims", "1/s", [Sample(1.0, 0.0)] * 4, [], None)
