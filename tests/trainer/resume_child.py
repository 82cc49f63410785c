"""A small training run for tests to kill: `python resume_child.py RUN_DIR N_STEPS [WORD ...]`.

`groups.jsonl` has a line for each step that was begun: its number and the groups that it took. The words: `resume` a run. With
`forget` the store keeps nothing that it may forget, all the time. With `fail` the algorithm raises in its fourth step, twice,
and is restarted. With `ahead` the rollouts of the next step run while the policy is trained. With `hosted` the gateway works in
the engine's process. With `imitate` the first two steps imitate successes. With `slow` a second passes between the rollouts of
a step and its training.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import leyden as ly
from leyden.algorithm.policy_gradient.step_data import StepData
from leyden.cli.demo import WEIGHTS
from leyden.cli.demo.demo_agent import play
from leyden.store import sweeper
from leyden.training import CsvWriter


class Failing(ly.PolicyGradient):
    """Raises after its first `failures` samplings, and keeps a list of the groups of each step."""

    failures = 0
    slow = False
    groups_file: Path

    async def _take(self, stream: Any, count: int, iteration: int) -> Any:
        taken = await super()._take(stream, count, iteration)
        line = {"step": iteration, "groups": [group.number for group in taken]}
        with self.groups_file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return taken

    async def _update(self, iteration: int, data: StepData) -> ly.Metrics:
        if iteration == 3 and self.failures:
            self.failures -= 1
            raise ZeroDivisionError("in the update")
        if self.slow:
            await asyncio.sleep(1)
        return await super()._update(iteration, data)


def main(
    directory: Path,
    n_steps: int,
    *,
    resume: bool,
    forget: bool,
    fail: bool,
    ahead: bool,
    hosted: bool,
    imitate: bool,
    slow: bool,
) -> None:
    algorithm = Failing(
        ly.IsolatedBackend(WEIGHTS, deterministic=True, device="cpu", seed=7, max_length=128),
        n_steps=n_steps,
        tasks_per_step=2,
        rollouts_per_task=6,
        minibatch_size=4,
        epochs=2,
        optim=ly.OptimParams(learning_rate=1e-3),
        max_tokens=6,
        seed=7,
        max_staleness=int(ahead),
        sft_steps=2 if imitate else 0,
        writers=[CsvWriter(directory / "metrics.csv")],
    )
    algorithm.failures = 2 if fail else 0
    algorithm.slow = slow
    algorithm.groups_file = directory / "groups.jsonl"
    trainer = ly.Trainer(
        algorithm=algorithm,
        llm_proxy=ly.LLMProxy(launch_mode="engine" if hosted else "thread", deterministic_seed=7),
        concurrency=12,
        run_dir=directory,
        retention=ly.Retention(max_rollouts=0) if forget else None,
        max_algorithm_restarts=2 if fail else 0,
    )
    if forget:
        sweeper.Sweeper.__init__.__kwdefaults__["prune_interval_seconds"] = 0.01  # five seconds: longer than the run
    trainer.fit(play, [{"secret": secret} for secret in range(10)], resume=resume)


if __name__ == "__main__":
    words = ("resume", "forget", "fail", "ahead", "hosted", "imitate", "slow")
    main(Path(sys.argv[1]), int(sys.argv[2]), **{word: word in sys.argv[3:] for word in words})
