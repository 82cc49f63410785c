"""A run that falls: `falling.py MODEL RUN_DIR PLANT KILL`. KILL is "before" or "after" (the restore), or "" for none.

The model can say 4 already, which is all that the task wants. A response depends on weights, prompt and seed alone, so
two runs are equal to the bit.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import leyden as ly
from leyden.objectives.losses import CrossEntropyLoss
from leyden.types import TrainingSequence
from tests.algorithm.asking import client

BROKEN = 2
"""The iteration whose update breaks the policy."""
RATE = 1e-5
PLANTS = ("rate", "reward", "kl", "entropy", "loss", "weights")


class Falls(ly.GRPO):
    """Breaks its policy in the update of one iteration, unless it has gone back to its best weights.

    rate: the learning rate is too large from then on. kl: it is far too large, once. weights: it is 1e30. entropy: the
    policy learns to give one wrong answer. loss: an advantage is infinite. reward: it wants another answer from then on.
    """

    plant = ""
    kill = ""
    now = 0

    async def _collect(self, iteration: int) -> Any:
        Falls.now = iteration
        return await super()._collect(iteration)

    def _scaled(self, optim: ly.OptimParams, iteration: int) -> ly.OptimParams:
        scaled = super()._scaled(optim, iteration)
        is_now = iteration == BROKEN or (iteration > BROKEN and self.plant == "rate")
        factor = {"rate": 3e3, "kl": 1e4, "weights": 1e35}.get(self.plant, 1.0)
        return (
            replace(scaled, learning_rate=scaled.learning_rate * factor)
            if is_now and not self._collapse.restores
            else scaled
        )

    async def _update(self, iteration: int, data: Any) -> Any:
        if self.plant == "entropy" and iteration == BROKEN and not self._collapse.restores:
            ids = next(each for each in data.trained if each.data.reward == 1.0).sequences[0].token_ids
            wrong = TrainingSequence(  # one digit lower than the right one
                token_ids=[*ids[:-2], ids[-2] - 1, ids[-1]], weights=[0.0] * (len(ids) - 2) + [1.0] * 2
            )
            for _ in range(30):
                await self.backend.forward_backward([wrong], CrossEntropyLoss())
                await self.backend.optim_step(ly.OptimParams(learning_rate=3e-3))
            return {"optimizer_steps": 30, "policy_version": self.backend.policy_version}
        return await super()._update(iteration, data)

    async def _optimise(self, batches: Any, loss: Any, iteration: int) -> Any:
        batches = list(batches)
        if iteration == BROKEN and self.plant == "loss" and not self._collapse.restores:
            columns = batches[-1][0].columns
            columns["advantages"] = [math.inf] * len(columns["advantages"])
        return await super()._optimise(batches, loss, iteration)

    async def _load_best(self) -> None:
        if self.kill == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        await super()._load_best()
        if self.kill == "after":
            os.kill(os.getpid(), signal.SIGKILL)


async def answer(llm: ly.LLM) -> str:
    asked = client().with_options(base_url=llm.endpoint).chat.completions
    said = await asked.create(
        model=llm.model, messages=[{"role": "user", "content": "guess 0..9"}], **llm.sampling_parameters
    )
    return (said.choices[0].message.content or "").strip()


@ly.llm_rollout
async def says_four(task: int, llm: ly.LLM) -> float:
    return float((await answer(llm) == "4") != (Falls.plant == "reward" and Falls.now > BROKEN))


@ly.llm_rollout
async def says_no_four(task: int, llm: ly.LLM) -> float:
    return float(await answer(llm) != "4")


def algorithm(model: str | Path, plant: str, **options: Any) -> Falls:
    Falls.plant, Falls.now = plant, 0
    backend = ly.EmbeddedBackend(model, device="cpu", max_length=128, seed=1, deterministic=True)
    defaults = {"n_steps": 7, "max_tokens": 4, "tasks_per_step": 2, "rollouts_per_task": 12, "minibatch_size": 8}
    options = {**defaults, "optim": ly.OptimParams(learning_rate=RATE), "warmup_steps": 0, **options}
    return Falls(backend, **options)


def fit(model: str | Path, run_dir: Path, plant: str, *, resume: bool = False, **options: Any) -> Falls:
    falls = algorithm(model, plant, **options)
    proxy = ly.LLMProxy(deterministic_seed=5)
    ly.Trainer(algorithm=falls, run_dir=run_dir, llm_proxy=proxy, progress=False).fit(says_four, [0], resume=resume)
    return falls


if __name__ == "__main__":
    model, directory, plant, Falls.kill = sys.argv[1:]
    fit(model, Path(directory), plant, resume=(Path(directory) / "run.json").exists())
