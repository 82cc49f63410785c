"""Faults of machines and connections."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

import leyden as ly
from leyden.errors import LeydenError
from leyden.execution.sandbox import Sandbox
from leyden.rl import Trainer as SimulatorTrainer
from leyden.testing import FakeUpstream
from leyden.testing.upstream import Misbehaviour
from leyden.training.runs import open_run
from leyden.training.runs.control import ControlFile, ControlLine
from leyden.training.runs.folder import Manifest
from tests.algorithm.asking import ask, backend
from tests.doctor import recorded
from tests.doctor.child import Stands, waits
from tests.doctor.faults import Case
from tests.doctor.policy import says_four, train
from tests.rl.parts import vessel_of

ROOT = Path(__file__).parents[2]
NOBODY = "http://127.0.0.1:9/v1"
"""A port at which nothing listens."""


def measure(directory: Path, agent: Any, **trainer: Any) -> None:
    """Run an agent on three tasks, and keep the run even if it fails."""
    with contextlib.suppress(LeydenError, OSError):
        ly.Trainer(algorithm="baseline", run_dir=directory, progress=False, **trainer).fit(agent, [1, 2, 3])


def program(name: str, directory: Path, **options: Any) -> subprocess.Popen[str]:
    """Start a program of `tests.doctor.child`."""
    command = [sys.executable, "-m", "tests.doctor.child", name, str(directory)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, **options)


@ly.llm_rollout
async def asks(task: int, llm: ly.LLM) -> float:
    await ask(llm)
    return 1.0


@ly.llm_rollout
async def asks_and_shrugs(task: int, llm: ly.LLM) -> float:
    try:
        return float(await ask(llm) == "4")
    except Exception:  # noqa: BLE001 -- the fault
        return 0.0


# ---- the model's server --------------------------------------------------------------------------


@contextlib.contextmanager
def serving(**options: Any) -> Generator[FakeUpstream]:
    """Serve in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = FakeUpstream(**options)
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def gateway_to(address: str, model: str = "fake", **options: Any) -> ly.LLMProxy:
    parameters = {"model": f"openai/{model}", "api_base": address, "api_key": "secret-key"}
    return ly.LLMProxy(model_list=[{"model_name": "policy", "litellm_params": parameters}], **options)


def directly(model: str | None = None, agent: Any = asks, **server: Any) -> Callable[[Path], None]:
    """Agents call the server themselves."""

    def make(directory: Path) -> None:
        with serving(**server) as upstream:
            measure(directory, agent, initial_resources={"llm": upstream.llm(model)})

    return make


def through_the_gateway(model: str = "fake", agent: Any = asks, **server: Any) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        with serving(**server) as upstream:
            measure(directory, agent, llm_proxy=gateway_to(upstream.endpoint, model, timeout_seconds=1.0))

    return make


def answering(status: int) -> dict[str, Any]:
    def fault(_: dict[str, Any]) -> Misbehaviour:
        return Misbehaviour(status=status)

    return {"fault": fault}


def another_name_in_the_agent(directory: Path) -> None:
    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        return float(await ask(llm.model_copy(update={"model": "gpt-4o"})) == "4")

    with contextlib.suppress(LeydenError):
        train(directory, agent)


def nobody_listens(directory: Path) -> None:
    measure(directory, asks, initial_resources={"llm": ly.LLM(endpoint=NOBODY, model="m")})


def nobody_listens_behind_the_gateway(directory: Path) -> None:
    measure(directory, asks, llm_proxy=gateway_to(NOBODY))


def no_such_host(directory: Path) -> None:
    measure(directory, asks, initial_resources={"llm": ly.LLM(endpoint="http://no-such-host.invalid/v1", model="m")})


def no_such_folder(directory: Path) -> None:
    with contextlib.suppress(LeydenError):
        train(directory, ly.llm_rollout(says_four), backend=ly.EmbeddedBackend(str(directory / "none"), device="cpu"))


# ---- ports, packages, programs -------------------------------------------------------------------


def gateway_port_taken(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        measure(directory, asks, llm_proxy=gateway_to(NOBODY, port=other.getsockname()[1]))


def two_trainers_on_one_port(directory: Path) -> None:
    with program("serves", directory.with_name("first")) as first:
        assert first.stdout is not None
        port = int(first.stdout.readline())
        measure(directory, waits, strategy={"type": "cs", "server_port": port})
        first.kill()


def no_package(directory: Path) -> None:
    @ly.rollout
    def agent(task: int) -> float:
        return float(len(importlib.import_module("not_installed_anywhere").__doc__ or ""))

    measure(directory, agent)


def no_vllm(directory: Path) -> None:
    from leyden.cli.demo import WEIGHTS
    from leyden.engine import VLLMBackend

    with contextlib.suppress(LeydenError):
        train(directory, ly.llm_rollout(says_four), backend=VLLMBackend(WEIGHTS))


def no_program(directory: Path) -> None:
    measure(directory, ly.ProcessAgent(["/no/such/program"]))


def a_program_without_a_call(directory: Path) -> None:
    with contextlib.suppress(LeydenError):
        train(directory, ly.ProcessAgent([sys.executable, "-c", "print('hello')"]))


def beyond_the_sandbox(directory: Path) -> None:
    fills = "[open(f'x{n}', 'wb').write(b'0' * 500_000) for n in range(100)]; import time; time.sleep(50)"
    sandbox = Sandbox(disk_bytes=1_000_000)
    measure(directory, ly.ProcessAgent([sys.executable, "-c", fills], sandbox=sandbox, reward="last_line"))


# ---- resources -----------------------------------------------------------------------------------


def no_descriptors(directory: Path) -> None:
    @ly.rollout
    def agent(task: int) -> float:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            Path("/dev/null").open().close()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return 1.0

    measure(directory, agent)


def no_memory(directory: Path) -> None:
    @ly.rollout
    def agent(task: int) -> float:
        return float(len(bytearray(1 << 62)))

    measure(directory, agent)


def no_threads(directory: Path) -> None:
    @ly.rollout
    def agent(task: int) -> float:
        size = threading.stack_size(1 << 40)  # no machine has room for it
        try:
            threading.Thread(target=print).start()
        finally:
            threading.stack_size(size)
        return 1.0

    measure(directory, agent)


def no_disk_for_an_agent(directory: Path) -> None:
    @ly.rollout
    def agent(task: int) -> float:
        with Path("/dev/full").open("w") as file:
            file.write("x")
        return 1.0

    measure(directory, agent)


@contextlib.contextmanager
def no_disk_for_the_run(directory: Path) -> Generator[None]:
    """The run has a file system of 4 MB, in a mount namespace that lasts as long as the fault."""
    small = directory.with_name("small")
    small.mkdir()
    script = f"mount -t tmpfs -o size=4m none {small} && ({sys.executable} -m tests.doctor.child fills {small}/run; echo; cat)"
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        directory.symlink_to(f"/proc/{shell.pid}/root{small}/run")
        yield
        shell.communicate()


def no_gpu_memory(directory: Path) -> None:
    cause = (
        "EngineError: a gradient of one sequence of 4096 tokens does not fit into memory (CUDA out of memory. Tried to "
    )
    recorded.record(directory, recorded.steps(reward=[0.1, 0.2]), status="failed", cause=cause + "allocate 2.00 GiB)")


# ---- processes -----------------------------------------------------------------------------------


@ly.rollout
def kills_itself(task: int) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


@ly.rollout
def exits(task: int) -> float:
    os._exit(3)


def dies(agent: Any) -> Callable[[Path], None]:
    return lambda directory: measure(directory, agent, strategy="ipc", n_runners=2)


@contextlib.contextmanager
def running(name: str, directory: Path) -> Generator[tuple[subprocess.Popen[str], int]]:
    """Start a run in a program of its own. Yield it and the pid of one of its workers when that works."""
    with program(name, directory) as child:
        assert child.stdout is not None
        worker = int(child.stdout.readline())
        runners = psutil.Process(child.pid).children(recursive=True)
        try:
            yield child, worker
        finally:
            child.kill()
            for each in runners:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


@contextlib.contextmanager
def suspended_worker(directory: Path) -> Generator[None]:
    with running("works", directory) as (_, worker):
        os.kill(worker, signal.SIGSTOP)
        silent_for = 1.0  # five heartbeats of this run's workers
        time.sleep(silent_for)
        yield


@contextlib.contextmanager
def suspended_worker_live(directory: Path) -> Generator[None]:
    with running("works_slowly", directory) as (_, worker):
        os.kill(worker, signal.SIGSTOP)
        yield


@contextlib.contextmanager
def server_gone_live(directory: Path) -> Generator[None]:
    with running("asks_nobody", directory):
        yield


@contextlib.contextmanager
def paused_workers(directory: Path) -> Generator[None]:
    with running("paused", directory):
        yield


@contextlib.contextmanager
def paused_for_hours(directory: Path) -> Generator[None]:
    with running("works_slowly", directory):
        asked = ControlLine("1", time.time() - 7200, "ann", "pause")
        ControlFile(directory).append([asked, replace(asked, state="done", iteration=0)])
        yield


@contextlib.contextmanager
def never_answered(directory: Path) -> Generator[None]:
    with running("works_slowly", directory):
        ControlFile(directory).append([ControlLine("1", time.time() - 3600, "ann", "extend", path="n_steps", value=3)])
        yield


def killed(directory: Path) -> None:
    with running("works_slowly", directory) as (process, _):
        process.kill()
        process.wait()


def interrupted_policy(directory: Path) -> None:
    """The policy's process is killed in the middle of the run."""

    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        for child in psutil.Process().children():
            if "resource_tracker" not in " ".join(child.cmdline()):  # Python's own
                child.kill()
        return float(await ask(llm) == "4")

    from leyden.cli.demo import WEIGHTS

    with contextlib.suppress(LeydenError):
        train(directory, agent, backend=ly.IsolatedBackend(WEIGHTS, device="cpu", max_length=128))


# ---- clocks, the store, checkpoints --------------------------------------------------------------


def run_with(name: str) -> Callable[[Path], None]:
    """The whole run is a program of `child`."""

    def make(directory: Path) -> None:
        with program(name, directory) as child:
            assert child.wait(timeout=50) == 0

    return make


def damaged(directory: Path) -> None:
    train(directory, ly.llm_rollout(says_four))
    for checkpoint in (directory / "checkpoints").glob("step-*"):
        file = max((each for each in checkpoint.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size)
        file.write_bytes(file.read_bytes()[:-100])


def damaged_and_resumed(directory: Path) -> None:
    damaged(directory)
    algorithm = ly.GRPO(backend(), n_steps=5, tasks_per_step=2, rollouts_per_task=4, max_tokens=4)
    with contextlib.suppress(LeydenError):
        trainer = ly.Trainer(algorithm=algorithm, run_dir=directory, progress=False)
        trainer.fit(ly.llm_rollout(says_four), list(range(8)), resume=True)


@contextlib.contextmanager
def filling(directory: Path) -> Generator[None]:
    """Records grow by far more in each step than the disk has room for."""
    rows = recorded.steps(reward=[0.1, 0.2, 0.3])
    recorded.record(directory, rows, config={"algorithm": {"name": "a.B", "options": {"n_steps": 10**9}}})
    with (directory / "run.log").open("ab") as log:
        log.truncate(2_000_000)
    manifest = Manifest(open_run(directory).record).of_this_process()
    manifest.record.status, manifest.record.end_time = "running", None
    manifest.write(directory)
    yield


# ---- agents and simulators -----------------------------------------------------------------------


def blocks(directory: Path) -> None:
    @ly.rollout
    async def agent(task: int) -> float:
        seconds = 2.0 if task == 1 else 0.0
        time.sleep(seconds)  # noqa: ASYNC251 -- the fault
        return 1.0

    measure(directory, agent)


def takes_too_long(directory: Path) -> None:
    @ly.rollout
    async def agent(task: int) -> float:
        await asyncio.Event().wait()
        return 1.0

    with contextlib.suppress(LeydenError):
        train(directory, agent, timeout_seconds=0.5)


def simulator_hangs(directory: Path) -> None:
    trainer = SimulatorTrainer(
        max_iters=1, env_options={"step_timeout_seconds": 3.0}, run_dir=directory, progress=False
    )
    with contextlib.suppress(LeydenError):
        trainer.fit(vessel_of(simulator=Stands))


CASES = (
    ("a model's name that the server does not have", directly("gpt-nope"), "wrong-model-name"),
    ("a model's name that the server behind the gateway does not have", through_the_gateway("gpt-nope"), "wrong-model-name"),
    ("an agent that asks for a model of its own", another_name_in_the_agent, "wrong-model-name"),
    ("a model's folder that does not exist", no_such_folder, "wrong-model-name"),
    ("a server of the model that is not started", nobody_listens, "upstream-unreachable"),
    ("the same behind the gateway", nobody_listens_behind_the_gateway, "upstream-unreachable"),
    ("a host name that nobody knows", no_such_host, "upstream-unreachable"),
    ("a key that the server rejects (401)", directly(**answering(401)), "upstream-refuses"),
    ("a model that the key may not use (403)", through_the_gateway(**answering(403)), "upstream-refuses"),
    ("a rejected key, and an agent that goes on", through_the_gateway(agent=asks_and_shrugs, **answering(401)), "upstream-refuses"),
    ("a rate limit (429)", directly(**answering(429)), "upstream-refuses"),
    ("a server that fails (500)", through_the_gateway(**answering(500)), "upstream-refuses"),
    ("a server that hangs", through_the_gateway(delay_seconds=5.0), "upstream-refuses"),
    ("a gateway's port that is taken", gateway_port_taken, "port-taken"),
    ("a package that is missing", no_package, "missing-package"),
    ("an agent's program that does not exist", no_program, "missing-package"),
    ("a program that calls no model", a_program_without_a_call, "harness"),
    ("no file descriptors", no_descriptors, "resource-exhausted"),
    ("no memory", no_memory, "resource-exhausted"),
    ("no threads", no_threads, "resource-exhausted"),
    ("a full disk in the agent", no_disk_for_an_agent, "resource-exhausted"),
    ("checkpoints that are damaged", damaged, "damaged-checkpoint"),
    ("a resume from damaged checkpoints", damaged_and_resumed, "damaged-checkpoint"),
    ("a disk that will be full", filling, "disk-filling"),
    ("an agent that blocks the event loop", blocks, "stuck-agent"),
    ("agents that do not return", takes_too_long, "stuck-agent"),
    ("two trainers on one port", two_trainers_on_one_port, "port-taken"),
    ("vLLM that is not installed", no_vllm, "missing-package"),
    ("a program beyond a limit of its sandbox", beyond_the_sandbox, "sandbox-refused"),
    ("runners that are killed", dies(kills_itself), "worker-died"),
    ("runners that exit", dies(exits), "worker-died"),
    ("a policy's process that is killed", interrupted_policy, "worker-died"),
    ("a worker that is suspended (SIGSTOP)", suspended_worker, "worker-silent"),
    ("workers that an alert has paused", paused_workers, "paused"),
    ("a run that was paused hours ago", paused_for_hours, "paused"),
    ("a request that the run does not answer", never_answered, "paused"),
    ("a run that is killed", killed, "run-killed"),
    ("a worker whose clock is an hour ahead", run_with("clock_ahead"), "clock-skew"),
    ("a worker whose clock is an hour behind", run_with("clock_behind"), "clock-skew"),
    ("a store behind a slow network", run_with("slow_store"), "slow-store"),
    ("a simulator that hangs", simulator_hangs, "stuck-environment"),
)  # fmt: skip

FAULTS = (
    *(Case(name, make, rule) for name, make, rule in CASES),
    Case("a full disk under the run", no_disk_for_the_run, "disk-filling", unread=True),
    Case("a store that goes away", run_with("store_goes"), "store-away", unread=True),
    Case("a worker that is suspended, asked at once", suspended_worker_live, "live-processes", live=True),
    Case("a model's server that has gone, asked at once", server_gone_live, "live-servers", live=True),
    Case("a GPU without memory", no_gpu_memory, "resource-exhausted", recorded=True),
)
