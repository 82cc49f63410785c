"""The memory of one gradient of the embedded engine, in a process of its own: `memory_side.py OPTIONS`.

OPTIONS is a JSON object: `layers`, `width`, `vocabulary`, `trained` (tokens with a loss, of each sequence), `whole_logits` (compute
the logits of a micro-batch at once) and `backend` (options of `EmbeddedBackend`). The last line of the output is a JSON object: MiB
above Python with torch after loading (`loaded`) and at the peak of a step (`peak`), and CPU seconds of the step.
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

import psutil
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from leyden.engine import EmbeddedBackend, OptimParams, heads
from leyden.objectives.losses import PPOLoss
from leyden.types import TrainingSequence

ROWS, LENGTH = 8, 256
MIB = 2**20


def main() -> None:
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if options["whole_logits"]:
        heads.SMALLEST_CHUNKED_VOCABULARY = sys.maxsize  # pyright: ignore[reportAttributeAccessIssue] -- what is compared
    print(json.dumps(asyncio.run(measured(options))), flush=True)


async def measured(options: dict[str, Any]) -> dict[str, float]:
    process = psutil.Process()
    before = process.memory_info().rss
    model = make_model(options["layers"], options["width"], options["vocabulary"])
    rng, trained = random.Random(0), options["trained"]
    sequences = [
        TrainingSequence(
            [rng.randrange(options["vocabulary"]) for _ in range(LENGTH)],
            [0.0] * (LENGTH - trained) + [1 / (trained * ROWS)] * trained,
            {"logprobs": [-10.4] * LENGTH, "advantages": [(-1.0) ** row] * LENGTH},
        )
        for row in range(ROWS)
    ]
    async with EmbeddedBackend(model, device="cpu", threads=1, **options["backend"]) as backend:
        loaded = process.memory_info().rss
        began = time.process_time()
        for _ in range(2):  # the first step makes the optimizer's moments
            await backend.forward_backward(sequences, PPOLoss())
            await backend.optim_step(OptimParams(learning_rate=1e-5))
        seconds = (time.process_time() - began) / 2
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"loaded": (loaded - before) / MIB, "peak": (peak - before) / MIB, "cpu_s": seconds}


def make_model(layers: int, width: int, vocabulary: int) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=4 * width,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


if __name__ == "__main__":
    main()
