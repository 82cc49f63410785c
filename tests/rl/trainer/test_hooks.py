"""What callbacks see of the trainer and the vessel, while stages run and after; and the state of a trainer."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.errors import ConfigError
from leyden.rl import Trainer, TrainingVessel
from leyden.training import Callback, CsvWriter, EarlyStopping, LogBuffer, LogWriter
from tests.rl.parts import vessel_of


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def trainer_of(**options: Any) -> Trainer:
    return Trainer(**({"max_iters": 2, "finite_env_type": "dummy", "concurrency": 2} | options))


class At(Callback):
    """Calls a function in one hook."""

    def __init__(self, hook: str, look: Any) -> None:
        setattr(self, hook, look)


HOOKS = [f"on_{stage}_{end}" for stage in ("fit", "iter", "train", "validate", "test") for end in ("start", "end")]


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_gets_the_trainer_and_the_vessel_themselves(hook: str) -> None:
    seen: list[tuple[Any, Any]] = []
    trainer = trainer_of(max_iters=1, val_every_n_iters=1, callbacks=[At(hook, lambda *given: seen.append(given))])
    vessel = vessel_of()
    trainer.fit(vessel)
    trainer.test(vessel)
    assert seen == [(trainer, vessel)]


def test_a_callback_reaches_all_that_the_trainer_and_the_vessel_have(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def look(trainer: Trainer, vessel: Any) -> None:
        vessel.log("weights", 1.0)
        seen.update(
            policy=vessel.policy,
            states=vessel.train_initial_states,
            loggers=list(trainer.named_loggers()),
            callbacks=list(trainer.named_callbacks()),
            options=(trainer.concurrency, trainer.fast_dev_run, trainer.finite_env_type, trainer.max_iters),
            saved=trainer.state_dict()["vessel"]["policy"]["n_updates"],
            trainer=vessel.trainer,
            methods=(trainer.fit, trainer.test),
        )

    writer, callback = CsvWriter(tmp_path / "a.csv"), At("on_train_end", look)
    trainer = trainer_of(max_iters=1, loggers=writer, callbacks=[callback], progress=False)
    vessel = vessel_of()
    trainer.fit(vessel)
    assert seen["policy"] is vessel.policy and seen["states"] is vessel.train_initial_states
    assert (seen["loggers"], seen["callbacks"]) == (["csvwriter:a.csv", "logbuffer"], ["at"])
    assert seen["options"] == (2, None, "dummy", 1)
    assert seen["saved"] == vessel.policy.n_updates > 0  # type: ignore[attr-defined]
    assert seen["trainer"] is trainer and seen["methods"] == (trainer.fit, trainer.test)


def test_the_hooks_of_a_test_see_its_stage_and_its_metrics() -> None:
    seen: list[tuple[str, list[str]]] = []

    def look(trainer: Trainer, vessel: Any) -> None:
        seen.append((trainer.current_stage, sorted(trainer.metrics)))

    trainer = trainer_of(val_every_n_iters=1, callbacks=[At("on_test_start", look), At("on_test_end", look)])
    vessel = vessel_of()
    trainer.fit(vessel)
    trainer.test(vessel)
    assert seen == [("test", []), ("test", ["distance", "reward", "steps_per_episode"])]


def test_a_hook_of_a_fit_may_run_a_test_and_the_fit_goes_on_as_it_was(tmp_path: Path) -> None:
    tested: list[Any] = []

    def test_now(trainer: Trainer, vessel: Any) -> None:
        before = (dict(trainer.metrics), trainer.current_stage, trainer.last_row)
        tested.append(trainer.test(vessel))
        assert (dict(trainer.metrics), trainer.current_stage, trainer.last_row) == before

    plain, testing = vessel_of(), vessel_of()
    trainer_of().fit(plain)
    writer = CsvWriter(tmp_path / "a.csv")
    trainer_of(loggers=writer, callbacks=[At("on_train_end", test_now)]).fit(testing)
    assert [sorted(metrics) for metrics in tested] == [["distance", "reward", "steps_per_episode"]] * 2
    stages = [line.split(",")[1] for line in (tmp_path / "a.csv").read_text().splitlines()[1:]]
    assert stages == ["train", "test", "train", "test", "val"]
    weights, others = (vessel.policy.state_dict()["model"] for vessel in (plain, testing))
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_fit_within_a_fit_is_refused() -> None:
    trainer = trainer_of(callbacks=[At("on_iter_end", lambda trainer, vessel: trainer.fit(vessel))])
    with pytest.raises(ConfigError, match="in the middle of a run"):
        trainer.fit(vessel_of())


# ---- metrics ---------------------------------------------------------------------------------------------------------------


def test_each_iteration_begins_without_the_metrics_of_the_one_before() -> None:
    seen: list[tuple[bool, bool]] = []

    def look(trainer: Trainer, vessel: Any) -> None:
        seen.append(("reward" in trainer.metrics, "val/reward" in trainer.metrics))

    hooks = [At(hook, look) for hook in ("on_iter_start", "on_train_end", "on_iter_end")]
    trainer = trainer_of(max_iters=3, val_every_n_iters=2, callbacks=hooks)
    trainer.fit(vessel_of())
    assert seen == [
        *[(False, False), (True, False), (True, False)],
        *[(False, False), (True, False), (True, True)],
        *[(False, False), (True, False), (True, False)],
    ]
    assert "val/reward" not in trainer.state_dict()["metrics"]


def test_metrics_and_the_count_of_episodes_are_up_to_date_while_a_stage_collects() -> None:
    seen: list[tuple[str, int, int, set[str]]] = []

    class Watching(Callback):
        def on_progress(self, loop: Any, progress: Any) -> None:
            seen.append((loop.current_stage, loop.current_episode, loop.total_steps, set(loop.metrics)))

    trainer = trainer_of(max_iters=1, val_every_n_iters=1, concurrency=1, callbacks=[Watching()])
    trainer.fit(vessel_of(episode_per_iter=3))
    assert [(stage, episode) for stage, episode, _, _ in seen] == [("train", n) for n in (1, 2, 3)] + [("val", 3)] * 3
    assert [steps for *_, steps, _ in seen] == sorted(steps for *_, steps, _ in seen)
    assert seen[0][3] == {"reward", "steps_per_episode", "distance"}
    assert {"val/reward", "val/distance"} <= seen[3][3]
    assert trainer.total_steps == seen[-1][2] == trainer.metrics["total_steps"]


def test_rows_of_stages_have_the_episodes_and_steps_of_training_so_far(tmp_path: Path) -> None:
    trainer = trainer_of(max_iters=2, val_every_n_iters=1, loggers=CsvWriter(tmp_path / "a.csv"))
    trainer.fit(vessel_of())
    header, *lines = [line.split(",") for line in (tmp_path / "a.csv").read_text().splitlines()]
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    assert [(row["stage"], row["total_episodes"]) for row in rows] == [
        *[("train", "6"), ("val", "6")],
        *[("train", "12"), ("val", "12")],
    ]
    assert int(rows[0]["total_steps"]) < int(rows[2]["total_steps"]) == trainer.total_steps


def test_a_log_buffer_reports_episodes_and_collects_to_its_callback() -> None:
    heard: list[tuple[bool, bool, float, float]] = []

    def callback(on_episode: bool, on_collect: bool, buffer: LogBuffer) -> None:
        newest, means = buffer.episode_metrics(), buffer.collect_metrics()
        heard.append((on_episode, on_collect, newest["reward"], means["reward"]))

    buffer = LogBuffer(callback)
    with pytest.raises(ValueError, match="no episode has ended"):
        buffer.episode_metrics()
    trainer_of(max_iters=1, concurrency=1, loggers=buffer).fit(vessel_of(episode_per_iter=3, val_initial_states=None))
    rewards = [reward for _, _, reward, _ in heard[:3]]
    means = [sum(rewards[:n]) / n for n in (1, 2, 3)]
    assert [event[:2] for event in heard] == [(True, False)] * 3 + [(False, True)]
    assert [event[3] for event in heard] == pytest.approx([*means, means[-1]])
    assert buffer.global_episode == 3
    again = LogBuffer(callback)
    again.load_state_dict(buffer.state_dict())
    assert (again.collect_metrics(), again.episode_metrics()) == (buffer.collect_metrics(), buffer.episode_metrics())


# ---- state -----------------------------------------------------------------------------------------------------------------


class Counting(Callback):
    def __init__(self) -> None:
        self.n = 0

    def on_train_end(self, loop: Any, vessel: Any) -> None:
        self.n += 1

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]


def test_a_fresh_trainer_that_loads_a_state_has_all_of_it(tmp_path: Path) -> None:
    def make() -> Trainer:
        loggers: list[LogWriter] = [CsvWriter(tmp_path / "a.csv"), CsvWriter(tmp_path / "b.csv", rows="episode")]
        return trainer_of(val_every_n_iters=1, callbacks=[Counting(), EarlyStopping(patience=9)], loggers=loggers)

    trainer = make()
    trainer.fit(vessel_of())
    trainer.should_stop = True
    state = trainer.state_dict()
    assert {"vessel", "callbacks", "loggers", "should_stop", "current_iter", "current_episode"} <= state.keys()
    assert {"current_stage", "metrics"} <= state.keys()
    fresh, vessel = make(), vessel_of()
    fresh.load_state_dict(state)
    assert fresh.callbacks[0].n == 2  # type: ignore[attr-defined]
    assert (fresh.current_stage, fresh.should_stop, fresh.current_iter, fresh.current_episode) == ("val", True, 2, 12)
    unlike = {"vessel", "rng"}  # there is no vessel yet; random states are compared by the run that continues
    loaded = fresh.state_dict()
    assert {key: loaded[key] for key in loaded if key not in unlike} == {
        key: state[key] for key in state if key not in unlike
    }
    fresh.test(vessel)
    assert torch.equal(vessel.policy.optimizer.state_dict()["state"][0]["exp_avg"], moments(trainer))  # type: ignore[attr-defined]


def moments(trainer: Trainer) -> Any:
    assert trainer.vessel is not None
    return trainer.vessel.policy.optimizer.state_dict()["state"][0]["exp_avg"]  # type: ignore[attr-defined]


def test_a_fit_after_a_state_was_loaded_is_the_uninterrupted_one(tmp_path: Path) -> None:
    def make(name: str, max_iters: int) -> Trainer:
        return trainer_of(max_iters=max_iters, callbacks=[Counting()], loggers=CsvWriter(tmp_path / name))

    straight = vessel_of(val_initial_states=None)
    make("straight.csv", 4).fit(straight)
    first = make("broken.csv", 2)
    first.fit(vessel_of(val_initial_states=None))
    state = first.state_dict()
    second, vessel = make("broken.csv", 4), vessel_of(val_initial_states=None)
    second.load_state_dict(state)
    second.fit(vessel)
    assert (second.current_iter, second.current_episode, second.callbacks[0].n) == (4, 24, 4)  # type: ignore[attr-defined]
    weights, others = (each.policy.state_dict()["model"] for each in (straight, vessel))
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert timeless(tmp_path / "broken.csv") == timeless(tmp_path / "straight.csv")
    second.fit(vessel_of())  # the state was used up: this one begins anew
    assert (second.current_iter, second.current_episode) == (4, 24)


def timeless(path: Path) -> list[list[str]]:
    return [[cell for at, cell in enumerate(line.split(",")) if at != 2] for line in path.read_text().splitlines()]


def test_callbacks_whose_names_end_in_a_number_have_keys_of_their_own() -> None:
    class H(Counting):
        pass

    class H2(Counting):
        pass

    callbacks = [H(), H(), H2()]
    assert list(trainer_of(callbacks=callbacks).named_callbacks().values()) == callbacks


def test_a_trainer_that_is_dropped_goes_at_once_with_its_vessel() -> None:
    trainer, vessel = trainer_of(max_iters=1), vessel_of()
    trainer.fit(vessel)
    gone = weakref.ref(trainer)
    gc.disable()
    try:
        del trainer
        assert gone() is None
    finally:
        gc.enable()


def test_a_vessel_knows_its_iteration_without_its_trainer() -> None:
    seen: list[tuple[str, int, int | None]] = []

    class Noted(TrainingVessel):
        def assign_trainer(self, trainer: Any) -> None:
            """Keep nothing: Leyden reads no trainer from a vessel."""

        def train(self, vector_env: Any) -> Any:
            seen.append(("train", self.iteration.number, self.iteration.fast_dev_run))
            return super().train(vector_env)

        def validate(self, vector_env: Any) -> Any:
            seen.append(("val", self.iteration.number, self.iteration.fast_dev_run))
            return super().validate(vector_env)

    vessel = vessel_of()
    vessel.__class__ = Noted
    assert (vessel.iteration.number, vessel.iteration.fast_dev_run) == (0, None)
    trainer_of(max_iters=2, val_every_n_iters=1, fast_dev_run=2).fit(vessel)
    assert seen == [("train", 0, 2), ("val", 1, 2), ("train", 1, 2), ("val", 2, 2)]
