"""Training runs of the demo's tiny policy that end within seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import leyden as ly
from tests.algorithm.asking import ask, backend


def train(directory: Path, agent: Any, tasks: Any = None, val: Any = None, **options: Any) -> None:
    """Train the demo's policy with GRPO for a few steps, and keep the run even if it fails."""
    kind = options.pop("kind", ly.GRPO)
    policy = options.pop("backend", None) or backend()
    trainer = {
        name: options.pop(name)
        for name in (
            "strategy",
            "n_runners",
            "concurrency",
            "adapter",
            "llm_proxy",
            "tracer",
            "initial_resources",
            "callbacks",
        )
        if name in options
    }
    algorithm = kind(policy, **{"n_steps": 4, "tasks_per_step": 2, "rollouts_per_task": 4, "max_tokens": 4} | options)
    tasks = list(range(8)) if tasks is None else tasks
    ly.Trainer(algorithm=algorithm, run_dir=directory, progress=False, **trainer).fit(agent, tasks, val_dataset=val)


async def says_four(task: Any, llm: ly.LLM) -> float:
    """The reward is 1 for "4"; the given policy says it in about one game of four."""
    return float((await ask(llm)).strip() == "4")
