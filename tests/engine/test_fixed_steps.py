"""`cuda_graphs=True`: steps of fixed shapes sample what the ordinary decoder does, captured and not.

A CPU has no graphs. `Recorder` stands for them: it records a step's operations with their memory, and replays them
there, so that a number of the host that stays in the recording, or memory that moved, shows as a wrong token. It refuses
what a capture on a GPU refuses: values that the host reads, and values of the host that a step copies.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from leyden.engine import EmbeddedBackend, SamplingParams
from leyden.engine.decoder import Decoder, Generation, PendingGenerations
from leyden.engine.forward.graph import FixedSteps, fixed_steps
from leyden.engine.forward.layout import LayoutForward
from leyden.errors import ConfigError, EngineError
from tests.engine import tiny
from tests.engine.test_decoder import check_logprobs, one, step
from tests.engine.waiting import until_sampling

torch.set_num_threads(1)

MODELS: dict[str, dict[str, Any]] = {
    "qwen2, drawn in blocks": {"vocab_size": 6000},
    "llama": {"kind": "llama", "kv_heads": 2},
    "qwen3": {"kind": "qwen3", "head_dim": 32},
    "gemma3": {
        "kind": "gemma3_text",
        "head_dim": 32,
        "layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 16,
    },
}


class Recorder(TorchDispatchMode):
    """Records the operations of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).partition(".")[2].split(".")[0] in ("_local_scalar_dense", "lift_fresh", "nonzero"):
            raise RuntimeError(f"{func} waits for the host")
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, made in self.calls:
                again = func(*args, **kwargs)
                pairs = zip(again, made, strict=True) if isinstance(made, tuple | list) else [(again, made)]
                for new, old in pairs:
                    if isinstance(old, torch.Tensor) and new.data_ptr() != old.data_ptr():
                        old.copy_(new)


def recorded(fixed: list[FixedSteps]) -> Callable[..., Callable[[], None]]:
    """Return a capture that records. Like a capture on a GPU it leaves the results as they were."""

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        before = fixed[0]._results_2B.clone()
        with Recorder() as recorder:
            work()
        fixed[0]._results_2B.copy_(before)
        return recorder.replay

    return capture


def made(forward: LayoutForward, *, records: bool) -> FixedSteps:
    holder: list[FixedSteps] = []
    fixed = FixedSteps(forward, max_rows=8, capture=recorded(holder) if records else None)
    holder.append(fixed)
    fixed.check(260)
    return fixed


async def sampled(model: Any, requests: list[Generation], way: str) -> tuple[Decoder, FixedSteps | None]:
    forward = LayoutForward(model, max_rows=16, max_length=400)
    fixed = None if way == "ordinary" else made(forward, records=way == "recorded")
    decoder = Decoder(
        forward,
        max_batch_rows=8,
        max_prefill_tokens=500,
        deterministic=False,
        seed=0,
        threads=1,
        min_copied=16,
        fixed=fixed,
    )
    pending = PendingGenerations(requests)
    decoder.submit(requests)
    decoder.start()
    try:
        assert await pending.finished()
    finally:
        decoder.stop()
    return decoder, fixed


def requests() -> list[Generation]:
    """More than fit a batch, of many lengths; some begin alike, some draw from half of the tokens or none."""
    rng = random.Random(0)
    begun = [rng.randrange(260) for _ in range(20)]
    found: list[Generation] = []
    for index in range(16):
        prompt = [*begun[: rng.choice((0, 20))], *[rng.randrange(260) for _ in range(rng.choice((1, 5, 90)))]]
        temperature, top_p = rng.choice([(1.0, 1.0), (1.0, 1.0), (0.7, 1.0), (1.0, 0.8), (0.0, 0.5)])
        stops = frozenset(range(rng.choice((0, 6))))
        found.append(Generation(prompt, rng.choice((1, 9, 40)), temperature, top_p, stops, seed=index))
    return found


@pytest.mark.parametrize("way", ["as they are", "recorded"])
@pytest.mark.parametrize("kind", MODELS)
async def test_fixed_steps_sample_the_tokens_of_the_ordinary_decoder(kind: str, way: str):
    model = tiny.model(**MODELS[kind])
    wanted, found = requests(), requests()
    await sampled(model, wanted, "ordinary")
    _, fixed = await sampled(model, found, way)
    assert fixed is not None
    for fixed_one, other in zip(found, wanted, strict=True):
        assert fixed_one.token_ids == other.token_ids
        assert fixed_one.finish_reason == other.finish_reason
        assert fixed_one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert fixed._n_started > 40
    if way == "recorded":
        assert fixed.n_replays > 20


def test_the_ordinary_step_cannot_be_captured():
    forward = LayoutForward(tiny.model(), max_rows=4, max_length=64)
    with torch.inference_mode():
        forward.decode([0], [[1, 2, 3]], [0])
        with pytest.raises(RuntimeError, match="waits for the host"), Recorder():
            forward.decode([0], [[1, 2, 3, 4]], [3])


async def test_a_step_that_cannot_be_captured_is_the_ordinary_decoders(caplog: pytest.LogCaptureFixture):
    model = tiny.model()
    wanted, found = requests(), requests()
    await sampled(model, wanted, "ordinary")
    forward = LayoutForward(model, max_rows=16, max_length=400)
    fixed = made(forward, records=True)

    def fails(work: Callable[[], None]) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    fixed._capture = fails
    decoder = Decoder(
        forward, max_batch_rows=8, max_prefill_tokens=500, deterministic=False, seed=0, threads=1, fixed=fixed
    )
    decoder.submit(found)
    decoder.start()
    with caplog.at_level(logging.WARNING, logger="leyden.engine"):
        assert await PendingGenerations(found).finished()
    decoder.stop()
    assert "decoding goes on without cuda_graphs" in caplog.text
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]


async def test_wrong_probabilities_are_found_before_the_first_request():
    forward = LayoutForward(tiny.model(), max_rows=4, max_length=64)
    right = forward.decode_fixed
    forward.decode_fixed = lambda ids, positions, rows, length: right(ids, positions.clamp_max(1), rows, length)
    with pytest.raises(EngineError, match="log-probabilities differ by"):
        fixed_steps(forward, max_rows=4, n_vocabulary=260)


async def test_new_weights_and_a_cancelled_request_leave_no_step_of_old_ones_behind():
    model = tiny.model()
    async with EmbeddedBackend(copy.deepcopy(model), max_batch_rows=4, cuda_graphs=True) as backend:
        prompts = [[1, 40 + index, 60] for index in range(4)]
        many = asyncio.create_task(backend.sample(prompts, SamplingParams(max_tokens=300, seed=1, stop_token_ids=[])))
        gone = asyncio.create_task(one(backend, [1, 2, 3], max_tokens=300))
        await until_sampling(backend, 20)
        await step(backend)
        gone.cancel()
        samples = await many
        after = await one(backend, prompts[0], max_tokens=20, seed=5)
        trained = copy.deepcopy(backend._running.policy.model)
    check_logprobs(trained, prompts[0], after)
    assert {0, 1} <= {version for sample in samples for version in sample.policy_versions}
    for prompt, sample in zip(prompts, samples, strict=True):
        n_old = sample.policy_versions.count(0)
        whole = torch.tensor([prompt + sample.token_ids])
        for weights, part in ((model, range(n_old)), (trained, range(n_old, len(sample.token_ids)))):
            with torch.no_grad():
                table = weights(input_ids=whole).logits[0].log_softmax(-1)
            for at in part:
                wanted = float(table[len(prompt) + at - 1, sample.token_ids[at]])
                assert sample.logprobs[at] == pytest.approx(wanted, abs=1e-4)


async def test_graphs_are_refused_where_they_cannot_be():
    with pytest.raises(ConfigError, match="leave one of them out"):
        EmbeddedBackend(tiny.model(), cuda_graphs=True, deterministic=True)
    with pytest.raises(ConfigError, match="needs a model of the Llama layout"):
        await EmbeddedBackend(tiny.model("gpt2"), cuda_graphs=True).start()
    async with EmbeddedBackend(tiny.model(), cuda_graphs=True, max_length=2, max_batch_rows=1) as backend:
        assert len((await one(backend, [1], max_tokens=9)).token_ids) == 1
