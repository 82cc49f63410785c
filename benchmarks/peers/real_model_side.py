"""Leyden's and transformers' sides of `benchmarks/real_model.py`, each run in a process of its own, on one thread.

`real_model_side.py SIDE WORK MODEL`: SIDE is `leyden`, `transformers` or `floor`; WORK is
`decode:ROWS`, `shared`, `gradient:JOB` or `start`.
`leyden job:FILE MODEL` writes the rollouts that both sides of `gradient` train on, with LoRA if FILE is `lora.json`. The
last line of the output is a JSON object: `value` (tokens a CPU second; CPU seconds of `start`), `cpu_s` and `peak_mib`, the
process's largest resident size.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

import torch

PROMPT, DECODED = 22, 17
"""Tokens of a prompt and of a response; the first comes with the prompt and is not counted."""
GROUPS, GROUP_SIZE, COMMON, OWN, ANSWER = 4, 8, 50, 13, 6
"""The rollouts of a step: 4 tasks of 8, whose prompts have 50 tokens in common and 13 of their own, and 6 sampled tokens."""
LONG, LONG_PROMPT, LORA = 256, 128, {"rank": 16, "alpha": 32}
"""The rollouts of the LoRA step: 8 in one group, of 256 tokens, half of them trained, with no token in common."""
CLIP, LEARNING_RATE, BETAS = (0.2, 0.28), 1e-5, (0.9, 0.99)
STEPS = 2
"""Optimizer steps; the first warms up."""
MICRO_BATCH = 16
"""Sequences of the peer's forward pass."""


def main() -> None:
    side, work, folder = sys.argv[1:]
    torch.set_num_threads(1)
    kind, _, argument = work.partition(":")
    if side == "floor":
        found = floor(Path(folder), int(argument))
    elif kind in ("decode", "shared"):
        prompts = shared_prompts() if kind == "shared" else [tokens(seed, PROMPT) for seed in range(int(argument))]
        if side == "leyden":
            found = asyncio.run(leyden_sample(folder, prompts, shared=kind == "shared"))
        else:
            found = transformers_sample(folder, prompts, shared=kind == "shared")
    elif kind == "job":
        Path(argument).write_text(json.dumps(asyncio.run(made_job(folder, lora=Path(argument).stem == "lora"))))
        found = {"value": 0.0, "cpu_s": time.process_time()}
    elif kind == "gradient":
        found = asyncio.run(leyden_gradient(json.loads(Path(argument).read_text())))
    else:
        found = asyncio.run(leyden_start(folder))
    found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(found), flush=True)


def tokens(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 400) for _ in range(n)]


def shared_prompts() -> list[list[int]]:
    return [tokens(0, COMMON) + tokens(1 + group, OWN) for group in range(GROUPS) for _ in range(GROUP_SIZE)]


def load(folder: str | Path) -> Any:
    """The model, which never ends a response, so that all have the same length."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


async def leyden_sample(folder: str, prompts: list[list[int]], *, shared: bool) -> dict[str, float]:
    from leyden.engine import EmbeddedBackend, SamplingParams

    async with EmbeddedBackend(load(folder), threads=1, device="cpu", max_length=1024) as backend:
        if not shared:
            await backend.sample(prompts, SamplingParams(max_tokens=DECODED + 1, seed=0))  # the prompts' keys stay
        cpu = time.process_time()
        n_new = ANSWER if shared else DECODED - 1
        samples = await backend.sample(prompts, SamplingParams(max_tokens=n_new, seed=0))
        cpu = time.process_time() - cpu
    assert all(len(sample.token_ids) == n_new for sample in samples)
    counted = sum(map(len, prompts)) + n_new * len(prompts) if shared else n_new * len(prompts)
    return {"value": counted / cpu, "cpu_s": cpu}


def transformers_sample(folder: str, prompts: list[list[int]], *, shared: bool) -> dict[str, float]:
    from transformers import LogitsProcessor

    times: list[float] = []

    class Clock(LogitsProcessor):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            times.append(time.process_time())
            return scores

    model, ids, seconds = load(folder), torch.tensor(prompts), list[float]()
    for cache in ("dynamic", "static"):  # the better of the two; a compiled one takes a minute to start
        times[:] = []
        began = time.process_time()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=ANSWER if shared else DECODED,
                logits_processor=[Clock()],
                pad_token_id=0,
                cache_implementation=cache,
                disable_compile=True,
            )
        seconds.append((time.process_time() if shared else times[-1]) - (began if shared else times[0]))
    counted = sum(map(len, prompts)) + ANSWER * len(prompts) if shared else (DECODED - 1) * len(prompts)
    return {"value": counted / min(seconds), "cpu_s": min(seconds)}


async def made_job(folder: str, *, lora: bool) -> dict[str, Any]:
    """Sample the rollouts of a step, and return them as `rl_tiny_trl.py` reads them."""
    from leyden.engine import EmbeddedBackend, SamplingParams

    prompts = [tokens(seed, LONG_PROMPT) for seed in range(GROUP_SIZE)] if lora else shared_prompts()
    n_new = LONG - LONG_PROMPT if lora else ANSWER
    async with EmbeddedBackend(load(folder), threads=1, device="cpu", max_length=1024) as backend:
        samples = await backend.sample(prompts, SamplingParams(max_tokens=n_new, seed=0))
    episodes = [
        {
            "prompt_ids": prompt,
            "completion_ids": sample.token_ids,
            "env_mask": [1] * n_new,
            "logprobs": sample.logprobs,
            "reward": float(index % 2),
        }
        for index, (prompt, sample) in enumerate(zip(prompts, samples, strict=True))
    ]
    return {
        "model": folder,
        "dtype": "float32",
        "group_size": GROUP_SIZE,
        "warm_up_steps": 1,
        "steps": STEPS - 1,
        "clip": CLIP,
        "learning_rate": LEARNING_RATE,
        "betas": BETAS,
        "max_grad_norm": 1.0,
        "lora": LORA if lora else None,
        "episodes": episodes,
    }


async def leyden_gradient(job: dict[str, Any]) -> dict[str, float]:
    from leyden.engine import EmbeddedBackend, OptimParams
    from leyden.objectives.losses import PPOLoss
    from leyden.types import TrainingSequence

    episodes = job["episodes"]
    rewards = torch.tensor([episode["reward"] for episode in episodes]).view(-1, job["group_size"])
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    weight = 1 / n_trained(episodes)
    sequences = [
        TrainingSequence(
            [*each["prompt_ids"], *each["completion_ids"]],
            [0.0] * len(each["prompt_ids"]) + [weight] * len(each["completion_ids"]),
            {
                "logprobs": [0.0] * len(each["prompt_ids"]) + each["logprobs"],
                "advantages": [float(advantage)] * len(each["prompt_ids"] + each["completion_ids"]),
            },
        )
        for each, advantage in zip(episodes, advantages, strict=True)
    ]
    norms: list[float] = []
    seconds = 0.0
    options = {"threads": 1, "device": "cpu", "max_length": 1024, "lora": job["lora"]}
    async with EmbeddedBackend(load(job["model"]), **options) as backend:
        for _ in range(STEPS):
            cpu = time.process_time()
            await backend.forward_backward(sequences, PPOLoss(clip_low=CLIP[0], clip_high=CLIP[1]))
            step = await backend.optim_step(OptimParams(learning_rate=LEARNING_RATE, betas=BETAS, weight_decay=0.0))
            norms.append(step.grad_norm)
            seconds = time.process_time() - cpu
    return {"value": n_trained(episodes) / seconds, "cpu_s": seconds, "grad_norm": norms[0]}


def n_trained(episodes: list[dict[str, Any]]) -> int:
    return sum(len(episode["completion_ids"]) for episode in episodes)


async def leyden_start(folder: str) -> dict[str, float]:
    """CPU seconds from the start of the process to new weights: imports, loading, the probe, sampling, one step."""
    from leyden.engine import EmbeddedBackend, OptimParams, SamplingParams
    from leyden.objectives.losses import PPOLoss
    from leyden.types import TrainingSequence

    prompts = shared_prompts()
    async with EmbeddedBackend(load(folder), threads=1, device="cpu", max_length=1024) as backend:
        samples = await backend.sample(prompts, SamplingParams(max_tokens=ANSWER, seed=0))
        sequences = [
            TrainingSequence(
                [*prompt, *sample.token_ids],
                [0.0] * len(prompt) + [1 / (ANSWER * len(prompts))] * ANSWER,
                {
                    "logprobs": [0.0] * len(prompt) + list(sample.logprobs),
                    "advantages": [(-1.0) ** index] * (len(prompt) + ANSWER),
                },
            )
            for index, (prompt, sample) in enumerate(zip(prompts, samples, strict=True))
        ]
        await backend.forward_backward(sequences, PPOLoss())
        await backend.optim_step(OptimParams(learning_rate=LEARNING_RATE))
        seconds = time.process_time()
    return {"value": seconds, "cpu_s": seconds}


def floor(folder: Path, n_rows: int) -> dict[str, float]:
    """The matrix products of one decoding step and nothing else, each by the fastest of MKL, oneDNN and packed weights.

    `value` is tokens a CPU second; `megabytes` what a step reads of weights, `bandwidth` GB/s at which a thread sums memory.
    """
    onednn: Any = torch.ops.mkldnn
    linears = [module for module in load(folder).modules() if isinstance(module, torch.nn.Linear)]
    packed = [onednn._reorder_linear_weight(module.weight.detach(), 64) for module in linears]
    best = [float("inf")] * len(linears)
    block, summed = torch.ones(2**26), float("inf")
    with torch.inference_mode():
        for _ in range(5):
            began = time.process_time()
            block.sum()
            summed = min(summed, time.process_time() - began)
            for way in ("MKL", "oneDNN", "packed"):  # over all layers, so that none finds its weights in a cache
                for index, module in enumerate(linears):
                    x, weight = (
                        torch.randn(n_rows, module.in_features),
                        packed[index] if way == "packed" else module.weight,
                    )
                    began = time.process_time()
                    if way == "MKL":
                        torch.nn.functional.linear(x, weight)
                    else:
                        onednn._linear_pointwise(x, weight, None, "none", [], "")
                    best[index] = min(best[index], time.process_time() - began)
    total, n_bytes, bandwidth = sum(best), sum(module.weight.nbytes for module in linears), block.nbytes / summed
    found = {"value": n_rows / total, "cpu_s": total, "megabytes": n_bytes / 1e6, "bandwidth": bandwidth / 1e9}
    return found


if __name__ == "__main__":
    main()
