"""vLLM's transfer of weights between processes, on a CPU.

vLLM's own engine `ipc` maps CUDA memory. Here a handle holds the weight's bytes, as torch pickles a tensor on a CPU.
The routes, the messages and the reload are vLLM's. A server takes it by
`--worker-extension-cls tests.vllm.cpu_transfer.Extension`.
"""

from __future__ import annotations

from typing import Any

from torch.multiprocessing.reductions import rebuild_tensor
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine


class CpuTransferEngine(IPCWeightTransferEngine):
    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # without waiting for an accelerator

    def receive_weights(self, update_info: Any) -> None:
        handles = zip(update_info.names, update_info.ipc_handles, strict=True)
        self.model.load_weights([(name, rebuild_tensor(*handle["cpu"])) for name, handle in handles])


WeightTransferEngineFactory._registry["ipc"] = lambda: CpuTransferEngine


class Extension:
    """Nothing: a worker imports this module when it looks for it."""
