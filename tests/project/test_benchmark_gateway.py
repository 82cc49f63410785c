"""The gateway benchmark: what is measured is recorded, and what is not recorded is no result."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gateway import PEERS, Benchmark, Leyden, Slice
from benchmarks.harness import PeerFailed
from benchmarks.sides import Side

PYTHON = Path(sys.executable)


@pytest.fixture
def upstream() -> Iterator[str]:
    with Side("upstream", PYTHON, PEERS / "gateway_upstream.py") as server:
        yield f"http://127.0.0.1:{server.ask('open')['port']}"


@pytest.fixture
def bench(upstream: str) -> Iterator[Benchmark]:
    with Side("load", PYTHON, PEERS / "gateway_load.py") as load:
        yield Benchmark(load, upstream, None)


def test_every_call_and_stream_is_recorded_with_the_tokens_of_the_server(bench: Benchmark, upstream: str):
    with Leyden(upstream, "--durable") as gateway:
        assert 0 < gateway.start_seconds < 60
        for do in ("calls", "streams"):
            assert len(bench.ask(gateway, do, "quick", callers=2, calls=5)["ms"]) == 5
        assert gateway.cpu_seconds() > 0
        assert gateway.memory_mb("VmHWM") >= gateway.memory_mb("VmRSS") > 10
        assert gateway.calls == 11  # with the one that showed that it had started


def test_a_call_that_is_not_recorded_is_told(upstream: str):
    with pytest.raises(RuntimeError, match="2 calls were answered, 1 are recorded"), Leyden(upstream) as gateway:
        gateway.calls += 1


def test_a_gateway_that_cannot_start_says_why(upstream: str):
    with (
        pytest.raises(PeerFailed, match=r"there is no option .--no-such-option."),
        Leyden(upstream, "--no-such-option"),
    ):
        pass


def test_a_server_takes_as_long_as_its_url_says(bench: Benchmark):
    fixed, quick = (bench.ask(None, "calls", model, callers=1, calls=5)["ms"] for model in ("fixed", "quick"))
    assert min(fixed) > 20 > min(quick)


def test_what_is_added_is_told_against_the_median_of_the_server_itself():
    direct = Slice([20.0, 21.0, 500.0], 0.0)
    added = Slice([22.0, 23.0, 30.0], 0.5)
    assert added.above(direct, 50).value == 2.0
    assert added.above(direct, 99).value == 9.0
