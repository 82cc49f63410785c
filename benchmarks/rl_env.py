"""Vectorised environments against those of Gymnasium, Stable-Baselines3 and tianshou: what a step of a cheap simulator costs.

Four environments of one simulator (16 floats, episodes of 200 steps, fixed actions). The figure is CPU microseconds of one step,
all processes together: what is left when the machine is shared, and what a simulator's own cost is added to. Leyden's environments do more
than the peers' (`peers/rl_env_side.py`): each seed of a finite set once, observations and actions validated, a logged value in each step,
episodes added up for a writer. Every side is a process that stays; short slices of all take turns.

Some rows run beside as many processes that compute as there are cores: workers that wait by spinning would collapse.

The last rows are the fixed cost of an iteration: `Trainer.fit` with PPO, 4 episodes of 5 steps each and an update from these 20, in
seconds of wall time an iteration after the first, which starts the workers. Torch has one thread, but in the last of these rows: for
networks of this size more of them only wait for each other, and much longer where other programs hold the cores. Qlib's trainer, which
makes workers and queues anew each time and waits for them by sleeping, took 2.7 to 3.5 s where it was measured by itself; it is no peer
here, for it does not install beside the others.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from benchmarks.harness import Peer, PeerFailed, Row, Sample, cpu_seconds
from benchmarks.sides import Side, alternate, row
from leyden.rl import PPO, ActionInterpreter, Simulator, StateInterpreter, Trainer, TrainingVessel
from leyden.rl.env import FiniteEnvType
from leyden.rl.env.group import cores
from leyden.training import Callback

PEER = "bench-rl"
SCRIPT = Path(__file__).parent / "peers" / "rl_env_side.py"
N_ENVS = 4
N_BATCHED = 1024
ROUNDS = 7
UNIT = "CPU µs/step"
SHORT_LENGTH, SHORT_ITERATIONS = 5, 40
SLICE_STEPS = {"dummy": 40_000, "sync": 40_000, "batch": 20_000_000}
"""Steps of a slice, by kind; PROCESS_STEPS for all others."""
PROCESS_STEPS = 12_000
IN_PROCESS = ["gymnasium-sync", "sb3-dummy", "tianshou-dummy"]
PROCESSES = ["gymnasium-async", "sb3-subproc", "tianshou-subproc", "tianshou-shmem"]
PEER_NAMES = {"gymnasium": "gymnasium 1.4", "sb3": "stable-baselines3 2.9.2", "tianshou": "tianshou 2.0.1"}
HEADLINES = (
    f"environments in one process ({N_ENVS}), gymnasium sync",
    f"environments in worker processes ({N_ENVS}), gymnasium async",
)


def main(peer: Peer | None) -> list[Row]:
    with ExitStack() as stack:
        sides: dict[str, Side] = {}

        def start(name: str, n: int = N_ENVS) -> None:
            python = Path(sys.executable) if name.startswith("leyden") else peer.python if peer else None
            if python is None:
                return
            side = stack.enter_context(Side(name.partition("-")[0], python, SCRIPT, name, str(n)))
            try:
                side.ask("run", steps=N_ENVS)
                sides[name] = side
            except PeerFailed as failure:
                print(f"without {name}: {failure}", flush=True)

        start("leyden-batch", N_BATCHED)
        for name in ["leyden-dummy", "leyden-subproc", "leyden-shmem", *IN_PROCESS, *PROCESSES]:
            start(name)
        cost = measure({name: costs(side, name) for name, side in sides.items()})
        in_workers = [name for name in ("leyden-shmem", "leyden-subproc", *PROCESSES) if name in sides]
        idle = measure({name: speed(sides[name]) for name in in_workers})
        with taken_cores():
            loaded = measure({name: speed(sides[name]) for name in in_workers})
    return [*rows(cost, idle, loaded), *fixed_costs()]


def rows(cost: dict[str, list[Sample]], idle: dict[str, list[Sample]], loaded: dict[str, list[Sample]]) -> list[Row]:
    found: list[Row] = []
    for ours, kinds, where in (
        ("leyden-dummy", IN_PROCESS, "in one process"),
        ("leyden-shmem", PROCESSES, "in worker processes"),
        ("leyden-subproc", ["sb3-subproc"], "in worker processes, messages"),
    ):
        for name in [name for name in kinds if name in cost] or [""]:
            label = f"environments {where} ({N_ENVS}){', ' + name.replace('-', ' ') if name else ''}"
            found.append(_row(label, UNIT, cost[ours], cost.get(name, []), name, higher_is_better=False))
    one_by_one = cost["leyden-dummy"]
    found.append(
        _row(
            f"simulator of {N_BATCHED} rows, one environment each",
            UNIT,
            cost["leyden-batch"],
            one_by_one,
            "leyden-dummy",
            higher_is_better=False,
        )
    )
    for name in [name for name in PROCESSES if name in loaded] or [""]:
        shown = name.replace("-", " ")
        label = f"worker processes ({N_ENVS}) while all cores are taken{', ' + shown if name else ''}"
        found.append(_row(label, "steps/s", loaded["leyden-shmem"], loaded.get(name, []), name))
    found.append(
        _row(
            "worker processes, cores taken against free",
            "steps/s",
            loaded["leyden-shmem"],
            idle["leyden-shmem"],
            "leyden-shmem",
        )
    )
    return found


def fixed_costs() -> list[Row]:
    kinds: dict[str, tuple[FiniteEnvType, int | None]] = {
        "dummy": ("dummy", 1),
        "subproc": ("subproc", 1),
        "shmem": ("shmem", 1),
        "dummy, torch's own number of threads": ("dummy", None),
    }
    samples = alternate([partial(short_iterations, *kind) for kind in kinds.values()], pairs=ROUNDS)
    title = f"an iteration of {N_ENVS} episodes of {SHORT_LENGTH} steps"
    return [
        row(f"{title}, {label}", "s", taken, [], None, higher_is_better=False)
        for label, taken in zip(kinds, samples, strict=True)
    ]


def short_iterations(kind: FiniteEnvType, num_threads: int | None) -> Sample:
    """One fit; its value is the mean of the iterations after the first. num_threads: torch's; None: as many as it takes by itself."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        return _short_iterations(kind)
    finally:
        torch.set_num_threads(before)


def _short_iterations(kind: FiniteEnvType) -> Sample:
    ends = Ends()
    policy = PPO(None, Position.observation_space, Push.action_space, lr=1e-3)
    vessel = TrainingVessel(
        simulator_fn=Short,
        state_interpreter=Position(),
        action_interpreter=Push(),
        policy=policy,
        train_initial_states=range(1000),
        episode_per_iter=N_ENVS,
        update_kwargs={"batch_size": N_ENVS * SHORT_LENGTH, "repeat": 1},
    )
    trainer = Trainer(
        max_iters=1 + SHORT_ITERATIONS, callbacks=[ends], finite_env_type=kind, concurrency=N_ENVS, progress=False
    )
    cpu = cpu_seconds()
    trainer.fit(vessel)
    return Sample(value=(ends.times[-1] - ends.times[0]) / SHORT_ITERATIONS, cpu_s=cpu_seconds() - cpu)


class Ends(Callback):
    """When each iteration ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_iter_end(self, loop: object, vessel: object) -> None:
        self.times.append(time.perf_counter())


class Short(Simulator[int, float, int]):
    def __init__(self, initial: int) -> None:
        self.position, self.steps = float(initial % 7), 0

    def step(self, action: int) -> None:
        self.position += action - 0.5
        self.steps += 1

    def get_state(self) -> float:
        return self.position

    def done(self) -> bool:
        return self.steps == SHORT_LENGTH


class Position(StateInterpreter[float, Any]):
    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def interpret(self, simulator_state: float) -> Any:
        return np.array([simulator_state], np.float32)


class Push(ActionInterpreter[float, int, int]):
    action_space = spaces.Discrete(2)

    def interpret(self, simulator_state: float, action: int) -> int:
        return action


def _row(
    label: str, unit: str, ours: list[Sample], theirs: list[Sample], name: str, *, higher_is_better: bool = True
) -> Row:
    library, _, kind = name.partition("-")
    peer = f"{PEER_NAMES.get(library, library)} {kind}" if name else None
    return row(label, unit, ours, theirs, peer, higher_is_better=higher_is_better)


def measure(sides: dict[str, Callable[[], Sample]]) -> dict[str, list[Sample]]:
    return dict(zip(sides, alternate(list(sides.values()), pairs=ROUNDS), strict=True))


def costs(side: Side, name: str) -> Callable[[], Sample]:
    steps = SLICE_STEPS.get(name.partition("-")[2], PROCESS_STEPS)

    def run() -> Sample:
        before = side.cpu_seconds()
        answer = side.ask("run", steps=steps)
        cpu_s = side.cpu_seconds() - before
        return Sample(value=cpu_s / answer["steps"] * 1e6, cpu_s=cpu_s)

    return run


def speed(side: Side) -> Callable[[], Sample]:
    def run() -> Sample:
        before = side.cpu_seconds()
        answer = side.ask("run", steps=PROCESS_STEPS // 2)
        return Sample(value=answer["steps"] / answer["seconds"], cpu_s=side.cpu_seconds() - before)

    return run


@contextmanager
def taken_cores() -> Iterator[None]:
    """Keep every core busy with a process that computes."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: sum(range(1000))"]) for _ in range(cores())]
    try:
        time.sleep(0.2)
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
