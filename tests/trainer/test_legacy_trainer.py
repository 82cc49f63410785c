"""The Trainer of Agent Lightning 0.1 and 0.2: `fit_v0` and its helpers, on a real server of tasks."""

import asyncio
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

import leyden as ly
from leyden._lib.host.orphans import RUNNER_MARK
from leyden.errors import ConfigError
from leyden.legacy import AgentLightningClient, AgentLightningServer, DevTaskLoader, TripletLegacy
from leyden.trainer import TrainerLegacy

pytestmark = pytest.mark.filterwarnings("ignore:.*(belongs to the task protocol|has a new name):DeprecationWarning")

MODEL = {"main_llm": ly.LLM(endpoint="http://127.0.0.1:9/v1", model="tiny")}


@ly.rollout
async def double(task: int) -> float:
    return 2.0 * task


class AgentOf01(ly.LitAgent):
    def training_rollout(self, task, rollout_id, resources):
        return [TripletLegacy(prompt={"token_ids": [task]}, response={"token_ids": [9]}, reward=float(task))]


@pytest.fixture
def served():
    """A server of tasks on a thread of its own, with its results as a function of the ids."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = AgentLightningServer(port=0)

    def call(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(100)

    call(server.start())
    call(server.update_resources(MODEL))
    yield server, call
    call(server.stop())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_trainer_is_a_legacy_trainer_and_knows_the_old_names():
    adapter = ly.TracerTraceToTriplet()
    with pytest.warns(DeprecationWarning, match="has a new name") as caught:
        trainer = ly.Trainer(n_workers=3, max_tasks=2, triplet_exporter=adapter)
    assert isinstance(trainer, TrainerLegacy)
    assert (trainer.n_runners, trainer.max_rollouts, trainer.adapter) == (3, 2, adapter)
    assert (trainer.n_workers, trainer.max_tasks, trainer.triplet_exporter) == (3, 2, adapter)
    assert trainer.daemon is True
    said = [str(warning.message) for warning in caught]
    assert [text.rpartition(" ")[2] for text in said] == ["n_runners=", "max_rollouts=", "adapter="]
    assert {warning.filename for warning in caught} == {__file__}
    assert ly.Trainer(n_workers=3, n_runners=2).n_runners == 2, "the new name counts"


def test_the_tasks_of_a_server_are_run_and_reported(served, tmp_path):
    server, call = served
    ids = [call(server.queue_task(n, mode="train")) for n in (1, 2, 3, 4)]
    trainer = ly.Trainer(n_runners=2, max_rollouts=2, run_dir=tmp_path / "run", progress=False)
    summary = trainer.fit_v0(AgentOf01(), server.endpoint)
    assert summary.result == 4 and summary.rollouts["succeeded"] == 4
    reports = [call(server.get_completed_rollout(rollout_id)) for rollout_id in ids]
    assert [report.final_reward for report in reports] == [1.0, 2.0, 3.0, 4.0]
    assert reports[0].triplets[0].prompt == {"token_ids": [1]}
    with pytest.raises(ConfigError, match="init"):
        trainer.client()


def test_a_url_in_the_place_of_the_data_is_a_server(served, tmp_path):
    server, call = served
    rollout_id = call(server.queue_task(21))
    with pytest.warns(DeprecationWarning, match="fit_v0 belongs to"):
        ly.Trainer(max_rollouts=1, run_dir=tmp_path / "run", progress=False).fit(double, server.endpoint)
    assert call(server.get_completed_rollout(rollout_id)).final_reward == 42.0


def test_an_agents_error_is_reported_with_its_reason_and_the_run_goes_on(served, tmp_path):
    server, call = served
    ids = [call(server.queue_task(task)) for task in ("bad", 1)]
    ly.Trainer(max_rollouts=2, run_dir=tmp_path / "run", progress=False).fit_v0(double, server.endpoint)
    failed, succeeded = (call(server.get_completed_rollout(rollout_id)) for rollout_id in ids)
    assert failed.is_empty and "TypeError" in failed.metadata["error"]
    assert succeeded.final_reward == 2.0


def test_a_dev_trainer_uses_the_dev_data_and_repeats_its_tasks():
    loader = DevTaskLoader([1, 2], MODEL)
    trainer = ly.Trainer(dev=True, max_rollouts=3, progress=False)
    trainer.fit_v0(double, "http://127.0.0.1:1", dev_data=loader)
    assert [report.final_reward for report in loader.rollouts] == [2.0, 4.0, 2.0]
    assert [report.rollout_id for report in loader.rollouts] == ["local_task_001", "local_task_002", "local_task_001"]
    with pytest.raises(ConfigError, match="dev_data"):
        trainer.fit_v0(double, [1])
    with pytest.raises(ConfigError, match="same option"):
        trainer.fit_v0(double, [1], dev_data=loader, dev_backend=loader)


def test_a_validation_set_beside_a_server_is_said_to_be_used_by_nothing(caplog: pytest.LogCaptureFixture):
    ly.Trainer(max_rollouts=1, progress=False).fit_v0(double, DevTaskLoader([1, 2], MODEL), val_data=[3])
    (warned,) = [message for message in caplog.messages if "val_data is used by nothing" in message]
    assert "the tasks come from" in warned
    with pytest.raises(ConfigError, match=r"resume=True, but the tasks come from http://127\.0\.0\.1:1"):
        ly.Trainer().fit(double, "http://127.0.0.1:1", resume=True)


def test_data_with_an_algorithm_is_fit_and_a_server_with_one_is_refused(tmp_path):
    trainer = ly.Trainer(algorithm="baseline", run_dir=tmp_path / "run", progress=False)
    assert trainer.fit_v0(double, [1, 2], val_data=[3]).rollouts["succeeded"] == 3
    with pytest.raises(ConfigError, match="Baseline would get no rollouts"):
        trainer.fit_v0(double, "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="no algorithm"):
        ly.Trainer().fit_v0(double, [1])
    with pytest.raises(ConfigError, match="no URL"):
        ly.Trainer().fit_v0(double, "tasks.parquet")


def test_workers_of_several_programs_share_a_server(served):
    server, call = served
    ids = [call(server.queue_task(n)) for n in (5, 6)]
    trainer = ly.Trainer(max_rollouts=1)
    trainer.init(server.endpoint)
    assert isinstance(trainer.client(), AgentLightningClient)
    assert trainer.run_worker(double) == 1
    with trainer.init_worker_context(double, worker_id=1) as worker:
        assert worker.worker_id == 1 and worker.run()
    trainer.teardown()
    assert [call(server.get_completed_rollout(rollout_id)).final_reward for rollout_id in ids] == [10.0, 12.0]


LEAVES_ONE = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
if sys.argv[1] == "killed": os._exit(0)
sys.stdin.read()
child.kill()
"""


def test_orphans_of_a_killed_run_end_and_processes_of_a_live_one_stay():
    def run(name: str, how: str) -> tuple[subprocess.Popen[bytes], psutil.Process]:
        variables = {**os.environ, RUNNER_MARK: f"{name}.0"}
        runner = subprocess.Popen(
            [sys.executable, "-c", LEAVES_ONE, how], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return runner, psutil.Process(int(runner.stdout.readline()))

    killed, orphan = run(f"run-killed-{os.getpid()}", "killed")
    live, kept = run(f"run-live-{os.getpid()}", "live")
    try:
        killed.wait(10)
        assert ly.Trainer.kill_orphaned_processes() >= 1
        assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
        assert kept.is_running()
    finally:
        live.communicate()
        killed.communicate()


WAITS = """
import leyden as ly

@ly.rollout
async def double(task):
    return 2.0 * task

if __name__ == "__main__":
    ly.Trainer(run_dir={run_dir!r}, strategy="ipc").fit_v0(double, {url!r})
"""


@pytest.mark.slow
@pytest.mark.merge
@pytest.mark.timeout(120)
def test_ctrl_c_ends_a_run_that_waits_for_a_servers_tasks(served, tmp_path):
    server, call = served
    rollout_id = call(server.queue_task(4))
    script = tmp_path / "waits.py"
    script.write_text(WAITS.format(run_dir=str(tmp_path / "run"), url=server.endpoint))
    process = subprocess.Popen([sys.executable, script], stderr=subprocess.PIPE, text=True)
    try:
        report = call(server.poll_completed_rollout(rollout_id, timeout=80))
    finally:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert report is not None and report.final_reward == 8.0, said
    assert process.returncode == 130, said
    assert "Traceback" not in said
