"""A run for tests to steer: `python -m tests.trainer.steered_child KIND DIR N_STEPS PLAN`; a run that exists is continued.

KIND: `count` (a step adds `gain` to a total), `baseline`, `free` (an algorithm that owns its loop), `policy` or `sim`.
PLAN, JSON: `seconds` a step of `count` or `free` takes; `asks`, what is asked in which step of the run's first process, as
`[step, command, path, value]`; `kill`, the step in which the process kills itself; `every`, the interval of checkpoints;
`fail`, the step that fails, once; `val`, the interval of validations.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import leyden as ly
from leyden._lib.options import check_number
from leyden.algorithm import IterativeAlgorithm, algo
from leyden.training import Callback
from leyden.training.runs.control import ask, read_control


class Count(IterativeAlgorithm):
    """Adds `gain` to a total in each step."""

    changeable: ClassVar[Any] = {"gain": ("gain",)}
    fixed_options: ClassVar[Any] = {"seconds": "a clock is not set back"}

    def __init__(self, gain: float = 1.0, *, seconds: float = 0.0, fail: int | None = None, **options: Any) -> None:
        check_number("gain", gain, above=0)
        super().__init__(**options)
        self.gain, self.seconds, self.fail = gain, seconds, fail
        self.total = 0.0

    async def setup(self, train_dataset: Any, val_dataset: Any) -> None:
        self.total = 0.0

    async def step(self, iteration: int) -> ly.Metrics:
        await asyncio.sleep(self.seconds)
        if iteration == self.fail:
            self.fail = None
            raise ZeroDivisionError("once")
        self.total = self.total * 1.25 + self.gain
        return {"reward": self.total, "gain": self.gain, "length": self.max_iters}

    async def validate(self, iteration: int) -> ly.Metrics:
        return {"reward": self.total}

    async def save(self, path: Path) -> Callable[[], Awaitable[None]] | None:
        (path / "total.json").write_text(json.dumps(self.total))

    async def load(self, path: Path) -> None:
        self.total = json.loads((path / "total.json").read_text())


class Plan(Callback):
    """Asks what the plan says, and kills the process."""

    def __init__(self, directory: Path, plan: dict[str, Any]) -> None:
        self.directory, self.plan = directory, plan

    def on_train_start(self, loop: Any, vessel: Any) -> None:
        asked = sum(line.state == "asked" for line in read_control(self.directory))
        for step, *request in self.plan.get("asks", ())[asked:]:
            if step == loop.current_iter + 1:
                ask(self.directory, request[0], by="plan", path=request[1], value=request[2])
        if self.plan.get("kill") == loop.current_iter + 1:
            os.kill(os.getpid(), signal.SIGKILL)


@ly.rollout
async def agent(task: Any) -> float:
    return 1.0


@algo
async def free(*, run: Any) -> None:
    for step in range(int(sys.argv[3])):
        await asyncio.sleep(json.loads(sys.argv[4]).get("seconds", 0.0))
        run.report({"reward": step}, iteration=step + 1)


def algorithm_of(kind: str, n_steps: int, plan: dict[str, Any]) -> Any:
    every, val = plan.get("every"), plan.get("val")
    if kind == "count":
        options = {"seconds": plan.get("seconds", 0.0), "fail": plan.get("fail")}
        return Count(max_iters=n_steps, checkpoint_every=every, val_every_n_iters=val, **options)
    if kind == "baseline":
        return ly.Baseline(n_epochs=n_steps)
    if kind == "free":
        return free
    from leyden.cli.demo import WEIGHTS

    return ly.PolicyGradient(
        ly.IsolatedBackend(WEIGHTS, deterministic=True, device="cpu", seed=7, max_length=128),
        n_steps=n_steps,
        tasks_per_step=2,
        rollouts_per_task=4,
        minibatch_size=4,
        optim=ly.OptimParams(learning_rate=1e-3),
        max_tokens=6,
        seed=7,
        checkpoint_every=every,
        val_every_n_steps=val,
    )


def train(kind: str, directory: Path, n_steps: int, plan: dict[str, Any]) -> None:
    from leyden.cli.demo.demo_agent import play

    has_loop = kind in ("count", "policy")
    trainer = ly.Trainer(
        algorithm=algorithm_of(kind, n_steps, plan),
        llm_proxy=ly.LLMProxy(deterministic_seed=7) if kind == "policy" else None,
        callbacks=[Plan(directory, plan)] if has_loop else [],
        concurrency=8,
        run_dir=directory,
        max_algorithm_restarts=1 if "fail" in plan else 0,
    )
    tasks = None if kind in ("count", "free") else [{"secret": secret} for secret in range(10)]
    val = tasks[:2] if tasks is not None and "val" in plan else None
    trainer.fit(play if kind == "policy" else agent, tasks, val, resume=(directory / "run.json").exists())


def simulate(directory: Path, n_steps: int, plan: dict[str, Any]) -> None:
    import torch

    from leyden.rl import Trainer
    from leyden.training import Checkpoint
    from leyden.training.state_files import write_state
    from tests.rl.parts import vessel_of

    class Slow(Callback):
        def on_train_start(self, loop: Any, vessel: Any) -> None:
            time.sleep(plan.get("seconds", 0.0))

    torch.set_num_threads(1)
    vessel = vessel_of()
    checkpoint = Checkpoint(directory / "checkpoints", every_n_iters=plan.get("every") or 1, keep=None)
    trainer = Trainer(
        max_iters=n_steps,
        val_every_n_iters=plan.get("val"),
        callbacks=[Plan(directory, plan), Slow(), checkpoint],
        finite_env_type="dummy",
        run_dir=directory,
    )
    trainer.fit(vessel, resume=(directory / "run.json").exists())
    (directory / "end").mkdir()
    write_state(vessel.state_dict(), directory / "end")


if __name__ == "__main__":
    kind, directory, n_steps, plan = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    simulate(directory, n_steps, plan) if kind == "sim" else train(kind, directory, n_steps, plan)
