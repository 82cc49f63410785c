"""The order of stages and hooks, and counters that stay true whatever stops or raises where."""

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.errors import ConfigError, InvalidMetrics
from leyden.training import Callback, LogWriter, MetricsRow, TrainLoop
from leyden.training.runs.run_metrics import in_order

HOOKS = [
    "on_fit_start",
    "on_fit_end",
    "on_iter_start",
    "on_iter_end",
    "on_train_start",
    "on_train_end",
    "on_validate_start",
    "on_validate_end",
]


class Stub:
    """A vessel that only counts."""

    def __init__(self, events: list[str]) -> None:
        self.events, self.steps, self.validations = events, 0, 0

    def step(self, iteration: int) -> dict[str, Any]:
        assert iteration == self.steps
        self.events.append(f"step {iteration}")
        self.steps += 1
        return {"reward": iteration}

    def validate(self, iteration: int) -> dict[str, Any]:
        assert iteration == self.steps
        self.events.append(f"validate {iteration}")
        self.validations += 1
        return {"reward": -iteration}

    def save(self, path: Any) -> None: ...
    def load(self, path: Any) -> None: ...


class AsyncStub(Stub):
    async def step(self, iteration: int) -> dict[str, Any]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(iteration)

    async def validate(self, iteration: int) -> dict[str, Any]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().validate(iteration)


class Rows(LogWriter):
    def __init__(self) -> None:
        self.rows: list[MetricsRow] = []
        self.is_open = False

    def open(self) -> None:
        self.is_open = True

    def write(self, row: MetricsRow) -> None:
        assert self.is_open
        self.rows.append(row)

    def close(self) -> None:
        self.is_open = False


class Trouble(Exception):
    pass


class Recorder(Callback):
    """Notes every hook and the counters in it; at the n-th hook it stops the loop, or raises."""

    def __init__(
        self, events: list[str], vessel: Stub, *, stop_at: int | None = None, raise_at: int | None = None
    ) -> None:
        self.events, self.vessel, self.stop_at, self.raise_at, self.calls = events, vessel, stop_at, raise_at, 0

    def note(self, hook: str, loop: TrainLoop) -> None:
        assert loop.current_iter == self.vessel.steps, "the counter is what the vessel did"
        self.events.append(f"{hook} {loop.current_iter}")
        self.calls += 1
        if self.calls == self.stop_at:
            loop.stop()
        if self.calls == self.raise_at:
            raise Trouble(hook)

    def on_exception(self, loop: TrainLoop, vessel: Any, error: BaseException) -> None:
        self.events.append(f"on_exception {error}")


def hook_of(name: str) -> Any:
    def hook(self: Recorder, loop: TrainLoop, vessel: Any) -> None:
        self.note(name, loop)

    return hook


for name in HOOKS:
    setattr(Recorder, name, hook_of(name))


class AsyncRecorder(Recorder):
    """The same hooks, as coroutines."""


def async_hook_of(name: str) -> Any:
    async def hook(self: Recorder, loop: TrainLoop, vessel: Any) -> None:
        await asyncio.sleep(0)
        self.note(name, loop)

    return hook


for name in HOOKS:
    setattr(AsyncRecorder, name, async_hook_of(name))


def run_recorded(
    *,
    asynchronous: bool = False,
    max_iters: int = 2,
    val_every: int | None = None,
    first: bool = False,
    stop_at: int | None = None,
    raise_at: int | None = None,
) -> tuple[list[str], TrainLoop, Stub, Rows]:
    events: list[str] = []
    rows = Rows()
    vessel = AsyncStub(events) if asynchronous else Stub(events)
    recorder = (AsyncRecorder if asynchronous else Recorder)(events, vessel, stop_at=stop_at, raise_at=raise_at)
    loop = TrainLoop(
        max_iters=max_iters, val_every_n_iters=val_every, validate_first=first, callbacks=[recorder], writers=[rows]
    )
    try:
        if asynchronous:
            asyncio.run(loop.arun(vessel))
        else:
            loop.run(vessel)
    except Trouble:
        events.append("raised")
    return events, loop, vessel, rows


def test_the_order_is_the_documented_one() -> None:
    events, loop, _, rows = run_recorded(max_iters=2, val_every=2, first=True)
    assert events == [
        "on_fit_start 0",
        *["on_validate_start 0", "validate 0", "on_validate_end 0"],
        *["on_iter_start 0", "on_train_start 0", "step 0", "on_train_end 1", "on_iter_end 1"],
        *["on_iter_start 1", "on_train_start 1", "step 1", "on_train_end 2"],
        *["on_validate_start 2", "validate 2", "on_validate_end 2", "on_iter_end 2"],
        "on_fit_end 2",
    ]
    assert [(row.iteration, row.stage, row.metrics["reward"]) for row in rows.rows] == [
        (0, "val", 0),
        (1, "train", 0),
        (2, "train", 1),
        (2, "val", -2),
    ]
    assert loop.metrics == {"reward": 1, "val/reward": -2}
    seconds = [row.seconds for row in rows.rows]
    assert seconds == sorted(seconds) and loop.total_seconds >= seconds[-1]


plans = st.fixed_dictionaries(
    {
        "max_iters": st.integers(0, 4),
        "val_every": st.sampled_from([None, 1, 2, 3]),
        "first": st.booleans(),
        "stop_at": st.none() | st.integers(1, 30),
        "raise_at": st.none() | st.integers(1, 30),
    }
)


@settings(max_examples=150)
@given(plan=plans)
def test_any_stop_or_error_in_any_hook_leaves_counters_true_and_writers_closed(plan: dict[str, Any]) -> None:
    events, loop, vessel, rows = run_recorded(**plan)
    assert loop.current_iter == vessel.steps <= plan["max_iters"]
    assert [row.iteration for row in rows.rows if row.stage == "train"] == list(range(1, vessel.steps + 1))
    assert sum(row.stage == "val" for row in rows.rows) == vessel.validations
    assert not rows.is_open
    raised = "raised" in events
    assert any(event.startswith("on_exception") for event in events) == raised
    if not raised:
        assert events[-1].startswith("on_fit_end")
        starts = [event.split()[0].removesuffix("_start") for event in events if "_start" in event]
        ends = [event.split()[0].removesuffix("_end") for event in events if "_end" in event]
        assert sorted(starts) == sorted(ends), "what starts, ends"
        due = plan["val_every"] is not None and vessel.steps > 0 and vessel.steps % plan["val_every"] == 0
        validated = any(event == f"validate {vessel.steps}" for event in events)
        if due:
            assert loop.validation_due != validated, "a validation that was due is either done or still due"
    if loop.should_stop and not raised:
        assert loop.current_iter <= plan["max_iters"]
    elif not raised:
        assert loop.current_iter == plan["max_iters"]


@settings(max_examples=40)
@given(plan=plans)
def test_both_drivers_run_the_same_flow(plan: dict[str, Any]) -> None:
    sync_events, sync_loop, *_ = run_recorded(**plan)
    async_events, async_loop, *_ = run_recorded(**plan, asynchronous=True)
    assert sync_events == async_events
    assert (sync_loop.metrics, sync_loop.validation_due) == (async_loop.metrics, async_loop.validation_due)


def test_a_stop_in_a_step_keeps_the_step_and_skips_what_follows() -> None:
    events, loop, _, _ = run_recorded(max_iters=5, val_every=1, stop_at=3)  # in on_train_start
    assert events[-4:] == ["step 0", "on_train_end 1", "on_iter_end 1", "on_fit_end 1"]
    assert loop.validation_due


def test_a_synchronous_run_refuses_an_asynchronous_vessel_with_the_remedy() -> None:
    events: list[str] = []
    with pytest.raises(ConfigError, match=r"await loop\.arun"):
        TrainLoop(max_iters=1, callbacks=[Heard(events)]).run(AsyncStub(events))
    assert events == ["heard ConfigError"]


class Heard(Callback):
    def __init__(self, events: list[str]) -> None:
        self.events = events

    def on_exception(self, loop: TrainLoop, vessel: Any, error: BaseException) -> None:
        self.events.append(f"heard {type(error).__name__}")


class Deaf(Callback):
    def on_exception(self, loop: TrainLoop, vessel: Any, error: BaseException) -> None:
        raise RuntimeError("second trouble")


def test_an_error_in_on_exception_is_logged_and_hides_neither_the_first_error_nor_the_news_from_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(Stub):
        def step(self, iteration: int) -> dict[str, Any]:
            raise Trouble("first")

    events: list[str] = []
    with pytest.raises(Trouble, match="first"):
        TrainLoop(max_iters=1, callbacks=[Deaf(), Heard(events)]).run(Failing(events))
    assert events == ["heard Trouble"]
    assert "second trouble" in caplog.text


async def test_cancellation_reaches_callbacks_and_the_step_does_not_count() -> None:
    class Endless(Stub):
        async def step(self, iteration: int) -> dict[str, Any]:  # type: ignore[override]
            await asyncio.Event().wait()
            return {}

    events: list[str] = []
    loop = TrainLoop(max_iters=1, callbacks=[Heard(events)])
    task = asyncio.create_task(loop.arun(Endless(events)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert events == ["heard CancelledError"] and loop.current_iter == 0


def test_a_stop_iteration_in_user_code_is_an_error_not_an_end() -> None:
    class Exhausted(Stub):
        def step(self, iteration: int) -> dict[str, Any]:
            raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        TrainLoop(max_iters=3).run(Exhausted([]))


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([1], "Stub.step returned list"),
        ({"reward": None}, "metric 'reward' is None"),
        ({"iteration": 1}, "named 'iteration'"),
        ({3: 1}, "named 3"),
    ],
)
def test_metrics_that_are_none_are_refused_by_name(metrics: Any, message: str) -> None:
    class Odd(Stub):
        def step(self, iteration: int) -> Any:
            return metrics

    Odd.__name__ = "Stub"
    with pytest.raises(InvalidMetrics, match=message):
        TrainLoop(max_iters=1).run(Odd([]))


def test_a_loop_runs_once() -> None:
    loop = TrainLoop(max_iters=1)
    loop.run(Stub([]))
    with pytest.raises(ConfigError, match="make a new one"):
        loop.run(Stub([]))


@pytest.mark.parametrize("options", [{"max_iters": -1}, {"max_iters": 1, "val_every_n_iters": 0}])
def test_wrong_options_are_refused_with_their_value(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"is {min(options.values())}"):
        TrainLoop(**options)


# ---- numbers of hooks --------------------------------------------------------------------------------------------------------


class Sets(Callback):
    """Sets `name` in one hook."""

    def __init__(self, hook: str, name: str, value: Any) -> None:
        def at(loop: TrainLoop, vessel: Any) -> None:
            loop.metrics[name] = value

        setattr(self, hook, at)


def rows_with(*callbacks: Callback, **options: Any) -> tuple[TrainLoop, list[tuple[int, str, dict[str, Any]]]]:
    rows = Rows()
    loop = TrainLoop(max_iters=2, val_every_n_iters=2, callbacks=callbacks, writers=[rows], **options)
    loop.run(Stub([]))
    return loop, [(row.iteration, row.stage, row.metrics) for row in in_order(rows.rows)]


@pytest.mark.parametrize(
    ("hook", "name", "found"),
    [
        ("on_fit_start", "mine", [(1, "train")]),
        ("on_iter_start", "mine", [(1, "train"), (2, "train")]),
        ("on_train_start", "mine", [(1, "train"), (2, "train")]),
        ("on_train_end", "mine", [(1, "train"), (2, "train")]),
        ("on_iter_end", "mine", [(1, "train"), (2, "train")]),
        ("on_fit_end", "mine", [(2, "train")]),
        ("on_validate_start", "mine", [(2, "val")]),
        ("on_validate_end", "mine", [(2, "val")]),
        ("on_validate_end", "val/mine", [(2, "val")]),
        ("on_iter_end", "val/mine", [(1, "val"), (2, "val")]),
    ],
)
def test_a_number_that_a_hook_sets_is_in_the_row_of_its_stage(hook: str, name: str, found: list[Any]) -> None:
    loop, rows = rows_with(Sets(hook, name, 42.0))
    assert [(iteration, stage) for iteration, stage, metrics in rows if metrics.get("mine") == 42.0] == found
    assert all("val/mine" not in metrics for _, _, metrics in rows)
    assert loop.metrics.get(name) == (42.0 if hook != "on_fit_start" else None)


def test_a_number_set_before_its_row_is_written_adds_no_row() -> None:
    rows = Rows()
    TrainLoop(max_iters=1, callbacks=[Sets("on_train_start", "mine", 1)], writers=[rows]).run(Stub([]))
    assert [row.metrics for row in rows.rows] == [{"mine": 1, "reward": 0}]


def test_the_later_of_two_numbers_of_one_name_counts() -> None:
    _, rows = rows_with(Sets("on_train_start", "reward", 5.0), Sets("on_train_end", "reward", 7.0))
    assert [metrics["reward"] for _, stage, metrics in rows if stage == "train"] == [7.0, 7.0]


def test_callbacks_after_it_see_the_number_in_the_row_and_a_checkpoint_has_it_as_a_plain_one() -> None:
    seen: list[Any] = []

    class Reads(Callback):
        def on_train_end(self, loop: TrainLoop, vessel: Any) -> None:
            seen.append((loop.last_row.metrics["mine"], type(loop.run_state()["metrics"]["mine"])))

    rows_with(Sets("on_train_end", "mine", np.array(0.5)), Reads())
    assert seen == [(0.5, float)] * 2


@pytest.mark.parametrize("value", [math.nan, np.float32("inf"), [1.0, 2.0], None])
def test_what_is_no_finite_number_is_refused_by_hook_and_name(value: Any) -> None:
    with pytest.raises(InvalidMetrics, match=r"Sets.on_train_end: metric 'mine'"):
        rows_with(Sets("on_train_end", "mine", value))
    with pytest.raises(InvalidMetrics, match=r"log: metric 'mine'"):
        TrainLoop(max_iters=1).log("mine", value)


def test_a_validation_before_the_first_step_takes_its_own_number() -> None:
    _, rows = rows_with(Sets("on_validate_end", "mine", 1), validate_first=True)
    assert [(iteration, stage) for iteration, stage, metrics in rows if "mine" in metrics] == [(2, "val"), (0, "val")][
        ::-1
    ]
