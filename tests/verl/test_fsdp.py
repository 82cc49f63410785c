"""Steps of verl's FSDP2 engine on gloo, with one rank and with two, equal those of Leyden's learner."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from leyden.algorithm.policy_gradient.step_data import build_step, estimate_advantages, weighted
from leyden.algorithm.verl.rows import (
    RewardedRollout,
    make_rows,
    placeholder_row,
    row_tensors,
    score_rollouts,
    truncate_rows,
)
from leyden.engine import EmbeddedBackend, OptimParams
from leyden.objectives.advantages import DrGRPOAdvantages
from leyden.objectives.losses import PPOLoss
from tests.engine import tiny
from tests.verl.made import make_groups

pytestmark = [pytest.mark.verl, pytest.mark.merge, pytest.mark.timeout(300)]

RATE, STEPS = 1e-3, 3
MICRO = 4
"""Rows of a micro-batch, which must divide the rows of each rank."""


async def stepped_by_leyden(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights after the steps of `EmbeddedBackend`."""
    step = build_step(make_groups(0), DrGRPOAdvantages(), keep_flat=True)
    estimate_advantages(step, DrGRPOAdvantages())
    optim = OptimParams(learning_rate=RATE, betas=(0.9, 0.99), weight_decay=0.0, max_grad_norm=1.0)
    async with EmbeddedBackend(str(folder / "model"), device="cpu") as backend:
        for _ in range(STEPS):
            loss = PPOLoss(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
            await backend.forward_backward(weighted(step.trained, "rollout"), loss)
            await backend.optim_step(optim)
        await backend.save_pretrained(folder / "ours")
    return load_file(folder / "ours" / "model.safetensors")


def write_rows(path: Path, n_ranks: int) -> None:
    step = build_step(make_groups(0), DrGRPOAdvantages(), keep_flat=True)
    estimate_advantages(step, DrGRPOAdvantages())
    advantages = {rollout.data.rollout_id: rollout.advantages[0] for rollout in step.trained}
    scored, report = score_rollouts(make_groups(0))
    rows = truncate_rows(make_rows(scored), scored, report, max_prompt_length=64, max_response_length=64)
    filler = RewardedRollout("filler", "filler", 0.0, ())
    rows += [placeholder_row(filler, 0) for _ in range(-len(rows) % (MICRO * n_ranks))]
    tensors = row_tensors(rows, pad_id=0)
    of_rows = torch.tensor([advantages.get(row.rollout_id, 0.0) for row in rows])
    tensors["advantages"] = (of_rows * tensors.pop("rollout_scales"))[:, None] * tensors["response_mask"]
    tensors["old_log_probs"] = tensors.pop("rollout_log_probs")
    del tensors["token_level_scores"]
    torch.save(tensors, path)


def stepped_by_verl(folder: Path, n_ranks: int) -> dict[str, torch.Tensor]:
    """Return the weights after the steps of verl's FSDP2 engine on `n_ranks` ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    done = subprocess.run(
        [*command, Path(__file__).with_name("fsdp_step.py"), folder, str(RATE), str(STEPS)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return load_file(folder / f"after-{n_ranks}.safetensors")


async def test_weights_after_fsdp2_steps_equal_those_of_leydens_learner(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model")
    before = load_file(tmp_path / "model" / "model.safetensors")
    ours = await stepped_by_leyden(tmp_path)
    moved = max(float((ours[name] - before[name]).abs().max()) for name in before)
    assert moved > 1.5 * RATE
    for n_ranks in (1, 2):
        write_rows(tmp_path / "rows.pt", n_ranks)
        theirs = await asyncio.to_thread(stepped_by_verl, tmp_path, n_ranks)
        furthest = {name: float((theirs[name] - ours[name]).abs().max()) for name in ours if name in theirs}
        assert len(furthest) >= len(before) and max(furthest.values()) < 1e-4, furthest
