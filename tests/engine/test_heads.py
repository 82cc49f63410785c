"""Log-probabilities in chunks equal those of all logits at once, in value and gradient, with bounded memory."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leyden.engine.forward.cached import CachedForward, UncachedForward
from leyden.engine.forward.layout import LayoutForward
from leyden.engine.heads import SMALLEST_CHUNKED_VOCABULARY, TokenReader, chunked_logprobs
from leyden.engine.learner import TorchLearner
from leyden.engine.policy_backend import OptimParams
from leyden.errors import ConfigError
from leyden.objectives.losses import PPOLoss
from tests.engine import tiny
from tests.engine.test_learner import a_batch, gradient
from tests.engine.weighted_likelihood import WeightedLikelihood

torch.set_num_threads(1)
ROOT = Path(__file__).parents[2]


def all_at_once(logits_NV: Tensor, ids_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The textbook formulas."""
    table = torch.log_softmax(logits_NV.float() / temperature, dim=-1)
    return table.gather(-1, ids_N[:, None])[:, 0], torch.distributions.Categorical(logits=table).entropy()


def head_of(kind: str) -> torch.nn.Module:
    torch.manual_seed(1)
    if kind == "wrapped":  # as an adapter wraps it: no plain linear layer
        return torch.nn.Sequential(torch.nn.Linear(16, 8, bias=False), torch.nn.Linear(8, 50))
    return torch.nn.Linear(16, 50, bias=kind == "with a bias")


@pytest.mark.parametrize("kind", ["linear", "with a bias", "wrapped"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("uses_entropies", [False, True])
def test_chunks_equal_all_logits_at_once_in_value_and_gradient(kind: str, temperature: float, uses_entropies: bool):
    generator = torch.Generator().manual_seed(0)
    hidden, ids = torch.randn(23, 16, generator=generator), torch.randint(50, (23,), generator=generator)
    weights, more = torch.randn(23, generator=generator), torch.randn(23, generator=generator)
    found: list[list[Tensor]] = []
    for compute in ("chunked", "whole"):
        head, x = head_of(kind), hidden.clone().requires_grad_()
        if compute == "chunked":
            logprobs, entropies = chunked_logprobs(x, head, ids, temperature, chunk_elements=7 * 50)
        else:
            logprobs, entropies = all_at_once(head(x), ids, temperature)
        loss = (weights * logprobs).sum() + ((more * entropies).sum() if uses_entropies else 0.0)
        loss.backward()
        found.append([logprobs.detach(), entropies.detach(), x.grad, *(p.grad for p in head.parameters())])
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("wrap", [torch.nn.Identity, torch.nn.Sequential], ids=["a layer", "a head with adapters"])
def test_the_log_probabilities_of_a_large_vocabulary_are_exact(wrap: Any):
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 262_144)
    hidden_NE, ids_N = torch.randn(3, 8) * 6, torch.tensor([5, 100_000, 262_143])
    logprobs_N, _ = chunked_logprobs(
        hidden_NE, linear if wrap is torch.nn.Identity else wrap(linear), ids_N, 1.0, chunk_elements=2**20
    )
    wanted_NV = torch.nn.functional.linear(hidden_NE, linear.weight, linear.bias).double().log_softmax(-1)
    assert torch.allclose(logprobs_N.double(), wanted_NV.gather(-1, ids_N[:, None])[:, 0], atol=5e-6, rtol=0)


@pytest.mark.parametrize("kind", ["linear", "with a bias", "wrapped"])
def test_a_frozen_head_whose_entropies_have_no_gradient_passes_the_same_one_on(kind: str):
    hidden, ids, weights = torch.randn(23, 16), torch.randint(50, (23,)), torch.randn(23)
    head, found = head_of(kind).requires_grad_(False), list[list[Tensor]]()
    for entropy_gradient in (False, True):
        x = hidden.clone().requires_grad_()
        logprobs, entropies = chunked_logprobs(x, head, ids, 0.7, entropy_gradient, chunk_elements=7 * 50)
        assert entropies.requires_grad == entropy_gradient
        (weights * logprobs).sum().backward()
        found.append([logprobs.detach(), entropies.detach(), x.grad])
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=1e-5)


def test_a_frozen_head_gets_no_gradient_and_half_precision_weights_keep_their_type():
    head = head_of("linear").requires_grad_(False).to(torch.bfloat16)
    hidden = torch.randn(9, 16, dtype=torch.bfloat16).requires_grad_()
    ids = torch.arange(9)
    logprobs, _ = chunked_logprobs(hidden, head, ids, 1.0, chunk_elements=100)
    wanted, _ = all_at_once(head(hidden), ids, 1.0)
    torch.testing.assert_close(logprobs, wanted, atol=1e-5, rtol=1e-5)
    logprobs.sum().backward()
    assert next(head.parameters()).grad is None
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("way", [LayoutForward, CachedForward, UncachedForward])
def test_a_large_vocabulary_has_the_gradient_of_the_direct_path(way: Any, monkeypatch: pytest.MonkeyPatch):
    model = tiny.model(vocab_size=SMALLEST_CHUNKED_VOCABULARY, layers=1)
    monkeypatch.setattr("leyden.engine.heads._CHUNK_ELEMENTS", 5 * SMALLEST_CHUNKED_VOCABULARY)
    twin, batch = copy.deepcopy(model), a_batch(7)
    ours = TorchLearner(model, way(model, max_rows=4, max_length=128), max_tokens_per_microbatch=512)
    result = ours.forward_backward(batch, PPOLoss(), 0.9)
    monkeypatch.setattr("leyden.engine.heads.SMALLEST_CHUNKED_VOCABULARY", 10**9)
    direct = TorchLearner(twin, way(twin, max_rows=4, max_length=128), max_tokens_per_microbatch=512)
    wanted = direct.forward_backward(batch, PPOLoss(), 0.9)
    assert result.loss == pytest.approx(wanted.loss, rel=1e-5, abs=1e-6)
    assert result.metrics == pytest.approx(wanted.metrics, rel=1e-4, abs=1e-6)
    gradients = gradient(direct)
    for name, got in gradient(ours).items():
        torch.testing.assert_close(got, gradients[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("way", [LayoutForward, CachedForward, UncachedForward])
@pytest.mark.parametrize(
    "options",
    [
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
        {"kind": "gemma3_text", "head_dim": 32},  # tied, with a padding token
        {"kind": "gemma2", "head_dim": 32, "final_logit_softcapping": 5.0},
    ],
    ids=["tied", "untied", "gemma3", "softcapped"],
)
def test_the_gradient_is_that_of_whole_logits_in_float64(options: dict[str, Any], way: Any):
    model = tiny.model(vocab_size=SMALLEST_CHUNKED_VOCABULARY, layers=1, **options)
    twin, batches = copy.deepcopy(model).double(), (a_batch(7), a_batch(8))
    scored = [[replace(s, columns={"score": s.columns["advantages"]}) for s in batch] for batch in batches]
    try:
        forward = way(model, max_rows=4, max_length=128)
    except ConfigError:
        pytest.skip("this forward refuses the model")
    learner = TorchLearner(model, forward, max_tokens_per_microbatch=60)
    for batch in scored:  # several micro-batches each, and the second adds to the gradient of the first
        learner.forward_backward(batch, WeightedLikelihood(), 1.0)
        for s in batch:
            logprobs = twin(torch.tensor([s.token_ids]), use_cache=False).logits[0, :-1].log_softmax(-1)
            chosen = logprobs.gather(-1, torch.tensor(s.token_ids[1:])[:, None])[:, 0]
            weights = torch.tensor(s.weights[1:], dtype=torch.float64)
            (-(weights * torch.tensor(s.columns["score"][1:], dtype=torch.float64) * chosen).sum()).backward()
    assert gradient(learner).keys() == dict(twin.named_parameters()).keys()
    for name, wanted in twin.named_parameters():
        torch.testing.assert_close(gradient(learner)[name].double(), wanted.grad, atol=2e-4, rtol=1e-3)
    learner.clear_gradient()
    learner.forward_backward(batches[0], PPOLoss(), 1.0)
    once = gradient(learner)
    learner.apply(OptimParams(learning_rate=0.0))
    learner.forward_backward(batches[0], PPOLoss(), 1.0)
    for name, wanted in gradient(learner).items():
        assert torch.equal(wanted, once[name]), "nothing of an earlier gradient is left"


@pytest.mark.parametrize(
    ("options", "exact"),
    [({"kind": "gpt2", "n_positions": 512}, True), ({"kind": "granite", "logits_scaling": 2.0}, False)],
)
def test_logits_that_are_more_than_the_heads_output_take_the_direct_path(options: dict[str, Any], exact: bool):
    forward = UncachedForward(tiny.model(**options), max_rows=4, max_length=64)
    assert (forward.head is not None) == exact
    assert TokenReader(forward, n_vocabulary=10**6).in_chunks == exact
    if forward.head is not None:
        sequences, positions = [[5, 6, 7, 8], [9, 10]], [[1, 3], [0]]
        torch.testing.assert_close(
            forward.head(forward.hidden_at(sequences, positions)), forward.logits_at(sequences, positions)
        )


_COPIES = """
import resource, torch
from leyden.engine.forward.layout import LayoutForward
from leyden.engine.learner import TorchLearner
from leyden.objectives.losses import PPOLoss
from tests.engine import tiny
from tests.engine.test_learner import a_batch
torch.set_num_threads(1)
model = tiny.model(vocab_size=50_000, hidden=1024, layers=1)
learner = TorchLearner(model, LayoutForward(model, max_rows=4, max_length=128), max_tokens_per_microbatch=10**6)
learner.forward(a_batch(1), 1.0)
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() // 1024
for _ in range({calls}):
    learner.forward_backward(a_batch(1), PPOLoss(), 1.0)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("calls", "n_copies"), [(1, 1.7), (2, 2.9)])
def test_a_tied_heads_gradient_has_no_copy_that_is_not_needed(calls: int, n_copies: float):
    script = _COPIES.replace("{calls}", str(calls))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < n_copies * 50_000 * 1024 * 4 / 2**20 + 52  # and the gradient of the layers


_PEAK = """
import resource, torch
from leyden.engine.heads import chunked_logprobs, _direct
torch.set_num_threads(1)
n_tokens, n_vocabulary = 1024, 100_000
head = torch.nn.Linear(8, n_vocabulary, bias=False)
hidden, ids = torch.randn(n_tokens, 8, requires_grad=True), torch.arange(n_tokens)
torch.randn(64, 64) @ torch.randn(64, 64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
logprobs, _ = chunked_logprobs(hidden, head, ids, 1.0, chunk_elements=2**24) if {chunked} else _direct(head(hidden), ids, 1.0, False)
logprobs.sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
def test_peak_memory_is_that_of_a_chunk_and_not_of_all_logits():
    def peak_mib(chunked: bool) -> int:
        script = _PEAK.replace("{chunked}", str(chunked))
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
        return int(done.stdout)

    # All logits are 391 MiB in float32, and the direct path holds several such tensors; two chunks are 128 MiB.
    assert peak_mib(chunked=True) < 250
    assert peak_mib(chunked=False) > 700


def test_loud_logits_are_computed_in_chunks_and_only_where_they_are_wanted():
    model = tiny.model("gemma3_text", head_dim=32, vocab_size=6_000)
    norm, sizes = model.model.norm.weight, list[int]()
    with torch.no_grad():
        largest = model(torch.tensor([[0, 1, 2], [2, 1, 0]]), use_cache=False).logits.abs().max()
        norm.copy_((1 + norm) * 40 / largest - 1)

    def rounded(module: Any, given: Any, logits: torch.Tensor) -> torch.Tensor:
        """Round by the number of rows as kernels do: those of Gemma 3 270M differ by 3.3e-5."""
        sizes.append(logits.numel() // logits.shape[-1])
        return logits + 3.3e-5 * (sizes[-1] % 2)

    model.lm_head.register_forward_hook(rounded)
    forward = UncachedForward(model, max_rows=4, max_length=64)
    sizes.clear()
    logits = forward.logits_at([[5, 6, 7, 8], [9, 10]], [[1, 3], [0]])
    assert 30 < logits.abs().max() < 50
    assert sizes == [3]
    assert TokenReader(forward, n_vocabulary=6_000).in_chunks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cap_or_a_scale_that_small_logits_do_not_show_is_found(dtype: torch.dtype):
    for options in ({"final_logit_softcapping": 500.0, "kind": "gemma2"}, {"logits_scaling": 1.02, "kind": "granite"}):
        options = {"initializer_range": 1e-3, "head_dim": 32, **options}
        forward = UncachedForward(tiny.model(**options).to(dtype), max_rows=4, max_length=64)
        assert forward.head is None
        assert "scales or caps" in forward.headless


def test_whole_logits_of_a_large_vocabulary_are_logged_with_the_reason(caplog: pytest.LogCaptureFixture):
    capped = UncachedForward(tiny.model("gemma2", head_dim=32), max_rows=4, max_length=64)
    TokenReader(capped, n_vocabulary=4_095)
    assert not caplog.records
    TokenReader(capped, n_vocabulary=262_144)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "262,144 for each token, because the logits of this model are not its output head's" in record.message
