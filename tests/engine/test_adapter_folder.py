"""A run that trains an adapter leaves the adapter and the place of its base model, and every reader opens that."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import leyden as ly
from leyden.cli import models
from leyden.engine import EmbeddedBackend, IsolatedBackend, LoRA, OptimParams
from leyden.engine.source import BASE, why_not_loadable
from leyden.errors import ConfigError, EngineError
from leyden.objectives.losses import CrossEntropyLoss
from leyden.types import TrainingSequence
from tests.engine import tiny
from tests.engine.test_gguf import random_model, write_gguf

peft = pytest.importorskip("peft")
torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning",  # PEFT reads a name of the past
    "ignore:Model has `tie_word_embeddings=True` and a tied layer:UserWarning",
    "ignore:Setting `save_embedding_layers`:UserWarning",
)
IDS = [1, 50, 60, 7, 9, 50, 33, 8]
SEQUENCE = TrainingSequence(IDS, [0.0] + [1 / 7] * 7)


async def train(model: Any, out: Path, **options: Any) -> list[float]:
    """Train an adapter, write the model to `out`, and return the trained policy's log-probabilities."""
    async with EmbeddedBackend(model, device="cpu", **{"lora": LoRA(rank=4), **options}) as backend:
        for _ in range(3):
            await backend.forward_backward([SEQUENCE], CrossEntropyLoss())
            await backend.optim_step(OptimParams(learning_rate=2e-2))
        await backend.save_pretrained(out)
        return (await backend.forward([SEQUENCE])).logprobs[0]


async def logprobs_of(backend: Any) -> list[float]:
    async with backend:
        return (await backend.forward([SEQUENCE])).logprobs[0]


def logprobs_by_transformers(model: Any) -> list[float]:
    with torch.no_grad():
        table = model.eval()(torch.tensor([IDS])).logits[0].log_softmax(-1)
    return [0.0, *(float(table[at - 1, IDS[at]]) for at in range(1, len(IDS)))]


def export(source: Path, out: Path, *, type: str | None = None, base: str | None = None) -> None:
    models.export(str(source), out, type=type, base=base)


async def test_the_default_learning_rate_of_what_a_run_leaves_is_that_of_its_base_model(tmp_path: Path) -> None:
    base, out = tiny.make(tmp_path / "base"), tmp_path / "out"
    await train(base, out)
    of_base, of_run = (ly.PolicyGradient(IsolatedBackend(each, device="cpu"), n_steps=1).optim for each in (base, out))
    assert of_run == of_base == OptimParams(learning_rate=1e-3)


@pytest.mark.parametrize("modules", ["all-linear", ["embed_tokens", "q_proj"], ["lm_head"]])
async def test_what_a_run_leaves_is_the_trained_policy_for_every_reader(tmp_path: Path, modules: Any) -> None:
    base, out, whole = tiny.make(tmp_path / "base"), tmp_path / "out", tmp_path / "whole"
    trained = await train(base, out, lora=LoRA(rank=4, target_modules=modules))
    untrained = await logprobs_of(EmbeddedBackend(base, device="cpu"))
    assert trained != pytest.approx(untrained, abs=0.1)
    assert not (out / "model.safetensors").exists()
    assert why_not_loadable(out) == ""
    near = pytest.approx(trained, abs=1e-4)
    assert await logprobs_of(EmbeddedBackend(out, device="cpu")) == near
    assert await logprobs_of(IsolatedBackend(out, device="cpu")) == near
    assert logprobs_by_transformers(AutoModelForCausalLM.from_pretrained(out)) == near
    by_peft = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
    assert logprobs_by_transformers(by_peft) == near
    assert len(AutoTokenizer.from_pretrained(out)) == len(AutoTokenizer.from_pretrained(base))
    export(out, whole)
    assert not (whole / BASE).exists()
    assert logprobs_by_transformers(AutoModelForCausalLM.from_pretrained(whole)) == near
    continued = EmbeddedBackend(base, device="cpu", lora=LoRA(adapter=out))
    assert await logprobs_of(continued) == near


async def test_training_goes_on_from_it_in_full_and_with_a_new_adapter(tmp_path: Path) -> None:
    base, out = tiny.make(tmp_path / "base"), tmp_path / "out"
    await train(base, out)
    for name, options in (("full", {"lora": None}), ("again", {})):
        trained = await train(out, tmp_path / name, **options)
        assert (tmp_path / name / "model.safetensors").exists()  # nothing that peft could name as its base
        assert await logprobs_of(EmbeddedBackend(tmp_path / name, device="cpu")) == pytest.approx(trained, abs=1e-4)


async def test_the_whole_model_can_be_asked_for_and_one_form_replaces_the_other(tmp_path: Path) -> None:
    base, out = tiny.make(tmp_path / "base"), tmp_path / "out"
    for lora in (LoRA(rank=4), LoRA(rank=4, merge=True), LoRA(rank=4)):
        trained = await train(base, out, lora=lora, dtype="bfloat16")
        assert (out / "model.safetensors").exists() == lora.merge
        assert (out / "adapter_model.safetensors").exists() != lora.merge
        opened = EmbeddedBackend(out, device="cpu", dtype="bfloat16")
        assert await logprobs_of(opened) == pytest.approx(trained, abs=0.1)  # bfloat16 rounds the merged weights
    export(out, tmp_path / "whole")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype="auto").dtype == torch.bfloat16


def gone(base: Path) -> None:
    shutil.rmtree(base)


def moved(base: Path) -> None:
    base.rename(base.with_name("elsewhere"))


async def test_another_version_of_transformers_in_the_configuration_is_no_other_model(tmp_path: Path) -> None:
    base, out = tiny.make(tmp_path / "base"), tmp_path / "out"
    trained = await train(base, out)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"transformers_version": "9.9"}))
    assert await logprobs_of(EmbeddedBackend(out, device="cpu")) == pytest.approx(trained, abs=1e-4)


def one_weight(base: Path) -> None:
    weights = load_file(base / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})


def configuration(base: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (gone, "which is gone"),
        (moved, "which is gone"),
        (one_weight, "has other weights or another configuration"),
        (configuration, "has other weights or another configuration"),
    ],
)
async def test_a_base_model_that_is_gone_or_another_is_refused_with_its_place_and_the_remedy(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    base, out = tiny.make(tmp_path / "base"), tmp_path / "out"
    trained = await train(base, out)
    shutil.copytree(base, tmp_path / "kept")
    change(base)
    for start in (EmbeddedBackend(out, device="cpu")._start, lambda: export(out, tmp_path / "whole")):  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(EngineError) as raised:
            start()
        assert message in str(raised.value)
        assert str(base) in str(raised.value)
        assert f"leyden models export {out} FOLDER --base PLACE" in str(raised.value)
    assert not (tmp_path / "whole").exists()
    export(out, tmp_path / "whole", base=str(tmp_path / "kept"))
    assert await logprobs_of(EmbeddedBackend(tmp_path / "whole", device="cpu")) == pytest.approx(trained, abs=1e-4)


async def test_a_base_model_that_changes_during_the_run_costs_the_whole_model_and_not_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base, out = tiny.make(tmp_path / "base"), tmp_path / "out"
    async with EmbeddedBackend(base, device="cpu", lora=LoRA(rank=4)) as backend:
        await backend.forward_backward([SEQUENCE], CrossEntropyLoss())
        await backend.optim_step(OptimParams(learning_rate=2e-2))
        trained = (await backend.forward([SEQUENCE])).logprobs[0]
        shutil.rmtree(base)
        await backend.save_pretrained(out)
    assert f"{base} has changed since it was loaded" in caplog.text
    assert await logprobs_of(EmbeddedBackend(out, device="cpu")) == pytest.approx(trained, abs=1e-4)


async def test_an_adapter_on_a_gguf_file_is_exported_to_gguf_and_outlives_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_gguf(tmp_path / "base.gguf", "llama", random_model("llama"))
    trained = await train("base.gguf", tmp_path / "out")
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.chdir("/")
    export(tmp_path / "out", tmp_path / "trained.gguf", type="f32")
    assert await logprobs_of(EmbeddedBackend(tmp_path / "trained.gguf", device="cpu")) == pytest.approx(
        trained, abs=1e-4
    )


async def test_an_adapter_is_not_applied_twice_and_a_whole_model_is_not_merged(tmp_path: Path) -> None:
    base, out = tiny.make(tmp_path / "base"), tmp_path / "out"
    await train(base, out)
    for make in (EmbeddedBackend, IsolatedBackend):
        with pytest.raises(ConfigError, match="leave the adapter out"):
            make(out, lora=LoRA(adapter=out))
    for source, to, options, message in (
        (base, tmp_path / "whole", {}, "has no adapter to merge"),
        (out, tmp_path / "whole", {"type": "f16"}, "belong to a GGUF file"),
        (out, base, {}, "exists"),
        (base, tmp_path / "x.gguf", {"base": "there"}, "without an adapter"),
    ):
        with pytest.raises(ConfigError, match=message):
            export(source, to, **options)
    (out / BASE).write_text("{")
    with pytest.raises(EngineError, match="cannot be read, so the adapter's base model is unknown"):
        await EmbeddedBackend(out).start()
