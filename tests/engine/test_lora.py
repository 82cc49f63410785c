"""Adapters made by the engine: only they are trained and saved, and peft and transformers load what is exported."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from leyden.engine import EmbeddedBackend, IsolatedBackend, LoRA, OptimParams, SampledResponse, SamplingParams
from leyden.errors import ConfigError
from leyden.objectives.losses import CrossEntropyLoss
from leyden.types import TrainingSequence
from tests.engine import tiny
from tests.engine.test_state import iterate

peft = pytest.importorskip("peft")
torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning",  # PEFT reads a name of the past
    "ignore:Model has `tie_word_embeddings=True` and a tied layer:UserWarning",
    "ignore:fan_in_fan_out is set to:UserWarning",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, float]:
    """The exports of a run that trained adapters, and the likeliest token after [1, 50, 60] with its log-probability."""
    out = tmp_path_factory.mktemp("out")

    async def train() -> SampledResponse:
        async with EmbeddedBackend(folder, lora=LoRA(rank=4, alpha=8, merge=True), dtype="bfloat16") as backend:
            for iteration in range(2):
                await iterate(backend, iteration)
            await backend.save_state(out / "state")
            await backend.save_pretrained(out / "merged")
            await backend.save_adapter(out / "adapter")
            (sample,) = await backend.sample([[1, 50, 60]], SamplingParams(max_tokens=1, temperature=0))
            return sample

    sample = asyncio.run(train())
    return out, sample.token_ids[0], sample.logprobs[0]


def logprob_of(model: Any, token: int) -> float:
    with torch.no_grad():
        return float(model(torch.tensor([[1, 50, 60]])).logits[0, -1].float().log_softmax(-1)[token])


async def test_only_float32_adapters_are_in_the_state(trained: tuple[Path, int, float]):
    weights = load_file(trained[0] / "state" / "model.safetensors")
    assert weights
    assert all("lora_" in name and tensor.dtype == torch.float32 for name, tensor in weights.items())
    assert any(tensor.abs().max() > 0 for name, tensor in weights.items() if "lora_B" in name)


async def test_transformers_loads_the_merged_folder_and_peft_the_adapter(
    folder: Path, trained: tuple[Path, int, float]
):
    out, token, wanted = trained
    merged = AutoModelForCausalLM.from_pretrained(out / "merged", dtype=torch.float32)
    assert logprob_of(merged, token) == pytest.approx(wanted, abs=0.1)  # bfloat16 rounds the merged weights
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    before = logprob_of(base, token)
    with_adapter = peft.PeftModel.from_pretrained(base, out / "adapter").eval()
    assert logprob_of(with_adapter, token) == pytest.approx(wanted, abs=0.03)
    assert before != pytest.approx(wanted, abs=0.03)


async def test_training_goes_on_with_an_exported_adapter(folder: Path, trained: tuple[Path, int, float]):
    out, token, wanted = trained
    async with EmbeddedBackend(folder, lora=LoRA(adapter=out / "adapter"), dtype="bfloat16") as backend:
        (sample,) = await backend.sample([[1, 50, 60]], SamplingParams(max_tokens=1, temperature=0))
        await iterate(backend, 2)
        await backend.save_state(out / "later")
    assert (sample.token_ids, sample.logprobs) == ([token], pytest.approx([wanted], abs=0.01))
    before, after = (load_file(out / name / "model.safetensors") for name in ("state", "later"))
    assert {name: tensor.shape for name, tensor in before.items()} == {n: t.shape for n, t in after.items()}


async def test_an_adapter_of_another_model_is_refused_by_name(trained: tuple[Path, int, float], tmp_path: Path):
    adapter = trained[0] / "adapter"
    for options, message in (
        ({"hidden": 32}, r"belongs to another model \(.*model\d+\): .*lora_A.*\(4, 192\) in the file, \(4, 96\)"),
        ({"kind": "gpt2", "n_positions": 512}, "belongs to another model"),
    ):
        model: Any = tiny.model(**options)
        with pytest.raises(ConfigError, match=message):
            await EmbeddedBackend(model, lora=LoRA(adapter=adapter)).start()
    with pytest.raises(ConfigError, match="holds no adapter"):
        await EmbeddedBackend(tiny.model(), lora=LoRA(adapter=tmp_path)).start()


async def test_equal_seeds_make_equal_adapters_and_leave_torch_s_own_random_state(folder: Path, tmp_path: Path):
    for name in ("one", "two"):
        torch.manual_seed(len(name) if name == "one" else 99)
        before = torch.get_rng_state()
        async with EmbeddedBackend(folder, lora=LoRA(rank=2, target_modules=["q_proj"]), seed=5) as backend:
            await backend.save_state(tmp_path / name)
        assert torch.equal(torch.get_rng_state(), before)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert {n.rsplit(".lora_", 1)[0].rsplit(".", 1)[-1] for n in one} == {"q_proj"}
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_options_travel_to_another_process_as_json(folder: Path):
    backend = IsolatedBackend(folder, lora=LoRA(rank=2, target_modules=("q_proj",), adapter="here"))
    assert backend.capabilities.adapter
    assert EmbeddedBackend(folder, lora=asdict(LoRA(rank=2))).capabilities.adapter


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rnak": 2}, "did you mean 'rank'"),
        ({"rank": 0}, "rank"),
        ({"target_modules": ()}, "target_modules"),
        ("q_proj", "lora is 'q_proj'"),
    ],
)
def test_options_that_cannot_be_are_refused(folder: Path, lora: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        EmbeddedBackend(folder, lora=lora)


async def test_a_layer_that_the_model_lacks_is_refused(folder: Path):
    with pytest.raises(ConfigError, match="lora cannot be applied to Qwen2ForCausalLM"):
        await EmbeddedBackend(folder, lora=LoRA(target_modules=["c_attn"])).start()


async def test_without_adapters_none_is_saved(folder: Path, tmp_path: Path):
    async with EmbeddedBackend(folder) as backend:
        with pytest.raises(ConfigError, match=r"lora=LoRA\(\)"):
            await backend.save_adapter(tmp_path)


def tied_by_identity() -> Any:
    model: Any = tiny.model(tie_word_embeddings=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def untied_against_the_configuration() -> Any:
    model: Any = tiny.model()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 0.9)
    return model


def with_adapter(**options: Any) -> Any:
    return peft.get_peft_model(tiny.model(), peft.LoraConfig(task_type="CAUSAL_LM", r=4, **options))


HEAD_AND_ONE: LoRA = LoRA(rank=4, target_modules=["lm_head", "q_proj"])


@pytest.mark.parametrize(
    ("make", "lora"),
    [
        (tiny.model, LoRA(rank=4, target_modules=["lm_head"])),
        (tiny.model, LoRA(rank=4, target_modules=["embed_tokens", "q_proj"])),
        (tiny.model, LoRA(rank=4, target_modules=["embed_tokens", "lm_head"])),
        (tiny.model, LoRA(rank=4, target_modules=r".*\.?(lm_head|q_proj)")),
        (lambda: tiny.model("gemma3_text", head_dim=32), LoRA(rank=4, target_modules=["embed_tokens"])),
        (lambda: tiny.model("gpt2", n_positions=128), LoRA(rank=4, target_modules=["lm_head", "c_attn"])),
        (tied_by_identity, HEAD_AND_ONE),
        (tied_by_identity, None),
        (untied_against_the_configuration, HEAD_AND_ONE),
        (untied_against_the_configuration, None),
        (lambda: with_adapter(target_modules=["lm_head"], use_rslora=True), None),
        (lambda: with_adapter(target_modules=["embed_tokens"], use_dora=True), None),
        (lambda: with_adapter(target_modules=["q_proj"], modules_to_save=["lm_head"]), None),
        (lambda: with_adapter(target_modules=["q_proj"], modules_to_save=["embed_tokens"]), None),
        (lambda: with_adapter(target_modules=["q_proj"], trainable_token_indices=[1, 50, 7, 9]), None),
    ],
)
async def test_the_exported_model_is_the_trained_policy_whatever_is_tied(make: Any, lora: LoRA | None, tmp_path: Path):
    model = make()
    declared = model.config.tie_word_embeddings
    ids = [1, 50, 60, 7, 9, 50, 33, 8]
    sequence = TrainingSequence(ids, [0.0] + [1 / 7] * 7)
    async with EmbeddedBackend(model, max_length=64, lora=lora) as backend:
        before = (await backend.forward([sequence])).logprobs[0]
        for _ in range(4):
            await backend.forward_backward([sequence], CrossEntropyLoss())
            await backend.optim_step(OptimParams(learning_rate=2e-2))
        trained = (await backend.forward([sequence])).logprobs[0]
        await backend.save_pretrained(tmp_path / "model")
        assert (await backend.forward([sequence])).logprobs[0] == pytest.approx(trained, abs=1e-5)
        if lora is not None:
            await backend.save_adapter(tmp_path / "adapter")
    assert trained != pytest.approx(before, abs=0.1)
    assert model.config.tie_word_embeddings == declared

    def logprobs(loaded: Any) -> list[float]:
        with torch.no_grad():
            table = loaded(torch.tensor([ids])).logits[0].log_softmax(-1)
        return [0.0, *(float(table[at - 1, ids[at]]) for at in range(1, len(ids)))]

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert logprobs(exported) == pytest.approx(trained, abs=1e-3)
    head, embeddings = exported.get_output_embeddings().weight, exported.get_input_embeddings().weight
    assert exported.config.tie_word_embeddings == (head is embeddings)  # other libraries tie by the configuration alone
    if lora is not None:
        again = peft.PeftModel.from_pretrained(make(), tmp_path / "adapter").eval()
        assert logprobs(again) == pytest.approx(trained, abs=1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: peft.get_peft_model(
                tiny.model(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
            ),
            "adapters of the kind PREFIX_TUNING cannot be merged",
        ),
        (
            lambda: with_adapter(target_modules=["embed_tokens"], ensure_weight_tying=True),
            "make it with ensure_weight_tying=False",
        ),
        (
            lambda: with_adapter(target_modules=["q_proj", "lm_head"], trainable_token_indices=[5, 6]),
            "all adapters of the module 'lm_head",
        ),
        (lambda: with_adapter(target_modules=["o_proj"], lora_bias=True), "the base layer has no bias"),
    ],
)
@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
async def test_adapters_that_cannot_be_merged_are_refused_at_the_start(make: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        await EmbeddedBackend(make()).start()
