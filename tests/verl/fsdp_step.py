"""Run by torchrun: steps of verl's FSDP2 engine on gloo, on rows of a file; rank 0 writes the weights after them."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

os.environ.update(VERL_PLATFORM="cpu", RAY_USAGE_STATS_ENABLED="0", VERL_LOGGING_LEVEL="ERROR")

import examples.verl_cpu.cpu as cpu  # noqa: I001 -- the platform is registered before verl looks for one
import torch
from safetensors.torch import save_file
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

folder, learning_rate, n_steps = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
cpu.register_engine()

model = HFModelConfig(
    path=str(folder / "model"),
    use_remove_padding=False,
    override_config={"attn_implementation": "sdpa"},
    enable_gradient_checkpointing=False,
)
model.model_type = "language_model"
precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
settings = FSDPEngineConfig(
    strategy="fsdp2",
    use_torch_compile=False,
    use_dynamic_bsz=False,
    micro_batch_size_per_gpu=4,
    infer_micro_batch_size_per_gpu=4,
    dtype="float32",
    model_dtype="fp32",
    mixed_precision=precision,
)
optimizer = FSDPOptimizerConfig(
    lr=learning_rate,
    betas=(0.9, 0.99),
    weight_decay=0.0,
    clip_grad=1.0,
    total_training_steps=100,
    lr_warmup_steps=0,
    lr_scheduler_type="constant",
)
engine = EngineRegistry.new(
    model_type="language_model",
    backend="fsdp2",
    model_config=model,
    engine_config=settings,
    optimizer_config=optimizer,
    checkpoint_config=CheckpointConfig(),
)
engine.initialize()
loss = partial(
    ppo_loss,
    config=FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_mini_batch_size=8,
        ppo_micro_batch_size_per_gpu=4,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        loss_agg_mode="seq-mean-token-sum",
        use_torch_compile=False,
    ),
)
rows: dict[str, torch.Tensor] = torch.load(folder / "rows.pt")
n_rows = len(rows["prompts"])
for _ in range(n_steps):
    mine = {name: tensor[rank::world].contiguous() for name, tensor in rows.items()}
    batch = left_right_2_no_padding(TensorDict(mine, batch_size=n_rows // world))
    tu.assign_non_tensor(
        batch,
        use_remove_padding=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=4,
        temperature=1.0,
        calculate_entropy=False,
        global_batch_size=n_rows,
        batch_num_tokens=int(rows["response_mask"].sum()),
        dp_size=world,
        pad_mode="no_padding",
        use_fused_kernels=False,
        max_response_len=rows["responses"].shape[1],
        compute_loss=True,
        update_lr_scheduler=True,
    )
    with engine.train_mode():
        engine.train_batch(batch, loss)
weights = {
    name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().contiguous().clone()
    for name, tensor in engine.get_per_tensor_param()[0]
}
if rank == 0:
    save_file(weights, folder / f"after-{world}.safetensors")
torch.distributed.destroy_process_group()
