"""Decode with a model of Qwen2.5-1.5B's shape in bfloat16: as it is, with CUDA graphs, and with compiled pieces in the graphs.

Figures are tokens a second of 256 tokens after prompts of 200, by the number of responses at once. `apart` is the largest difference
between a sampled log-probability and the learner's, for each way. The aim is 15,000 tokens a second at 64 responses.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from typing import Any

from common import Measurement, compiled_pieces, main, model_of, profile

from benchmarks.peers.engine_gpu import SHAPES, Shape, tokens

WAYS = ("ordinary", "graphs", "graphs, compiled pieces")


def measure(measurement: Measurement) -> None:
    shape = SHAPES["tiny" if measurement.cpu else "1.5B"]
    model = model_of(shape.config, measurement.device)
    weights = sum(parameter.numel() for parameter in model.parameters()) * 2
    measurement.figures |= {"aim": 15_000, "at_once": shape.at_once, "weight_bytes": weights}
    for way in WAYS:
        compiled = compiled_pieces("eager" if measurement.cpu else "inductor") if "compiled" in way else nullcontext()
        with compiled:
            measurement.figures[way] = asyncio.run(decoded(measurement, model, shape, way))


async def decoded(measurement: Measurement, model: Any, shape: Shape, way: str) -> dict[str, float]:
    from leyden.engine import EmbeddedBackend, SamplingParams
    from leyden.types import TrainingSequence

    found: dict[str, float] = {}
    vocabulary = shape.config["vocab_size"]
    batches = (1, shape.at_once) if measurement.cpu else (1, 16, shape.at_once, 256)
    async with EmbeddedBackend(
        model, device=measurement.device, dtype="bfloat16", max_batch_rows=max(batches), cuda_graphs=way != "ordinary"
    ) as backend:
        for n in batches:
            prompts = [tokens(seed, shape.prompt, vocabulary) for seed in range(n)]
            for _ in range(2):  # the first computes the prompts, and captures the graphs
                began = time.perf_counter()
                samples = await backend.sample(prompts, SamplingParams(max_tokens=shape.decoded, seed=0))
                seconds = time.perf_counter() - began
            found[f"tokens/s at {n}"] = sum(len(each.token_ids) for each in samples) / seconds
        rows = [
            TrainingSequence(prompt + each.token_ids, [0.0] * len(prompt) + [1.0] * len(each.token_ids), {})
            for prompt, each in zip(prompts[:4], samples, strict=False)
        ]
        learned = (await backend.forward(rows)).logprobs
        pairs = [
            zip(row[shape.prompt :], each.logprobs, strict=True) for row, each in zip(learned, samples, strict=False)
        ]
        found["apart"] = max(abs(one - other) for pair in pairs for one, other in pair)
        fixed = backend._running.decoder._fixed  # pyright: ignore[reportPrivateUsage, reportOptionalMemberAccess]
        found["replays"] = 0 if fixed is None else fixed.n_replays
        if way != WAYS[-1]:
            some = prompts[: shape.at_once]
            loop = asyncio.get_running_loop()

            def again() -> None:
                params = SamplingParams(max_tokens=8, seed=0)
                asyncio.run_coroutine_threadsafe(backend.sample(some, params), loop).result()

            await asyncio.to_thread(profile, measurement, f"decode_{way}", again)
    return found


if __name__ == "__main__":
    main(__file__, __doc__, measure)
