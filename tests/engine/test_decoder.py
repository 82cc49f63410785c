"""Sampling: distribution, seeds, the reuse of finished rows, and new weights in the middle of a response."""

from __future__ import annotations

import asyncio
import copy
import math
import random
from collections import Counter
from itertools import groupby
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leyden.engine import EmbeddedBackend, OptimParams, SampledResponse, SamplingParams
from leyden.engine.decoder import Decoder, Generation, PendingGenerations
from leyden.engine.forward.layout import LayoutForward
from leyden.engine.forward.products import has_faster_products, packed_bytes
from leyden.engine.sampling import draw
from leyden.engine.slots import Place, SlotTable
from leyden.errors import ConfigError, EngineError
from leyden.objectives.losses import PPOLoss
from tests.contracts.engine import sequence_of
from tests.engine import tiny
from tests.engine.waiting import until_sampling

torch.set_num_threads(1)


def table(model: Any, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities (T, V) of a plain forward pass."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)


def check_logprobs(model: Any, prompt: list[int], sample: SampledResponse) -> None:
    wanted = table(model, prompt + sample.token_ids)
    for index, (token, logprob) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
        assert logprob == pytest.approx(float(wanted[len(prompt) + index - 1, token]), abs=1e-5)


async def one(backend: EmbeddedBackend, prompt: list[int], **params: Any) -> SampledResponse:
    (sample,) = await backend.sample([prompt], SamplingParams(**params))
    return sample


async def step(backend: EmbeddedBackend, learning_rate: float = 1e-2) -> None:
    data = sequence_of([1, 2, 3, 4], [0, -5.0, -5.0, -5.0], [1.0] * 4, [0, 1.0, 1.0, 1.0])
    await backend.forward_backward([data], PPOLoss())
    await backend.optim_step(OptimParams(learning_rate=learning_rate))


async def test_logprobs_are_those_of_a_forward_pass_however_requests_overlap():
    model, rng = tiny.model(), random.Random(0)
    async with EmbeddedBackend(model, max_batch_rows=8) as backend:
        prompts = [[rng.randrange(260) for _ in range(rng.randrange(1, 60))] for _ in range(40)]

        async def late(prompt: list[int]) -> SampledResponse:
            await asyncio.sleep(rng.random() / 20)
            return await one(backend, prompt, max_tokens=rng.randrange(1, 30))

        for prompt, sample in zip(prompts, await asyncio.gather(*map(late, prompts)), strict=True):
            check_logprobs(model, prompt, sample)


@pytest.mark.parametrize("kind", ["gpt2", "mamba", "qwen3"])
async def test_any_architecture_is_sampled_and_trained_alike(kind: str):
    options: dict[str, Any] = {"gpt2": {"n_positions": 128}, "mamba": {"state_size": 4}, "qwen3": {"head_dim": 32}}[
        kind
    ]
    model = tiny.model(kind, **options)
    async with EmbeddedBackend(model, max_length=100) as backend:
        tokens = [1, 50, 51]
        for _ in range(3):
            sample = await one(backend, tokens, max_tokens=6)
            check_logprobs(model, tokens, sample)
            data = sequence_of(
                tokens + sample.token_ids,
                [0.0] * len(tokens) + sample.logprobs,
                [1.0] * (len(tokens) + len(sample.token_ids)),
                [0.0] * len(tokens) + [1.0] * len(sample.token_ids),
            )
            assert (await backend.forward_backward([data], PPOLoss())).metrics["max_logprob_difference"] < 1e-5
            await backend.optim_step(OptimParams(learning_rate=1e-3))
            tokens = [*tokens, *sample.token_ids, 60, 61]


async def test_a_conversation_continues_in_the_cache_of_its_last_turn():
    model = tiny.model()
    async with EmbeddedBackend(model) as backend:
        tokens, expected = [1, 50, 51, 52], 0
        for _ in range(4):
            sample = await one(backend, tokens, max_tokens=5)
            check_logprobs(model, tokens, sample)
            assert (await backend.statistics()).extra["reused_prompt_tokens"] == expected
            expected += len(tokens) + len(sample.token_ids) - 1  # the last sampled token was never run
            tokens = [*tokens, *sample.token_ids, 60, 61, 62]


async def test_a_step_drops_every_kept_row():
    model = tiny.model()
    async with EmbeddedBackend(model) as backend:
        first = await one(backend, [1, 50, 51, 52], max_tokens=5)
        await step(backend)
        longer = [1, 50, 51, 52, *first.token_ids, 60]
        check_logprobs(model, longer, await one(backend, longer, max_tokens=5))
        assert (await backend.statistics()).extra["reused_prompt_tokens"] == 0


@pytest.mark.slow
@pytest.mark.merge
@pytest.mark.skipif(not has_faster_products(), reason="torch's own products are as fast here")
async def test_weights_are_packed_while_they_are_sampled_and_never_outlive_a_step():
    model = tiny.model(hidden=512, layers=1)  # its layers are large enough to be packed
    model.generation_config.eos_token_id = None  # it is not to end before they are
    async with EmbeddedBackend(model) as backend:
        for _ in range(2):
            sample = await one(backend, [1, 50, 51, 52], max_tokens=40)
            assert (await backend.statistics()).extra["packed_weights_bytes"] > 0
            check_logprobs(copy.deepcopy(model), [1, 50, 51, 52], sample)
            await step(backend, learning_rate=1e-4)
        sample = await one(backend, [1, 50, 51, 52], max_tokens=2)
        check_logprobs(copy.deepcopy(model), [1, 50, 51, 52], sample)
        await one(backend, [1, 50, 51, 52], max_tokens=40)
        assert packed_bytes(model) > 0
    assert packed_bytes(model) == 0, "the engine has stopped"
    async with EmbeddedBackend(model, deterministic=True) as backend:
        await one(backend, [1, 50, 51, 52], max_tokens=40, seed=0)
        assert (await backend.statistics()).extra["packed_weights_bytes"] == 0


async def test_each_token_has_the_version_and_the_weights_that_drew_it():
    model, before = tiny.model(), tiny.model()
    model.generation_config.eos_token_id = None  # it is not to end before the step
    async with EmbeddedBackend(model) as backend:
        prompt = [1, 50, 51]
        sampling = asyncio.create_task(one(backend, prompt, max_tokens=400))
        await until_sampling(backend, n_tokens=20)
        await step(backend, learning_rate=1e-3)
        sample = await sampling
        assert [version for version, _ in groupby(sample.policy_versions)] == [0, 1]
        tables = [table(m, prompt + sample.token_ids) for m in (before, model)]
        for index, (token, logprob, version) in enumerate(
            zip(sample.token_ids, sample.logprobs, sample.policy_versions, strict=True)
        ):
            assert logprob == pytest.approx(float(tables[version][len(prompt) + index - 1, token]), abs=1e-5)


async def test_in_deterministic_mode_neither_order_nor_company_changes_an_answer():
    prompts = [[1, 50 + i, 60] for i in range(6)]

    async def answers(order: list[int], together: bool) -> dict[int, SampledResponse]:
        async with EmbeddedBackend(tiny.model(), deterministic=True) as backend:
            ask = [one(backend, prompts[i], max_tokens=8, seed=i) for i in order]
            samples = await asyncio.gather(*ask) if together else [await asked for asked in ask]
        return dict(zip(order, samples, strict=True))

    assert await answers([0, 1, 2, 3, 4, 5], True) == await answers([5, 3, 1, 0, 2, 4], False)
    assert not torch.are_deterministic_algorithms_enabled()


async def test_a_deterministic_backend_demands_a_seed():
    async with EmbeddedBackend(tiny.model(), deterministic=True) as backend:
        with pytest.raises(ConfigError, match="seed"):
            await one(backend, [1, 2])


async def test_a_seed_gives_the_same_tokens_in_any_company():
    async with EmbeddedBackend(tiny.model()) as backend:
        alone = await one(backend, [1, 2, 3], max_tokens=10, seed=5)
        crowd = [one(backend, [1, 9, i], max_tokens=10) for i in range(20)]
        among, *_ = await asyncio.gather(one(backend, [1, 2, 3], max_tokens=10, seed=5), *crowd)
        assert among.token_ids == alone.token_ids


async def test_stopping_fails_the_requests_under_way():
    model = tiny.model()
    model.generation_config.eos_token_id = None
    backend = EmbeddedBackend(model)
    await backend.start()
    sampling = asyncio.create_task(one(backend, [1, 2], max_tokens=500))
    await until_sampling(backend)
    await backend.stop()
    with pytest.raises(EngineError, match="stopped"):
        await sampling


async def test_more_requests_than_rows_wait_their_turn():
    model = tiny.model()
    async with EmbeddedBackend(model, max_batch_rows=2) as backend:
        samples = await backend.sample([[1, i] for i in range(50)], SamplingParams(max_tokens=3))
        for i, sample in enumerate(samples):
            check_logprobs(model, [1, i], sample)


async def test_weights_that_are_not_finite_fail_the_request_and_not_the_engine():
    model = tiny.model()
    async with EmbeddedBackend(model) as backend:
        kept = model.model.norm.weight.detach().clone()
        with torch.no_grad():
            model.model.norm.weight.fill_(math.nan)
        with pytest.raises(EngineError, match="not finite"):
            await one(backend, [1, 2, 3])
        with torch.no_grad():
            model.model.norm.weight.copy_(kept)
        check_logprobs(model, [1, 2, 3], await one(backend, [1, 2, 3]))


def test_draws_follow_the_tempered_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    n, rng = 20_000, random.Random(0)
    for temperature in (0.5, 1.0, 2.0):
        tokens, logprobs = draw(logits.expand(n, -1), [temperature] * n, [1.0] * n, [rng.random() for _ in range(n)])
        wanted = (logits[0] / temperature).softmax(-1)
        counts = Counter(tokens)
        for token in range(4):
            p = float(wanted[token])
            assert abs(counts[token] / n - p) < 5 * math.sqrt(p * (1 - p) / n)
        assert logprobs[0] == pytest.approx(math.log(float(wanted[tokens[0]])), abs=1e-5)


@pytest.mark.parametrize("n_vocabulary", [4096, 5003, 32_000])
def test_a_large_vocabulary_is_drawn_by_its_cumulative_distribution(n_vocabulary: int):
    rng = random.Random(n_vocabulary)
    logits_V = 3 * torch.randn(n_vocabulary, generator=torch.Generator().manual_seed(n_vocabulary))
    logits_V[rng.sample(range(n_vocabulary), n_vocabulary // 2)] = -math.inf
    logits_V[-100:] = -math.inf
    uniforms = [0.0, 1 - 2**-53, *(rng.random() for _ in range(200))]
    tokens, logprobs = draw(logits_V.repeat(len(uniforms), 1), [1.0] * len(uniforms), [1.0] * len(uniforms), uniforms)
    cumulative_V = logits_V.double().softmax(-1).cumsum(-1)
    for token, logprob, uniform in zip(tokens, logprobs, uniforms, strict=True):
        before, after = (float(cumulative_V[at]) if at >= 0 else 0.0 for at in (token - 1, token))
        assert before - 1e-6 <= uniform <= after + 1e-6
        assert logprob == pytest.approx(float(logits_V.log_softmax(-1)[token]), abs=1e-5)
        assert math.isfinite(logprob)


def test_the_log_probabilities_of_a_large_vocabulary_are_exact():
    logits = torch.randn(3, 262_144, generator=torch.Generator().manual_seed(0)) * 3
    tokens, logprobs = draw(logits, [1.0, 0.5, 0.0], [1.0] * 3, [0.1, 0.5, 0.9])
    wanted = (logits.double() / torch.tensor([1.0, 0.5, 1.0])[:, None]).log_softmax(-1)
    assert logprobs == pytest.approx([float(wanted[row, token]) for row, token in enumerate(tokens)], abs=5e-6)


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_reports_the_probability_of_the_draw():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    n, rng = 2000, random.Random(0)
    tokens, logprobs = draw(logits.expand(n, -1), [1.0] * n, [0.7] * n, [rng.random() for _ in range(n)])
    assert set(tokens) == {0, 1}
    assert Counter(tokens)[0] / n == pytest.approx(0.5 / 0.8, abs=0.05)
    assert logprobs[tokens.index(1)] == pytest.approx(math.log(0.3 / 0.8), abs=1e-5)
    assert logprobs[tokens.index(0)] == pytest.approx(math.log(0.5 / 0.8), abs=1e-5)


def test_each_row_of_a_batch_reports_the_probability_of_its_own_draw():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(4, -1)
    tokens, logprobs = draw(logits, [1.0, 0.0, 2.0, 1.0], [0.4, 0.4, 0.4, 1.0], [0.9, 0.9, 0.9, 0.9])
    assert tokens == [0, 0, 1, 2]
    roots = [math.sqrt(p) for p in (0.5, 0.3, 0.15, 0.05)]
    second = roots[1] / (roots[0] + roots[1])  # at temperature 2, the two likeliest reach 0.4
    for found, wanted in zip(logprobs, [1.0, 0.5, second, 0.15], strict=True):
        assert found == pytest.approx(math.log(wanted), abs=1e-5)


def test_temperature_zero_takes_the_likeliest_token():
    logits = torch.randn(5, 30, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = draw(logits, [0.0, 0.0, 0.0, 0.0, 1.0], [1.0] * 5, [0.99] * 5)
    assert tokens[:4] == logits.argmax(-1).tolist()[:4]
    assert logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[0].max()), abs=1e-5)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(0, 3), st.booleans()), max_size=40
    ),
    st.sampled_from([None, 1, 3]),
)
def test_a_row_given_out_holds_exactly_the_prefix_that_it_promises(
    events: list[tuple[list[int], int, bool]], min_copied: int | None
):
    slots = SlotTable(4, min_copied=min_copied)
    held: dict[int, list[int]] = {}
    used: dict[int, list[int]] = {}
    for prompt, pick, keep in events:
        if pick == 3:
            slots.drop()
            held.clear()
        if not slots.should_wait(prompt) and (place := slots.acquire(prompt)) is not None:
            row, cached = place.row, place.n_cached
            assert row not in used
            assert cached < len(prompt)
            if place.copy_from is not None:
                assert min_copied is not None and place.copy_from != row
                assert held[place.copy_from][:cached] == prompt[:cached]
                assert cached >= min(min_copied, len(prompt) - 1)
            elif cached:
                assert prompt[: len(held[row])] == held[row]
                assert cached == min(len(held[row]), len(prompt) - 1)
            held.pop(row, None)
            used[row] = prompt
        elif len(used) == 4:
            row = sorted(used)[pick % 4]
            tokens = used.pop(row)
            slots.release(row, tokens if keep else ())
            held[row] = tokens if keep else []
        if pick == 2:  # a step: all prompts are in the cache
            slots.computed()
            held |= used


def test_the_longest_prefix_wins_and_the_oldest_row_is_evicted():
    slots = SlotTable(3)
    rows = [place.row for index in range(3) if (place := slots.acquire([9, index]))]
    for row, tokens in zip(rows, ([1, 2], [1, 2, 3], [5, 6]), strict=True):
        slots.release(row, tokens)
    assert slots.acquire([1, 2, 3, 4]) == Place(rows[1], 3)
    assert slots.acquire([7]) == Place(rows[0])


def test_prompts_that_begin_alike_wait_for_the_first_and_are_copied_from_it():
    slots = SlotTable(3, min_copied=2)
    first = slots.acquire([1, 2, 3, 4])
    assert first is not None
    assert slots.should_wait([1, 2, 3, 9])
    assert not slots.should_wait([1, 9]), "too little to be worth it"
    slots.computed()
    assert not slots.should_wait([1, 2, 3, 9])
    second = slots.acquire([1, 2, 3, 9])
    assert second == Place(second.row if second else -1, 3, first.row)
    third = slots.acquire([1, 2, 3, 4])
    assert third == Place(third.row if third else -1, 3, first.row), "the last token is computed"


async def test_a_group_of_equal_prompts_is_computed_once_and_sampled_as_if_it_was_not():
    model = tiny.model(layers=2, heads=2, kv_heads=1)
    prompts = [[*range(5, 45)]] * 4 + [[*range(5, 35), 60, 61]] * 3 + [[7, 8, 9]]

    async def sampled(min_copied: int | None) -> tuple[list[list[int]], list[list[float]], float, int]:
        forward = LayoutForward(model, max_rows=32, max_length=100)
        steps: list[int] = []
        decode = forward.decode

        def counted(rows: Any, sequences: Any, cached: Any) -> Any:
            steps.append(sum(len(sequence) - held for sequence, held in zip(sequences, cached, strict=True)))
            return decode(rows, sequences, cached)

        forward.decode = counted
        decoder = Decoder(
            forward,
            max_batch_rows=16,
            max_prefill_tokens=2048,
            deterministic=False,
            seed=0,
            threads=1,
            min_copied=min_copied,
        )
        generations = [
            Generation(list(prompt), 6, 1.0, 1.0, frozenset(), seed=index) for index, prompt in enumerate(prompts)
        ]
        pending = PendingGenerations(generations)
        decoder.submit(generations)
        decoder.start()
        assert await pending.finished()
        reused = decoder.statistics().extra["reused_prompt_tokens"]
        decoder.stop()
        return [g.token_ids for g in generations], [g.logprobs for g in generations], reused, sum(steps)

    tokens, logprobs, reused, n_computed = await sampled(None)
    shared = await sampled(8)
    assert shared[0] == tokens
    for one, other in zip(shared[1], logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert reused == 0
    assert shared[2] == 3 * 39 + 30 + 2 * 31
    assert n_computed - shared[3] == shared[2]


class Among:
    """A constraint: these tokens alone, for the first `lasts` tokens."""

    def __init__(self, tokens: set[int], lasts: int) -> None:
        self._mask = bytes(token in tokens for token in range(260))
        self._left = lasts
        self.accepted: list[int] = []

    def allowed(self) -> bytes:
        if not self._left:
            raise EngineError("the grammar is lost")
        self._left -= 1
        return self._mask

    def accept(self, token: int) -> None:
        self.accepted.append(token)


async def test_a_constraint_binds_its_own_row_and_one_that_fails_ends_its_own():
    model = tiny.model()
    among, lost = Among({50, 51, 52}, lasts=99), Among({50}, lasts=2)
    done = asyncio.Event()

    def generation(constraint: Among | None) -> Generation:
        options: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "stop_ids": frozenset()}
        loop = asyncio.get_running_loop()
        return Generation([1, 40], **options, seed=3, loop=loop, notify=done.set, constraint=constraint)

    bound, failing, free = generations = [generation(constraint) for constraint in (among, lost, None)]
    async with EmbeddedBackend(model) as backend:
        assert backend._running is not None
        backend._running.decoder.submit(generations)
        while not all(each.done for each in generations):
            await done.wait()
            done.clear()
    assert str(failing.error) == "the grammar is lost"
    assert failing.token_ids == [50, 50]
    check_logprobs(model, [1, 40], SampledResponse(free.token_ids, free.logprobs, free.policy_versions, "length"))
    assert set(bound.token_ids) <= {50, 51, 52}
    assert among.accepted == bound.token_ids
    allowed = torch.tensor([50, 51, 52])
    wanted_TA = table(model, [1, 40, *bound.token_ids])[1:-1, allowed].log_softmax(-1)  # renormalised among the three
    for place, token in enumerate(bound.token_ids):
        assert bound.logprobs[place] == pytest.approx(float(wanted_TA[place, token - 50]), abs=1e-5)
