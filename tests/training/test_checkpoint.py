"""Checkpoints: what is there is whole, and what is not is refused by name."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leyden.errors import CheckpointError, ConfigError
from leyden.training import Checkpoint, CheckpointStore, TrainLoop, open_checkpoint
from tests.training.toy import ToyVessel


def save(store: CheckpointStore, *iterations: int) -> None:
    for iteration in iterations:
        vessel = store.prepare(iteration)
        (vessel / "deep").mkdir()
        (vessel / "weights.bin").write_bytes(bytes([iteration % 256]) * 100)
        (vessel / "deep" / "more.json").write_text("{}")
        store.commit(iteration, {"current_iter": iteration})


def test_a_checkpoint_says_what_is_in_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, config={"lr": 0.1})
    save(store, 12)
    manifest = json.loads((tmp_path / "step-000012" / "manifest.json").read_text())
    assert (manifest["format"], manifest["iteration"], manifest["config"]) == (1, 12, {"lr": 0.1})
    assert sorted(manifest["files"]) == ["state.json", "vessel/deep/more.json", "vessel/weights.bin"]
    assert manifest["files"]["vessel/weights.bin"] == {
        "bytes": 100,
        "sha256": hashlib.sha256(b"\x0c" * 100).hexdigest(),
    }
    saved = store.latest()
    assert saved is not None and (saved.iteration, saved.state) == (12, {"current_iter": 12})
    assert (saved.vessel_path / "weights.bin").read_bytes() == b"\x0c" * 100


def test_no_checkpoint_is_none_not_an_error(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "missing").latest() is None
    (tmp_path / "step-12").mkdir()
    (tmp_path / "other").write_text("")
    assert CheckpointStore(tmp_path).latest() is None


def test_the_order_is_by_number_also_beyond_six_digits(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    save(store, 999_998, 999_999, 1_000_000)
    assert store.steps() == [999_998, 999_999, 1_000_000]
    saved = store.latest()
    assert saved is not None and saved.iteration == 1_000_000


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "manifest missing": (
        lambda step: (step / "manifest.json").unlink(),
        r"manifest\.json cannot be read: No such file",
    ),
    "manifest cut": (lambda step: (step / "manifest.json").write_text('{"kind'), r"manifest\.json is not JSON"),
    "manifest binary": (
        lambda step: (step / "manifest.json").write_bytes(b"\xff\xfe\x00"),
        r"manifest\.json is not JSON",
    ),
    "manifest a list": (lambda step: (step / "manifest.json").write_text("[]"), r"manifest\.json holds a list"),
    "foreign": (
        lambda step: (step / "manifest.json").write_text('{"format": 1}'),
        r"not a manifest of a Leyden checkpoint",
    ),
    "no files": (lambda step: edit(step / "manifest.json", files=3), r"does not list its files"),
    "outside": (
        lambda step: edit(step / "manifest.json", files={"state.json": {}, "../x": {}}),
        r"state\.json has \d+ bytes",
    ),
    "escaping": (lambda step: edit(step / "manifest.json", files={"../x": {}, "state.json": {}}), r"lies outside"),
    "other iteration": (lambda step: edit(step / "manifest.json", iteration=7), r"is of iteration 7"),
    "file missing": (lambda step: (step / "vessel/weights.bin").unlink(), r"weights\.bin cannot be read"),
    "file cut": (lambda step: (step / "vessel/weights.bin").write_bytes(b"x"), r"weights\.bin has 1 bytes, .* 100"),
    "bit flipped": (lambda step: flip_a_bit(step / "vessel/weights.bin"), r"weights\.bin is not what was saved"),
    "state flipped": (lambda step: flip_a_bit(step / "state.json"), r"state\.json is not what was saved"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, 2)
    harm, message = DAMAGE[kind]
    harm(tmp_path / "step-000002")
    with pytest.raises(CheckpointError, match=message):
        store.load(2)
    saved = store.latest()
    assert saved is not None and saved.iteration == 1
    assert "passed over a damaged checkpoint" in caplog.text and "step-000002" in caplog.text


def test_when_every_checkpoint_is_damaged_the_run_does_not_start_from_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, 2)
    for step in (1, 2):
        flip_a_bit(tmp_path / f"step-00000{step}" / "state.json")
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        store.latest()


def test_a_newer_format_is_refused_and_neither_passed_over_nor_replaced(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, 2)
    edit(tmp_path / "step-000002" / "manifest.json", format=2, leyden_version="9.9")
    with pytest.raises(CheckpointError, match=r"format 2, written by Leyden 9\.9; this one reads up to 1"):
        store.latest()
    with pytest.raises(CheckpointError, match="checkpoint of iteration 2, this run is at 0"):
        TrainLoop(max_iters=3, callbacks=[Checkpoint(tmp_path)]).run(ToyVessel())


def test_another_configuration_is_refused_by_the_option_that_differs(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path, config={"lr": 0.1, "betas": (0.9, 0.99)}), 1)
    assert CheckpointStore(tmp_path, config={"betas": [0.9, 0.99], "lr": 0.1}).latest() is not None
    with pytest.raises(CheckpointError, match=r"was made with lr=0\.1, this run has lr=0\.2"):
        CheckpointStore(tmp_path, config={"lr": 0.2, "betas": (0.9, 0.99)}).latest()


def test_a_damaged_newer_checkpoint_is_replaced_when_its_step_is_done_again_and_pushes_out_no_good_one(
    tmp_path: Path,
) -> None:
    def run(max_iters: int) -> ToyVessel:
        checkpoint, vessel = Checkpoint(tmp_path, keep=1), ToyVessel()
        TrainLoop(max_iters=max_iters, callbacks=[checkpoint]).run(vessel, resume=checkpoint.latest())
        return vessel

    run(2)
    (tmp_path / "step-000004").mkdir()
    assert run(3).steps == [0, 1, 2]
    assert CheckpointStore(tmp_path).steps() == [3, 4]
    assert run(4).steps == [0, 1, 2, 3]
    assert CheckpointStore(tmp_path).steps() == [4] and CheckpointStore(tmp_path).damage(4) is None


def test_what_an_interrupted_save_left_is_cleared_away(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    (store.prepare(3) / "half").write_text("")
    TrainLoop(max_iters=1, callbacks=[Checkpoint(tmp_path)]).run(ToyVessel())
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_keeping_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep is 0"):
        Checkpoint(tmp_path, keep=0)
    with pytest.raises(ConfigError, match="every_n_iters is 0"):
        Checkpoint(tmp_path, every_n_iters=0)


# ---- when, which, and what else ------------------------------------------------------------------------------------------


class Scripted(ToyVessel):
    """Validation rewards from a list."""

    def __init__(self, rewards: list[float]) -> None:
        super().__init__()
        self.rewards = rewards

    def validate(self, iteration: int) -> dict[str, Any]:
        return {"reward": self.rewards[iteration - 1]}


def steps_of(folder: Path) -> list[int]:
    return CheckpointStore(folder).steps()


def test_checkpoints_every_n_iterations_coincide_with_validations_every_n(tmp_path: Path) -> None:
    validated: list[int] = []

    class Vessel(ToyVessel):
        def validate(self, iteration: int) -> dict[str, Any]:
            validated.append(iteration)
            return {}

    checkpoint = Checkpoint(tmp_path, every_n_iters=3, keep=None)
    TrainLoop(max_iters=7, val_every_n_iters=3, callbacks=[checkpoint]).run(Vessel())
    assert (validated, steps_of(tmp_path)) == ([3, 6], [3, 6, 7])
    checkpoint = Checkpoint(tmp_path / "no end", every_n_iters=3, keep=None, save_on_fit_end=False)
    TrainLoop(max_iters=7, callbacks=[checkpoint]).run(ToyVessel())
    assert steps_of(tmp_path / "no end") == [3, 6]


def test_a_time_interval_is_counted_from_the_last_save(tmp_path: Path) -> None:
    now = 100.0

    class Slow(ToyVessel):
        def step(self, iteration: int) -> dict[str, Any]:
            nonlocal now
            now += 4.0
            return super().step(iteration)

    checkpoint = Checkpoint(tmp_path, time_interval=10, keep=None, save_on_fit_end=False, clock=lambda: now)
    TrainLoop(max_iters=8, callbacks=[checkpoint]).run(Slow())
    assert steps_of(tmp_path) == [3, 6]
    both = Checkpoint(tmp_path / "both", time_interval=10, every_n_iters=4, keep=None, clock=lambda: now)
    TrainLoop(max_iters=8, callbacks=[both]).run(Slow())
    assert steps_of(tmp_path / "both") == [3, 4, 7, 8]


def test_the_best_checkpoint_is_kept_beside_the_newest_and_known_after_a_resume(tmp_path: Path) -> None:
    rewards = [1.0, 3.0, 2.0, 2.0, 2.0, 9.0, 0.0, 0.0]
    seen: list[tuple[int | None, list[int]]] = []
    for max_iters in (1, 5, 7, 8):
        checkpoint = Checkpoint(tmp_path, every_n_iters=5, keep=1, monitor="val/reward")
        loop = TrainLoop(max_iters=max_iters, val_every_n_iters=1, callbacks=[checkpoint])
        loop.run(Scripted(rewards), resume=checkpoint.latest())
        best = Checkpoint(tmp_path).best()
        seen.append((best and best.iteration, steps_of(tmp_path)))
    assert seen == [(1, [1]), (2, [2, 5]), (6, [6, 7]), (6, [6, 8])]
    with pytest.raises(
        ConfigError,
        match=r"Checkpoint needs the metric 'val/score', which is not there.* There are: late, note, reward",
    ):
        TrainLoop(max_iters=4, val_every_n_iters=4, callbacks=[Checkpoint(tmp_path / "x", monitor="val/score")]).run(
            Scripted(rewards)
        )


def test_a_best_checkpoint_that_is_gone_is_named_and_the_next_one_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def run(max_iters: int) -> Checkpoint:
        checkpoint = Checkpoint(tmp_path, keep=1, monitor="val/reward")
        loop = TrainLoop(max_iters=max_iters, val_every_n_iters=1, callbacks=[checkpoint])
        loop.run(Scripted([5.0, 1.0, 0.0]), resume=checkpoint.latest())
        return checkpoint

    run(2)
    shutil.rmtree(tmp_path / "step-000001")
    assert run(3).best_iter == 3
    assert "the best checkpoint so far, of iteration 1, is not in" in caplog.text


def test_the_link_to_the_latest_is_relative_and_survives_moving_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    TrainLoop(max_iters=3, callbacks=[Checkpoint("run/checkpoints", save_latest="link")]).run(ToyVessel())
    assert Path("run/checkpoints/latest").readlink() == Path("step-000003")
    Path("run").rename("moved")
    assert open_checkpoint("moved/checkpoints/latest").iteration == 3
    assert not list(Path("moved/checkpoints").glob(".tmp-*"))


def test_what_an_error_interrupts_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    class Failing(ToyVessel):
        def step(self, iteration: int) -> dict[str, Any]:
            if iteration == 2:
                raise KeyboardInterrupt
            return super().step(iteration)

        def save(self, path: Path) -> None:
            super().save(path)
            if len(self.steps) == 2:
                (path / "half").write_text("half")

    with pytest.raises(KeyboardInterrupt):
        TrainLoop(max_iters=9, callbacks=[Checkpoint(tmp_path)]).run(Failing())
    saved = Checkpoint(tmp_path).latest()
    assert saved is not None and saved.iteration == 2 and not list(tmp_path.glob(".tmp-*"))

    class Full(ToyVessel):
        def save(self, path: Path) -> None:
            (path / "half").write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        TrainLoop(max_iters=9, callbacks=[Checkpoint(tmp_path)]).run(Full(), resume=saved)
    assert steps_of(tmp_path) == [1, 2], "neither unlinked nor replaced by half a one"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_interval": -1}, "time_interval is -1"),
        ({"mode": "best"}, "mode is 'best'"),
        ({"save_latest": "move"}, "save_latest is 'move'"),
        ({"save_latest": "copy"}, "which is for files"),
        ({"filename": "{iter}.pt"}, r"filename is '{iter}\.pt'; it must end in \.pth"),
        ({"filename": "latest.pth"}, "another than latest.pth"),
        ({"filename": "{iter.pth"}, "cannot be filled in"),
    ],
)
def test_wrong_options_of_checkpoint_are_refused_with_their_value(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        Checkpoint(tmp_path, **options)


def test_what_is_no_checkpoint_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        open_checkpoint(tmp_path)
