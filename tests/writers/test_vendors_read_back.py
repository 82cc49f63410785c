"""What other people's packages were given is there when their own readers are asked. Runs in the environment `writers`."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leyden.errors import CheckpointError, ConfigError
from leyden.training import EpisodeStats, LogLevel, LogWriter, MetricsRow, MlflowWriter, TensorboardWriter, WandbWriter

pytestmark = [
    pytest.mark.writers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # MLflow's use of SQLAlchemy
]

Points = dict[str, list[tuple[int, float]]]
"""For each name the steps and their values, in the order in which they were written."""


def read_tensorboard(folder: Path, writer: LogWriter) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "board"))
    events.Reload()
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def read_mlflow(folder: Path, writer: LogWriter) -> Points:
    from mlflow import MlflowClient

    assert isinstance(writer, MlflowWriter) and writer.run_id is not None
    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/runs.db")
    run = client.get_run(writer.run_id)
    assert run.info.status == "FINISHED"
    histories = {name: client.get_metric_history(writer.run_id, name) for name in run.data.metrics}
    return {name: [(point.step, point.value) for point in history] for name, history in histories.items()}


def records(file: Path) -> Iterator[bytes]:
    """The records of a `.wandb` file: LevelDB's log format after a header of 7 bytes."""
    content, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def read_wandb(folder: Path, writer: LogWriter) -> Points:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # waits for its service process, which may still be writing when a run has finished
    points: Points = {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for content in records(file):
            record = Record()
            record.ParseFromString(content)
            step = record.history.step.num
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if not name.startswith("_"):
                    points.setdefault(name, []).append((step, json.loads(item.value_json)))
    return points


def tensorboard(folder: Path, **options: Any) -> LogWriter:
    return TensorboardWriter(folder / "board", **options)


def mlflow(folder: Path, **options: Any) -> LogWriter:
    return MlflowWriter("toys", tracking_uri=f"sqlite:///{folder}/runs.db", run_name="first", **options)


def weights_and_biases(folder: Path, **options: Any) -> LogWriter:
    return WandbWriter("toys", mode="offline", dir=folder, config={"lr": 0.1}, **options)


Vendor = tuple[Callable[..., LogWriter], Callable[[Path, LogWriter], Points]]
VENDORS: dict[str, Vendor] = {
    "tensorboard": (tensorboard, read_tensorboard),
    "mlflow": (mlflow, read_mlflow),
    "wandb": (weights_and_biases, read_wandb),
}


@pytest.fixture(params=VENDORS)
def vendor(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Vendor:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    return VENDORS[request.param]


def write_stages(writer: LogWriter, iterations: range) -> None:
    for iteration in iterations:
        writer.on_stage_start(iteration, "train")
        writer.write(MetricsRow(iteration, "train", 1.5, {"reward": iteration / 2, "note": "text", "games": iteration}))
        writer.write(MetricsRow(iteration, "val", 1.5, {"reward": -iteration / 4}))


def expected(iterations: range) -> Points:
    return {
        "reward": [(i, i / 2) for i in iterations],
        "games": [(i, i) for i in iterations],
        "val/reward": [(i, -i / 4) for i in iterations],
    }


def test_stages_are_read_back_by_the_vendors_reader(vendor: Vendor, tmp_path: Path) -> None:
    make, read = vendor
    writer = make(tmp_path)
    writer.open()
    write_stages(writer, range(1, 5))
    writer.close()
    writer.close()
    assert read(tmp_path, writer) == expected(range(1, 5))


def test_a_resumed_run_doubles_no_point(vendor: Vendor, tmp_path: Path) -> None:
    make, read = vendor
    writer = make(tmp_path)
    writer.open()
    write_stages(writer, range(1, 3))
    state = json.loads(json.dumps(writer.state_dict()))
    write_stages(writer, range(3, 4))  # after the checkpoint, lost by a kill
    writer.close()
    resumed = make(tmp_path)
    resumed.load_state_dict(state)
    resumed.open()
    write_stages(resumed, range(3, 6))
    resumed.close()
    points = read(tmp_path, resumed)
    if isinstance(resumed, WandbWriter):  # offline the lost points are in the first folder too, under the same run id
        assert resumed.run_id == state["run_id"]
        points = {name: sorted(set(each)) for name, each in points.items()}
    assert points == expected(range(1, 6))


def test_episodes_and_steps_are_read_back(vendor: Vendor, tmp_path: Path) -> None:
    make, read = vendor
    for rows in ("episode", "step"):
        folder = tmp_path / rows
        folder.mkdir()
        writer = make(folder, rows=rows)
        writer.open()
        writer.on_stage_start(1, "train")
        writer.on_env_all_ready()
        for length in (2, 1):
            writer.on_env_reset(0, None)
            for step in range(length):
                logs = {"cost": (LogLevel.PERIODIC, 0.5), "text": (LogLevel.INFO, "x"), "obs": (LogLevel.DEBUG, 1.0)}
                writer.on_env_step(0, None, 1.0, step == length - 1, {"log": logs})
            writer.log_episode(EpisodeStats(length, float(length), {"cost": 0.5}, env_id=0))
        writer.on_env_all_done()
        writer.close()
        if rows == "episode":
            lengths = [(1, 2), (2, 1)]
            assert read(folder, writer) == {
                "episode/cost": [(1, 0.5), (2, 0.5)],
                "episode/length": lengths,
                "episode/reward": lengths,
            }
        else:
            each = range(1, 4)
            assert read(folder, writer) == {
                "step/cost": [(i, 0.5) for i in each],
                "step/reward": [(i, 1.0) for i in each],
            }


def test_a_run_that_mlflow_does_not_have_is_refused_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer = mlflow(tmp_path)
    writer.load_state_dict({"run_id": "f" * 32})
    with pytest.raises(CheckpointError, match=f"run '{'f' * 32}' is not in sqlite"):
        writer.open()


def test_a_store_that_mlflow_cannot_open_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"cannot use the store 'sqlite:.*/file/runs\.db'"):
        MlflowWriter(tracking_uri=f"sqlite:///{tmp_path}/file/runs.db").open()


def test_tensorboard_may_have_a_number_of_the_row_as_its_axis(tmp_path: Path) -> None:
    writer = TensorboardWriter(tmp_path / "board", axis="total_steps")
    writer.open()
    for iteration, metrics in enumerate(
        [{"reward": 1.0, "total_steps": 50}, {"reward": 2.0, "total_steps": 120}, {"reward": 3.0}]
    ):
        writer.write(MetricsRow(iteration + 1, "train", 0.0, dict(metrics)))
    writer.close()
    assert read_tensorboard(tmp_path, writer)["reward"] == [(50, 1.0), (120, 2.0)]
