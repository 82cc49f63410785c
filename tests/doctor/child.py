"""Programs whose runs have faults that need a process of their own: `python -m tests.doctor.child NAME FOLDER`.

Those that keep running print a line when the fault can be made: the pid of a worker, or a port.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if shift := float(os.environ.get("TEST_CLOCK_SHIFT", "0")):  # before Leyden reads the clock
    real, real_ns = time.time, time.time_ns
    time.time, time.time_ns = lambda: real() + shift, lambda: real_ns() + int(shift * 1e9)

import leyden as ly
from leyden.errors import LeydenError
from leyden.execution.client_server import ClientServerExecutionStrategy
from leyden.execution.runner import LitAgentRunner
from leyden.store import LightningStore, LightningStoreClient
from tests.rl.parts import Walk


@ly.rollout
async def waits(task: int) -> float:
    """Run until the process ends."""
    ly.emit_message("begun")
    await asyncio.Event().wait()
    return 1.0


@ly.rollout
async def quick(task: int) -> float:
    return float(task)


def runs(directory: Path, heartbeat_seconds: float, *, pause: bool = False, model: str | None = None) -> None:
    """Run two workers in processes, and tell the pid of one when both have reported."""

    @ly.algo
    async def algorithm(*, store: LightningStore) -> None:
        for task in range(4):
            await store.enqueue_rollout(task)
        if model is not None:
            await store.add_resources({"llm": ly.LLM(endpoint=model, model="m")})
        while len(workers := [each for each in await store.query_workers() if each.heartbeat_stats]) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        if pause:
            for worker in workers:
                await store.pause_worker(worker.worker_id)
        print((workers[0].heartbeat_stats or {})["pid"], flush=True)
        await asyncio.Event().wait()

    runner: LitAgentRunner[Any] = LitAgentRunner(heartbeat_interval=heartbeat_seconds, concurrency=2)
    ly.Trainer(algorithm=algorithm, run_dir=directory, strategy="ipc", n_runners=2, runner=runner, progress=False).fit(
        waits
    )


def serves(directory: Path) -> None:
    """Hold the port of a run's store server, and tell it."""
    port = free_port()

    @ly.algo
    async def algorithm(*, store: LightningStore) -> None:
        print(port, flush=True)
        await asyncio.Event().wait()

    ly.Trainer(
        algorithm=algorithm, run_dir=directory, strategy={"type": "cs", "server_port": port}, progress=False
    ).fit(waits)


def fills(directory: Path) -> None:
    """Train until the disk is full."""

    @ly.rollout
    async def agent(task: int) -> float:
        with (directory / "filler").open("ab") as filler:
            filler.write(b"x" * 1_000_000)
        ly.emit_message("y" * 100_000)
        return 1.0

    ly.Trainer(algorithm="baseline", run_dir=directory, progress=False).fit(agent, list(range(100)))


# ---- a worker on another machine -----------------------------------------------------------------


def run_elsewhere(directory: Path, *, shift_seconds: float = 0.0, delay_seconds: float = 0.0) -> None:
    """Run the algorithm here, and the agents in another program that reaches the store over a connection with a delay.

    shift_seconds: how far the clock of that program is ahead.
    """
    port = free_port()

    @ly.algo
    async def algorithm(*, store: LightningStore) -> None:
        server = await asyncio.start_server(partial(pass_on, port=port, delay_seconds=delay_seconds), "127.0.0.1", 0)
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        command = [sys.executable, "-m", "tests.doctor.child", "worker", address]
        env = {**os.environ, "TEST_CLOCK_SHIFT": str(shift_seconds)}
        async with server:
            worker = await asyncio.create_subprocess_exec(*command, env=env)
            try:
                rollouts = [await store.enqueue_rollout(task) for task in range(4)]
                await store.wait_for_rollouts(rollout_ids=[each.rollout_id for each in rollouts], timeout=40)
                workers = await store.query_workers()
                while not any("store_latency_seconds" in (each.heartbeat_stats or {}) for each in workers):
                    await asyncio.sleep(0.05)
                    workers = await store.query_workers()
            finally:
                worker.kill()
                await worker.wait()

    strategy = ClientServerExecutionStrategy(role="algorithm", server_port=port, drain_seconds=0.1)
    ly.Trainer(algorithm=algorithm, run_dir=directory, strategy=strategy, progress=False).fit(quick)


async def pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, port: int, delay_seconds: float
) -> None:
    """Connect a client to the store's server. What it sends arrives later."""
    there, back = await asyncio.open_connection("127.0.0.1", port)

    async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter, seconds: float) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await source.read(65536):
                await asyncio.sleep(seconds)
                target.write(piece)
                await target.drain()
        target.close()

    await asyncio.gather(carry(reader, back, delay_seconds), carry(there, writer, 0.0))


def works_elsewhere(address: Path) -> None:
    runner: LitAgentRunner[Any] = LitAgentRunner(heartbeat_interval=0.5, concurrency=1)
    ly.Trainer(store=str(address).replace(":/", "://"), runner=runner, progress=False).fit(quick)


def loses_its_store(directory: Path) -> None:
    """The server of the store is killed in the middle of the run."""
    command = [
        sys.executable,
        "-m",
        "leyden",
        "store",
        "--url",
        str(directory.with_name("x.sqlite")),
        "--port",
        str(port := free_port()),
    ]

    @ly.rollout
    async def agent(task: int) -> float:
        server.kill()
        server.wait()
        return 1.0

    with subprocess.Popen(command) as server, contextlib.suppress(LeydenError):
        client = LightningStoreClient(f"http://127.0.0.1:{port}", retry_seconds=2.0)
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.05)
        ly.Trainer(algorithm="baseline", store=client, run_dir=directory, progress=False).fit(agent, [1, 2, 3])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


# ---- a simulator ---------------------------------------------------------------------------------


class Stands(Walk):
    """Hangs in its first step."""

    def step(self, action: int) -> None:
        threading.Event().wait()


def main() -> None:
    name, directory = sys.argv[1], Path(sys.argv[2])
    programs: dict[str, Callable[[Path], None]] = {
        "works": lambda folder: runs(folder, 0.2),
        "works_slowly": lambda folder: runs(folder, 10.0),
        "paused": lambda folder: runs(folder, 0.2, pause=True),
        "asks_nobody": lambda folder: runs(folder, 0.2, model="http://127.0.0.1:9/v1"),
        "serves": serves,
        "fills": fills,
        "worker": works_elsewhere,
        "clock_ahead": lambda folder: run_elsewhere(folder, shift_seconds=3600.0),
        "clock_behind": lambda folder: run_elsewhere(folder, shift_seconds=-3600.0),
        "slow_store": lambda folder: run_elsewhere(folder, delay_seconds=0.7),
        "store_goes": loses_its_store,
    }
    programs[name](directory)


if __name__ == "__main__":
    main()
