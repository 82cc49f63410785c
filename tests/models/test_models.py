"""Two pretrained models from the package index: each learns the tool task through a kill, and stays exact."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from leyden.engine import EmbeddedBackend, OptimParams, SamplingParams
from leyden.engine.gguf import export_gguf, import_gguf
from leyden.objectives.losses import PPOLoss
from leyden.training.runs import open_run
from leyden.types import TrainingSequence

pytestmark = [pytest.mark.models, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
EXACT = 1e-4
STEPS = 10


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param
    command = [sys.executable, "-m", "leyden", "models", "get", request.param, str(folder)]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the example, killed while it writes a checkpoint, and resumed to its end."""
    run = tmp_path_factory.mktemp("runs") / folder.name
    program = [sys.executable, str(ROOT / "examples/real_model/train.py"), str(folder), "--steps", str(STEPS)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    first = subprocess.Popen([*program, "--run-dir", str(run)], env=environment, start_new_session=True)
    while not writes_a_checkpoint(run / "checkpoints", after=3):
        assert first.poll() is None
        time.sleep(0.001)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    subprocess.run([*program, "--resume", str(run)], env=environment, check=True)
    return run


def writes_a_checkpoint(folder: Path, *, after: int) -> bool:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return f"step-{after:06}" in names and any(name.startswith(".tmp-") for name in names)


def test_ten_steps_teach_three_tools_through_a_kill(run: Path) -> None:
    rows = open_run(run).metrics("train")
    assert [row.iteration for row in rows] == list(range(1, STEPS + 1))
    before, *_, after = open_run(run).metrics("val")
    rewards = [row.metrics["reward"] for row in rows]
    print(f"{run.name}: rewards {rewards}, held-out {before.metrics['reward']:.2f} to {after.metrics['reward']:.2f}")
    assert sum(rewards[-3:]) / 3 - rewards[0] >= 0.3
    assert after.metrics["reward"] - before.metrics["reward"] >= 0.15  # three standard errors
    differences = [row.metrics["logprob_difference"] for row in rows if "logprob_difference" in row.metrics]
    assert differences
    assert max(differences) < EXACT


async def test_what_is_sampled_is_what_any_library_computes_from_what_was_saved(folder: Path, run: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer((ROOT / "docs/training.md").read_text()).input_ids
    prompts = [text[:5], text[:40], text[:700]]  # the last is longer than Gemma's sliding window of 512
    whole = run.parent / f"{folder.name}-whole"
    async with EmbeddedBackend(run / "model", device="cpu", seed=0, max_length=1024) as backend:
        samples = await backend.sample(prompts, SamplingParams(max_tokens=12, seed=1))
        check("the run's model/", await recomputed(backend, prompts, samples), samples)
        sequences = [
            TrainingSequence(
                [*prompt, *sample.token_ids],
                [0.0] * len(prompt) + [1.0] * len(sample.token_ids),
                {
                    "logprobs": [0.0] * len(prompt) + list(sample.logprobs),
                    "advantages": [(-1.0) ** index] * (len(prompt) + len(sample.token_ids)),
                },
            )
            for index, (prompt, sample) in enumerate(zip(prompts, samples, strict=True))
        ]
        await backend.forward_backward(sequences, PPOLoss())
        await backend.optim_step(OptimParams(learning_rate=1e-4))
        await backend.publish_weights()
        samples = await backend.sample(prompts, SamplingParams(max_tokens=12, seed=2))
        check("after an update", await recomputed(backend, prompts, samples), samples)
        await backend.save_pretrained(whole)
    check("saved and reloaded", of_transformers(whole, prompts, samples), samples)
    again = import_gguf(export_gguf(whole, run.parent / f"{folder.name}.gguf", type="f32"), run.parent / "again")
    check("written as GGUF and read", of_transformers(again, prompts, samples), samples)


async def recomputed(backend: EmbeddedBackend, prompts: list[list[int]], samples: Any) -> list[list[float]]:
    result = await backend.forward(
        [
            TrainingSequence([*prompt, *sample.token_ids], [0.0] * len(prompt) + [1.0] * len(sample.token_ids))
            for prompt, sample in zip(prompts, samples, strict=True)
        ]
    )
    return [found[len(prompt) :] for found, prompt in zip(result.logprobs, prompts, strict=True)]


@torch.inference_mode()
def of_transformers(folder: Path, prompts: list[list[int]], samples: Any) -> list[list[float]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: list[list[float]] = []
    for prompt, sample in zip(prompts, samples, strict=True):
        ids = torch.tensor([[*prompt, *sample.token_ids]])
        log_probabilities = model(ids, logits_to_keep=len(sample.token_ids) + 1).logits[0, :-1].double().log_softmax(-1)
        found.append(log_probabilities.gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist())
    return found


def check(what: str, wanted: list[list[float]], samples: Any) -> None:
    pairs = zip(wanted, samples, strict=True)
    worst = max(abs(a - b) for mine, sample in pairs for a, b in zip(mine, sample.logprobs, strict=True))
    print(f"{what}: log-probabilities differ by {worst:.2g}")
    assert worst < EXACT, what
