"""Values become metrics, metrics become rows, rows survive."""

import csv
import io
import json
import math
import pickle
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.errors import CheckpointError, ConfigError, InvalidMetrics
from leyden.training import (
    ConsoleWriter,
    CsvWriter,
    JsonlWriter,
    LogCollector,
    LogLevel,
    LogWriter,
    MetricsAggregator,
    MetricsRow,
    PickleWriter,
    read_pickled_rows,
)
from leyden.training.metrics import clean_metrics
from leyden.training.rng import capture_rng, restore_rng
from tests.training.toy import MEMORY_DISK


class Scalar:
    """What NumPy scalars and tensors of one element look like."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def item(self) -> Any:
        if isinstance(self.value, list):
            raise ValueError("only one element tensors can be converted to Python scalars")
        return self.value


def test_a_buffer_reduces_each_metric_over_the_steps_that_have_it() -> None:
    buffer, collector = MetricsAggregator({"tokens": "sum", "lr": "last"}), LogCollector()
    for tokens, lr, reward in [(10, 0.1, 1.0), (20, 0.2, None), (30, 0.3, 0.0)]:
        collector.reset()
        collector.add_scalar("tokens", tokens)
        collector.add_scalar("lr", Scalar(lr))
        if reward is not None:
            collector.add_scalar("reward", reward)
        buffer.add(collector.logs())
    assert buffer.metrics() == {"tokens": 60.0, "lr": 0.3, "reward": 0.5}
    assert buffer.counts() == {"tokens": 3, "lr": 3, "reward": 2}
    buffer.clear()
    assert buffer.metrics() == {}


def test_a_metric_is_averaged_over_the_episodes_that_have_it_and_numpy_numbers_are_numbers() -> None:
    np = pytest.importorskip("numpy")
    episodes = MetricsAggregator({})
    episodes.add({"x": 1.0, "reward": 2})
    episodes.add({"reward": 4})
    assert episodes.metrics() == {"x": 1.0, "reward": 3.0}, "not 0.5: one of two episodes has no x"
    steps = MetricsAggregator()
    for value in (np.float32(1), np.array(3.0), np.int64(5), np.bool_(True)):
        collector = LogCollector()
        collector.add_scalar("value", value)
        collector.add_any("raw", value)
        collector.add_scalar("reward", value)
        steps.add(collector.logs())
    assert steps.metrics() == {"value": 2.5, "raw": 2.5, "reward": 10.0}


def test_a_collector_keeps_what_is_important_enough_and_looks_at_nothing_else() -> None:
    collector = LogCollector(LogLevel.INFO)
    collector.add_scalar("dropped", "not even looked at")
    collector.add_string("dropped", "x", LogLevel.DEBUG)
    collector.add_string("note", "x", LogLevel.INFO)
    collector.add_any("object", {"a": 1}, LogLevel.CRITICAL)
    assert collector.logs() == {"note": (LogLevel.INFO, "x"), "object": (LogLevel.CRITICAL, {"a": 1})}
    buffer = MetricsAggregator(loglevel=LogLevel.INFO)
    buffer.add({"low": (LogLevel.PERIODIC, 1.0), "high": (LogLevel.INFO, 2.0), "text": (LogLevel.CRITICAL, "x")})
    assert buffer.metrics() == {"high": 2.0}


def test_a_collector_refuses_what_it_cannot_keep() -> None:
    collector = LogCollector()
    collector.add_scalar("reward", 1)
    with pytest.raises(InvalidMetrics, match="'reward' was logged twice"):
        collector.add_scalar("reward", 2)
    for value in ("high", None, [1.0], Scalar([1, 2])):
        with pytest.raises(InvalidMetrics, match="'x'"):
            collector.add_scalar("x", value)
    np = pytest.importorskip("numpy")
    with pytest.raises(InvalidMetrics, match="'x' has 2 elements, not one number"):
        collector.add_scalar("x", np.ones(2))
    with pytest.raises(InvalidMetrics, match="add_string takes strings"):
        collector.add_string("x", 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidMetrics, match="add_array takes arrays"):
        collector.add_array("x", [1.0])
    collector.add_array("x", np.ones(2))
    with pytest.raises(InvalidMetrics, match="'x' was logged twice"):
        collector.add_any("x", None)
    with pytest.raises(ConfigError, match="unknown reducer 'median'; choose one of mean, sum, last"):
        MetricsAggregator({"x": "median"})


def test_metrics_are_cleaned_to_plain_values() -> None:
    cleaned = clean_metrics({"a": Scalar(0.5), "b": True, "c": "x", "d": 3}, source="step")
    assert cleaned == {"a": 0.5, "b": 1, "c": "x", "d": 3}
    assert type(cleaned["b"]) is int
    assert clean_metrics(None, source="step") == {}


def row(iteration: int, **metrics: Any) -> MetricsRow:
    return MetricsRow(iteration, "train", float(iteration), metrics)


def test_the_console_shows_a_row_as_a_line() -> None:
    stream = io.StringIO()
    ConsoleWriter(stream).write(row(7, reward=0.53125, games=12, note="two\nlines"))
    assert stream.getvalue() == "[   7] train  reward 0.5312  games 12  note two lines\n"


def test_the_console_shows_a_row_in_one_line_and_in_the_streams_encoding_whatever_its_names_are() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    ConsoleWriter(stream).write(row(3, **{"µ\n[   4] \x1b[2J": 0.5}))
    assert raw.getvalue() == b"[   3] train  ? [   4]  [2J 0.5\n"


def test_the_console_shows_five_figures_unless_others_are_chosen() -> None:
    many = {f"figure{index}": float(index) for index in range(20)}
    metrics = {**many, "learning_rate": 1e-5, "loss": -0.00003, "reward": 0.5}

    def line(**options: Any) -> str:
        stream = io.StringIO()
        ConsoleWriter(stream, **options).write(row(1, **metrics))
        return stream.getvalue().removeprefix("[   1] train  ").rstrip()

    assert line() == "reward 0.5  loss -3e-05  figure0 0  figure1 1  figure2 2"
    assert line(metrics=["learning_rate", "missing", "reward"]) == "learning_rate 1e-05  reward 0.5"
    assert line(metrics="all").count("  ") == len(metrics) - 1
    with pytest.raises(ConfigError, match=r"metrics is 'reward'; give a list of names, \['reward'\], or 'all'"):
        ConsoleWriter(metrics="reward")  # pyright: ignore[reportArgumentType]


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=4).filter(
    lambda name: name not in ("iteration", "stage", "seconds")
)
values = st.floats() | st.integers(-(10**20), 10**20) | st.text(st.characters(codec="utf-8"), max_size=6)
histories = st.lists(st.dictionaries(names, values, max_size=4), min_size=1, max_size=8)


def write_all(writer: LogWriter, history: list[dict[str, Any]], first: int = 0) -> None:
    for iteration, metrics in enumerate(history, first):
        writer.write(MetricsRow(iteration, "train", 1.5, metrics))


@settings(max_examples=60)
@given(history=histories, data=st.data())
@pytest.mark.parametrize("kind", [CsvWriter, JsonlWriter, PickleWriter])
def test_a_file_cut_at_a_checkpoint_and_continued_equals_the_uninterrupted_one(
    kind: type[CsvWriter] | type[JsonlWriter] | type[PickleWriter], history: list[dict[str, Any]], data: st.DataObject
) -> None:
    saved_at = data.draw(st.integers(0, len(history)))
    lost_after = data.draw(st.integers(saved_at, len(history)))
    torn = data.draw(st.sampled_from([b"", b'12,"torn', b"\x80\x04", b'{"iteration": 3, "rew']))
    with tempfile.TemporaryDirectory(dir=MEMORY_DISK) as folder:
        whole, parts = kind(Path(folder, "whole")), kind(Path(folder, "parts"))
        whole.open()
        write_all(whole, history)
        whole.close()
        parts.open()
        write_all(parts, history[:saved_at])
        state = json.loads(json.dumps(parts.state_dict()))
        write_all(parts, history[saved_at:lost_after], saved_at)
        parts.close()
        with parts.path.open("ab") as file:
            file.write(torn)
        resumed = kind(parts.path)
        resumed.load_state_dict(state)
        resumed.open()
        write_all(resumed, history[saved_at:], saved_at)
        resumed.close()
        assert resumed.path.read_bytes() == whole.path.read_bytes()


def test_a_column_that_appears_later_loses_no_row_and_numbers_read_back_the_same(tmp_path: Path) -> None:
    writer = CsvWriter(tmp_path / "deep" / "metrics.csv")
    writer.open()
    write_all(writer, [{"a": 0.1 + 0.2}, {"b": 2}, {"a": math.inf, "c": "x,y"}])
    writer.close()
    with writer.path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["iteration", "stage", "seconds", "a", "b", "c"]
    assert [(r["a"], r["b"], r["c"]) for r in rows] == [(repr(0.1 + 0.2), "", ""), ("", "2", ""), ("inf", "", "x,y")]
    assert float(rows[0]["a"]) == 0.1 + 0.2


def test_json_lines_hold_null_for_what_json_has_no_number_for(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.open()
    write_all(writer, [{"a": math.nan, "b": -math.inf, "c": 1.0}])
    writer.close()
    assert json.loads(writer.path.read_text()) == {
        "iteration": 0,
        "stage": "train",
        "seconds": 1.5,
        "a": None,
        "b": None,
        "c": 1.0,
    }


@pytest.mark.parametrize("kind", [CsvWriter, JsonlWriter, PickleWriter])
def test_a_writer_serves_the_next_run_from_the_start(
    kind: type[CsvWriter] | type[JsonlWriter] | type[PickleWriter], tmp_path: Path
) -> None:
    writer = kind(tmp_path / "rows")
    contents: list[bytes] = []
    for _ in range(2):
        writer.open()
        write_all(writer, [{"a": 1}, {"b": 2}])
        writer.close()
        contents.append(writer.path.read_bytes())
    assert contents[0] == contents[1]


@pytest.mark.parametrize("kind", [CsvWriter, JsonlWriter, PickleWriter])
@pytest.mark.parametrize("loss", ["gone", "short"])
def test_a_file_that_lacks_rows_of_the_checkpoint_is_refused_by_name(
    kind: type[CsvWriter] | type[JsonlWriter] | type[PickleWriter], loss: str, tmp_path: Path
) -> None:
    writer = kind(tmp_path / "rows")
    writer.open()
    write_all(writer, [{"a": 1}, {"a": 2}])
    state = writer.state_dict()
    writer.close()
    if loss == "gone":
        writer.path.unlink()
    else:
        writer.path.write_bytes(writer.path.read_bytes()[:-20])
    resumed = kind(writer.path)
    resumed.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"rows.*the checkpoint counts"):
        resumed.open()
    resumed.close()


def test_the_random_states_of_python_numpy_and_torch_go_on_where_they_were() -> None:
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")

    def drawn() -> list[float]:
        return [random.gauss(0, 1), random.random(), *np.random.standard_normal(3), *torch.randn(3).tolist()]

    drawn()
    states = json.loads(json.dumps(capture_rng()))
    expected = drawn()
    restore_rng(states)
    assert drawn() == expected


def test_the_random_states_of_a_process_without_torch_do_not_load_it() -> None:
    program = (
        "import sys\nfrom leyden.training.rng import capture_rng, restore_rng\n"
        "states = capture_rng()\nrestore_rng(states)\nassert 'torch' not in states and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


def test_a_saved_state_of_torch_is_passed_over_with_a_warning_where_torch_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torch")
    states = capture_rng()
    monkeypatch.setitem(sys.modules, "torch", None)
    restore_rng(states)
    assert "the saved run had loaded torch, which cannot be imported here" in caplog.text


def test_pickled_rows_read_back_to_the_bit_and_reading_runs_no_code(tmp_path: Path) -> None:
    writer = PickleWriter(tmp_path / "rows.pkl")
    writer.open()
    write_all(writer, [{"a": 0.1 + 0.2, "b": "x"}, {"a": math.inf}])
    writer.close()
    assert [(r["a"], r.get("b")) for r in read_pickled_rows(writer.path)] == [(0.1 + 0.2, "x"), (math.inf, None)]

    class Evil:
        def __reduce__(self) -> Any:
            return (Path(tmp_path, "ran").touch, ())

    with writer.path.open("ab") as file:
        file.write(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="plain containers only"):
        list(read_pickled_rows(writer.path))
    assert not (tmp_path / "ran").exists()
    writer.path.write_bytes(writer.path.read_bytes()[:40])
    with pytest.raises(CheckpointError, match="damaged in the row that begins at byte 0"):
        list(read_pickled_rows(writer.path))
