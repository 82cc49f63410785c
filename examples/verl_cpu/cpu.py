"""Run verl's training engine on CPUs: a platform and an FSDP2 engine for verl's registries.

verl 0.9 has platforms for accelerators only. With the keys `trainer.device=cpu` and
`leyden.platform=examples.verl_cpu.cpu` each of its processes imports this module. It is meant for
tests and small models: FSDP2 on gloo, in float32. FSDP1 refuses CPU parameters.
"""

# verl is installed in few environments, and it has no types.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportUntypedClassDecorator=false

from __future__ import annotations

import contextlib
import types
from functools import cache
from typing import Any, cast

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

RESOURCE = "GPU"
"""The resource of Ray that a rank takes. verl counts only GPUs, so `ray start --num-gpus 2` has
room for two ranks. If `run_ppo` starts Ray itself, it declares as many as it needs."""


def _returning(value: Any) -> Any:
    """Return a function that takes any arguments and returns this value."""

    def answer(*_: Any, **__: Any) -> Any:
        return value

    return answer


def _device_module() -> Any:
    """Return `torch.cpu` with the functions that only `torch.cuda` has."""
    module = types.SimpleNamespace(**{name: getattr(torch.cpu, name) for name in dir(torch.cpu) if name[:2] != "__"})
    nothing = ("empty_cache", "reset_peak_memory_stats", "set_device", "synchronize", "ipc_collect")
    zero = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "current_device")
    for name in nothing:
        setattr(module, name, _returning(None))
    for name in zero:
        setattr(module, name, _returning(0))
    module.manual_seed = module.manual_seed_all = torch.manual_seed
    module.get_rng_state, module.set_rng_state = torch.get_rng_state, torch.set_rng_state
    module.mem_get_info = _returning((1 << 34, 1 << 34))  # free and total bytes: 16 GiB
    module.get_device_name = _returning("CPU")  # the name in verl's table of operations per second
    module.device_count = _returning(1)
    module.is_available = _returning(True)
    return module


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """verl's platform for CPUs: the CPU in the place of an accelerator."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def _ignore(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = _ignore

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # never detected: it must be chosen by VERL_PLATFORM

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def ray_resource_name(self) -> str:
        return RESOURCE

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def policy_worker() -> type:
    """Return the class of verl's workers that hold the policy."""
    from examples.verl_cpu.cpu_worker import CPUWorker

    return CPUWorker


@cache
def register_engine() -> None:
    """Register verl's FSDP engines for CPUs: of policies and references, and of critics.

    It imports verl's trainer, so it runs when an engine is needed. Calling it again does nothing.
    """
    from transformers import AutoModelForTokenClassification
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    class InPlace:
        """Keep the weights of a reference model in place between two uses.

        verl moves them to pinned memory of the CPU, which torch allocates only with an accelerator.
        """

        engine_config: Any

        def _build_fsdp_module(self, module: Any) -> Any:
            forward_only, self.engine_config.forward_only = self.engine_config.forward_only, False
            try:
                return cast(Any, super())._build_fsdp_module(module)
            finally:
                self.engine_config.forward_only = forward_only

    class CPUEngine(InPlace, FSDPEngineWithLMHead):
        """verl's FSDP2 engine of a policy or its reference."""

    class CPUCriticEngine(InPlace, FSDPEngineWithValueHead):
        """verl's FSDP2 engine of a critic, loaded with the attention that `override_config` names.
        verl's own loader demands flash attention, whatever the configuration says.
        """

        def _build_module(self) -> Any:
            """Return a model with one value per token, in float32, without the flash attention that
            verl's own function demands.
            """
            model = self.model_config
            model.hf_config.update({"num_labels": 1, "classifier_dropout": 0.0})
            module = AutoModelForTokenClassification.from_pretrained(
                model.local_path,
                dtype=torch.float32,
                config=model.hf_config,
                trust_remote_code=model.trust_remote_code,
            )
            if model.enable_gradient_checkpointing:
                module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return module

    for model_type, engine in (("language_model", CPUEngine), ("value_model", CPUCriticEngine)):
        EngineRegistry.register(model_type=model_type, backend=["fsdp", "fsdp2"], device="cpu")(engine)
