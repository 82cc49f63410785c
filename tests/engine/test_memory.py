"""Training in less memory has the same gradient: layers computed again, halved micro-batches, offloaded state."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from leyden.engine import EmbeddedBackend, OptimParams, SamplingParams
from leyden.engine.forward.cached import CachedForward, UncachedForward
from leyden.engine.forward.layout import LayoutForward
from leyden.engine.forward.recompute import recompute_layers
from leyden.engine.learner import TorchLearner
from leyden.engine.memory import is_out_of_memory
from leyden.engine.sampling import draw
from leyden.engine.threads import threads_for
from leyden.errors import ConfigError, EngineError
from leyden.objectives.losses import PPOLoss
from tests.engine import tiny
from tests.engine.test_learner import a_batch, gradient
from tests.engine.waiting import until_sampling

torch.set_num_threads(1)


class SmallMemory(LayoutForward):
    """Runs out of memory with more than `limit` padded tokens, in the forward or in the backward pass."""

    def __init__(self, model: Any, *, limit: int, backward: bool, error: Exception) -> None:
        super().__init__(model, max_rows=4, max_length=128)
        self.limit, self.backward, self.error = limit, backward, error
        self.failures = 0

    def hidden_at(self, sequences: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> Tensor:
        fits = len(sequences) * max(map(len, sequences)) <= self.limit
        if not fits and not (self.backward and torch.is_grad_enabled()):
            self.fail()
        if fits:
            return super().hidden_at(sequences, positions)
        # The hook runs when the layers above it have added their gradients already.
        layer = self._layers[0]
        handle = layer._o.register_full_backward_hook(lambda *_: self.fail())
        try:
            return super().hidden_at(sequences, positions)
        finally:
            handle.remove()

    def fail(self) -> None:
        self.failures += 1
        raise self.error


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"vocab_size": 5_000}, {"vocab_size": 5_000, "tie_word_embeddings": False}])
def test_a_micro_batch_that_does_not_fit_is_halved_with_the_same_gradient(
    backward: bool, error: Exception, options: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    model, batches = tiny.model(**options), (a_batch(1, n=12), a_batch(2, n=12))
    twin = copy.deepcopy(model)
    whole = TorchLearner(twin, LayoutForward(twin, max_rows=4, max_length=128), max_tokens_per_microbatch=10**6)
    forward = SmallMemory(model, limit=130, backward=backward, error=error)
    small = TorchLearner(model, forward, max_tokens_per_microbatch=10**6)
    with caplog.at_level(logging.WARNING, logger="leyden.engine"):
        for batch in batches:  # the second adds to the gradient of the first
            first, second = (each.forward_backward(batch, PPOLoss(), 1.0) for each in (whole, small))
            assert second.loss == pytest.approx(first.loss, rel=1e-4, abs=1e-4)
            assert (second.n_tokens, second.n_trained) == (first.n_tokens, first.n_trained)
            failures = forward.failures
    assert failures > 0
    assert small.max_tokens <= 260
    assert len(caplog.records) == 1
    assert f"max_tokens_per_microbatch={10**6}" not in caplog.text
    wanted = gradient(whole)
    for name, got in gradient(small).items():
        torch.testing.assert_close(got, wanted[name], atol=1e-4, rtol=1e-3)
    small.forward_backward(batches[0], PPOLoss(), 1.0)
    assert forward.failures == failures  # remembered: nothing fails again


async def test_a_stopped_backend_frees_weights_and_optimizer():
    kept: list[weakref.ref[object]] = []

    async def train() -> None:
        async with EmbeddedBackend(tiny.model(), device="cpu") as backend:
            await backend.forward_backward(a_batch(1), PPOLoss())
            await backend.optim_step(OptimParams())
            running = backend._running
            kept.extend(map(weakref.ref, [running.learner, running.learner.optimizer, running.policy.model]))

    await train()
    gc.collect()
    assert [each() for each in kept] == [None] * 3


def test_a_forward_pass_alone_is_halved_too():
    model, batch = tiny.model(), a_batch(1, n=12)
    learner = TorchLearner(
        model,
        SmallMemory(model, limit=60, backward=False, error=MemoryError()),
        max_tokens_per_microbatch=10**6,
    )
    plain = TorchLearner(model, LayoutForward(model, max_rows=4, max_length=128), max_tokens_per_microbatch=10**6)
    for ours, wanted in zip(learner.forward(batch, 1.0).logprobs, plain.forward(batch, 1.0).logprobs, strict=True):
        assert ours == pytest.approx(wanted, abs=1e-5)


def test_one_sequence_that_does_not_fit_is_an_error_that_names_the_settings():
    model = tiny.model()
    learner = TorchLearner(
        model,
        SmallMemory(model, limit=2, backward=True, error=torch.OutOfMemoryError("tried to allocate 9 GiB")),
        max_tokens_per_microbatch=512,
    )
    with pytest.raises(
        EngineError, match=r"tried to allocate 9 GiB.*max_tokens_per_microbatch.*gradient_checkpointing"
    ):
        learner.forward_backward(a_batch(1), PPOLoss(), 1.0)
    with pytest.raises(EngineError, match="no gradient"):
        learner.clip(OptimParams())
    assert not gradient(learner)


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize(("kind", "way"), [("qwen2", LayoutForward), ("qwen2", CachedForward), ("gpt2", CachedForward)])
def test_layers_that_are_computed_again_keep_less_and_have_the_same_gradient(kind: str, way: Any):
    model, batch = tiny.model(kind, layers=4), a_batch(3)
    kept: list[int] = []
    found: list[dict[str, Tensor]] = []
    for recompute in (False, True):
        twin = copy.deepcopy(model)
        forward = way(twin, max_rows=4, max_length=128)
        if recompute:
            forward.recompute_layers()
        sizes: list[int] = []
        learner = TorchLearner(twin, forward, max_tokens_per_microbatch=512)

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward.logits_at([s.token_ids for s in batch], [[0] for _ in batch])
        kept.append(sum(sizes))
        learner.forward_backward(batch, PPOLoss(), 1.0)
        found.append(gradient(learner))
    assert kept[1] < kept[0] / 3
    for name, got in found[1].items():
        torch.testing.assert_close(got, found[0][name], atol=1e-6, rtol=1e-5)


def test_a_model_without_layers_to_compute_again_is_refused():
    with pytest.raises(ConfigError, match="gradient_checkpointing=True: Linear has no layers"):
        recompute_layers(torch.nn.Linear(2, 2))


async def test_offloading_changes_no_weight_and_says_that_it_does_nothing_on_the_cpu(
    caplog: pytest.LogCaptureFixture,
):
    models = [tiny.model(), tiny.model()]
    for model, offload in zip(models, (False, True), strict=True):
        with caplog.at_level(logging.WARNING, logger="leyden.engine"):
            async with EmbeddedBackend(model, offload=offload, dtype="bfloat16", device="cpu") as backend:
                for seed in range(2):
                    await backend.forward_backward(a_batch(seed), PPOLoss())
                    await backend.optim_step(OptimParams(learning_rate=1e-3))
    assert caplog.text.count("offload=True does nothing") == 1
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize(
    ("n_parameters", "n_cores", "wanted"),
    [(120_000, 8, 1), (15_000_000, 2, 1), (62_000_000, 1, 1), (62_000_000, 2, 2), (62_000_000, 8, 7)],
)
def test_threads_follow_from_the_size_of_the_model(n_parameters: int, n_cores: int, wanted: int):
    assert threads_for(n_parameters, n_cores) == wanted


async def test_threads_are_chosen_at_the_start_and_shown():
    async with EmbeddedBackend(tiny.model(), device="cpu") as backend:
        assert (await backend.statistics()).extra["threads"] == 1
    with pytest.raises(ConfigError, match="threads is 'atuo'"):
        EmbeddedBackend(tiny.model(), threads="atuo")  # pyright: ignore[reportArgumentType] -- a typing error of a user


class SmallCache(LayoutForward):
    """Decodes at most `limit` padded tokens at once, and no row of more than `longest` tokens. Records each size."""

    limit, longest = 10**9, 10**9
    sizes: ClassVar[list[int]] = []

    def decode(self, rows: Sequence[int], sequences: Sequence[Sequence[int]], cached: Sequence[int]) -> Tensor:
        new = [len(sequence) - held for sequence, held in zip(sequences, cached, strict=True)]
        size = len(new) * max(new)
        if size > self.limit or max(map(len, sequences)) > self.longest:
            # A store that grew before the allocation failed must not grow for shorter rows.
            self._store.reserve(max(rows), self.max_length)
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
            )
        self.sizes.append(max(new) * sum(each > 1 for each in new))
        return super().decode(rows, sequences, cached)


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> type[SmallCache]:
    class Fresh(SmallCache):
        sizes: ClassVar[list[int]] = []

    monkeypatch.setattr("leyden.engine.forward.choose.CANDIDATES", [Fresh])
    return Fresh


PROMPTS = [[1, 5 + n, 6] for n in range(40)]
PROMPTS[7:7] = [[1, *range(3, 203)]]
"""Many short prompts, and a long one among them."""


async def sampled(**options: Any) -> list[list[int]]:
    async with EmbeddedBackend(tiny.model(), max_length=256, **options) as backend:
        responses = await backend.sample(PROMPTS, SamplingParams(max_tokens=5, seed=3, temperature=1.0))
        return [response.token_ids for response in responses]


async def test_padding_counts_for_prompts_that_are_computed_at_once(small_cache: type[SmallCache]):
    wanted = await sampled()
    assert max(small_cache.sizes) <= 2048
    small_cache.sizes.clear()
    assert await sampled(max_tokens_per_microbatch=64) == wanted
    assert sorted(size for size in small_cache.sizes if size > 64) == [201]  # one prompt cannot be divided


async def test_rows_under_way_are_computed_again_within_the_budget(small_cache: type[SmallCache]):
    async with EmbeddedBackend(tiny.model(), max_tokens_per_microbatch=100) as backend:
        small_cache.sizes.clear()
        going = asyncio.create_task(
            backend.sample([[1, 5 + n] for n in range(20)], SamplingParams(max_tokens=200, seed=1, stop_token_ids=()))
        )
        await until_sampling(backend)
        await backend.forward_backward([a_batch(1, n=12)[0]], PPOLoss())
        await backend.optim_step(OptimParams(learning_rate=1e-4))
        await going
    assert max(small_cache.sizes) <= 210  # a row of more than 100 tokens is computed alone


@pytest.mark.parametrize("limit", [100, 7])
async def test_a_step_that_does_not_fit_is_halved_with_the_same_responses(
    limit: int, small_cache: type[SmallCache], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    wanted = await sampled()
    async with EmbeddedBackend(tiny.model(), max_length=256) as backend:
        monkeypatch.setattr(small_cache, "limit", limit)
        short = [prompt for prompt in PROMPTS if len(prompt) < 10]
        responses = await backend.sample(short, SamplingParams(max_tokens=5, seed=3, temperature=1.0))
        assert len(responses) == 40
        assert all(response.finish_reason for response in responses)
    assert [response.token_ids for response in responses][:7] == wanted[:7]
    assert "it is halved, now and later" in caplog.text


async def test_a_row_that_does_not_fit_alone_fails_alone(
    small_cache: type[SmallCache], monkeypatch: pytest.MonkeyPatch
):
    wanted = await sampled()
    async with EmbeddedBackend(tiny.model(), max_length=256) as backend:
        monkeypatch.setattr(small_cache, "longest", 100)
        results = await asyncio.gather(
            *(
                backend.sample([prompt], SamplingParams(max_tokens=5, seed=3 + index, temperature=1.0))
                for index, prompt in enumerate(PROMPTS)
            ),
            return_exceptions=True,
        )
    failed = results.pop(7)
    assert not [each for each in results if isinstance(each, BaseException)]
    assert isinstance(failed, EngineError)
    assert "a sequence of 201 tokens does not fit into memory; lower max_length" in str(failed)
    assert [each[0].token_ids for each in results] == [*wanted[:7], *wanted[8:]]


@pytest.mark.parametrize("limit", [7, 1])
async def test_rows_whose_sampling_does_not_fit_are_drawn_in_halves_with_the_same_responses(
    limit: int, monkeypatch: pytest.MonkeyPatch
):
    wanted = await sampled()

    def small_draw(logits_BV: Tensor, *rest: Any) -> Any:
        if len(logits_BV) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return draw(logits_BV, *rest)

    monkeypatch.setattr("leyden.engine.decoder.draw", small_draw)
    assert await sampled() == wanted


async def test_a_row_whose_sampling_does_not_fit_alone_fails_alone(monkeypatch: pytest.MonkeyPatch):
    wanted = await sampled()

    def small_draw(logits_BV: Tensor, temperatures: Sequence[float], *rest: Any) -> Any:
        if 0.5 in temperatures:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return draw(logits_BV, temperatures, *rest)

    monkeypatch.setattr("leyden.engine.decoder.draw", small_draw)
    async with EmbeddedBackend(tiny.model(), max_length=256) as backend:
        results = await asyncio.gather(
            *(
                backend.sample(
                    [prompt], SamplingParams(max_tokens=5, seed=3 + index, temperature=0.5 if index in (3, 7) else 1.0)
                )
                for index, prompt in enumerate(PROMPTS)
            ),
            return_exceptions=True,
        )
    failed = [results.pop(7), results.pop(3)]
    for each in failed:
        assert isinstance(each, EngineError)
        assert "sampling from 260 tokens does not fit into memory" in str(each)
    assert not [each for each in results if isinstance(each, BaseException)]
    assert [each[0].token_ids for each in results] == [*wanted[:3], *wanted[4:7], *wanted[8:]]


async def test_sequences_without_a_cache_count_whole(monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []

    class Whole(UncachedForward):
        def decode(self, rows: Sequence[int], sequences: Sequence[Sequence[int]], cached: Sequence[int]) -> Tensor:
            sizes.append(len(sequences) * max(map(len, sequences)))
            return super().decode(rows, sequences, cached)

    monkeypatch.setattr("leyden.engine.forward.choose.CANDIDATES", [Whole])
    await sampled(max_tokens_per_microbatch=210)
    assert max(sizes) <= 210
