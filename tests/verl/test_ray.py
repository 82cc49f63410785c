"""verl's agent loops before Leyden's replica, and whole steps of verl's trainer, under Ray on a CPU."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from leyden.errors import ConfigError

pytestmark = [pytest.mark.verl, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "leyden" / "cli" / "demo" / "weights")
PAGE = ROOT / "docs" / "verl.md"


WATCHED = set(
    re.findall(r"`((?:verl/)?[a-z_/]+)`", re.findall(r"(?s)## Metrics to watch.*?\n## ", PAGE.read_text())[0])
)
"""Metrics that the page names."""


def run(program: str, *arguments: object) -> str:
    """Run a program of `under_ray.py` and return what it printed. Fail with its last lines unless it succeeds."""
    command = [sys.executable, str(Path(__file__).with_name("under_ray.py")), program, *map(str, arguments)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_verls_own_agent_loops_sample_through_leydens_replica(tmp_path: Path) -> None:
    run("agent_loop", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["states"] == {"a": "finished", "b": "finished", "c": "finished"}
    assert sorted(found["rows"]) == [f"{uid}_{session}_0" for uid in "abc" for session in (0, 1)]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for uid, number in (("a", 9), ("b", 5), ("c", 2)):
        message = [{"role": "user", "content": f"guess 0..{number}"}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"]
        assert found["rows"][f"{uid}_0_0"]["prompts"] == prompt
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for row in found["rows"].values():
        assert 1 <= len(row["responses"]) <= 8 and all(row["response_mask"])
        wanted = logprobs(model, row["prompts"], row["responses"])
        assert max(abs(a - b) for a, b in zip(wanted, row["rollout_log_probs"], strict=True)) < 1e-4


def test_a_ray_without_room_for_the_ranks_is_an_error_with_the_settings() -> None:
    message = "trainer.n_gpus_per_node=2 and trainer.nnodes=1 need 2 x GPU, and Ray has 1; lower them"
    assert message in run("no_room")


def logprobs(model: Any, prompt: list[int], response: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return [float(value) for value in torch.log_softmax(logits, -1)[range(len(response)), response]]


def test_whole_steps_of_verls_trainer_are_in_the_run_and_a_resumed_run_continues(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run("whole_step", folder, 1)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(row["stage"], row["iteration"]) for row in rows] == [("val", 0), ("train", 1), ("val", 1)]
    train = rows[1]
    assert train["rollouts"] == 16 and train["failed"] == 0 and train["rows"] >= 16
    assert train["verl/training/rollout_probs_diff_max"] < 1e-4  # the sampler has the learner's weights
    assert math.isfinite(train["verl/actor/loss"]) and train["verl/actor/grad_norm"] > 0
    assert train["verl/training/off_policy/trajectory_staleness/max"] == 0
    assert train["verl/critic/score/mean"] == pytest.approx(train["reward"])
    assert rows[2]["rollouts"] == 4
    assert set(train) >= WATCHED
    first = moved(folder, 1)
    assert first > 1e-5
    assert "succeeded" in (folder / "run.json").read_text()

    run("whole_step", folder, 2, "resume")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if row["stage"] == "train"] == [1, 2]
    assert rows[-2]["verl/training/rollout_probs_diff_max"] < 1e-4  # also of weights that a checkpoint restored
    assert (folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"


def test_a_critic_and_a_reference_train_beside_the_policy(tmp_path: Path) -> None:
    first, second = steps_of(tmp_path / "run", "critic_and_reference")
    assert first["verl/actor/kl_loss"] == pytest.approx(0, abs=1e-6)  # the reference has the policy's first weights
    assert second["verl/actor/kl_loss"] > 1e-6
    for row in (first, second):
        assert row["verl/critic/grad_norm"] > 0 and math.isfinite(row["verl/critic/vf_loss"])
        assert row["verl/training/rollout_probs_diff_max"] < 1e-4
    assert first["verl/critic/values/mean"] != second["verl/critic/values/mean"]


def test_adapters_reach_the_sampler_and_runners_have_processes_of_their_own(tmp_path: Path) -> None:
    first, second = steps_of(tmp_path / "run", "adapters", "cs")
    assert first["verl/actor/grad_norm"] > 0
    for row in (first, second):  # the second step samples with adapters that the first one moved
        assert row["verl/training/rollout_probs_diff_max"] < 1e-4


def test_an_adapter_changes_a_layer_as_peft_merges_it() -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    from leyden.algorithm.verl.replica import adapter_changes

    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    config = LoraConfig(r=3, lora_alpha=7, target_modules="all-linear", use_rslora=True, init_lora_weights=False)
    adapted: Any = get_peft_model(model, config)
    found = adapter_changes(get_peft_model_state_dict(adapted), config.to_dict())
    merged = adapted.merge_and_unload().state_dict()
    changed = {name for name in before if not torch.equal(before[name], merged[name])}
    assert set(found) == changed != set()
    for name, change in found.items():
        torch.testing.assert_close(before[name] + change, merged[name])


def test_an_adapter_of_another_kind_is_refused_by_name() -> None:
    from leyden.algorithm.verl.replica import adapter_changes

    with pytest.raises(ConfigError, match=r"knows no q_proj\.lora_magnitude_vector.*lora\.merge=true"):
        adapter_changes({"base_model.model.q_proj.lora_magnitude_vector": torch.ones(2)}, {"r": 1, "lora_alpha": 1})


def steps_of(folder: Path, kind: str, strategy: str = "shm") -> list[dict[str, Any]]:
    """Train two steps with the keys of a kind, and return their metrics."""
    run("whole_step", folder, 2, kind, strategy)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert "succeeded" in (folder / "run.json").read_text()
    return [row for row in rows if row["stage"] == "train"]


@dataclass(frozen=True)
class Failed:
    """A run of two steps, whose second one failed."""

    raised: list[str]
    """The kind of the error that `fit` raised and its message, by line."""
    log: str
    """Of the run's folder."""


def failed(folder: Path, part: str) -> Failed:
    """Run two steps, in the second of which a part fails, and compare the record with the error."""
    printed = run("fails", folder, part)
    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "failed"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows if row["stage"] == "train"] == [1]
    lines = printed[printed.index("fit raised ") + len("fit raised ") :].splitlines()
    line = " ".join(" ".join(lines).split())  # the record leaves out the middle of a long one
    assert record["cause"].startswith(line[:100]) and record["cause"].endswith(line[-100:])
    return Failed(lines, (folder / "run.log").read_text())


def test_a_trainer_that_raises_in_a_step_is_in_the_record_with_its_own_error(tmp_path: Path) -> None:
    run = failed(tmp_path / "run", "fail_in_the_trainer")
    assert run.raised == ["ArithmeticError: the trainer has had enough"]
    assert "in fail_in_the_trainer" in run.log  # the traceback


def test_a_process_of_ray_that_raises_is_in_the_record_with_its_traceback(tmp_path: Path) -> None:
    run = failed(tmp_path / "run", "fail_in_the_worker")
    assert re.match(
        r"EngineError: verl failed in step 2: \S*WorkerDict\S* \(pid .* raised IndexError: list", run.raised[0]
    )
    assert run.raised[-1] == "IndexError: list index out of range"


@pytest.mark.merge
def test_a_worker_that_is_killed_is_in_the_record_with_the_last_lines_of_its_log(tmp_path: Path) -> None:
    run = failed(tmp_path / "run", "kill_the_worker")
    assert re.match(r"EngineError: verl failed in step 2: \S*WorkerDict \(pid .* died: The actor died", run.raised[0])
    assert "the worker's last words" in run.raised


def test_a_server_that_is_killed_is_in_the_record_with_the_last_lines_of_its_log(tmp_path: Path) -> None:
    run = failed(tmp_path / "run", "kill_the_server")
    assert re.match(r"EngineError: verl failed in step 2(:|, because) \S*EngineServer \(pid .* died: ", run.raised[0])
    assert "the server's last words" in run.raised


def moved(folder: Path, step: int) -> float:
    """Return how far the furthest weight of a checkpoint is from the model's."""
    path = folder / "checkpoints" / f"global_step_{step}" / "actor" / "model_world_size_1_rank_0.pt"
    after: dict[str, Any] = torch.load(path, weights_only=False)
    before = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).state_dict()
    whole = {name: getattr(value, "_local_tensor", value) for name, value in after.items()}
    return max(float((whole[name] - before[name]).abs().max()) for name in before)
