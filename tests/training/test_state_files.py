"""A nested state in files: in a directory of plain formats, and in one `.pth` file that `torch.load(weights_only=True)` reads."""

import math
import os
import pickle
import tempfile
from collections import OrderedDict
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.errors import CheckpointError, ConfigError
from leyden.training import Callback, Checkpoint, EarlyStopping, TrainLoop, open_checkpoint
from leyden.training.pth import read_pth, write_pth
from leyden.training.state_files import read_state, write_state
from tests.training.toy import MEMORY_DISK, ToyVessel

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
torch.set_num_threads(1)

NUMPY = ["float32", "float64", "int64", "uint8", "uint32", "bool", "complex64"]
TORCH = ["float32", "float64", "bfloat16", "float16", "int64", "uint8", "bool"]
arrays = st.builds(
    lambda shape, kind: np.asarray(np.random.default_rng(0).standard_normal(shape) * 9).astype(kind),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(NUMPY),
)
tensors = st.builds(
    lambda shape, kind: (torch.randn(shape) * 9).to(getattr(torch, kind)),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(TORCH),
)
plain = st.none() | st.booleans() | st.integers(-(2**128), 2**128) | st.floats() | st.text(max_size=5)
keys = st.text(max_size=5) | st.integers(0, 9) | st.sampled_from(["__tensor__", "__array__", "__tuple__", "__pairs__"])
states = st.recursive(
    plain | arrays | tensors,
    lambda parts: (
        st.lists(parts, max_size=3) | st.lists(parts, max_size=3).map(tuple) | st.dictionaries(keys, parts, max_size=3)
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        bits = (a.dtype, a.shape) == (b.dtype, b.shape)
        return bits and a.flatten().view(torch.uint8).equal(b.flatten().view(torch.uint8)) if a.numel() else bits
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    return a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


@settings(max_examples=60)
@given(state=states)
def test_a_state_written_to_files_and_read_is_the_same_to_the_bit(state: Any) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY_DISK) as folder:
        write_state(state, Path(folder))
        assert same(read_state(Path(folder)), state)


@settings(max_examples=40)
@given(state=states.filter(lambda state: "__array__" not in repr(state)))
def test_a_state_in_one_file_is_the_same_and_torch_loads_it_without_running_code(state: Any) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY_DISK) as folder:
        path = Path(folder, "3.pth")
        write_pth(path, {"current_iter": 3, "metrics": {"reward": 1.5}}, state)
        saved = read_pth(path)
        assert same(saved.vessel_state, state) and saved.iteration == 3
        assert torch.load(path, weights_only=True)["metrics"] == {"reward": 1.5}


class Level(IntEnum):
    HIGH = 3


def test_what_is_nearly_plain_becomes_plain_and_what_is_not_is_refused_by_its_place(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 1)
    state = {
        "net": OrderedDict(module.state_dict()),
        "parameter": module.weight,
        "level": Level.HIGH,
        "x": np.float32(2),
    }
    write_state(state, tmp_path)
    again = read_state(tmp_path)
    assert (again["level"], again["x"], type(again["x"])) == (3, 2.0, float)
    assert again["net"]["weight"].equal(module.weight) and not again["parameter"].requires_grad
    for bad, where in (
        ({"opt": [{"f": len}]}, r"state\['opt'\]\[0\]\['f'\] is a builtin_function_or_method"),
        ({"a": {1.5: 0}}, r"state\['a'\] has the key 1\.5"),
        ({"o": np.array([None])}, r"state\['o'\] is a ndarray"),
    ):
        with pytest.raises(CheckpointError, match=where):
            write_state(bad, tmp_path)


def test_a_key_that_stands_for_an_array_in_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'__array__' stands for an array"):
        write_pth(tmp_path / "a.pth", {"current_iter": 1}, {"deep": [{"__array__": 1}]})


def test_a_view_is_saved_without_what_it_is_a_view_of(tmp_path: Path) -> None:
    big = torch.zeros(1_000_000)
    write_pth(tmp_path / "view.pth", {"current_iter": 1}, {"row": big[:3]})
    assert (tmp_path / "view.pth").stat().st_size < 10_000


class Policy:
    """A vessel as Qlib's are: one value is its state."""

    def __init__(self) -> None:
        self.weight, self.moments, self.steps = torch.zeros(2), np.zeros(2), 0

    def step(self, iteration: int) -> dict[str, float]:
        self.weight, self.moments = self.weight * 0.9 + iteration, self.moments + 1
        self.steps += 1
        return {"reward": float(self.weight[0])}

    def validate(self, iteration: int) -> dict[str, float]:
        return {"reward": -abs(float(self.weight[0]) - 2.0)}

    def state_dict(self) -> dict[str, Any]:
        return {"policy": {"weight": self.weight}, "moments": self.moments, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight, self.moments, self.steps = state["policy"]["weight"], state["moments"], state["steps"]


def train(folder: Path, max_iters: int, source: str | None = None, **options: Any) -> Policy:
    vessel, checkpoint = Policy(), Checkpoint(folder, **options)
    loop = TrainLoop(max_iters=max_iters, val_every_n_iters=2, callbacks=[checkpoint, EarlyStopping(patience=99)])
    loop.run(vessel, resume=open_checkpoint(folder / source) if source else None)
    return vessel


@pytest.mark.parametrize("source", [".", "step-000002", "002.pth", "latest.pth"])
def test_a_vessel_with_nothing_but_a_state_dict_resumes_from_a_directory_or_a_file(tmp_path: Path, source: str) -> None:
    whole = train(tmp_path / "whole", 6, filename="{iter:03d}.pth")
    train(tmp_path / "parts", 2, filename="{iter:03d}.pth")
    parts = train(tmp_path / "parts", 6, source, filename="{iter:03d}.pth")
    assert same(parts.state_dict(), whole.state_dict())


def test_a_file_is_named_by_iteration_time_and_metrics_and_follows_the_checkpoints_that_are_kept(
    tmp_path: Path,
) -> None:
    train(tmp_path, 7, filename="{iter:03d}-{val/reward:.2f}.pth", every_n_iters=2, keep=1, monitor="val/reward")
    rewards = [-1.0, -2.439, -6.875, -6.875]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"002-{rewards[0]:.2f}.pth",
        *(path.name for path in sorted(tmp_path.glob("007-*.pth"))),
        "latest.pth",
        "step-000002",
        "step-000007",
    ]
    (newest,) = tmp_path.glob("007-*.pth")
    assert (tmp_path / "latest.pth").readlink() == Path(newest.name)
    assert torch.load(tmp_path / "latest.pth", weights_only=True)["vessel"]["policy"]["weight"].shape == (2,)
    train(tmp_path / "copied", 2, filename="{time}.pth", save_latest="copy")
    assert (
        not (tmp_path / "copied" / "latest.pth").is_symlink()
        and read_pth(tmp_path / "copied/latest.pth").iteration == 2
    )
    train(tmp_path / "all", 3, filename="{iter}.pth", save_latest=None, keep=None)
    assert sorted(path.name for path in (tmp_path / "all").glob("*.pth")) == ["1.pth", "2.pth", "3.pth"]


def test_a_metric_that_a_file_name_needs_and_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"needs a validation at each save, but every_n_iters is 1 and val_every_n_iters 2"
    ):
        train(tmp_path, 3, filename="{iter}-{val/reward:.1f}.pth")
    with pytest.raises(
        CheckpointError, match=r"needs \{rewrad\}, which is not there; did you mean 'reward'\? There are: iter"
    ):
        train(tmp_path / "misspelt", 3, filename="{iter}-{rewrad:.1f}.pth")
    with pytest.raises(CheckpointError, match=r"becomes '\.\./1\.pth', which is in another directory"):
        train(tmp_path / "deep", 3, filename="../{iter}.pth")
    with pytest.raises(CheckpointError, match=r"needs \{iter\.real\}"):
        train(tmp_path / "attribute", 3, filename="{iter.real}.pth")


def test_a_vessel_without_a_state_dict_is_refused_when_a_file_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ToyVessel has no state_dict"):
        TrainLoop(max_iters=1, callbacks=[Checkpoint(tmp_path, filename="{iter}.pth")]).run(ToyVessel())

    class Bare:
        def step(self, iteration: int) -> None: ...
        def validate(self, iteration: int) -> None: ...

    with pytest.raises(ConfigError, match=r"Bare has neither save\(path\) and load\(path\) nor state_dict"):
        TrainLoop(max_iters=1, callbacks=[Checkpoint(tmp_path / "bare")]).run(Bare())


def test_a_file_that_a_kill_left_out_is_made_good_on_resume(tmp_path: Path) -> None:
    train(tmp_path, 2, filename="{iter:03d}.pth")
    for lost in ("002.pth", "latest.pth"):
        (tmp_path / lost).unlink()
        train(tmp_path, 2, ".", filename="{iter:03d}.pth")
        assert read_pth(tmp_path / "latest.pth").iteration == read_pth(tmp_path / "002.pth").iteration == 2


def test_a_file_that_a_kill_kept_from_being_removed_is_removed_on_resume(tmp_path: Path) -> None:
    """What a kill leaves between a new checkpoint and the removal of the oldest file: all is there but that."""
    train(tmp_path, 3, filename="{iter:03d}-a.pth")
    (tmp_path / "001-a.pth").write_bytes((tmp_path / "002-a.pth").read_bytes())
    (tmp_path / "mine.pth").write_bytes(b"of somebody else")
    train(tmp_path, 4, ".", filename="{iter:03d}-b.pth")
    assert sorted(path.name for path in tmp_path.glob("*.pth")) == ["003-a.pth", "004-b.pth", "latest.pth", "mine.pth"]


def test_a_stop_before_a_validation_is_saved_under_a_name_without_its_metric(tmp_path: Path) -> None:
    class Stopping(Callback):
        def on_train_end(self, loop: TrainLoop, vessel: Any) -> None:
            if loop.current_iter == 3:
                loop.stop()

    checkpoint = Checkpoint(tmp_path, "{iter}-{val/reward:.1f}.pth", keep=None, every_n_iters=1)
    TrainLoop(max_iters=9, val_every_n_iters=1, callbacks=[Stopping(), checkpoint]).run(Policy())
    names = sorted(path.name for path in tmp_path.glob("[0-9]*.pth"))
    assert [name.split("-", 1)[0] for name in names] == ["1", "2", "3"]
    assert names[2] == "3-nan.pth"
    by_time = Checkpoint(tmp_path / "time", "{iter}-{val/reward:.1f}.pth", keep=None, time_interval=0.0)
    TrainLoop(max_iters=2, val_every_n_iters=2, callbacks=[by_time]).run(Policy())
    assert (tmp_path / "time" / "1-nan.pth").exists()


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def test_loading_a_checkpoint_runs_no_code_and_a_damaged_one_is_refused_by_name(tmp_path: Path) -> None:
    good = tmp_path / "good.pth"
    write_pth(good, {"current_iter": 1}, {"weight": torch.ones(1000)})
    ran = tmp_path / "ran"
    cases: dict[str, bytes] = {
        "pickle": pickle.dumps({"kind": "leyden checkpoint", "vessel": Evil(ran)}),
        "cut": good.read_bytes()[:-500],
        "empty": b"",
        "text": b"{}",
    }
    for name, content in cases.items():
        path = tmp_path / f"{name}.pth"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{name}\.pth is damaged, or holds more than plain"):
            open_checkpoint(path)
    torch.save({"vessel": Evil(ran)}, tmp_path / "evil.pth")
    with pytest.raises(CheckpointError, match="evil"):
        open_checkpoint(tmp_path / "evil.pth")
    torch.save({"weight": torch.ones(1)}, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match="not a checkpoint of Leyden;"):
        open_checkpoint(tmp_path / "other.pth")
    assert not ran.exists()
    np.save(tmp_path / "arrays.npz", np.array([Evil(ran)]), allow_pickle=True)
    (tmp_path / "arrays.npz.npy").rename(tmp_path / "arrays.npz")
    (tmp_path / "state.json").write_text('{"a": {"__array__": "0"}}')
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_state(tmp_path)
    assert not ran.exists()
