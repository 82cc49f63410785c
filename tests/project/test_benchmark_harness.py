"""Paired runs, their ratio, and where the rows are written."""

import importlib
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import report, store
from benchmarks.__main__ import peer_name
from benchmarks.harness import Peer, PeerFailed, Row, Sample, compare, rate, summary
from benchmarks.report import Table

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


@pytest.fixture
def pages(tmp_path: Path) -> dict[str, Path]:
    """A README, a summary, a folder with a page for the benchmarks `a` and `store`, and the folder of results."""
    (tmp_path / "pages").mkdir()
    pages = {"readme": tmp_path / "README.md", "summary": tmp_path / "benchmarks.md"}
    for path in pages.values():
        path.write_text("before\n<!-- bench:start -->\nold\n<!-- bench:end -->\nafter\n")
    return {**pages, "pages": tmp_path / "pages", "results": tmp_path}


def name_on_a_page(pages: dict[str, Path], *names: str) -> Path:
    page = pages["pages"] / "everything.md"
    page.write_text(f"before\n<!-- bench:start {' '.join(names)} -->\nold\n<!-- bench:end -->\nafter\n")
    return page


def test_every_page_shows_the_rows_of_its_benchmarks_and_keeps_the_rest(pages: dict[str, Path]):
    report.save("b", [Row("alone", "s", 0.04567, None, None, None, 5, 0.04, 0.05, 1)], results=pages["results"])
    report.save("a", [Row("claims", "1/s", 1234, 100, "other 1.0", 12.34, 5, 10, 15, 1)], results=pages["results"])
    page = name_on_a_page(pages, "b", "a")
    for _ in range(2):
        report.rewrite_pages(**pages)
    for path in (pages["readme"], pages["summary"], page):
        text = path.read_text()
        assert text.startswith("before\n")
        assert text.endswith("<!-- bench:end -->\nafter\n")
        assert "old" not in text
    for path in (pages["summary"], page):
        text = path.read_text()
        assert "| claims | 1/s | 1,230 | 100 (other 1.0) | **12.3x** (10 to 15) |\n" in text
        assert "| alone | s | 0.0457 |  |  |\n" in text
    assert page.read_text().index("## b\n") < page.read_text().index("## a\n")


def test_a_benchmark_must_be_on_a_page_and_have_results(pages: dict[str, Path]):
    report.save("a", [Row("alone", "s", 0.04567, None, None, None, 5, 0.04, 0.05, 1)], results=pages["results"])
    with pytest.raises(ValueError, match="a: name it in the line `bench:start`"):
        report.rewrite_pages(**pages)
    name_on_a_page(pages, "a", "gone")
    with pytest.raises(ValueError, match="names gone, which has no results"):
        report.rewrite_pages(**pages)


def test_the_summary_has_the_headlines_alone(pages: dict[str, Path]):
    rows = [Row(name, "1/s", 12, None, None, None, 5, 10, 15, 1) for name in (store.HEADLINES[0], "by the way")]
    table = Table("Calls", ["store", "claim"], [["in memory", "30 / 40"]])
    report.save("store", [*rows, table], results=pages["results"])
    page = name_on_a_page(pages, "store")
    report.rewrite_pages(**pages)
    everything = page.read_text()
    assert everything.index("| by the way |") < everything.index(
        "Calls\n\n| store | claim |\n| --- | --- |\n| in memory |"
    )
    assert report.load("store", results=pages["results"]) == rows
    summary = pages["summary"].read_text()
    assert store.HEADLINES[0] in summary
    assert "by the way" not in summary
    assert "Calls" not in summary


def test_the_summary_shows_a_headline_beside_the_peer_that_comes_closest():
    name = store.HEADLINES[0]
    rows = [Row(name, "1/s", 12, 12 / ratio, f"peer {ratio}", ratio, 5, 1, 9, 1) for ratio in (5.0, 2.0, 3.0)]
    assert report.headlines("store", rows) == [rows[1]]


def test_the_summary_has_ten_headlines_and_the_readme_four_of_them():
    names = [path.stem for path in report.RESULTS.glob("*.json")]
    rows = [row.row for name in names for row in report.headlines(name, report.load(name))]
    assert len(rows) == 10
    assert set(rows) >= report.README_ROWS
    readme = report.MARKED.findall(report.README.read_text())[0][1]
    assert {line.split(" | ")[0].removeprefix("| ") for line in readme.splitlines()[2:]} == report.README_ROWS


@pytest.mark.parametrize("name", ["store", "store_scale", "gateway"])
def test_every_headline_is_a_row(name: str):
    rows = {row.row for row in report.load(name)}
    assert set(importlib.import_module(f"benchmarks.{name}").HEADLINES) <= rows


@pytest.mark.parametrize("name", ["readme", "summary"])
def test_a_page_without_markers_is_refused(pages: dict[str, Path], name: str):
    pages[name].write_text("nothing here")
    with pytest.raises(ValueError, match="bench:start"):
        report.rewrite_pages(**pages)


@pytest.mark.parametrize(
    ("environment", "package"), [("bench-trl", "trl 1."), ("bench-agentlightning", "agentlightning 0.3.0")]
)
def test_a_peer_is_named_with_its_pinned_version(environment: str, package: str):
    assert peer_name(environment).startswith(package)
