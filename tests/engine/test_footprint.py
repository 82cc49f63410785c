"""What training a model will take is said before it is loaded, near the measured peak, and refused if it cannot fit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import leyden as ly
from leyden._lib.host.limits import memory_limit
from leyden.engine.footprint import check_room, footprint
from leyden.errors import ConfigError
from tests.engine import tiny

TRAIN = """
import asyncio, random, sys, torch
from transformers import AutoModelForCausalLM, LlamaConfig
from leyden.engine import EmbeddedBackend, OptimParams
from leyden.objectives.losses import CrossEntropyLoss
from leyden.types import TrainingSequence

folder, options = sys.argv[1], eval(sys.argv[2])
torch.set_num_threads(1)

async def main():
    async with EmbeddedBackend(folder, device="cpu", tokenizer=None, **options) as backend:
        draw = random.Random(0)
        sequences = [
            TrainingSequence([draw.randrange(5000) for _ in range(256)], [0.0] * 128 + [1 / 256] * 128) for _ in range(8)
        ]
        for _ in range(2):
            await backend.forward_backward(sequences, CrossEntropyLoss())
            await backend.optim_step(OptimParams())
        print([line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")][0])

asyncio.run(main())
"""


@ly.llm_rollout
def agent(task: int, llm: ly.LLM) -> float:
    return 0.0


def declared(folder: Path, n_weights: int) -> Path:
    """A model's folder whose safetensors file is a header alone, which declares `n_weights` weights in one layer."""
    tiny.make(folder)
    header = json.dumps(
        {"model.layers.0.x": {"dtype": "F32", "shape": [n_weights // 1000, 1000], "data_offsets": [0, 0]}}
    )
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"lora": {"rank": 16}}])
def test_the_estimate_is_within_thirty_percent_of_the_peak(tmp_path: Path, options: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(  # of the shape of SmolLM2 135M
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    del model
    done = subprocess.run([sys.executable, "-c", TRAIN, tmp_path, repr(options)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = footprint({"model": tmp_path, **options})
    assert expected is not None
    assert expected.n_weights == 134_515_008
    assert expected.fixed + expected.activations == pytest.approx(int(done.stdout) * 1024, rel=0.3)


def test_a_model_beyond_the_machine_is_refused_before_it_is_loaded_and_leaves_no_run(tmp_path: Path) -> None:
    backend = ly.IsolatedBackend(declared(tmp_path / "huge", 10**13), device="cpu")
    trainer = ly.Trainer(algorithm=ly.PolicyGradient(backend), run_dir=tmp_path / "run", progress=False)
    with pytest.raises(ConfigError, match=r"needs 160 TB of memory beside its micro-batches, .*lora="):
        trainer.fit(agent, [1])
    assert not (tmp_path / "run").exists()


def test_a_disk_without_room_is_refused_and_one_that_will_fill_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    options = {"model": declared(tmp_path / "huge", 10**13), "device": "cuda"}  # whose memory is not known here
    with pytest.raises(
        ConfigError, match=rf"needs 160 TB of disk for one checkpoint and the model, and {tmp_path} has"
    ):
        check_room([options], directory=tmp_path, resume=False, n_checkpoints=2, n_rollouts=10)
    check_room([options], directory=tmp_path, resume=True, n_checkpoints=2, n_rollouts=10)  # it has its checkpoints
    assert "a micro-batch or a checkpoint being written 120 TB" in caplog.text
    caplog.clear()
    middle = {**options, "model": declared(tmp_path / "middle", 20_000_000)}
    check_room([middle], directory=tmp_path, resume=False, n_checkpoints=10**6, n_rollouts=10)
    assert "and up to 240 TB of disk" in caplog.text and "keep_last=1" in caplog.text


def test_a_reference_counts_and_a_small_model_passes_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    check_room(
        [{"model": tiny.make(tmp_path / "tiny")}], directory=tmp_path, resume=False, n_checkpoints=2, n_rollouts=1
    )
    assert caplog.text == ""
    options = {"model": declared(tmp_path / "middle", 20_000_000), "device": "cpu"}
    check_room([options, options], directory=tmp_path, resume=False, n_checkpoints=2, n_rollouts=1000)
    assert "weights 80 MB, other models 80 MB, gradients and moments 240 MB" in caplog.text
    assert "3 checkpoints of 240 MB, model 80 MB" in caplog.text


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_is_that_of_the_narrowest_control_group(tmp_path: Path, version: int) -> None:
    gib, machine = 2**30, psutil.virtual_memory().total
    (tmp_path / "proc" / "self").mkdir(parents=True)
    root = tmp_path / "groups" / ("memory" if version == 1 else "")
    (tmp_path / "proc" / "self" / "cgroup").write_text("7:cpu:/a\n4:memory:/a/b\n" if version == 1 else "0::/a/b\n")
    (root / "a" / "b").mkdir(parents=True)
    limit, used = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    )
    for group, most in (("a", str(gib)), ("a/b", str(2**63) if version == 1 else "max")):
        (root / group / limit).write_text(f"{most}\n")
        (root / group / used).write_text(f"{gib // 2}\n")
        (root / group / "memory.stat").write_text(f"anon 5\ninactive_file {gib // 4}\n")
    assert machine > gib
    assert memory_limit(tmp_path / "proc", tmp_path / "groups") == (gib, 3 * gib // 4)
    total, free = memory_limit(tmp_path / "none", tmp_path)
    assert total == machine and 0 < free <= total
