"""The GPU's half of `benchmarks/engine.py`: `engine_gpu.py SHAPE DEVICE`, with the embedded engine in bfloat16.

SHAPE is `1.5B`, that of Qwen2.5-1.5B with random weights, or `tiny`, with which a test runs this script on a CPU. Times are of
the clock. The last line of the output is a JSON object: the `card`, tokens a second of `decode` and trained tokens a second of
`gradient`, the model's own operations a second in `gradient_flops`, and `product_flops`, those of one large matrix product.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from leyden.engine import EmbeddedBackend, OptimParams, SamplingParams
from leyden.objectives.losses import PPOLoss
from leyden.types import TrainingSequence

STEPS = 3
"""Optimizer steps that are timed, after one that warms up."""


@dataclass(frozen=True)
class Shape:
    """A model, and the work that it is given."""

    config: dict[str, Any]
    prompt: int
    """Tokens of a prompt, which are not trained on."""
    decoded: int
    at_once: int
    """Responses that are decoded at once."""
    rows: int
    length: int
    """Rows of an optimizer step, and their tokens."""
    product: int
    """Size of the square matrices of the large product."""


SHAPES = {
    "1.5B": Shape(
        {
            "vocab_size": 151_936,
            "hidden_size": 1536,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "intermediate_size": 8960,
        },
        *(200, 256, 64, 32, 1024, 8192),
    ),
    "tiny": Shape(
        {
            "vocab_size": 300,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "intermediate_size": 64,
        },
        *(8, 4, 2, 2, 16, 64),
    ),
}


async def main(shape: Shape, device: str) -> dict[str, float | str]:
    torch.manual_seed(0)
    config = Qwen2Config(
        **shape.config, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None
    )
    model: Any = Qwen2ForCausalLM(config).to(torch.bfloat16)
    flops = step_flops(model, shape)
    microbatch = 8 * shape.length
    async with EmbeddedBackend(
        model, device=device, dtype="bfloat16", max_tokens_per_microbatch=microbatch, gradient_checkpointing=True
    ) as backend:
        prompts = [tokens(seed, shape.prompt, config.vocab_size) for seed in range(shape.at_once)]
        await backend.sample(prompts, SamplingParams(max_tokens=1, seed=0))  # the prompts' keys and values stay
        began = time.perf_counter()
        samples = await backend.sample(prompts, SamplingParams(max_tokens=shape.decoded, seed=0))
        decode = sum(len(sample.token_ids) for sample in samples) / (time.perf_counter() - began)
        rows = sequences(shape, config.vocab_size)
        for step in range(STEPS + 1):
            if step == 1:
                began = time.perf_counter()
            await backend.forward_backward(rows, PPOLoss())
            await backend.optim_step(OptimParams(learning_rate=1e-6))  # returns a number, so it waits for the device
        seconds = (time.perf_counter() - began) / STEPS
    return {
        "card": torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or device,
        "decode": decode,
        "gradient": shape.rows * (shape.length - shape.prompt) / seconds,
        "gradient_flops": flops / seconds,
        "product_flops": product_flops(shape.product, device),
    }


def step_flops(model: Any, shape: Shape) -> float:
    """Operations of one step's forward and backward passes, without what is computed again.

    A product with n weights takes 2n of them a token, and twice as many backward. The head sees the trained tokens alone.
    A token attends to half of its row in the mean.
    """
    head = model.get_output_embeddings()
    layers = sum(
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    )
    attention = 2 * shape.config["num_hidden_layers"] * shape.config["hidden_size"] * shape.length / 2
    trained = shape.length - shape.prompt
    return 3 * 2 * shape.rows * (shape.length * (layers + attention) + trained * head.weight.numel())


def product_flops(size: int, device: str) -> float:
    """Operations a second of one product of square matrices in bfloat16, the fastest of ten."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds: list[float] = []
    for _ in range(10):
        began = time.perf_counter()
        (left @ right)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def tokens(seed: int, n: int, vocabulary: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocabulary) for _ in range(n)]


def sequences(shape: Shape, vocabulary: int) -> list[TrainingSequence]:
    trained = shape.length - shape.prompt
    behaviour = [-torch.tensor(float(vocabulary)).log().item()] * shape.length
    return [
        TrainingSequence(
            tokens(1000 + row, shape.length, vocabulary),
            [0.0] * shape.prompt + [1 / (trained * shape.rows)] * trained,
            {"logprobs": behaviour, "advantages": [(-1.0) ** row] * shape.length},
        )
        for row in range(shape.rows)
    ]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(SHAPES[sys.argv[1]], sys.argv[2]))), flush=True)
