"""Rung (e): a whole step of verl's trainer under Ray on CPU, with validation and a checkpoint; prints what was reported."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp

from leyden.demo.game import Game
from leyden.litagent import llm_rollout
from leyden.types import LLM


@llm_rollout
async def play(task: dict[str, int], llm: LLM) -> float:
    """Play the demo's game, without the OpenAI client, which this environment lacks."""
    game = Game(task["secret"])
    messages: list[dict[str, str]] = [{"role": "user", "content": game.prompt()}]
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {llm.api_key}"}) as session:
        while not game.done:
            request: dict[str, Any] = {
                "model": llm.model,
                "messages": messages,
                "max_tokens": 2,
                **llm.sampling_parameters,
            }
            async with session.post(f"{llm.endpoint}/chat/completions", json=request) as response:
                response.raise_for_status()
                reply = (await response.json())["choices"][0]["message"]["content"] or ""
            messages.append({"role": "assistant", "content": reply})
            messages.append({"role": "user", "content": game.guess(reply).text})
    return float(game.won)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    os.environ.update(
        OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false"
    )
    from leyden import Trainer
    from leyden.algorithm.verl import VERL

    model = str(Path(__file__).resolve().parents[2] / "leyden" / "demo" / "weights")
    algorithm = VERL(
        {
            "actor_rollout_ref.model.path": model,
            "actor_rollout_ref.model.use_remove_padding": False,
            "actor_rollout_ref.model.enable_gradient_checkpointing": False,
            "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
            "actor_rollout_ref.actor.strategy": "fsdp2",
            "actor_rollout_ref.actor.use_torch_compile": False,
            "actor_rollout_ref.actor.optim.lr": 5e-4,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
            "actor_rollout_ref.actor.fsdp_config.model_dtype": "fp32",
            "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
            "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
            "actor_rollout_ref.rollout.name": "leyden",
            "actor_rollout_ref.rollout.n": 4,
            "actor_rollout_ref.rollout.agent.num_workers": 1,
            "actor_rollout_ref.rollout.free_cache_engine": False,
            "data.train_batch_size": 4,
            "data.max_prompt_length": 64,
            "data.max_response_length": 64,
            "reward.num_workers": 1,
            "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
            "trainer.device": "cpu",
            "trainer.total_training_steps": 2,
            "trainer.save_freq": 2,
            "trainer.test_freq": 2,
            "+ray_kwargs.ray_init.resources": {"VERL_CPU": 1},
            "ray_kwargs.ray_init.num_cpus": 16,
            "+ray_kwargs.ray_init.include_dashboard": False,
        }
    )
    tasks = [{"secret": number} for number in range(8)]
    trainer = Trainer(algorithm=algorithm, n_runners=1, run_dir=folder / "run", progress=False)
    summary = trainer.fit(play, tasks, tasks[:4])
    print(json.dumps({"summary": str(summary)}))
