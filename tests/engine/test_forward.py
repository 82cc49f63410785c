"""Every way to compute logits equals the model's own forward, and the choice between them is proven at load."""

from __future__ import annotations

import logging
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.engine.forward.cached import CachedForward, UncachedForward
from leyden.engine.forward.choose import Mismatch, choose_forward, probe
from leyden.engine.forward.layout import MODEL_TYPES, LayoutForward
from leyden.engine.forward.model_forward import ModelForward
from leyden.errors import ConfigError, EngineError
from tests.engine import tiny

torch.set_num_threads(1)

LLAMA4: dict[str, Any] = {
    "kind": "llama4_text",
    "attention_chunk_size": 30,
    "floor_scale": 30,
    "attn_scale": 0.5,
    "no_rope_layers": [1, 0],
    "moe_layers": [],
    "num_local_experts": 2,
    "intermediate_size_mlp": 64,
    "head_dim": 32,
}
"""Rotary layers attend within chunks; the others scale attention by the position, from 30 tokens on."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "qwen2": {"kind": "qwen2"},
    "grouped heads": {"kind": "qwen2", "heads": 6, "kv_heads": 2, "hidden": 96},
    "every head its own keys": {"kind": "qwen2", "heads": 4, "kv_heads": 4},
    "untied": {"kind": "qwen2", "tie_word_embeddings": False},
    "qwen3 with norms on queries": {"kind": "qwen3", "head_dim": 16},
    "llama": {"kind": "llama"},
    "llama3 rotary scaling": {
        "kind": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "mistral": {"kind": "mistral", "sliding_window": None},
    "llama with biases everywhere": {"kind": "llama", "attention_bias": True, "mlp_bias": True},
    "phi3, fused projections": {"kind": "phi3", "heads": 4, "kv_heads": 2, "sliding_window": None},
    "phi4-mini, rotated in part": {
        "kind": "phi3",
        "heads": 4,
        "kv_heads": 2,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.75,
            "factor": 4.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [4.0] * 6,
        },
        "original_max_position_embeddings": 128,
    },
    "smollm3, a layer without positions": {"kind": "smollm3", "layers": 3, "no_rope_layers": [1, 0, 1]},
    "dynamic rotary scaling within the context": {
        "kind": "llama",
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    },
    "gemma3, sliding and full": {
        "kind": "gemma3_text",
        "head_dim": 16,
        "layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 4,
        "query_pre_attn_scalar": 24,
    },
    "gemma3, full at the end": {
        "kind": "gemma3_text",
        "head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
        "tie_word_embeddings": False,
    },
}
FOREIGN: dict[str, dict[str, Any]] = {
    "learned positions": {"kind": "gpt2", "n_positions": 512},
    "no rotary, linear biases": {"kind": "bloom"},
    "partial rotary": {"kind": "gpt_neox"},
    "sliding window": {"kind": "mistral", "sliding_window": 5},
    "mixed sliding and full, soft caps": {"kind": "gemma2", "sliding_window": 6, "head_dim": 32},
    "scaled embeddings": {"kind": "granite", "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "chunked attention": {**LLAMA4, "attn_temperature_tuning": False},
    "attention scaled by the position": {
        "kind": "ministral3",
        "head_dim": 32,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 17.0,
            "original_max_position_embeddings": 30,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "rotary angles that change beyond the context": {
        "kind": "phi3",
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 4.0,
            "short_factor": [1.0] * 16,
            "long_factor": [4.0] * 16,
        },
        "original_max_position_embeddings": 90,
    },
    "mixture of experts": {
        "kind": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Any:
    return tiny.model(**LAYOUTS[request.param])


@torch.no_grad()
def own_logits(model: Any, sequence: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0]


@torch.inference_mode()
def check_any_schedule(model: Any, forward: ModelForward, seed: int) -> None:
    """Random conversations over random rows: chunks of random length, rows pausing, in every mixture."""
    rng = random.Random(seed)
    rows = rng.sample(range(8), 5)
    sequences = [[rng.randrange(260) for _ in range(rng.randrange(2, 90))] for _ in rows]
    cached = [0] * 5
    while any(held < len(sequence) for held, sequence in zip(cached, sequences, strict=True)):
        going = [b for b in range(5) if cached[b] < len(sequences[b]) and rng.random() < 0.7]
        if not going:
            continue
        ends = [min(len(sequences[b]), cached[b] + rng.choice([1, 1, 2, 17, 40])) for b in going]
        got = forward.decode(
            [rows[b] for b in going],
            [sequences[b][:end] for b, end in zip(going, ends, strict=True)],
            [cached[b] for b in going],
        )
        for b, end, logits in zip(going, ends, got, strict=True):
            torch.testing.assert_close(logits, own_logits(model, sequences[b][:end])[-1], atol=3e-5, rtol=1e-4)
            cached[b] = end


@pytest.mark.parametrize("way", [LayoutForward, CachedForward, UncachedForward])
def test_decoding_any_schedule_equals_the_model_on_each_sequence_alone(layout: Any, way: Any):
    check_any_schedule(layout, way(layout, max_rows=8, max_length=100), seed=1)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=15)
def test_the_fast_path_and_the_general_path_take_any_schedule(seed: int):
    model = tiny.model(layers=2, heads=2, kv_heads=1)
    for way in (LayoutForward, CachedForward):
        check_any_schedule(model, way(model, max_rows=8, max_length=100), seed)


def test_the_layout_is_chosen_where_it_is_equal(layout: Any):
    assert isinstance(choose_forward(layout, max_rows=2, max_length=128), LayoutForward)


def test_each_family_of_the_docs_table_is_fast_and_tested():
    page = Path(__file__).parents[2] / "docs" / "how-to" / "choose-a-model.md"
    table = set(re.findall(r"^\|[^|]+\| `(\w+)` \| [\d.]+ : ", page.read_text(), re.MULTILINE))
    assert {options["kind"] for options in LAYOUTS.values()} == MODEL_TYPES == table


@pytest.mark.parametrize("name", FOREIGN)
def test_any_other_model_runs_through_its_own_forward(name: str):
    model = tiny.model(**FOREIGN[name])
    forward = choose_forward(model, max_rows=8, max_length=100)
    assert type(forward) is CachedForward
    check_any_schedule(model, forward, seed=2)


def test_a_model_that_takes_columns_for_positions_runs_without_a_cache():
    model = tiny.model(**LLAMA4, attn_temperature_tuning=True)
    forward = choose_forward(model, max_rows=8, max_length=90)
    assert type(forward) is UncachedForward
    check_any_schedule(model, forward, seed=1)
    assert type(choose_forward(model, max_rows=8, max_length=29)) is CachedForward


def test_a_model_with_a_recurrent_state_runs_without_a_cache():
    model = tiny.model(kind="mamba", state_size=4, hidden=32)
    forward = choose_forward(model, max_rows=8, max_length=100)
    assert type(forward) is UncachedForward
    check_any_schedule(model, forward, seed=3)


@pytest.mark.parametrize("way", [LayoutForward, UncachedForward])
def test_training_logits_and_gradients_are_those_of_the_model(layout: Any, way: Any):
    sequences = [[5, 6, 7, 8, 9, 10, 11], [20, 21], [30, 31, 32, 33]]
    positions = [[2, 3, 6], [0], [1, 3]]
    direction = torch.randn(6, 260, generator=torch.Generator().manual_seed(0))

    layout.zero_grad()
    wanted = torch.cat(
        [layout(input_ids=torch.tensor([s])).logits[0, p] for s, p in zip(sequences, positions, strict=True)]
    )
    (wanted * direction).sum().backward()
    wanted_gradients = {name: p.grad.clone() for name, p in layout.named_parameters()}

    layout.zero_grad()
    got = way(layout, max_rows=8, max_length=100).logits_at(sequences, positions)
    (got * direction).sum().backward()
    assert difference(got, wanted) < 1e-5
    for name, parameter in layout.named_parameters():
        assert difference(parameter.grad, wanted_gradients[name]) < 1e-5, name


def difference(got: torch.Tensor | None, wanted: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    assert got is not None
    return float(((got - wanted).abs().max() / wanted.abs().max()).detach())


@pytest.mark.parametrize("window", [20, 500])
def test_a_long_shared_prefix_and_a_window_give_the_models_gradient(window: int):
    """Only what rows do not share are queries, some of whose windows begin within the shared part."""
    model = tiny.model(
        kind="gemma3_text",
        head_dim=16,
        layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=window,
    )
    shared = [(7 * n) % 250 + 3 for n in range(120)]
    sequences = [[*shared, *range(5, 35)], [*shared, *range(60, 67)], [*shared[:110], *range(90, 100)], [4, 5, 6]]
    positions = [[119, 125, 149], [126], [3, 119], [2]]
    direction = torch.randn(7, 260, generator=torch.Generator().manual_seed(0))
    wanted = torch.cat(
        [model(input_ids=torch.tensor([s])).logits[0, p] for s, p in zip(sequences, positions, strict=True)]
    )
    (wanted * direction).sum().backward()
    wanted_gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    got = LayoutForward(model, max_rows=8, max_length=200).logits_at(sequences, positions)
    (got * direction).sum().backward()
    torch.testing.assert_close(got, wanted, atol=3e-5, rtol=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted_gradients[name], atol=2e-4, rtol=1e-3)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT reads a name of the past
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
def test_adapters_count_in_decoding_and_in_training(targets: Any):
    peft = pytest.importorskip("peft")
    plain = tiny.model()
    sequence = list(range(40, 60))
    before = own_logits(plain, sequence)
    model = peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.5)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    assert float((own_logits(model, sequence) - before).abs().max()) > 0.1
    forward = choose_forward(model, max_rows=8, max_length=100)
    assert isinstance(forward, LayoutForward)
    check_any_schedule(model, forward, seed=4)
    forward.logits_at([sequence], [[3, 5]]).sum().backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name and gradient is not None for name, gradient in trained.items())


def test_new_weights_are_read_at_once():
    model = tiny.model()
    forward = choose_forward(model, max_rows=8, max_length=100)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    check_any_schedule(model, forward, seed=5)


class Wrong(CachedForward):
    """Right for prompts, wrong once something is cached."""

    name = "wrong"

    def decode(self, rows: Any, sequences: Any, cached: Any) -> torch.Tensor:
        logits = super().decode(rows, sequences, cached)
        return logits + 0.01 if any(cached) else logits


def test_a_candidate_that_differs_is_passed_over_and_the_log_says_why(caplog: pytest.LogCaptureFixture):
    model = tiny.model()
    with caplog.at_level(logging.INFO, logger="leyden.engine"):
        chosen = choose_forward(model, max_rows=8, max_length=64, candidates=[Wrong, CachedForward])
    assert type(chosen) is CachedForward
    assert "wrong: Mismatch" in caplog.text
    assert "differ by 0.01" in caplog.text


def test_without_any_right_candidate_loading_fails_with_the_reasons():
    with pytest.raises(EngineError, match="differ by"):
        choose_forward(tiny.model(), max_rows=8, max_length=64, candidates=[Wrong])


def test_the_probe_sees_a_model_whose_norm_is_not_what_it_seems():
    model = tiny.model()
    model.model.norm.forward = lambda x: x * 1.5
    with pytest.raises(Mismatch):
        probe(model, LayoutForward(model, max_rows=8, max_length=64))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kind": "mistral", "sliding_window": 30}, "slides over 30"),
        (
            {
                "kind": "llama",
                "max_position_embeddings": 99,
                "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            },
            "dynamic",
        ),
        ({"kind": "gpt2"}, "gpt2"),
    ],
)
def test_what_a_short_probe_cannot_see_is_refused_by_the_layout(options: dict[str, Any], reason: str):
    with pytest.raises(ConfigError, match=reason):
        LayoutForward(tiny.model(**options), max_rows=8, max_length=100)
