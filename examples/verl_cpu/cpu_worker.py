"""verl's worker on CPUs. It has its own module, because importing verl's workers imports all of
verl's engines.
"""

# verl is installed in few environments, and it has no types.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUntypedBaseClass=false

from __future__ import annotations

import os
from typing import Any

import torch
from verl.workers.engine_workers import ActorRolloutRefWorker

from examples.verl_cpu.cpu import register_engine


class CPUWorker(ActorRolloutRefWorker):
    """verl's worker, with a process group that uses only gloo.

    verl makes a group with gloo for CPUs and another backend for the accelerator, which torch
    refuses if both are the CPU. A critic is made later in the same process, and finds the group and
    its engine.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        register_engine()
        super().__init__(*args, **kwargs)
        torch.set_num_threads(1)
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                "gloo",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                init_method=os.environ.get("DIST_INIT_METHOD"),
            )
