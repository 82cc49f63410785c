"""Leyden's embedded engine as a rollout engine of verl, chosen by `actor_rollout_ref.rollout.name=leyden`.

It serves small models on machines without vLLM. Each replica is one server, an actor of Ray, which gets the trainer's
weights through Ray's object store. `register` adds the engine to verl's registries, in each process that imports
`leyden.algorithm.verl.plugin`.
"""

# verl is installed in few environments, and it has no types.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUntypedBaseClass=false, reportMissingTypeStubs=false

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout  # pyright: ignore[reportPrivateUsage] -- verl has no function
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from leyden.dialects.sampling import SAMPLING_PARAMETERS, changes
from leyden.engine import EmbeddedBackend, SamplingParams
from leyden.errors import ConfigError

NAME = "leyden"


def register() -> None:
    """Add the engine to verl's registries. Calling it again does nothing."""
    RolloutReplicaRegistry.register(NAME, lambda: EngineReplica)
    _ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.ServerAdapter"


class EngineServer:
    """An actor of Ray that serves a model at an OpenAI-compatible endpoint, and loads new weights."""

    def __init__(self, model: str, *, max_length: int, response_length: int) -> None:
        """
        model: the model's folder.
        max_length: the most tokens of prompt and response together.
        response_length: the default of `max_tokens` in `generate`.
        """
        from transformers import AutoModelForCausalLM

        self._folder, self._max_length, self._response_length = model, max_length, response_length
        self._step: int | None = None
        """The trainer's step whose weights are served; None before the first."""
        self._base: dict[str, torch.Tensor] = {}
        """The weights without adapters of each layer that has some."""
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._backend: EmbeddedBackend | None = None
        self._port = 0
        """The port: 0, for a free one, at first; then always the same."""

    async def start(self) -> str:
        """Start to serve, or restart if it serves already, and return the address as `host:port`."""
        await self.stop()
        backend = self._backend = EmbeddedBackend(
            self._model, tokenizer=self._folder, model_name=self._folder, max_length=self._max_length, port=self._port
        )
        await backend.start()
        address = backend.endpoint().endpoint.removeprefix("http://").removesuffix("/v1")
        self._port = int(address.rpartition(":")[2])
        return address

    async def stop(self) -> None:
        if self._backend is not None:
            await self._backend.stop()

    async def set_weights(
        self, weights: Mapping[str, torch.Tensor], step: int | None, lora: Mapping[str, Any] | None = None
    ) -> list[str]:
        """Serve these weights from now on, at the same address, and return the names that the model does not have.

        step: the trainer's step.
        lora: PEFT's configuration, if the weights are adapters, which are added to the weights that the model had
        before any adapter.

        Restart the engine, so that no cached state of the old weights survives.
        """
        await self.stop()
        own = self._model.state_dict()
        if lora is None:
            self._base.clear()
        else:
            changes = adapter_changes(weights, lora)
            self._base = {name: own[name].clone() for name in changes if name in own} | self._base
            weights = {name: change + self._base.get(name, 0) for name, change in changes.items()}
        with torch.no_grad():
            for name, weight in weights.items():
                if name in own:
                    own[name].copy_(weight)
        self._step = step
        await self.start()
        return sorted(set(weights) - set(own))

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], request_id: str, **_: Any
    ) -> Any:
        """Sample a response to a prompt for verl's own agent loops, and return verl's `TokenOutput`. Leyden's agents
        call the endpoint instead.

        sampling_params: `max_tokens`, `temperature` and `top_p`. Others, such as `top_k` and `repetition_penalty`, must
            have the values that change nothing.
        Raise ConfigError for another value.
        """
        params = _sampling(
            sampling_params, default_tokens=self._response_length, room=self._max_length - len(prompt_ids)
        )
        assert self._backend is not None
        [sample] = await self._backend.sample([list(prompt_ids)], params)
        return TokenOutput(
            token_ids=sample.token_ids,
            log_probs=sample.logprobs,
            stop_reason="completed",
            extra_fields={"global_steps": self._step},
        )

    async def _ignore(self, **_: Any) -> None:
        """Do nothing: the engine keeps its weights. They change between two steps, when no call is under way, and
        `set_weights` restarts the engine with an empty cache.
        """

    wake_up = sleep = abort_all_requests = resume_generation = _ignore
    clear_kv_cache = release_kv_cache = resume_kv_cache = _ignore


def adapter_changes(weights: Mapping[str, torch.Tensor], lora: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the changes of each layer's weight that adapters stand for: `alpha / r * B A` (LoRA, arXiv:2106.09685,
    section 4.1).

    weights: PEFT's state: `base_model.model.LAYER.lora_A.weight` of shape (r, inputs), and `lora_B` of shape (outputs,
        r).
    lora: PEFT's configuration, with `r` and `lora_alpha`.
    Raise ConfigError for a kind of adapter that has other weights, such as DoRA's.
    """
    scale = lora["lora_alpha"] / (math.sqrt(lora["r"]) if lora.get("use_rslora") else lora["r"])
    factors = {name.removeprefix(_OF_PEFT): weight for name, weight in weights.items()}
    layers = {name.removesuffix(_LORA_A) for name in factors if name.endswith(_LORA_A)}
    if unknown := sorted(set(factors) - {layer + end for layer in layers for end in (_LORA_A, _LORA_B)}):
        raise ConfigError(
            f"the rollout engine 'leyden' adds LoRA's two factors to a layer, and knows no {unknown[0]}; set "
            "actor_rollout_ref.model.lora.merge=true to have verl merge its adapters, or take rollout.name=vllm"
        )
    return {f"{layer}.weight": scale * (factors[layer + _LORA_B] @ factors[layer + _LORA_A]) for layer in layers}


_OF_PEFT, _LORA_A, _LORA_B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def _sampling(given: Mapping[str, Any], *, default_tokens: int, room: int) -> SamplingParams:
    """Raise ConfigError for a parameter that the engine does not have.

    default_tokens: `max_tokens` if verl gives none.
    room: the tokens for which the engine has room after the prompt.
    """
    for name in changes(given):
        if name != "top_p":
            raise ConfigError(
                f"the rollout engine 'leyden' has no {name}; set actor_rollout_ref.rollout.{name} to "
                f"{SAMPLING_PARAMETERS[name].neutral[0]}"
            )
    return SamplingParams(
        max_tokens=max(1, min(int(given.get("max_tokens", default_tokens)), room)),
        temperature=float(given.get("temperature", 1.0)),
        top_p=float(given.get("top_p", 1.0)),
    )


def server_name(replica_rank: int) -> str:
    return f"leyden_engine_server_{replica_rank}"


class EngineReplica(RolloutReplica):
    """A replica in verl's sense: one `EngineServer`."""

    async def launch_servers(self) -> None:
        """Start the server."""
        actor = ray.remote(EngineServer).options(name=server_name(self.replica_rank), num_cpus=0)
        limit = self.config.max_model_len or self.config.prompt_length + self.config.response_length
        server = actor.remote(self.model_config.path, max_length=limit, response_length=self.config.response_length)
        self._server_address = await server.start.remote()
        self._server_handle = server
        self.servers = [server]


class ServerAdapter(BaseRollout):
    """The trainer's side of a replica: sends the weights of verl's training engine to the replica's server."""

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: the engine keeps its weights."""

    async def release(self) -> None:
        """Do nothing: the engine keeps its weights."""

    async def update_weights(
        self,
        weights: Any,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        *,
        peft_config: Mapping[str, Any] | None = None,
        base_sync_done: bool = False,
        **_: Any,
    ) -> None:
        """Send full weights, or adapters, to the server. Every rank gathers them; the first rank of each replica sends
        them.

        peft_config: the configuration of a model with adapters.
        base_sync_done: whether the weights are those of the adapters. Otherwise they are those of the layers without
            them, under vLLM's names (`q_proj.base_layer.weight`).
        Raise RuntimeError for weights that the server's model does not have.
        """
        if wire_format != "named_tensors":
            raise NotImplementedError(f"the engine 'leyden' takes named tensors, not {wire_format!r}")
        gathered = {
            name.replace(".base_layer.", "."): weight.detach().to("cpu", torch.float32).clone()
            for name, weight in weights
        }
        config = self.config
        size = config.tensor_model_parallel_size * config.data_parallel_size * config.pipeline_model_parallel_size
        rank = torch.distributed.get_rank()
        if rank % size:
            return
        lora = dict(peft_config) if peft_config and base_sync_done else None
        unknown = await ray.get_actor(server_name(rank // size)).set_weights.remote(gathered, global_steps, lora)
        if unknown:
            raise RuntimeError(f"the engine 'leyden' has no weights called {', '.join(unknown[:5])}")
