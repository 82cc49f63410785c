"""What a run of `fit` leaves behind: its folder and its rows in the store, whatever the algorithm, however it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.algorithm import IterativeAlgorithm, Run
from leyden.errors import ConfigError, GatewayError
from leyden.training import Callback, CsvWriter, JsonlWriter, LogWriter, Metrics, Row
from leyden.training.runs import RecordedRun, list_runs, open_run
from leyden.types.run_record import MetricPoint, RunRecord


@ly.rollout
async def odd(task: int) -> float:
    if task < 0:
        raise ValueError(f"{task} is negative")
    return float(task % 2)


class Rows(LogWriter):
    """Keeps the rows that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, int, Any]] = []

    def write(self, row: Row) -> None:
        self.rows.append((row.stage, row.iteration, row.flat()["reward"]))


class Counting(IterativeAlgorithm):
    """Its reward is its step; it fails in `fails_in`, and has a model that is a folder."""

    def __init__(
        self,
        model: str = "tiny",
        *,
        max_iters: int = 3,
        fails_in: int | None = None,
        api_key: str = "",
        every: int | None = 2,
    ) -> None:
        super().__init__(max_iters=max_iters, val_every_n_iters=every, checkpoint_every=2)
        self.model, self.fails_in = model, fails_in

    def trained_model(self) -> Any:
        return self.model

    async def step(self, iteration: int) -> Metrics:
        if iteration == self.fails_in:
            raise ZeroDivisionError("in the step")
        return {"reward": float(iteration), "loss": math.nan, "note": "text"}

    async def validate(self, iteration: int) -> Metrics:
        return {"reward": 10.0 * iteration}

    async def save(self, path: Path) -> None:
        (path / "state").touch()

    async def load(self, path: Path) -> None:
        pass


def stored(run: RecordedRun) -> tuple[Sequence[RunRecord], Sequence[MetricPoint], Sequence[ly.Rollout]]:
    """The store's side of the run."""

    async def read() -> Any:
        async with run.open_store() as store:
            run_id = run.record.run_id
            points = await store.query_metrics(run_id)
            return list(await store.query_runs()), list(points), list(await store.query_rollouts(run_id=run_id))

    return asyncio.run(read())


def rows(run: RecordedRun) -> list[tuple[str, int, Any]]:
    return [(row.stage, row.iteration, row.metrics.get("reward")) for row in run.metrics()]


# ---- what is recorded --------------------------------------------------------------------------------------------------


def test_a_baseline_leaves_its_configuration_its_metrics_its_failures_and_its_log(tmp_path: Path) -> None:
    trainer = ly.Trainer(algorithm=ly.Baseline(train_split=0.75), run_dir=tmp_path / "run", name="my first")
    summary = trainer.fit(odd, [1, 2, -3, 5])
    run = open_run(tmp_path / "run")
    assert (run.state, run.record.name, run.record.kind) == ("succeeded", "my first", "fit")
    assert run.record.run_id == summary.run_id
    assert rows(run) == [("train", 1, 0.5), ("val", 1, 1.0)]
    assert (run.metrics("train")[0].metrics["rollouts"], run.metrics("train")[0].metrics["failed"]) == (3, 1)
    [failure] = run.failures()
    assert (failure.reason_kind, failure.reason, failure.mode) == ("exception", "ValueError: -3 is negative", "train")
    config = run.record.config
    assert config["algorithm"]["name"] == "leyden.algorithm.fast.Baseline"
    assert config["algorithm"]["options"]["train_split"] == 0.75
    assert config["data"]["train"]["length"] == 4
    assert config["argv"] and config["command"] and config["cwd"] == str(Path.cwd())
    assert config["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert run.log_path is not None
    lines = run.log_path.read_text().splitlines()
    assert any("INFO iteration 1: train done, reward 0.5" in line for line in lines)
    assert any("rollouts: 1 failed, 3 succeeded" in line for line in lines), "it ends with the summary"
    assert any("epoch 1: 4 of 4 rollouts finished, 1 of them failed, mean reward 0.667" in line for line in lines)
    assert all(line[:4].isdigit() or line.startswith(" ") for line in lines), "each line has a date"


def test_the_store_knows_the_run_its_metrics_and_whose_its_rollouts_are(tmp_path: Path) -> None:
    ly.Trainer(algorithm="baseline", run_dir=tmp_path).fit(odd, [1, 2])
    run = open_run(tmp_path)
    records, points, rollouts = stored(run)
    assert [(record.run_id, record.status) for record in records] == [(run.record.run_id, "succeeded")]
    assert records[0].config == run.record.config
    rewards = {(point.stage, point.iteration): point.value for point in points if point.name == "reward"}
    assert rewards == {("train", 1): 0.5}
    assert {rollout.run_id for rollout in rollouts} == {run.record.run_id}
    assert len(rollouts) == 2


def test_the_summary_has_the_rewards_the_last_metrics_and_what_the_algorithm_returned(tmp_path: Path) -> None:
    @ly.algo
    async def search(*, run: Run) -> str:
        for reward in (0.25, 0.75, 0.5):
            run.report({"reward": reward})
        return "the best prompt"

    writer = Rows()
    summary = ly.Trainer(algorithm=search, run_dir=tmp_path, loggers=writer).fit(odd)
    assert summary.reward is not None
    assert (summary.reward.first, summary.reward.last, summary.reward.best) == (0.25, 0.5, 0.75)
    assert (summary.reward.best_iteration, summary.reward.values) == (2, (0.25, 0.75, 0.5))
    assert (summary.result, summary.metrics) == ("the best prompt", {"reward": 0.5})
    assert writer.rows == [("train", 1, 0.25), ("train", 2, 0.75), ("train", 3, 0.5)]
    assert rows(open_run(tmp_path)) == writer.rows


def test_a_sync_algorithm_reports_from_any_thread(tmp_path: Path) -> None:
    @ly.algo
    def search(*, run: Run) -> int:
        def work(iteration: int) -> None:
            run.progress(iteration, 5)
            run.report({"reward": float(iteration)}, iteration=iteration)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        run.report({"reward": 9.0}, stage="val", iteration=5)
        return 42

    summary = ly.Trainer(algorithm=search, run_dir=tmp_path).fit(odd)
    assert summary.result == 42
    assert rows(open_run(tmp_path)) == [*(("train", n, float(n)) for n in range(1, 6)), ("val", 5, 9.0)]


def test_an_iterative_algorithm_reports_through_its_loop_with_callbacks_and_loggers(tmp_path: Path) -> None:
    seen: list[int] = []

    class Watches(Callback):
        def on_iter_end(self, loop: Any, vessel: Any) -> None:
            seen.append(loop.current_iter)

    writer = Rows()
    trainer = ly.Trainer(algorithm=Counting(), run_dir=tmp_path, callbacks=Watches(), loggers=[writer])
    summary = trainer.fit(odd)
    expected = [("train", 1, 0.0), ("train", 2, 1.0), ("val", 2, 20.0), ("train", 3, 2.0)]
    assert (seen, writer.rows, rows(open_run(tmp_path))) == ([1, 2, 3], expected, expected)
    assert summary.reward is not None
    assert summary.reward.best_iteration == 3
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (lines[0]["loss"], lines[0]["note"]) == (None, "text")
    _, points, _ = stored(open_run(tmp_path))
    losses = [point.value for point in points if point.name == "loss"]
    assert losses == [None, None, None]


def test_a_failure_that_the_algorithm_never_read_is_recorded(tmp_path: Path) -> None:
    @ly.algo
    async def careless(*, store: ly.LightningStore) -> None:
        bad = await store.enqueue_rollout(-1, mode="train", metadata={"step": 4})
        await store.wait_for_rollouts(rollout_ids=[bad.rollout_id])

    ly.Trainer(algorithm=careless, run_dir=tmp_path).fit(odd)
    [failure] = open_run(tmp_path).failures()
    assert (failure.reason, failure.iteration) == ("ValueError: -1 is negative", 5)


def test_secrets_are_in_no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--api-key", "hush-1", "--token=hush-2", "--lr", "3"])
    ly.Trainer(algorithm=Counting(api_key="hush-3", model="http://me:hush-4@host/m"), run_dir=tmp_path).fit(odd)
    text = (tmp_path / "run.json").read_text()
    assert "hush" not in text
    assert '"--lr"' in text


def test_a_run_in_a_given_store_keeps_its_metrics_there(tmp_path: Path) -> None:
    path = tmp_path / "mine.sqlite"
    summary = ly.Trainer(algorithm="baseline", store=f"sqlite://{path}").fit(odd, [1, -2])
    assert summary.run_dir is None
    run = open_run(path)
    assert (run.state, run.record.run_id, run.directory) == ("succeeded", summary.run_id, None)
    assert [(stage, iteration) for stage, iteration, _ in rows(run)] == [("train", 1)]
    assert run.metrics("train")[0].metrics == {"reward": 1.0, "rollouts": 2, "failed": 1}
    assert (run.summary_metrics().rollouts, run.summary_metrics().failed) == (2, 1)
    assert [failure.reason for failure in run.failures()] == ["ValueError: -2 is negative"]
    ly.Trainer(algorithm="baseline", store=f"sqlite://{path}").fit(odd, [1, 2])
    with pytest.raises(ConfigError, match=f"holds 2 runs; give run_id=, one of .*{summary.run_id}"):
        open_run(f"sqlite://{path}")
    assert open_run(path, run_id=summary.run_id).record.run_id == summary.run_id


# ---- what is shown -----------------------------------------------------------------------------------------------------


def test_progress_is_shown_on_standard_error_unless_it_is_switched_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ly.Trainer(algorithm="baseline", run_dir=tmp_path / "a", progress=False).fit(odd, [1, 2])
    assert capsys.readouterr() == ("", "")
    ly.Trainer(algorithm="baseline", run_dir=tmp_path / "b").fit(odd, [1, 2])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "iteration 1" in shown.err
    assert str(tmp_path / "b") in shown.err.splitlines()[0] or "b" in shown.err.splitlines()[0]


def test_the_log_of_a_run_changes_nothing_of_what_other_handlers_see(tmp_path: Path) -> None:
    heard: list[str] = []

    class Hears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    handler, logger = Hears(), logging.getLogger("leyden")
    logging.getLogger().addHandler(handler)
    try:
        level, filters = logger.level, list(handler.filters)
        ly.Trainer(algorithm="baseline", run_dir=tmp_path, progress=False).fit(odd, [1, 2])
    finally:
        logging.getLogger().removeHandler(handler)
    assert (logger.level, handler.filters, logger.handlers) == (level, filters, logger.handlers)
    assert not [line for line in heard if "epoch" in line]
    assert "epoch 1" in (tmp_path / "run.log").read_text()


def test_callbacks_that_nothing_would_call_are_refused_by_the_algorithms_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"callbacks=\['Callback'\], but Baseline has no TrainLoop"):
        ly.Trainer(algorithm="baseline", callbacks=Callback(), run_dir=tmp_path / "run").fit(odd, [1])
    assert not (tmp_path / "run").exists()


def test_a_writer_of_the_runs_own_file_is_refused(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(ConfigError, match=r"two writers write .*metrics.jsonl; give each a file of its own"):
        ly.Trainer(algorithm=Counting(), run_dir=tmp_path, loggers=writer).fit(odd)
    assert not tmp_path.exists() or not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callbacks": [3]}, "callbacks has 3 (a int); give instances of leyden.training.Callback"),
        ({"loggers": "metrics.csv"}, "give a LogWriter such as CsvWriter"),
        ({"progress": 1}, "progress is 1; possible: True, False"),
        ({"name": ""}, "name is ''; give 1 to 200 printable characters"),
    ],
)
def test_a_wrong_option_is_refused_with_what_is_possible(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ly.Trainer(**options)
    assert message in str(refused.value)


# ---- how a run ends ----------------------------------------------------------------------------------------------------


def test_a_run_that_could_not_start_says_why_and_leaves_its_folder_to_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        proxy = ly.LLMProxy(port=taken.getsockname()[1])
        trainer = ly.Trainer(algorithm="baseline", run_dir=".leyden/run", llm_proxy=proxy, progress=False)
        with pytest.raises(GatewayError):
            trainer.fit(odd, [1])
    run = open_run("latest")
    assert run.state == "failed" and "Address already in use" in (run.record.cause or "")
    with pytest.raises(ConfigError, match="there is no run to resume"):
        ly.Trainer(algorithm="baseline", progress=False).fit(odd, [1], resume=True)
    summary = ly.Trainer(algorithm="baseline", run_dir=".leyden/run", progress=False).fit(odd, [1])
    again = open_run("latest")
    assert summary.rollouts["succeeded"] == 1
    assert again.state == "succeeded" and again.record.cause is None and again.record.run_id == summary.run_id


def test_a_run_that_failed_says_why(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        ly.Trainer(algorithm=Counting(fails_in=1), run_dir=tmp_path).fit(odd)
    run = open_run(tmp_path)
    assert (run.state, run.record.cause) == ("failed", "ZeroDivisionError: in the step")
    assert rows(run) == [("train", 1, 0.0)]
    records, _, _ = stored(run)
    assert (records[0].status, records[0].cause) == ("failed", "ZeroDivisionError: in the step")


async def test_a_run_that_was_cancelled_is_stopped(tmp_path: Path) -> None:
    begun = asyncio.Event()

    @ly.algo
    async def waits(*, run: Run) -> None:
        run.report({"reward": 1.0})
        begun.set()
        await asyncio.Event().wait()

    fit = asyncio.ensure_future(ly.Trainer(algorithm=waits, run_dir=tmp_path).afit(odd))
    await begun.wait()
    assert open_run(tmp_path).state == "running"
    fit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fit
    run = open_run(tmp_path)
    assert (run.state, run.record.cause, rows(run)) == ("stopped", "interrupted", [("train", 1, 1.0)])


def test_a_run_that_never_started_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="needs tasks"):
        ly.Trainer(algorithm="baseline").fit(odd, [])
    assert list_runs() == []
    assert not list(tmp_path.glob(".leyden/*"))


def test_what_the_user_had_in_the_folder_stays_when_a_run_never_starts(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="needs tasks"):
        ly.Trainer(algorithm="baseline", run_dir=tmp_path).fit(odd, [])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


KILLED = """
import asyncio, sys
import leyden as ly

@ly.rollout
async def agent(task):
    return 1.0

@ly.algo
async def waits(*, run):
    run.report({"reward": 0.5})
    print("reported", flush=True)
    await asyncio.Event().wait()

ly.Trainer(algorithm=waits, run_dir=sys.argv[1]).fit(agent)
"""


@pytest.mark.faults
@pytest.mark.merge
def test_a_run_whose_process_was_killed_has_crashed_and_its_rows_are_there(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.readline()
    assert open_run(tmp_path).state == "running"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    run = open_run(tmp_path)
    assert (run.state, rows(run)) == ("crashed", [("train", 1, 0.5)])
    assert run.record.status == "running"


# ---- resuming ----------------------------------------------------------------------------------------------------------


def test_resuming_cuts_the_metrics_at_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        ly.Trainer(algorithm=Counting(max_iters=4, fails_in=3), run_dir=tmp_path).fit(odd)
    assert [row.iteration for row in open_run(tmp_path).metrics("train")] == [1, 2, 3]

    during: list[list[int]] = []

    class Looks(Callback):
        def on_train_start(self, loop: Any, vessel: Any) -> None:
            during.append([row.iteration for row in open_run(tmp_path).metrics("train")])

    trainer = ly.Trainer(algorithm=Counting(max_iters=4), run_dir=tmp_path, callbacks=Looks())
    summary = trainer.fit(odd, resume=True)
    assert during[0] == [1, 2], "the third row came after the checkpoint"
    run = open_run(tmp_path)
    assert [row.iteration for row in run.metrics("train")] == [1, 2, 3, 4]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6, "no row is there twice"
    assert (run.state, run.record.cause) == ("succeeded", None)
    assert summary.reward is not None
    assert summary.reward.iterations == (1, 2, 3, 4), "the rows before the resume count"
    _, points, _ = stored(run)
    assert [point.iteration for point in points if (point.stage, point.name) == ("train", "reward")] == [1, 2, 3, 4]


def test_a_resumed_algorithm_that_owns_its_loop_replaces_the_rows_that_it_reports_again(tmp_path: Path) -> None:
    def search(first: int, rewards: list[float]) -> Any:
        @ly.algo
        async def search(*, run: Run) -> None:
            for iteration, reward in enumerate(rewards, start=first):
                run.report({"reward": reward}, iteration=iteration)

        return search

    files = [CsvWriter(tmp_path / "m.csv"), JsonlWriter(tmp_path / "m.jsonl")]
    run_dir = tmp_path / "run"
    ly.Trainer(algorithm=search(1, [0.1, 0.2, 0.3]), run_dir=run_dir, loggers=files).fit(odd)
    ly.Trainer(algorithm=search(2, [0.9]), run_dir=run_dir, loggers=files).fit(odd, resume=True)
    assert rows(open_run(run_dir)) == [("train", 1, 0.1), ("train", 2, 0.9)]
    assert len((tmp_path / "m.csv").read_text().splitlines()) == 3
    assert [json.loads(line)["reward"] for line in (tmp_path / "m.jsonl").read_text().splitlines()] == [0.1, 0.9]


def test_resume_without_a_folder_takes_the_newest_run_of_this_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = ly.Trainer(algorithm=Counting()).fit(odd)
    ly.Trainer(algorithm="baseline").fit(odd, [1])
    resumed = ly.Trainer(algorithm=Counting(max_iters=4)).fit(odd, resume=True)
    assert (resumed.run_dir, resumed.run_id) == (first.run_dir, first.run_id)
    assert len(list_runs()) == 2

    @ly.algo
    async def other(*, run: Run) -> None:
        raise AssertionError

    with pytest.raises(ConfigError, match=r"the newest run, .*, was started by .* with leyden.algorithm.fast.Baseline"):
        ly.Trainer(algorithm=other).fit(odd, resume=True)


def test_another_algorithm_or_model_is_refused_and_other_differences_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"hidden_size": name}))
    run_dir = tmp_path / "run"
    ly.Trainer(algorithm=Counting(str(tmp_path / "one")), run_dir=run_dir).fit(odd, [1, 2])

    def resume(algorithm: Any) -> None:
        ly.Trainer(algorithm=algorithm, run_dir=run_dir).fit(odd, [1, 2, 3], resume=True)

    with pytest.raises(ConfigError, match=r"was started with the algorithm .*Counting, not with .*Baseline"):
        resume("baseline")
    with pytest.raises(ConfigError, match=r"trains the model .*one \(\w+\), not .*two \(\w+\)"):
        resume(Counting(str(tmp_path / "two")))
    assert open_run(run_dir).state == "succeeded", "a run that is refused is left as it was"
    resume(Counting(str(tmp_path / "one"), max_iters=4))
    [line] = [record.getMessage() for record in caplog.records if "other settings" in record.getMessage()]
    assert "train.length 2 -> 3" in line
    assert "max_iters 3 -> 4" in line


def test_a_run_of_the_previous_format_resumes(tmp_path: Path) -> None:
    first = {"format": 1, "run_id": "feedfacecafe", "started": time.time(), "options": {}}
    (tmp_path / "run.json").write_text(json.dumps(first))
    summary = ly.Trainer(algorithm=Counting(), run_dir=tmp_path).fit(odd, resume=True)
    assert summary.run_id == "feedfacecafe"
    assert json.loads((tmp_path / "run.json").read_text())["format"] == 2
    assert len(open_run(tmp_path).metrics("train")) == 3


def test_a_heartbeat_is_the_change_of_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyden.training.runs.recording.HEARTBEAT_SECONDS", 0.05)
    times: list[float] = []

    @ly.algo
    async def waits(*, run: Run) -> None:
        os.utime(tmp_path / "run.json", (1.0, 1.0))
        async with asyncio.timeout(20):
            while (beat := open_run(tmp_path).record.last_heartbeat_time) == 1.0:  # noqa: ASYNC110 -- a file
                await asyncio.sleep(0.01)
        times.append(beat or 0.0)

    ly.Trainer(algorithm=waits, run_dir=tmp_path).fit(odd)
    assert times[0] > 1e9


WARNS = """
import logging, sys
import leyden as ly

@ly.llm_rollout
def agent(task, llm):
    logging.getLogger("leyden.somewhere").warning("look at task %d", task)
    if task < 0:
        llm.openai_sync()
    return float("openai.resources.chat" in sys.modules)

if __name__ == "__main__":
    llm = ly.LLM(endpoint="http://127.0.0.1:9/v1", model="none")
    summary = ly.Trainer(algorithm="baseline", initial_resources={"llm": llm}, progress=False).fit(agent, [7])
    print(summary.reward.last)
"""


def test_a_script_without_logging_shows_warnings_and_imports_its_client_before_the_first_rollout(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(WARNS)
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (0, "1.0\n"), done.stderr
    assert done.stderr.count("WARNING look at task 7") == 1, done.stderr
    (log,) = tmp_path.glob(".leyden/*/run.log")
    assert "WARNING look at task 7" in log.read_text()


def test_a_run_records_its_components_with_their_options(tmp_path: Path) -> None:
    trainer = ly.Trainer(
        algorithm="baseline",
        strategy={"type": "shm", "n_runners": 2, "drain_seconds": 3.0},
        adapter={"agent_match": "writer"},
        max_rollouts=5,
        run_dir=tmp_path / "run",
        progress=False,
    )
    trainer.fit(odd, [1, 2])
    config = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    assert config["strategy"].endswith(".SharedMemoryExecutionStrategy")
    assert config["strategy_options"]["drain_seconds"] == 3.0 and config["max_rollouts"] == 5
    assert config["adapter"]["name"].endswith(".TraceToTriplet")
    assert config["adapter"]["options"]["agent_match"] == "writer"
    assert config["adapter"]["options"]["reward_match"] == "first_occurrence"
    assert config["tracer"]["name"].endswith(".OtelTracer")
    assert config["not_default"] == {
        "trainer.strategy.type": "shm",
        "trainer.strategy.n_runners": 2,
        "trainer.strategy.drain_seconds": 3.0,
        "trainer.adapter.agent_match": "writer",
        "trainer.max_rollouts": 5,
    }


@pytest.mark.parametrize(
    ("every", "val", "expected"), [(None, [1], [3]), (9, [1], [3]), (2, [1], [2]), (None, [], []), (None, None, [])]
)
def test_an_algorithm_of_ones_own_validates_once_at_the_end_if_no_interval_is_reached(
    tmp_path: Path, every: int | None, val: list[int] | None, expected: list[int]
) -> None:
    ly.Trainer(algorithm=Counting(every=every), run_dir=tmp_path).fit(odd, [1], val_dataset=val)
    assert [row.iteration for row in open_run(tmp_path).metrics("val")] == expected


def test_an_algorithm_without_a_validation_or_without_steps_validates_nothing(tmp_path: Path) -> None:
    class Plain(IterativeAlgorithm):
        async def step(self, iteration: int) -> Metrics:
            return {"reward": 1.0}

    for algorithm in (Plain(max_iters=2), Counting(max_iters=0, every=None)):
        folder = tmp_path / type(algorithm).__name__
        ly.Trainer(algorithm=algorithm, run_dir=folder).fit(odd, [1], val_dataset=[1])
        assert open_run(folder).metrics("val") == []


def test_checkpoints_that_are_asked_for_without_a_directory_are_said_not_to_be_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ly.Trainer(algorithm=Counting(), run_dir=tmp_path, progress=False).fit(odd, [1])
    assert "no checkpoint is saved" not in caplog.text
    ly.Trainer(algorithm=Counting(), store="memory", progress=False).fit(odd, [1])
    assert caplog.text.count("no checkpoint is saved, because the run has no directory") == 1


def test_a_run_names_the_store_that_it_was_given_and_its_rollouts_are_read_from_there(tmp_path: Path) -> None:
    elsewhere = f"sqlite://{tmp_path / 'elsewhere.db'}"
    ly.Trainer(algorithm="baseline", run_dir=tmp_path / "run", store=elsewhere, progress=False).fit(odd, [1, 3])
    run = open_run(tmp_path / "run")
    assert run.record.config["store"].endswith("elsewhere.db")
    assert len(run.read_store(lambda store: store.query_rollouts(run_id=run.record.run_id))) == 2
