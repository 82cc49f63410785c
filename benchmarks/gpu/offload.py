"""Steps with `offload=True`, whose optimizer state waits in pinned memory of the CPU, beside steps without it.

A model of Qwen2.5-1.5B's shape in bfloat16, 8 rows of 1,024 tokens a step: seconds, GiB of the GPU between two steps, and the largest
difference of the weights after four steps, which is 0 or rounding. Four steps did not end in half a minute before the memory was pinned.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from common import Measurement, main, model_of

from benchmarks.peers.engine_gpu import SHAPES, Shape, sequences


def measure(measurement: Measurement) -> None:
    shape = SHAPES["tiny" if measurement.cpu else "1.5B"]
    weights: list[dict[str, Any]] = []
    for offload in (False, True):
        model = model_of(shape.config, measurement.device)
        found = asyncio.run(stepped(measurement, model, shape, offload=offload))
        measurement.figures["offload" if offload else "resident"] = found
        weights.append({name: p.detach().float().cpu() for name, p in model.named_parameters()})
        del model
    measurement.figures["apart"] = max(
        float((weights[1][name] - each).abs().max()) for name, each in weights[0].items()
    )


async def stepped(measurement: Measurement, model: Any, shape: Shape, *, offload: bool) -> dict[str, Any]:
    import torch

    from leyden.engine import EmbeddedBackend, OptimParams
    from leyden.objectives.losses import PPOLoss

    batch = sequences(shape, shape.config["vocab_size"])[:8]
    seconds: list[float] = []
    async with EmbeddedBackend(
        model, device=measurement.device, dtype="bfloat16", max_tokens_per_microbatch=8 * shape.length, offload=offload
    ) as backend:
        for _ in range(4):
            began = time.perf_counter()
            await backend.forward_backward(batch, PPOLoss())
            await backend.optim_step(OptimParams(learning_rate=1e-6))
            seconds.append(time.perf_counter() - began)
        held = 0.0 if measurement.cpu else torch.cuda.memory_allocated() / 2**30
    return {"seconds": seconds, "held_gib": held}


if __name__ == "__main__":
    main(__file__, __doc__, measure)
