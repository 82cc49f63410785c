"""Optimizer steps with a model of Qwen2.5-1.5B's shape in bfloat16, beside one large product of matrices.

32 rows of 1,024 tokens, of which 824 are trained. Each way is a size of micro-batch, with or without checkpointing; `share` is the
model's own operations a second over those of the product. The aim is 0.45.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from typing import Any

from common import Measurement, compiled_pieces, main, model_of, profile

from benchmarks.peers.engine_gpu import SHAPES, STEPS, Shape, product_flops, sequences, step_flops


def measure(measurement: Measurement) -> None:
    import torch

    shape = SHAPES["tiny" if measurement.cpu else "1.5B"]
    product = product_flops(shape.product, measurement.device)
    measurement.figures |= {"aim": 0.45, "product_flops": product}
    halves = (shape.rows // 2,) if measurement.cpu else (8, 16, 32)
    ways = [(rows, False, False) for rows in halves] + [(halves[0], True, False), (halves[0], False, True)]
    for rows, checkpointing, compiled in ways:
        name = f"{rows} rows" + ", checkpointing" * checkpointing + ", compiled pieces" * compiled
        model = model_of(shape.config, measurement.device)
        pieces = compiled_pieces("eager" if measurement.cpu else "inductor") if compiled else nullcontext()
        try:
            with pieces:
                found = asyncio.run(stepped(measurement, model, shape, rows, name, checkpointing=checkpointing))
        except torch.OutOfMemoryError as error:
            measurement.figures[name] = {"out_of_memory": str(error).partition("\n")[0]}
            continue
        found["share"] = found["flops"] / product
        measurement.figures[name] = found
        del model


async def stepped(
    measurement: Measurement, model: Any, shape: Shape, rows: int, name: str, *, checkpointing: bool
) -> dict[str, float]:
    import torch

    from leyden.engine import EmbeddedBackend, OptimParams
    from leyden.objectives.losses import PPOLoss

    if not measurement.cpu:
        torch.cuda.reset_peak_memory_stats()
    batch = sequences(shape, shape.config["vocab_size"])
    async with EmbeddedBackend(
        model,
        device=measurement.device,
        dtype="bfloat16",
        max_tokens_per_microbatch=rows * shape.length,
        gradient_checkpointing=checkpointing,
    ) as backend:

        async def step() -> None:
            await backend.forward_backward(batch, PPOLoss())
            await backend.optim_step(OptimParams(learning_rate=1e-6))  # returns a number, so it waits for the device

        await step()
        began = time.perf_counter()
        for _ in range(STEPS):
            await step()
        seconds = (time.perf_counter() - began) / STEPS
        loop = asyncio.get_running_loop()
        again = lambda: asyncio.run_coroutine_threadsafe(step(), loop).result()  # noqa: E731
        await asyncio.to_thread(profile, measurement, "gradient_" + name.replace(", ", "_").replace(" ", "_"), again)
    return {
        "seconds": seconds,
        "flops": step_flops(model, shape) / seconds,
        "trained_tokens/s": shape.rows * (shape.length - shape.prompt) / seconds,
        "peak_gib": 0.0 if measurement.cpu else torch.cuda.max_memory_allocated() / 2**30,
    }


if __name__ == "__main__":
    main(__file__, __doc__, measure)
