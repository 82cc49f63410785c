"""Sample responses to prompts of token ids: `PolicyBackend.sample` by a decoder."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from leyden.engine.base import SampledResponse, SamplingParams
from leyden.engine.decoder import Decoder, Generation
from leyden.engine.loading import LoadedPolicy
from leyden.engine.refusal import check_prompts
from leyden.errors import ConfigError, EngineError


async def sample(
    decoder: Decoder,
    policy: LoadedPolicy,
    max_length: int,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    deterministic: bool,
) -> list[SampledResponse]:
    """Return one response for each prompt. Cancelling the call takes its responses out of the
    batch.

    With a seed, prompt i is sampled with `seed + i`. deterministic: whether a seed is required.
    Raise ConfigError for a prompt that cannot be continued, EngineError if decoding fails.
    """
    if deterministic and params.seed is None:
        raise ConfigError("this engine runs in deterministic mode; give SamplingParams a seed")
    check_prompts(prompts, policy.n_vocabulary, max_length)
    done = asyncio.Event()
    generations = [
        Generation(
            prompt_ids=list(prompt),
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            stop_ids=policy.eos_ids.union(params.stop_token_ids),
            seed=None if params.seed is None else params.seed + index,
            loop=asyncio.get_running_loop(),
            notify=done.set,
        )
        for index, prompt in enumerate(prompts)
    ]
    decoder.submit(generations)
    try:
        while not all(generation.done for generation in generations):
            await done.wait()
            done.clear()
    finally:
        for generation in generations:
            generation.cancelled = True
    return [_result(generation) for generation in generations]


def _result(generation: Generation) -> SampledResponse:
    """Return the response of a finished request. Raise its error if it failed."""
    if generation.error is not None:
        raise generation.error
    if generation.finish_reason is None:
        raise EngineError("a generation ended without a reason")
    return SampledResponse(
        generation.token_ids, generation.logprobs, generation.policy_versions, generation.finish_reason
    )
