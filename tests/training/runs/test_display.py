"""A run in words: one line that fits, a curve, and a summary."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden._lib.formatting import size
from leyden.training.runs import RewardMetrics, Run
from leyden.training.runs.chart import sparkline
from leyden.training.runs.display import closing_summary, first_line
from leyden.training.runs.folder import folder_bytes
from leyden.training.runs.summary import RunSummary


def test_a_curve_rises_where_the_values_rise() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, 0.0, 1.0, 1.0], 2) == "▁█", "each character is a mean"
    assert sparkline([1.0, None, math.nan, 2.0], 4) == "▁  █"
    assert sparkline([0.5] * 5, 10) == "▄▄▄▄▄"
    assert sparkline([], 10) == sparkline([1.0], 0) == ""
    assert sparkline([None, math.inf], 10) == "  "


@given(st.lists(st.floats() | st.none(), max_size=50), st.integers(0, 20))
def test_a_curve_fits_and_takes_any_numbers(values: list[float | None], width: int) -> None:
    curve = sparkline(values, width)
    assert len(curve) == min(len(values), width)
    assert set(curve) <= set(" ▁▂▃▄▅▆▇█")


CONFIG: dict[str, Any] = {
    "algorithm": {
        "name": "leyden.algorithm.policy_gradient.policy_gradient.PolicyGradient",
        "options": {"tasks_per_step": 8, "rollouts_per_task": 16},
    },
    "model": {"name": "/models/tiny-model", "digest": None, "n_weights": 117_312},
    "data": {"train": {"length": 32, "digest": None}, "val": None},
}
RUN = Run("ab12cd34", Path(".leyden/20261122-101500-ab12"))


def test_the_first_line_says_what_a_run_is_about_in_the_room_that_there_is() -> None:
    assert first_line(RUN, CONFIG, width=120) == (
        "run 20261122-101500-ab12 | PolicyGradient on tiny-model (117k weights) | 32 tasks, 8 x 16 rollouts a step"
    )
    assert first_line(RUN, CONFIG, width=84) == (
        "run 20261122-101500-ab12 | PolicyGradient on tiny-model (117k weights) | 32 tasks"
    )
    assert first_line(RUN, CONFIG, width=60) == "run 20261122-101500-ab12 | PolicyGradient on tiny-model"
    assert first_line(Run("dev"), {}, width=60) == "run"


@pytest.mark.parametrize("width", range(1, 130, 7))
def test_the_first_line_is_one_line_of_any_width(width: int) -> None:
    line = first_line(RUN, {**CONFIG, "model": {"name": "two\nlines\x1b[31m"}}, width=width)
    assert len(line) <= width and line.isprintable()


REWARD = RewardMetrics(0.42578125, 0.98, 0.991, 38, (0.42578125, 0.7, 0.991, 0.98), (1, 20, 38, 40))


def summary_of(run_dir: Path, **options: Any) -> RunSummary:
    counts = {"succeeded": 1920, "failed": 3, "cancelled": 0}
    failures = {"TimeoutError: no answer\nwithin <60> seconds": 2, "ValueError: " + "no such luck " * 20: 1}
    return RunSummary(run_dir, counts, failures, reward=REWARD, seconds=326.4, run_id="ab12", **options)


def test_the_summary_says_how_a_run_ended_and_where_everything_is(tmp_path: Path) -> None:
    directory = tmp_path / "a run"
    (directory / "model").mkdir(parents=True)
    text = closing_summary(summary_of(directory, result={"best": 3}), 120)
    lines = text.splitlines()
    assert lines[:3] == [
        "finished in 5:26",
        "rollouts: 1,920 succeeded, 3 failed",
        "  2 x TimeoutError: no answer within <60> seconds",
    ]
    assert "reward: 0.4258 -> 0.98, best 0.991 at iteration 38" in lines
    assert "  ▁▄██" in lines
    assert "result: {'best': 3}" in lines
    assert f"run: {directory}" in lines and f"model: {directory / 'model'}" in lines
    assert f"leyden show '{directory}'" in text and f"leyden plot '{directory}'" in text
    assert f"leyden show '{directory}' --failed" in text
    assert "--failed" not in closing_summary(replace(summary_of(directory), failures={}), 120)
    assert str(summary_of(directory)).startswith("finished in 5:26")


def test_the_summary_shows_the_reward_of_the_validations_beside_that_of_the_training(tmp_path: Path) -> None:
    several = RewardMetrics(0.41, 0.92, 0.95, 20, (0.41, 0.95, 0.92), (1, 20, 40))
    once = RewardMetrics(0.5, 0.5, 0.5, 1, (0.5,), (1,))
    assert (
        "validation: 0.41 -> 0.92, best 0.95 at iteration 20"
        in str(summary_of(tmp_path, val_reward=several)).splitlines()
    )
    assert "validation: 0.5" in str(summary_of(tmp_path, val_reward=once)).splitlines()
    html = summary_of(tmp_path, val_reward=several)._repr_html_()
    assert ">validation</th>" in html and "0.41 -&gt; 0.92" in html
    for without in (summary_of(tmp_path), RunSummary(None, reward=once, val_reward=once)):
        assert "validation" not in str(without) + without._repr_html_()


@pytest.mark.parametrize("width", [52, 60, 80, 120])
def test_the_summary_fits_but_for_paths_and_commands(width: int) -> None:
    text = closing_summary(summary_of(Path(".leyden/run"), stopped="all 3 runners have ended; " * 5), width)
    assert text.startswith("stopped in 5:26")
    assert all(len(line) <= width for line in text.splitlines())
    assert "run: .leyden/run" in text.splitlines()
    assert "leyden show run" in text and "leyden plot run" in text


def test_a_summary_of_little_is_short() -> None:
    assert str(RunSummary(None, {"succeeded": 2})) == "rollouts: 2 succeeded"
    assert str(RunSummary(None)) == "rollouts: none"
    once = RewardMetrics(0.5, 0.5, 0.5, 1, (0.5,), (1,))
    assert "reward: 0.5" in str(RunSummary(None, reward=once)).splitlines()


def test_a_notebook_shows_the_summary_as_a_table_with_a_curve_and_nothing_of_it_is_markup(tmp_path: Path) -> None:
    html = summary_of(tmp_path / "<b>", result="<script>alert(1)</script>")._repr_html_()
    assert "<script>" not in html and "<b>" not in html and "<60>" not in html
    assert "TimeoutError: no answer within &lt;60&gt; seconds" in html
    assert "0.4258 -&gt; 0.98" in html
    assert html.count("<polyline") == 1 and html.count("<tr>") == html.count("</tr>") > 5
    assert "<svg" not in RunSummary(None)._repr_html_()


def test_a_result_that_cannot_be_shown_does_not_spoil_the_summary() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise ZeroDivisionError

    summary = RunSummary(None, result=Silent())
    assert "result: (its __repr__ raised ZeroDivisionError)" in str(summary).splitlines()
    assert "(its __repr__ raised" in summary._repr_html_()  # pyright: ignore[reportPrivateUsage]


def test_the_size_of_a_folder_is_that_of_its_models_its_checkpoints_and_its_records(tmp_path: Path) -> None:
    for name, n_bytes in (
        ("run.json", 100),
        ("store.sqlite", 1900),
        ("model/weights", 479_000),
        ("model-last/weights", 21_000),
        ("checkpoints/step-2/state", 2_000_000),
        ("best/state", 900_000),
        ("another-run/model/weights", 5_000_000),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(n_bytes))
    (tmp_path / "checkpoints" / "linked").hardlink_to(tmp_path / "best" / "state")
    assert folder_bytes(tmp_path) == {"model": 500_000, "checkpoints": 2_900_000, "records": 2000}
    wanted = "size: 3.4 MB (model 500 kB, checkpoints 2.9 MB, records 2 kB)"
    assert wanted in str(summary_of(tmp_path)).splitlines()
    assert "size: " not in str(summary_of(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("n_bytes", "text"), [(0, "0 B"), (999, "999 B"), (99_600, "99.6 kB"), (999_600, "1 MB"), (2.5e15, "2,500 TB")]
)
def test_a_size_is_short(n_bytes: float, text: str) -> None:
    assert size(n_bytes) == text
