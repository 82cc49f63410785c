"""Runners in processes: what cannot travel is named, what dies is started again, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

import leyden as ly
from leyden._lib.host.limits import CUDA_DEVICES, share_out_gpus
from leyden.errors import ConfigError, RunnerDied, StoreError
from leyden.execution import processes
from leyden.execution.client_server import ClientServerExecutionStrategy
from leyden.execution.process_strategy import InterProcessExecutionStrategy
from tests.execution import agents
from tests.execution.family import gone, runners

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


async def fit(agent: ly.LitAgent[Any], tasks: list[Any], **options: Any) -> ly.LightningStore:
    """A run of one `ipc` runner; the store, still open."""
    store = ly.InMemoryLightningStore()
    await store.__aenter__()
    options = {"algorithm": "baseline", "strategy": "ipc", "store": store, **options}
    async with asyncio.timeout(50):
        await ly.Trainer(**options).afit(agent, tasks)
    return store


# ---- what travels ------------------------------------------------------------------------------------------------------


async def test_a_hook_that_cannot_travel_is_named_with_the_part_that_is_to_blame() -> None:
    hook = agents.Noting(Path())
    hook.lock = threading.Lock()  # pyright: ignore[reportAttributeAccessIssue] -- what users do
    with pytest.raises(ConfigError, match=r"lock of item 0 of hooks \(a lock\) cannot go to another process"):
        await fit(agents.double, [1], hooks=hook)


async def test_an_agent_that_holds_on_to_what_cannot_travel_is_named() -> None:
    lock = threading.Lock()

    @ly.rollout
    async def locked(task: int) -> float:
        with lock:
            return 1.0

    with pytest.raises(ConfigError, match=r"lock of function of agent \(a lock\) cannot go"):
        await fit(locked, [1])


async def test_what_cannot_be_made_anew_in_the_child_is_said_with_the_childs_traceback() -> None:
    with pytest.raises(RunnerDied, match=r"could not start(.|\n)*ZeroDivisionError: made anew"):
        await fit(agents.double, [1], hooks=agents.Broken())


# ---- what dies ---------------------------------------------------------------------------------------------------------


async def test_a_runner_that_dies_is_started_again_and_its_attempt_has_failed(tmp_path: Path) -> None:
    @ly.algo
    async def ask(*, store: ly.LightningStore, train_dataset: list[str]) -> None:
        config = ly.RolloutConfig(max_attempts=2, retry_condition=["failed"])
        rollout = await store.enqueue_rollout(train_dataset[0], config=config)
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id])

    store = await fit(agents.die_once, [str(tmp_path / "marker")], algorithm=ask)
    (rollout,) = await store.query_rollouts()
    first, *claimed_for_the_dead, last = await store.query_attempts(rollout.rollout_id)
    assert (rollout.status, first.status, last.status) == ("succeeded", "failed", "succeeded")
    assert first.metadata["reason_kind"] == "runner_died"
    assert "exit code 3" in first.metadata["reason"]
    assert {attempt.metadata["reason_kind"] for attempt in claimed_for_the_dead} <= {"interrupted"}
    assert runners() == []
    await store.close()


async def test_a_runner_that_dies_at_once_again_and_again_stops_the_run() -> None:
    with pytest.raises(RunnerDied, match=r"died 5 times in a row(.|\n)*exit code 3"):
        await fit(agents.die, list(range(500)), concurrency=1)
    assert runners() == []


async def test_what_a_stopped_run_was_working_on_goes_back_to_the_queue(tmp_path: Path) -> None:
    marker = tmp_path / "pipe"
    os.mkfifo(marker)

    @ly.rollout
    async def hang(task: int) -> float:
        os.close(os.open(marker, os.O_WRONLY))
        await asyncio.sleep(600)
        return 1.0

    strategy = InterProcessExecutionStrategy(drain_seconds=0.1)
    async with ly.InMemoryLightningStore() as store, asyncio.timeout(50):
        run = asyncio.create_task(ly.Trainer(algorithm="baseline", strategy=strategy, store=store).afit(hang, [1]))
        os.close(await asyncio.to_thread(os.open, marker, os.O_RDONLY))  # until the agent opens its end
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        (rollout,) = await store.query_rollouts()
    assert rollout.status == "requeuing"
    assert runners() == []


def test_a_program_without_a_file_runs_its_agent_in_a_process() -> None:
    program = """
import leyden as ly

FACTOR = 2.0

@ly.rollout
async def double(task):
    return FACTOR * task

print(ly.Trainer(algorithm="baseline", strategy="ipc", store="memory").fit(double, [1, 2]))
"""
    ended = run_program("-c", program)
    assert "rollouts: 2 succeeded" in ended.stdout.splitlines(), ended.stderr


def test_a_program_from_standard_input_is_told_that_no_process_can_import_it() -> None:
    program = "import leyden as ly; ly.Trainer(strategy='ipc', store='memory').fit(ly.rollout(lambda task: None))"
    assert "standard input" in run_program("-", given=program).stderr.splitlines()[-1]


def run_program(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Python with these arguments and this on standard input, when it has ended."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], input=given, capture_output=True, text=True, timeout=50, env=environment
    )


# ---- scripts -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, time, os, subprocess
import leyden as ly

@ly.rollout
def hang(task: int) -> float:
    child = subprocess.Popen(["sleep", "600"])
    print(f"started {{os.getpid()}} {{child.pid}}\\n", end="", flush=True)  # in one piece: the other may be a thread beside this
    time.sleep(600)
    return 1.0

if {guard}:
    strategy = {{"type": sys.argv[1], "n_runners": 2, "start_method": sys.argv[2], "drain_seconds": 0.5}}
    ly.Trainer(algorithm="baseline", strategy=strategy, store="memory").fit(hang, [1, 2])
"""


def start_script(tmp_path: Path, strategy: str, method: str, *, guard: bool = True) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(guard='__name__ == "__main__"' if guard else "True"))
    return subprocess.Popen(
        [sys.executable, str(script), strategy, method],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
    )


def begun(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """What runs once both agents do: the runners, what their agents started, and the rest of the script's processes."""
    assert process.stdout is not None
    for _ in range(2):
        word = process.stdout.readline().split()
        assert word, process.communicate()[1]
    return psutil.Process(process.pid).children(recursive=True)


def listening(processes: list[psutil.Process]) -> set[tuple[str, int]]:
    """The ports that these listen on; a fork has those of its parent."""
    return {
        (connection.laddr.ip, connection.laddr.port)
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.faults
@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
@pytest.mark.parametrize("strategy", ["ipc", "cs"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_script_that_is_stopped(
    tmp_path: Path, strategy: str, method: str, number: signal.Signals
) -> None:
    process = start_script(tmp_path, strategy, method)
    processes = begun(process)
    served = listening([psutil.Process(process.pid)])
    assert len(served) == (1 if strategy == "cs" else 0)
    addresses = served | listening(processes)  # runners take the spans of the programs that agents start
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert gone(processes, 8) == [], errors
    for address in addresses:
        socket.create_server(address).close()  # the port is free
    assert number == signal.SIGKILL or "the run was stopped" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


MANY_FILES = """
import resource
import leyden as ly
from leyden.execution.process_strategy import InterProcessExecutionStrategy

@ly.rollout
async def agent(task: int) -> float:
    return 1.0

if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    files = [open("/dev/null") for _ in range(1100)]
    strategy = InterProcessExecutionStrategy(start_method="fork")
    print(ly.Trainer(algorithm="baseline", strategy=strategy, store="memory").fit(agent, [1, 2]))
"""


@pytest.mark.faults
@pytest.mark.merge
def test_a_forked_runner_hears_its_parent_however_many_files_are_open(tmp_path: Path) -> None:
    """`select` knows only the first 1,024 descriptors."""
    script = tmp_path / "script.py"
    script.write_text(MANY_FILES)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=40,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "rollouts: 2 succeeded" in done.stdout.splitlines(), done.stderr


def test_ctrl_c_stops_runners_and_what_their_agents_started(tmp_path: Path) -> None:
    process = start_script(tmp_path, "ipc", "forkserver")
    processes = begun(process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert gone(processes, 8) == [], errors
    assert "the run was stopped" in errors


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_missing_main_guard_is_named(tmp_path: Path, method: str) -> None:
    process = start_script(tmp_path, "ipc", method, guard=False)
    _, errors = process.communicate(timeout=40)
    assert process.returncode == 1
    assert "`if __name__ == '__main__':`" in errors.splitlines()[-1]


# ---- options -----------------------------------------------------------------------------------------------------------


async def test_a_port_in_use_is_reported_with_the_option_that_changes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        strategy = ClientServerExecutionStrategy(server_port=port)
        with pytest.raises(StoreError, match=rf"port={port}(.|\n)*server_port="):
            await fit(agents.double, [1], strategy=strategy)


@pytest.mark.parametrize("prefix", ["LEYDEN", "AGL"])
def test_the_environment_says_role_and_address(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    values = {"CURRENT_ROLE": "runner", "SERVER_HOST": "10.0.0.7", "SERVER_PORT": "4999", "MANAGED_STORE": "0"}
    for name, value in values.items():
        monkeypatch.setenv(f"{prefix}_{name}", value)
    strategy = ClientServerExecutionStrategy()
    assert (strategy.role, strategy.server_host, strategy.server_port) == ("runner", "10.0.0.7", 4999)
    assert not strategy.managed_store


@pytest.mark.parametrize("prefix", ["LEYDEN", "AGL"])
@pytest.mark.parametrize(
    ("variable", "value"),
    [("SERVER_PORT", "http"), ("SERVER_PORT", "70000"), ("MANAGED_STORE", "maybe"), ("CURRENT_ROLE", "store")],
)
def test_an_error_names_the_variable_that_was_set(
    monkeypatch: pytest.MonkeyPatch, prefix: str, variable: str, value: str
) -> None:
    monkeypatch.setenv(f"{prefix}_{variable}", value)
    with pytest.raises(ConfigError, match=f"^{prefix}_{variable} is '{value}'"):
        ClientServerExecutionStrategy()


def test_wrong_options_are_refused_with_their_value(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"n_runners": 0}, "n_runners is 0"),
        ({"drain_seconds": -1}, "drain_seconds is -1"),
        ({"start_method": "thread"}, "start_method is 'thread'"),
        ({"role": "store"}, "role is 'store'"),
        ({"protocol": "grpc"}, "protocol is 'grpc'"),
        ({"host": "a", "server_host": "b"}, "host='a' and server_host='b'"),
        ({"cpu_affinity": [[0], [0]]}, "cpu_affinity has 2 lists of CPUs for 1 runners"),
        ({"cpu_affinity": [[9999]]}, r"cpu_affinity\[0\] is \[9999\]"),
        ({"gpus_per_runner": 0}, "gpus_per_runner is 0"),
        ({"memory_bytes": 0}, "memory_bytes is 0"),
        ({"n_runners": "2"}, "n_runners is '2'"),
        ({"drain_seconds": float("nan")}, "drain_seconds is nan"),
        ({"daemon": "yes"}, "daemon is 'yes'"),
        ({"cpu_affinity": [0]}, r"cpu_affinity is \[0\]; give a list of CPUs for each runner"),
        ({"gpus_per_runner": 0.5}, "gpus_per_runner is 0.5; it must be a whole number"),
        ({"memory_bytes": "1GB"}, "memory_bytes is '1GB'"),
        ({"memory_bytes": 2**64}, "memory_bytes is 18446744073709551616"),
        ({"server_port": "4747"}, "server_port is '4747'"),
        ({"server_port": -1}, "server_port is -1"),
        ({"server_host": 5}, "server_host is 5; it must be a string"),
        ({"managed_store": "no"}, "managed_store is 'no'; possible: True, False"),
        ({"patience_seconds": "60"}, "patience_seconds is '60'"),
    ]
    for options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            ClientServerExecutionStrategy(**options)
    monkeypatch.setenv(CUDA_DEVICES, "0,1,2")
    with pytest.raises(ConfigError, match="needs 4 GPUs, and there are 3"):
        share_out_gpus(2, 2)
    assert share_out_gpus(1, 3) == ["0", "1", "2"]


async def test_each_runner_has_its_cpus() -> None:
    cpu = min(os.sched_getaffinity(0))

    @ly.rollout
    async def where(task: int) -> float:
        return float(os.sched_getaffinity(0) == {cpu})

    store = await fit(where, [1], strategy=InterProcessExecutionStrategy(cpu_affinity=[[cpu]]))
    (rollout,) = await store.query_rollouts()
    assert ly.find_final_reward(await store.query_spans(rollout.rollout_id)) == 1.0
    await store.close()


async def test_runners_elsewhere_end_at_once_when_the_algorithm_has_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options: dict[str, Any] = {"server_port": port, "token": "secret"}
    runner = ly.Trainer(strategy=ClientServerExecutionStrategy(role="runner", **options))
    working = asyncio.create_task(runner.afit(agents.nap))
    async with ly.InMemoryLightningStore() as store:
        algorithm = ClientServerExecutionStrategy(role="algorithm", drain_seconds=20, **options)
        async with asyncio.timeout(50):
            await ly.Trainer(algorithm=_enqueue_and_wait_for_one, strategy=algorithm, store=store).afit(
                agents.nap, [1, 2, 3]
            )
        assert {rollout.status for rollout in await store.query_rollouts()} <= {"succeeded", "queuing"}
    async with asyncio.timeout(20):  # less than its patience
        await working
    assert runners() == []


@ly.algo
async def _enqueue_and_wait_for_one(*, store: ly.LightningStore, train_dataset: list[int]) -> None:
    """It ends while others are under way, which are reported before the server goes."""
    enqueued = [(await store.enqueue_rollout(task)).rollout_id for task in train_dataset]
    await store.wait_for_any_rollout(rollout_ids=enqueued)


TWO_ROLES = """
import asyncio, logging, sys
import leyden as ly
from leyden.execution import processes
from leyden.execution.client_server import ClientServerExecutionStrategy

@ly.rollout
async def work(task: float) -> float:
    await asyncio.sleep(task)
    return 1.0

if __name__ == "__main__":
    role, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    logging.basicConfig(level="INFO")
    strategy = ClientServerExecutionStrategy(2, role=role, server_port=port, patience_seconds=20 if role == "algorithm" else 3)
    store = "memory" if role == "algorithm" else None
    ly.Trainer(algorithm="baseline", strategy=strategy, store=store).fit(work, [seconds] * 4)
    print("done", flush=True)
"""


@pytest.mark.faults
@pytest.mark.timeout(120)
@pytest.mark.parametrize("ending", ["normal", "killed"])
def test_runner_processes_elsewhere_end_by_themselves(tmp_path: Path, ending: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(TWO_ROLES)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def start(role: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(script), role, str(port), "6" if ending == "normal" else "600"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    algorithm = start("algorithm")
    store = ly.LightningStoreClient(f"http://127.0.0.1:{port}", retry_seconds=40)

    async def all_are_under_way() -> None:
        async with store:
            while not await store.query_rollouts() or await store.query_rollouts(status_in=["queuing"]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # other processes work

    machines: list[subprocess.Popen[str]] = []
    processes: list[psutil.Process] = []
    try:
        asyncio.run(store.statistics())  # it is there
        machines += [start("runner"), start("runner")]
        if ending == "killed":
            asyncio.run(all_are_under_way())
            processes = [
                child for machine in machines for child in psutil.Process(machine.pid).children(recursive=True)
            ]
            algorithm.kill()
        ends = [machine.communicate(timeout=60) for machine in machines]
        assert algorithm.wait(timeout=60) == (-signal.SIGKILL if ending == "killed" else 0)
    finally:
        for process in (algorithm, *machines):
            process.kill()
            process.communicate()
    for machine, (output, errors) in zip(machines, ends, strict=True):
        assert (machine.returncode, output) == (0, "done\n"), errors
        assert ("the algorithm has ended" if ending == "normal" else "the algorithm's store has gone") in errors
    assert gone(processes, 8) == []


# ---- what is suspended -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ipc", "cs"])
@pytest.mark.parametrize("begun", [True, False])
async def test_a_suspended_runner_holds_up_no_run_that_is_done(
    strategy: str, begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "_SUSPENDED_SECONDS", 1.0)
    suspended: list[psutil.Process] = []

    @ly.rollout
    async def note(task: int) -> float:
        (tmp_path / str(os.getpid())).touch()
        await asyncio.sleep(0.2)
        return 1.0

    @ly.algo
    async def suspend_one(*, store: ly.LightningStore, train_dataset: list[int]) -> None:
        config = ly.RolloutConfig(max_attempts=5, unresponsive_seconds=2, retry_condition=["unresponsive"])
        if not begun:  # before it is ready to work
            while not runners():  # noqa: ASYNC110 -- a process table has no event
                await asyncio.sleep(0.005)
            suspended.append(runners()[0])
            suspended[0].suspend()
        rollouts = [await store.enqueue_rollout(task, config=config) for task in train_dataset]
        if begun:
            while len(workers := os.listdir(tmp_path)) < 2:  # noqa: ASYNC110, PTH208
                await asyncio.sleep(0.01)
            suspended.append(psutil.Process(int(workers[0])))
            suspended[0].suspend()
        await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id for rollout in rollouts])

    store = await fit(note, list(range(20)), algorithm=suspend_one, strategy=strategy, n_runners=2, concurrency=2)
    assert {rollout.status for rollout in await store.query_rollouts()} == {"succeeded"}
    assert not suspended[0].is_running()
    assert runners() == []
    assert "suspended (SIGSTOP)" in caplog.text
    await store.close()
