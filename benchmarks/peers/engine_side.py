"""Both sides of `benchmarks/engine.py`, each run in a process of its own: `engine_side.py SIDE WORK MODEL`.

SIDE is `leyden` (the embedded engine), `plain` (transformers' `generate`, and a plain loop of transformers and torch), or `floor`
(the same matrix products and nothing else). WORK is `decode:BATCH` or `gradient`. The last line of the output is a JSON object:
`value` (tokens a CPU second), `cpu_s`, `peak_mib` (the process's largest resident size) and `check` (the loss of the first step).
"""

from __future__ import annotations

import argparse
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
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_WAIT_POLICY="passive")  # spinning is no work

import torch
from transformers import AutoModelForCausalLM, LogitsProcessor

PROMPT, ROW = 200, 512
DECODED = 33
"""Tokens of each response; the first comes with the prompt and is not counted."""
ROWS, MICRO_BATCH = 8, 4
"""Rows of one optimizer step, and of one forward pass of the plain loop: Leyden's default of 2,048 tokens."""
STEPS = 2
"""Optimizer steps; the first warms up."""
LEARNING_RATE, BETAS, CLIP = 1e-5, (0.9, 0.99), (0.2, 0.28)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["leyden", "plain", "floor"])
    parser.add_argument("work")
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kind, _, size = options.work.partition(":")
    if options.side == "floor":
        found = floor(options.model, rows=int(size)) if kind == "decode" else floor(options.model, rows=None)
    elif kind == "decode":
        prompts = [random_tokens(seed, PROMPT) for seed in range(int(size))]
        if options.side == "leyden":
            found = asyncio.run(leyden_decode(options.model, prompts, options.threads))
        else:
            found = plain_decode(options.model, prompts)
    elif options.side == "leyden":
        found = asyncio.run(leyden_gradient(options.model, options.threads))
    else:
        found = plain_gradient(options.model)
    found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(found), flush=True)


def random_tokens(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 32_000) for _ in range(n)]


# ---- decoding --------------------------------------------------------------------------------------------------------------


async def leyden_decode(model: Path, prompts: list[list[int]], threads: int) -> dict[str, float]:
    from leyden.engine import EmbeddedBackend, SamplingParams

    async with EmbeddedBackend(load(model), threads=threads, device="cpu") as backend:
        await backend.sample(prompts, SamplingParams(max_tokens=1, seed=0))  # the prompts' keys and values stay
        cpu = time.process_time()
        samples = await backend.sample(prompts, SamplingParams(max_tokens=DECODED - 1, seed=0))
        cpu = time.process_time() - cpu
        reused = (await backend.statistics()).extra["reused_prompt_tokens"]
    n = sum(len(sample.token_ids) for sample in samples)
    assert n == len(prompts) * (DECODED - 1)
    assert reused == len(prompts) * (PROMPT - 1), "prompts were computed again"
    return {"value": n / cpu, "cpu_s": cpu, "check": 0.0}


class Clock(LogitsProcessor):
    """Notes the CPU seconds when each token's logits were there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.times.append(time.process_time())
        return scores


def plain_decode(folder: Path, prompts: list[list[int]]) -> dict[str, float]:
    model, clock = load(folder), Clock()
    torch.manual_seed(0)
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=DECODED,
            logits_processor=[clock],
            pad_token_id=0,
        )
    assert made.shape[1] == PROMPT + DECODED
    cpu = clock.times[-1] - clock.times[0]
    return {"value": len(prompts) * (DECODED - 1) / cpu, "cpu_s": cpu, "check": 0.0}


# ---- gradients -------------------------------------------------------------------------------------------------------------


def rows() -> tuple[list[list[int]], list[float]]:
    """Token ids of each row, and its advantage."""
    return [random_tokens(1000 + seed, ROW) for seed in range(ROWS)], [(-1.0) ** seed for seed in range(ROWS)]


BEHAVIOUR = -10.4
"""Log-probability that the sampler gave each token: about log(1 / 32,000)."""


async def leyden_gradient(model: Path, threads: int) -> dict[str, float]:
    from leyden.engine import EmbeddedBackend, OptimParams
    from leyden.objectives.losses import PPOLoss
    from leyden.types import TrainingSequence

    trained = ROW - PROMPT
    sequences = [
        TrainingSequence(
            ids,
            [0.0] * PROMPT + [1 / (trained * ROWS)] * trained,
            {"logprobs": [BEHAVIOUR] * ROW, "advantages": [advantage] * ROW},
        )
        for ids, advantage in zip(*rows(), strict=True)
    ]
    losses: list[float] = []
    async with EmbeddedBackend(load(model), threads=threads, device="cpu") as backend:
        for step in range(STEPS):
            if step == 1:
                cpu = time.process_time()
            result = await backend.forward_backward(sequences, PPOLoss(clip_low=CLIP[0], clip_high=CLIP[1]))
            losses.append(result.loss)
            await backend.optim_step(OptimParams(learning_rate=LEARNING_RATE, betas=BETAS))
        cpu = time.process_time() - cpu
    return {"value": (STEPS - 1) * ROWS * trained / cpu, "cpu_s": cpu, "check": losses[0]}


def plain_gradient(folder: Path) -> dict[str, float]:
    model = load(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True)
    ids, advantages = torch.tensor(rows()[0]), torch.tensor(rows()[1])
    trained = ROW - PROMPT
    losses: list[float] = []
    for step in range(STEPS):
        if step == 1:
            cpu = time.process_time()
        total = 0.0
        for part, advantage in zip(ids.split(MICRO_BATCH), advantages.split(MICRO_BATCH), strict=True):
            logits = model(input_ids=part).logits[:, PROMPT - 1 : -1].float()
            logprobs = torch.log_softmax(logits, dim=-1).gather(-1, part[:, PROMPT:, None])[..., 0]
            ratio = (logprobs - BEHAVIOUR).exp()
            bounded = ratio.clamp(1 - CLIP[0], 1 + CLIP[1])
            loss = -torch.minimum(ratio * advantage[:, None], bounded * advantage[:, None]).sum() / (trained * ROWS)
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    cpu = time.process_time() - cpu
    return {"value": (STEPS - 1) * ROWS * trained / cpu, "cpu_s": cpu, "check": losses[0]}


# ---- the floor -------------------------------------------------------------------------------------------------------------


def floor(folder: Path, *, rows: int | None) -> dict[str, float]:
    """Tokens a CPU second if nothing but the products of the linear layers took time, by the faster of torch's two libraries.

    They are those of one decoding step of so many rows; or, with None, of the forward and the backward pass of a micro-batch,
    whose output head sees the trained tokens alone.
    """
    from leyden.engine.forward.products import linear

    model = load(folder)
    n_trained = MICRO_BATCH * (ROW - PROMPT)
    work: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            n_out, n_in = module.weight.shape
            n_rows = rows or (n_trained if module is model.get_output_embeddings() else MICRO_BATCH * ROW)
            work.append((torch.randn(n_rows, n_in), module.weight.detach(), torch.randn(n_rows, n_out)))
    seconds: list[float] = []
    with torch.inference_mode():
        for _ in range(8 if rows else 3):
            began = time.process_time()
            for x, weight, by_output in work:
                linear(x, weight)
                if rows is None:
                    linear(by_output, weight.T)
                    linear(by_output.T, x.T)
            seconds.append(time.process_time() - began)
    return {"value": (rows or n_trained) / min(seconds[1:]), "cpu_s": sum(seconds), "check": 0.0}


def load(folder: Path) -> Any:
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


if __name__ == "__main__":
    main()
