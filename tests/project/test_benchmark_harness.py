"""Paired runs, their ratio, and where the rows are written."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import report
from benchmarks.__main__ import peer_name
from benchmarks.harness import Peer, PeerFailed, Row, Sample, compare, rate, summary

values = st.floats(min_value=1e-3, max_value=1e6)


def test_both_sides_run_in_turn_and_the_ratio_is_the_median_of_the_pairs():
    order = []
    ours, theirs = iter([10, 20, 30, 40, 50]), iter([10, 10, 10, 10, 10])

    def leyden():
        order.append("leyden")
        return Sample(next(ours), cpu_s=0.5)

    def peer():
        order.append("peer")
        return Sample(next(theirs), cpu_s=9)

    row = compare("claims", "claims/s", leyden, peer, peer_name="other 1.0")
    assert order == ["leyden", "peer"] * 5
    assert row == Row("claims", "claims/s", 30, 10, "other 1.0", 3, n=5, min=1, max=5, cpu_s=0.5)


@given(st.lists(st.tuples(values, values), min_size=5, max_size=9))
def test_better_is_above_one_whichever_way_the_unit_counts(pairs):
    ours, theirs = ([Sample(value, 0) for value in side] for side in zip(*pairs, strict=True))
    rate_row = summary("r", "1/s", ours, theirs, "other", higher_is_better=True)
    time_row = summary("r", "s", theirs, ours, "other", higher_is_better=False)
    assert (rate_row.min, rate_row.ratio, rate_row.max) == (time_row.min, time_row.ratio, time_row.max)
    assert rate_row.min <= rate_row.ratio <= rate_row.max


def test_without_a_peer_leyden_is_measured_alone():
    runs = iter([3, 1, 2, 5, 4])
    row = compare("claims", "claims/s", lambda: Sample(next(runs), 0), None, peer_name="other 1.0")
    assert (row.leyden, row.min, row.max) == (3, 1, 5)
    assert row.peer is row.peer_name is row.ratio is None


def test_a_peer_that_fails_is_dropped_and_its_reason_is_told(capsys):
    def peer():
        raise PeerFailed("out of memory")

    row = compare("claims", "claims/s", lambda: Sample(1, 0), peer, peer_name="other 1.0")
    assert row.peer is None
    assert row.n == 5
    assert "out of memory" in capsys.readouterr().out


def test_fewer_than_five_pairs_are_refused():
    with pytest.raises(ValueError, match="runs=4"):
        compare("claims", "claims/s", lambda: Sample(1, 0), runs=4)


def test_a_rate_counts_units_and_cpu_seconds():
    sample = rate(lambda: sum(1 for _ in range(300_000)))
    assert sample.value > 300_000 / 5
    assert 0 < sample.cpu_s < 5


def test_a_peer_answers_with_the_last_line_that_it_prints(tmp_path: Path):
    peer = Peer("other 1.0", Path(sys.executable))
    script = tmp_path / "peer.py"
    script.write_text("import sys\nprint('loading')\nprint('{\"value\": %s, \"cpu_s\": 1}' % sys.argv[1])")
    assert peer.sample(script, "7") == Sample(7, 1)
    script.write_text("raise SystemExit('no GPU')")
    with pytest.raises(PeerFailed, match="no GPU"):
        peer.sample(script)
    script.write_text("print('done')")
    with pytest.raises(PeerFailed, match="'done'"):
        peer.sample(script)


def test_the_readme_shows_the_rows_of_every_benchmark_and_keeps_the_rest(tmp_path: Path):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.START}\nold\n{report.END}\nafter\n")
    report.save("b", [Row("alone", "s", 0.04567, None, None, None, 5, 0.04, 0.05, 1)], results=tmp_path)
    report.save("a", [Row("claims", "1/s", 1234, 100, "other 1.0", 12.34, 5, 10, 15, 1)], results=tmp_path)
    for _ in range(2):
        report.rewrite_table(readme=readme, results=tmp_path)
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "old" not in text
    assert "| claims | 1/s | 1,230 | 100 (other 1.0) | **12.3x** (10 to 15) |\n| alone | s | 0.0457 |  |  |\n" in text


def test_a_readme_without_markers_is_refused(tmp_path: Path):
    readme = tmp_path / "README.md"
    readme.write_text("nothing here")
    with pytest.raises(ValueError, match="bench:start"):
        report.rewrite_table(readme=readme, results=tmp_path)


@pytest.mark.parametrize(
    ("environment", "package"), [("bench-trl", "trl 1."), ("bench-agentlightning", "agentlightning 0.3.0")]
)
def test_a_peer_is_named_with_its_pinned_version(environment: str, package: str):
    assert peer_name(environment).startswith(package)
