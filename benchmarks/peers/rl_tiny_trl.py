"""TRL's GRPOTrainer on rollouts that are finished already; the peer's half of `benchmarks/rl_tiny.py`.

Runs in the environment `bench-trl`. `rl_tiny_trl.py JOB` prints CPU seconds of each step: the whole of it without the time
that the rollouts take to arrive (`step_cpu_s`), and what follows the preparation of the batch (`gradient_cpu_s`: forward,
loss, backward, optimizer), and the process's largest resident size (`peak_mib`).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", HF_DATASETS_OFFLINE="1")

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """CPU seconds at the end of each step."""

    def __init__(self) -> None:
        self.rollouts = 0.0
        self.preparation = 0.0
        self.steps: list[float] = []
        self.gradients: list[float] = []
        self._mark = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.rollouts = self.preparation = 0.0
        self._mark = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        whole = time.process_time() - self._mark
        self.steps.append(whole - self.rollouts)
        self.gradients.append(whole - self.preparation)


class TimedTrainer(GRPOTrainer):
    clock: Clock

    def _prepare_inputs(self, *arguments: Any, **options: Any) -> Any:
        began = time.process_time()
        inputs = super()._prepare_inputs(*arguments, **options)
        self.clock.preparation += time.process_time() - began
        return inputs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument(
        "--micro-batch", type=int, help="sequences in one forward; all of them, the fastest, if not given"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    job = json.loads(options.job.read_text())
    clock = Clock()

    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(job, clock, folder, options.micro_batch or len(job["episodes"]))
        trainer.clock = clock
        trainer.train()
    answer = {
        "step_cpu_s": clock.steps,
        "gradient_cpu_s": clock.gradients,
        "grad_norm": trainer.state.log_history[0]["grad_norm"],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(answer), flush=True)


def make_trainer(job: dict[str, Any], clock: Clock, folder: str, micro_batch: int) -> TimedTrainer:
    episodes: list[dict[str, Any]] = job["episodes"]

    def recorded(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return the recorded episodes, equal in every step; the trainer requests all of them at once."""
        began = time.process_time()
        assert len(prompts) == len(episodes)
        fields = ("prompt_ids", "completion_ids", "env_mask", "logprobs", "reward")
        answer = {name: [episode[name] for episode in episodes] for name in fields}
        clock.rollouts += time.process_time() - began
        return answer

    def reward(*, reward: list[float], **_: Any) -> list[float]:
        return reward

    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=job["dtype"] == "bfloat16",
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=len(episodes) // micro_batch,
        num_generations=job["group_size"],
        max_steps=job["warm_up_steps"] + job["steps"],
        loss_type="grpo",
        scale_rewards="group",
        beta=0.0,
        epsilon=job["clip"][0],
        epsilon_high=job["clip"][1],
        temperature=1.0,
        learning_rate=job["learning_rate"],
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        weight_decay=0.0,
        max_grad_norm=job["max_grad_norm"],
        lr_scheduler_type="constant",
        max_completion_length=4096,
        pad_to_multiple_of=None,
        save_strategy="no",
        report_to="none",
        logging_steps=1000,
        logging_first_step=True,
        disable_tqdm=True,
    )
    adapter = job.get("lora") and {"r": job["lora"]["rank"], "lora_alpha": job["lora"]["alpha"]}
    return TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"]),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        args=config,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": [str(index) for index in range(len(episodes))]}),
        rollout_func=recorded,
        callbacks=[clock],
        peft_config=LoraConfig(**adapter, target_modules="all-linear") if adapter else None,
    )


if __name__ == "__main__":
    main()
