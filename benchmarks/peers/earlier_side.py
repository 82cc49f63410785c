"""One side of the benchmark of two commits: the gateway, runners, learning and demo of the Leyden that is imported, by CPU.

    PYTHONPATH=CLONE python earlier_side.py

Commands come as lines of JSON on the standard input, each is answered by one line on the standard output. Everything is measured with the
clone's own benchmarks, so that both sides are asked in the form that they know:

    {"do": "gateway", "kind": "calls" | "streams", "calls": N}     CPU milliseconds of the gateway for each call
    {"do": "starts", "strategy": S}                                 CPU milliseconds for each rollout, all processes, their start included
    {"do": "fit", "store": null | "memory", "tasks": N}             CPU milliseconds for each task
    {"do": "learn"}                                                 CPU milliseconds from recorded games to changed weights
    {"do": "demo", "steps": N}                                      CPU seconds of `leyden demo`, all processes
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks import fit, rl_tiny, runners
from benchmarks.gateway import CALLERS, PEERS, Benchmark
from benchmarks.gateway import Leyden as Gateway
from benchmarks.harness import cpu_seconds
from benchmarks.sides import Side


class Commands:
    """The parts of one clone. A gateway that was asked once stays."""

    def __init__(self, stack):
        self._stack = stack
        self._gateway = None
        self._games = None

    def gateway(self, kind, calls):
        if self._gateway is None:
            upstream, load = (
                self._stack.enter_context(Side(name, Path(sys.executable), PEERS / f"gateway_{name}.py"))
                for name in ("upstream", "load")
            )
            url = f"http://127.0.0.1:{upstream.ask('open')['port']}"
            self._gateway = Benchmark(load, url, None), self._stack.enter_context(Gateway(url, "--durable"))
        bench, gateway = self._gateway
        before = gateway.cpu_seconds()
        bench.ask(gateway, kind, "quick", callers=CALLERS, calls=calls)
        return (gateway.settled() - before) / calls * 1000

    def starts(self, strategy):
        before = cpu_seconds()
        asyncio.run(runners.one_by_one(strategy))
        return (cpu_seconds() - before) / runners.N_STARTS * 1000

    def fit(self, store, tasks):
        fit.N_TASKS = tasks
        return fit.fit(store).cpu_s / tasks * 1000

    def learn(self):
        torch.set_num_threads(1)
        if self._games is None:
            self._games = asyncio.run(rl_tiny.recorded_games(n_groups=8))
        takes_dtype = "dtype" in inspect.signature(rl_tiny.train).parameters  # a later commit's does
        dtype = {"dtype": "float32"} if takes_dtype else {}
        return self._games.n_trained / asyncio.run(rl_tiny.train(self._games, **dtype)).step.value * 1000

    def demo(self, steps):
        with tempfile.TemporaryDirectory() as folder:
            before = cpu_seconds()
            options = ["--deterministic", "--steps", str(steps), "--games", "50", "--run-dir", f"{folder}/run"]
            subprocess.run([sys.executable, "-m", "leyden", "demo", *options], check=True, stdout=subprocess.DEVNULL)
            return cpu_seconds() - before


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a run prints is no answer
    with ExitStack() as stack:
        commands = Commands(stack)
        for line in sys.stdin:
            command = json.loads(line)
            print(json.dumps(getattr(commands, command.pop("do"))(**command)), file=answers, flush=True)


if __name__ == "__main__":
    main()
