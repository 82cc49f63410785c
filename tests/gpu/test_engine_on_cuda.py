"""The engine on an NVIDIA GPU: the CPU's numbers, and what only a GPU has, such as memory that runs out.

`LEYDEN_TEST_DEVICE=cpu` runs those of them that a CPU can run, to try the tests themselves.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import logging
import multiprocessing
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.engine import EmbeddedBackend, IsolatedBackend, LoRA, OptimParams, SamplingParams
from leyden.objectives.losses import PPOLoss, ValueLoss
from leyden.training.rng import capture_rng, restore_rng
from leyden.types import TrainingSequence
from tests.engine import tiny
from tests.engine.test_learner import a_batch

DEVICE = os.environ.get("LEYDEN_TEST_DEVICE", "cuda")
STEP = OptimParams(learning_rate=1e-3)
PROMPTS = [[1, 50, 60, 70], [1, 80], [1, 5, 6, 7, 8, 9, 10, 11, 12, 13]]

needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU has this")


def one_prompt(seed: int, n: int = 8) -> list[TrainingSequence]:
    """Sequences of a group: one prompt, long enough to be shared, and responses of their own."""
    rng = random.Random(seed)
    prompt = [rng.randrange(3, 260) for _ in range(120)]
    rows: list[TrainingSequence] = []
    for row in range(n):
        response = [rng.randrange(3, 260) for _ in range(rng.randrange(4, 20))]
        length = len(prompt) + len(response)
        rows.append(
            TrainingSequence(
                prompt + response,
                [0.0] * len(prompt) + [1.0] * len(response),
                {"logprobs": [-5.5] * length, "advantages": [(-1.0) ** row] * length},
            )
        )
    return rows


async def trained(model: Any, device: str, batch: list[TrainingSequence], steps: int = 2, **options: Any) -> Any:
    """Log-probabilities before and after some steps, gradient norms, and the weights."""
    async with EmbeddedBackend(copy.deepcopy(model), device=device, **options) as backend:
        assert (await backend.device()).startswith(device)
        found: dict[str, Any] = {"before": (await backend.forward(batch)).logprobs, "norms": []}
        for _ in range(steps):
            await backend.forward_backward(batch, PPOLoss())
            if options.get("value_head"):
                valued = [
                    TrainingSequence(
                        each.token_ids,
                        each.weights,
                        {"returns": [0.5] * len(each.token_ids), "values": [0.0] * len(each.token_ids)},
                    )
                    for each in batch
                ]
                await backend.forward_backward(valued, ValueLoss())
            found["norms"].append((await backend.optim_step(STEP)).grad_norm)
        found["after"] = (await backend.forward(batch)).logprobs
        found["weights"] = {
            name: p.detach().float().cpu() for name, p in backend._running.policy.model.named_parameters()
        }
        return found


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ({}, {}),
        ({}, {"max_tokens_per_microbatch": 64}),
        ({}, {"gradient_checkpointing": True}),
        ({}, {"lora": LoRA(rank=4)}),
        ({}, {"value_head": True}),
        ({"vocab_size": 6000}, {}),
        ({"kind": "llama", "kv_heads": 2}, {}),
        ({"kind": "gpt2"}, {}),
    ],
    ids=["plain", "micro-batches", "recomputed", "lora", "value head", "logits in chunks", "llama", "gpt2"],
)
@pytest.mark.parametrize("shared", [False, True], ids=["rows", "one prompt"])
async def test_steps_on_the_gpu_are_those_on_the_cpu(
    architecture: dict[str, Any], options: dict[str, Any], shared: bool
) -> None:
    model, batch = tiny.model(**architecture), one_prompt(3) if shared else a_batch(3, n=12)
    here, there = await trained(model, "cpu", batch, **options), await trained(model, DEVICE, batch, **options)
    for when in ("before", "after"):
        for mine, wanted in zip(there[when], here[when], strict=True):
            assert mine == pytest.approx(wanted, abs=2e-3)
    assert there["norms"] == pytest.approx(here["norms"], rel=2e-3)
    # AdamW's first steps are the sign of a gradient times the learning rate, so one near zero may go either way.
    apart = [(there["weights"][name] - wanted).abs() for name, wanted in here["weights"].items()]
    assert max(float(each.max()) for each in apart) <= 2.1 * 2 * STEP.learning_rate
    assert float(torch.cat([each.flatten() for each in apart]).mean()) < 0.02 * STEP.learning_rate


async def test_what_is_sampled_has_the_probabilities_of_the_learner() -> None:
    async with EmbeddedBackend(tiny.model(), device=DEVICE) as backend:
        samples = await backend.sample(PROMPTS * 4, SamplingParams(max_tokens=24, seed=7))
        rows = [
            TrainingSequence(
                prompt + sample.token_ids,
                [0.0] * len(prompt) + [1.0] * len(sample.token_ids),
                {},
            )
            for prompt, sample in zip(PROMPTS * 4, samples, strict=True)
        ]
        logprobs = (await backend.forward(rows)).logprobs
    for prompt, sample, learned in zip(PROMPTS * 4, samples, logprobs, strict=True):
        assert learned[len(prompt) :] == pytest.approx(sample.logprobs, abs=1e-3)
    async with EmbeddedBackend(tiny.model(), device="cpu") as on_cpu:
        wanted = await on_cpu.sample(PROMPTS, SamplingParams(max_tokens=12, temperature=0, seed=0))
    async with EmbeddedBackend(tiny.model(), device=DEVICE) as on_gpu:
        found = await on_gpu.sample(PROMPTS, SamplingParams(max_tokens=12, temperature=0, seed=0))
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]


async def test_bfloat16_is_near_float32() -> None:
    model, batch = tiny.model(), one_prompt(5)
    whole = await trained(model, DEVICE, batch)
    rounded = await trained(model, DEVICE, batch, dtype="bfloat16")
    for when in ("before", "after"):
        apart = [
            abs(a - b) for pair in zip(rounded[when], whole[when], strict=True) for a, b in zip(*pair, strict=True)
        ]
        assert 0 < sum(apart) / sum(each != 0 for each in apart) < 0.1
    assert rounded["norms"] == pytest.approx(whole["norms"], rel=0.2)


async def test_two_deterministic_runs_have_equal_weights_to_the_bit() -> None:
    model, batch = tiny.model(), a_batch(4, n=12)
    samples, weights = [], []
    for _ in range(2):
        async with EmbeddedBackend(copy.deepcopy(model), device=DEVICE, deterministic=True) as backend:
            samples.append(await backend.sample(PROMPTS, SamplingParams(max_tokens=12, seed=3)))
        weights.append((await trained(model, DEVICE, batch, steps=3, deterministic=True))["weights"])
    assert samples[0] == samples[1]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


async def test_a_state_moves_between_gpu_and_cpu(tmp_path: Path) -> None:
    model, batch = tiny.model(), a_batch(6, n=12)
    async with EmbeddedBackend(copy.deepcopy(model), device=DEVICE) as there:
        await there.forward_backward(batch, PPOLoss())
        await there.optim_step(STEP)
        await there.save_state(tmp_path / "state")
        await there.forward_backward(batch, PPOLoss())
        await there.optim_step(STEP)
        wanted = (await there.forward(batch)).logprobs
        await there.load_state(tmp_path / "state")  # to the state after one step, and the second once more
        await there.forward_backward(batch, PPOLoss())
        await there.optim_step(STEP)
        again = (await there.forward(batch)).logprobs
    async with EmbeddedBackend(copy.deepcopy(model), device="cpu") as here:
        await here.load_state(tmp_path / "state")
        await here.forward_backward(batch, PPOLoss())
        await here.optim_step(STEP)
        on_cpu = (await here.forward(batch)).logprobs
    for mine, other, expected in zip(again, on_cpu, wanted, strict=True):
        assert mine == pytest.approx(expected, abs=1e-4)
        assert other == pytest.approx(expected, abs=2e-3)


async def test_a_child_process_has_the_gpu(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "model")
    async with IsolatedBackend(folder, device=DEVICE) as backend:
        assert (await backend.device()).startswith(DEVICE)
        batch = a_batch(7)
        before = (await backend.forward(batch)).logprobs
        await backend.forward_backward(batch, PPOLoss())
        await backend.optim_step(STEP)
        await backend.publish_weights()
        assert (await backend.forward(batch)).logprobs != before
        assert len(await backend.sample(PROMPTS, SamplingParams(max_tokens=4, seed=1))) == len(PROMPTS)


@needs_cuda
async def test_offloaded_moments_leave_the_gpu_and_change_no_weight() -> None:
    model, batch = tiny.model(hidden=256, layers=4), a_batch(8, n=8)
    parameters = sum(each.numel() for each in model.parameters())
    weights, held = [], []
    for offload in (False, True):
        async with EmbeddedBackend(copy.deepcopy(model), device=DEVICE, offload=offload) as backend:
            for _ in range(2):
                await backend.forward_backward(batch, PPOLoss())
                await backend.optim_step(STEP)
            states = backend._running.learner.optimizer.state
            moments = [state[name] for state in states.values() for name in ("exp_avg", "exp_avg_sq")]
            assert all(each.is_pinned() == offload for each in moments)
            places = [each.data_ptr() for each in moments]
            await backend.forward_backward(batch, PPOLoss())
            await backend.optim_step(STEP)
            if offload:
                assert [
                    state[name].data_ptr() for state in states.values() for name in ("exp_avg", "exp_avg_sq")
                ] == places
            held.append(torch.cuda.memory_allocated())
            weights.append({n: p.detach().cpu() for n, p in backend._running.policy.model.named_parameters()})
    assert held[0] - held[1] >= 0.95 * 8 * parameters  # two moments of four bytes each
    for name, wanted in weights[0].items():
        torch.testing.assert_close(weights[1][name], wanted, atol=1e-5, rtol=1e-4)


@needs_cuda
async def test_a_micro_batch_that_does_not_fit_into_the_gpu_is_halved(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny.model(hidden=256, layers=4)
    batch = [each for seed in range(12) for each in one_prompt(seed, n=24)]
    whole = await trained(model, DEVICE, batch, steps=1)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 300 * 2**20) / total)
        with caplog.at_level(logging.WARNING, logger="leyden.engine"):
            small = await trained(model, DEVICE, batch, steps=1, max_tokens_per_microbatch=10**6)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "does not fit into memory" in caplog.text
    assert small["norms"] == pytest.approx(whole["norms"], rel=1e-3)


@needs_cuda
def test_a_checkpoint_has_the_random_state_of_the_gpu() -> None:
    torch.cuda.manual_seed_all(11)
    torch.rand(3, device=DEVICE)
    states = capture_rng()
    assert len(states["torch"]["cuda"]) == torch.cuda.device_count()
    wanted = torch.rand(5, device=DEVICE).tolist()
    torch.rand(9, device=DEVICE)
    restore_rng(states)
    assert torch.rand(5, device=DEVICE).tolist() == wanted


def mapped(handles: str, names: list[str], answers: Any, go_on: Any) -> None:
    """Map the weights as vLLM's worker does, and send the sum of each, twice."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    uuid = str(torch.cuda.get_device_properties(0).uuid)
    tensors = [rebuild_cuda_tensor(*each[uuid]) for each in pickle.loads(base64.b64decode(handles))]
    for _ in range(2):
        torch.cuda.synchronize()
        answers.put({name: float(tensor.double().sum()) for name, tensor in zip(names, tensors, strict=True)})
        go_on.get(timeout=60)


@needs_cuda
async def test_another_process_maps_the_weights_of_the_gpu_without_a_copy() -> None:
    spawn = multiprocessing.get_context("spawn")
    answers, go_on = spawn.Queue(), spawn.Queue()
    async with EmbeddedBackend(tiny.model(), device=DEVICE) as backend:
        model = backend._running.policy.model

        def sums() -> dict[str, float]:
            return {n: float(p.detach().double().sum()) for n, p in model.named_parameters(remove_duplicate=False)}

        shared = await backend.share_weights()
        child = spawn.Process(target=mapped, args=(shared.handles, shared.names, answers, go_on))
        child.start()
        try:
            assert await asyncio.to_thread(answers.get, timeout=60) == pytest.approx(sums())
            before = sums()
            await backend.forward_backward(a_batch(9), PPOLoss())
            await backend.optim_step(STEP)
            torch.cuda.synchronize()
            go_on.put(None)
            after = await asyncio.to_thread(answers.get, timeout=60)
            assert after == pytest.approx(sums())
            assert after != before
        finally:
            go_on.put(None)
            child.join(30)
            child.kill()
