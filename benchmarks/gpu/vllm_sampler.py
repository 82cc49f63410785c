"""Sample with vLLM and train with Leyden on one GPU, with weights that pass as handles of its memory (`transfer="ipc"`).

A model of Qwen2.5-1.5B's shape in bfloat16: seconds of the start and of each push, vLLM's tokens a second for 64 responses of 256 tokens,
and the largest difference between both sides' log-probabilities. `--python` is an interpreter that has vLLM, in a build for its torch.
With `--cpu`, vLLM's build for CPUs takes a tiny model's weights through a folder.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Measurement, main, model_of

from benchmarks.peers.engine_gpu import SHAPES, sequences, tokens


def measure(measurement: Measurement) -> None:
    from tests.engine import tiny

    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        model = Path(folder) / "model"
        if measurement.cpu:
            tiny.make(model)
        else:
            model_of(SHAPES["1.5B"].config, measurement.device).cpu().save_pretrained(model)
            tiny.tokenizer().save_pretrained(model)
        asyncio.run(pushed(measurement, model, folder))


async def pushed(measurement: Measurement, model: Path, exchange: str) -> None:
    from leyden.engine import OptimParams, SamplingParams, VLLMBackend
    from leyden.objectives.losses import PPOLoss
    from leyden.types import TrainingSequence

    shape = SHAPES["tiny" if measurement.cpu else "1.5B"]
    vocabulary = 260 if measurement.cpu else shape.config["vocab_size"]
    more: dict[str, Any] = (
        {
            "transfer": "folder",
            "extra_arguments": ["--enforce-eager"],
            "dtype": "float32",
            "environment": {"OMP_NUM_THREADS": "1"},
        }
        if measurement.cpu
        else {"transfer": "ipc", "gpu_memory_utilization": 0.4, "dtype": "bfloat16", "max_length": 2048}
    )
    began = time.perf_counter()
    async with VLLMBackend(
        model, python=measurement.options.python, device=measurement.device, exchange_dir=exchange, **more
    ) as backend:
        measurement.figures["start_seconds"] = time.perf_counter() - began
        prompts = [tokens(seed, shape.prompt, vocabulary) for seed in range(shape.at_once)]
        measurement.figures["pushes"] = pushes = []
        for n in range(3):
            for _ in range(2):  # the first warms up
                began = time.perf_counter()
                samples = await backend.sample(prompts, SamplingParams(max_tokens=shape.decoded, seed=n))
                seconds = time.perf_counter() - began
            rows = [
                TrainingSequence(prompt + each.token_ids, [0.0] * len(prompt) + [1.0] * len(each.token_ids), {})
                for prompt, each in zip(prompts[:8], samples, strict=False)
            ]
            learned = (await backend.forward(rows)).logprobs
            pairs = [
                zip(row[shape.prompt :], each.logprobs, strict=True)
                for row, each in zip(learned, samples, strict=False)
            ]
            found = {
                "tokens/s": sum(len(each.token_ids) for each in samples) / seconds,
                "apart": max(abs(one - other) for pair in pairs for one, other in pair),
            }
            pushes.append(found)
            await backend.forward_backward(sequences(shape, vocabulary)[:8], PPOLoss())
            await backend.optim_step(OptimParams(learning_rate=1e-5))
            began = time.perf_counter()
            await backend.publish_weights()  # raises an error if the server kept old weights
            found["push_seconds"] = time.perf_counter() - began


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        measure,
        [("--python", {"default": sys.executable, "help": "the interpreter that has vLLM (default: this one)"})],
    )
