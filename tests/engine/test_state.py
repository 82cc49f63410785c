"""A killed and resumed training equals the uninterrupted one."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from leyden.engine import EmbeddedBackend, IsolatedBackend, OptimParams, SampledResponse, SamplingParams
from leyden.objectives.losses import PPOLoss
from tests.contracts.engine import sequence_of
from tests.engine import tiny


async def iterate(backend: EmbeddedBackend, iteration: int) -> list[SampledResponse]:
    """Sample, and reinforce even tokens."""
    prompts = [[1, 50 + i, iteration] for i in range(6)]
    samples = await backend.sample(prompts, SamplingParams(max_tokens=8, seed=1000 * iteration))
    batch = [
        sequence_of(
            prompt + s.token_ids,
            [0.0] * 3 + s.logprobs,
            [0.0] * 3 + [1.0 if token % 2 == 0 else -1.0 for token in s.token_ids],
            [0.0] * 3 + [1 / len(s.token_ids)] * len(s.token_ids),
        )
        for prompt, s in zip(prompts, samples, strict=True)
    ]
    for half in (batch[:3], batch[3:]):
        await backend.forward_backward(half, PPOLoss())
        await backend.optim_step(OptimParams(learning_rate=3e-3, weight_decay=0.01))
    return samples


def suffixes(folder: Path) -> set[str]:
    return {path.suffix for path in folder.iterdir()}


async def test_in_deterministic_mode_a_resumed_run_ends_with_the_same_weights(tmp_path: Path):
    folder = tiny.make(tmp_path / "model")
    uninterrupted: list[list[SampledResponse]] = []
    async with EmbeddedBackend(folder, deterministic=True) as backend:
        for iteration in range(5):
            uninterrupted.append(await iterate(backend, iteration))
        await backend.save_state(tmp_path / "whole")

    async with EmbeddedBackend(folder, deterministic=True) as backend:
        resumed = [await iterate(backend, iteration) for iteration in range(2)]
        await backend.save_state(tmp_path / "part")
        await iterate(backend, 2)  # lost with the process
    async with EmbeddedBackend(folder, deterministic=True) as backend:
        await backend.load_state(tmp_path / "part")
        resumed += [await iterate(backend, iteration) for iteration in range(2, 5)]
        await backend.save_state(tmp_path / "resumed")

    assert resumed == uninterrupted
    for file in ("model.safetensors", "optimizer.safetensors", "optimizer.json", "engine.json"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "resumed" / file).read_bytes()


async def test_the_samplers_random_state_is_part_of_the_state(tmp_path: Path):
    async with EmbeddedBackend(tiny.model()) as backend:
        await backend.sample([[1, 2]], SamplingParams(max_tokens=5))
        await backend.save_state(tmp_path)
        first = await backend.sample([[1, 2]], SamplingParams(max_tokens=20))
        second = await backend.sample([[1, 2]], SamplingParams(max_tokens=20))
        await backend.load_state(tmp_path)
        again = await backend.sample([[1, 2]], SamplingParams(max_tokens=20))
    assert again == first != second


async def test_a_state_holds_no_pickle_and_tied_weights_once(tmp_path: Path):
    async with EmbeddedBackend(tiny.model()) as backend:
        await iterate(backend, 0)
        await backend.save_state(tmp_path)
    assert suffixes(tmp_path) == {".safetensors", ".json"}
    names = set(load_file(tmp_path / "model.safetensors"))
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT reads a name of the past
async def test_of_a_model_with_adapters_only_those_are_trained_and_saved_and_any_library_loads_the_result(
    tmp_path: Path,
):
    peft = pytest.importorskip("peft")
    plain = tiny.model()
    frozen = plain.model.layers[0].mlp.up_proj.weight
    before = frozen.detach().clone()
    model = peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules="all-linear"))
    async with EmbeddedBackend(model, tokenizer=tiny.tokenizer()) as backend:
        for iteration in range(2):
            await iterate(backend, iteration)
        await backend.save_state(tmp_path / "state")
        await backend.save_pretrained(tmp_path / "hf")
        (sample,) = await backend.sample([[1, 50, 60]], SamplingParams(max_tokens=1, temperature=0))
    assert torch.equal(frozen, before)
    assert all("lora_" in name for name in load_file(tmp_path / "state" / "model.safetensors"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        logprobs = merged(torch.tensor([[1, 50, 60]])).logits[0, -1].log_softmax(-1)
    assert float(logprobs[sample.token_ids[0]]) == pytest.approx(sample.logprobs[0], abs=1e-4)


@pytest.mark.parametrize(("free", "is_copied"), [(2.1, True), (1.9, False)])
async def test_a_state_whose_copy_would_fill_the_memory_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, is_copied: bool
):
    async with EmbeddedBackend(tiny.model(), device="cpu", max_length=32) as backend:
        data = [sequence_of([1, 50, 60, 70], [0.0] * 4, [1.0] * 4, [0.0, 1.0, 1.0, 1.0])]
        await backend.forward_backward(data, PPOLoss())
        await backend.optim_step(OptimParams())
        n_bytes = 3 * sum(each.nbytes for each in backend._running.policy.model.parameters())  # with two moments
        memory = psutil.virtual_memory()._replace(available=int(free * n_bytes))
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        await backend.snapshot_state(tmp_path / "state")
        assert bool(backend._running.writing) == is_copied
        assert is_copied or (tmp_path / "state" / "engine.json").is_file()
        await backend.state_written(tmp_path / "state")
        await backend.load_state(tmp_path / "state")


@pytest.mark.parametrize("isolated", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_a_copied_state_is_written_while_training_goes_on_and_is_that_of_its_moment(
    tmp_path: Path, isolated: bool
):
    folder = tiny.make(tmp_path / "model")
    kind = IsolatedBackend if isolated else EmbeddedBackend
    async with kind(folder, max_length=32) as backend:
        data = [sequence_of([1, 50, 60, 70], [0.0] * 4, [1.0] * 4, [0.0, 1.0, 1.0, 1.0])]
        await backend.forward_backward(data, PPOLoss())
        await backend.optim_step(OptimParams(learning_rate=1e-3))
        await backend.save_state(tmp_path / "at once")
        assert await backend.snapshot_state(tmp_path / "aside")
        await backend.forward_backward(data, PPOLoss())
        await backend.optim_step(OptimParams(learning_rate=1e-3))
        await backend.state_written(tmp_path / "aside")
        await backend.state_written(tmp_path / "aside")  # waiting twice is once
    for file in ("model.safetensors", "optimizer.safetensors", "optimizer.json", "engine.json"):
        assert (tmp_path / "aside" / file).read_bytes() == (tmp_path / "at once" / file).read_bytes()
