"""`EmbeddedBackend`: a Hugging Face model in this process, trained by torch and sampled by a batched decoding loop over
the same parameters.

Three threads share the model: the decoder's thread samples, and swaps weights between two steps; a training thread
computes gradients; a third one serves HTTP. torch and transformers are imported when the backend starts, not before.
The same code runs on a CPU and on one GPU.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from leyden._lib.extras import import_optional
from leyden._lib.host.listening import check_token, is_loopback, listen, netloc
from leyden._lib.options import check_choice, check_flag, check_number
from leyden.engine.chat_templates import chat_template_text
from leyden.engine.policy_backend import (
    EngineCapabilities,
    EngineStatistics,
    ForwardBackwardResult,
    ForwardResult,
    LoRA,
    OptimParams,
    OptimStepResult,
    PolicyBackend,
    SampledResponse,
    SamplingParams,
    SharedWeights,
    started,
)
from leyden.engine.source import BaseModel
from leyden.engine.threads import Threads, check_threads, n_cores, threads_for
from leyden.engine.tools import PARSERS
from leyden.errors import ConfigError, EngineError
from leyden.objectives.losses import LOSSES, Loss
from leyden.types import LLM, TrainingSequence

if TYPE_CHECKING:
    from leyden.engine.loading import LoadedPolicy
    from leyden.engine.running_policy import RunningPolicy

Companion = Callable[[Any, str], AbstractAsyncContextManager[object]]
"""Returns the context of a server, given the endpoint as an ASGI application and its base URL."""
_DTYPES = ("bfloat16", "float16", "float32", "float64")


logger = logging.getLogger("leyden.engine")
_MIN_COPIED_TOKENS: Final = 16
_MIN_COPIED_WORK: Final = 500_000_000
"""Tokens times parameters from which on a common beginning of two prompts is copied instead of computed. That takes a
millisecond or more then, where the copy and the step that one of them waits take less."""


def engine_listener(name: str, host: str, port: int) -> socket.socket:
    """Return a socket that listens on an engine's address. Raise EngineError, which names the engine, if the address is
    taken or not this machine's.
    """
    try:
        return listen(host, port)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "is in use by another program" if taken else f"cannot be opened: {error.strerror}"
        raise EngineError(
            f"the {name} cannot listen on host={host!r}, port={port}, which {why}; port=0 takes a free one"
        ) from error


class EmbeddedBackend(PolicyBackend):
    """Any `AutoModelForCausalLM`, sampled and trained in this process."""

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        model_name: str = "policy",
        device: str | None = None,
        dtype: str | None = None,
        max_batch_rows: int = 128,
        max_length: int | None = None,
        max_tokens_per_microbatch: int = 2048,
        lora: LoRA | Mapping[str, Any] | None = None,
        value_head: bool = False,
        gradient_checkpointing: bool = False,
        offload: bool = False,
        cuda_graphs: bool = False,
        deterministic: bool = False,
        seed: int = 0,
        threads: Threads = "auto",
        tool_parser: str | None = None,
        chat_template: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        control_key: str | None = None,
        companion: Companion | None = None,
    ) -> None:
        """model: a folder, a GGUF file, a hub name, or a model object (also a PEFT model), which the backend then owns.
            A GGUF file is dequantised to float32 once, into the user's cache. An adapter that a run has left is merged
            into its base model.
        tokenizer: a folder, a hub name, or a tokenizer object; None takes the tokenizer beside the model. A model
            object without a tokenizer is sampled by token ids.
        model_name: the name under which the endpoint serves the policy.
        device: "cpu" or "cuda"; None takes CUDA if there is a GPU.
        dtype: the type of the weights, "float32" or "bfloat16"; None is float32, or the model object's own type. The
            optimizer's weights are float32.
        max_batch_rows: how many requests are decoded at once; others wait.
        max_length: the longest sequence; None: the model's context, at most 4,096. The cache's memory grows only as far
            as it is used. The context ends where a rotary embedding changes the angles of a whole sequence with its
            length (LongRoPE, dynamic NTK).
        max_tokens_per_microbatch: the most tokens that a gradient, or the prompts that join a decode step, may hold in
            memory at once. Padding counts; a prefix that sequences share counts once. A gradient or a step that runs
            out of memory halves it.
        lora: train low-rank adapters in float32 and freeze the weights: `LoRA()`, or its fields as a dict.
            None: train all weights.
        value_head: add a linear head on the last hidden state that estimates returns (a critic), for losses that use
            values. It is trained with the policy and saved in its state, but is not part of an exported Hugging Face
            folder.
        gradient_checkpointing: keep only the input of each layer for the gradient and compute the rest again. This
            takes a third more time, and memory that hardly grows with the number of layers.
        offload: keep the optimizer's moments, and its float32 copies of narrower weights, in the CPU's memory between
            two steps. The weights stay, because sampling reads them. It does nothing on a CPU.
        cuda_graphs: decode with a GPU's graphs: one call starts a whole step, and the next step starts before the
            tokens of this one have arrived. For models of the Llama layout, Qwen and Gemma 3. Steps with new prompts,
            or with tools or schemas that limit tokens, run as without it. A CPU runs such steps without graphs, slower
            than without the option.
        deterministic: make a response depend only on weights, prompt and seed. Requests are then decoded one by one,
            and each must have a seed. Without it, other rows in the batch change the last bits of a probability, so a
            seed gives equal responses only up to rounding.
        seed: the seed of the sampler, for requests without a seed.
        threads: torch's threads, for decoding and for training each. "auto" takes one on a GPU and for a model of less
            than 16 million parameters, else all cores, or all but one if there are at least four. None leaves torch's
            default. `statistics().extra["threads"]` has the number.
        tool_parser: the form in which the model writes tool calls, such as "hermes"; None takes the first that can read
            the calls that the chat template writes.
        chat_template: "chatml", "gemma", or a file with a Jinja template, in place of the tokenizer's own, which None
            keeps.
        host, port: the endpoint's address; port 0 takes a free one. Any address but loopback needs `api_key`.
        api_key: the key that clients must send; None: none.
        control_key: also serve training, to clients with this key. `IsolatedBackend` drives its child process with it.
        companion: a server that runs in the endpoint's event loop and calls the endpoint without HTTP, such as a
            gateway in the engine's process.
        Raise ConfigError for an option out of its range.
        """
        check_token("api_key", api_key, host=host)
        check_number("max_batch_rows", max_batch_rows, at_least=1, whole=True)
        check_number("max_tokens_per_microbatch", max_tokens_per_microbatch, at_least=1, whole=True)
        check_number("max_length", max_length, at_least=2, whole=True, or_none="the model's context")
        check_number("seed", seed, whole=True)
        check_number("port", port, at_least=0, at_most=65_535, whole=True)
        check_threads(threads)
        flags = ("deterministic", deterministic), ("value_head", value_head), ("offload", offload)
        for name, flag in (*flags, ("gradient_checkpointing", gradient_checkpointing), ("cuda_graphs", cuda_graphs)):
            check_flag(name, flag)
        if cuda_graphs and deterministic:
            raise ConfigError(
                "cuda_graphs=True samples on the GPU, which deterministic=True does not; leave one of them out"
            )
        if dtype is not None:
            check_choice("dtype", dtype, _DTYPES)
        if device is not None and re.fullmatch(r"(cpu|cuda|mps|xpu|meta)(:\d+)?", device) is None:
            raise ConfigError(
                f"device is {device!r}; possible: 'cpu', 'cuda', 'cuda:1', or None for CUDA where there is one"
            )
        if tool_parser is not None:
            check_choice("tool_parser", tool_parser, PARSERS)
        self.model_name = model_name
        self._tool_parser = tool_parser
        if chat_template is not None:
            chat_template_text(chat_template)  # raises ConfigError if it cannot be read
        self._chat_template = chat_template
        self._source = (model, tokenizer, device, dtype)
        self._max_batch_rows = max_batch_rows
        self._max_length = max_length
        self._max_tokens_per_microbatch = max_tokens_per_microbatch
        self._lora = LoRA.of(lora)
        if self._lora and self._lora.adapter and isinstance(model, str | Path) and (base := BaseModel.of(model)):
            raise ConfigError(
                f"{model} is an adapter of {base.model} itself, and lora= adds the one in {self._lora.adapter}; give "
                f"model={base.model!r}, or leave the adapter out"
            )
        self._value_head = value_head
        self._gradient_checkpointing = gradient_checkpointing
        self._offload = offload
        self._cuda_graphs = cuda_graphs
        self._deterministic = deterministic
        self._seed = seed
        self._threads = threads
        self._address = (host, port)
        self._api_key = api_key
        self._control_key = control_key
        self._companion = companion
        self._lock = threading.Lock()
        """Held while starting or stopping."""
        self._running: RunningPolicy | None = None
        self._was_deterministic = False
        """Torch's setting before this backend changed it."""
        self._had_cudnn_attention = False
        """Whether this backend has turned cuDNN's attention off."""

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            losses=frozenset(LOSSES),
            values=self._value_head,
            adapter=self._lora is not None,
            shared_weights=True,
            reports_versions=True,
        )

    @property
    def policy_version(self) -> int:
        return 0 if self._running is None else self._running.decoder.policy_version

    async def start(self) -> None:
        await asyncio.to_thread(self._start)

    async def stop(self) -> None:
        await asyncio.to_thread(self._stop)

    def endpoint(self) -> LLM:
        running = started(self._running)
        address = netloc(self._address[0], running.port)
        return LLM(endpoint=f"http://{address}/v1", model=self.model_name, api_key=self._api_key)

    def stop_serving(self) -> None:
        """Close the endpoint, and end the companion, the server that runs in the endpoint's event loop. The decoder and
        the learner continue.
        """
        if self._running is not None:
            self._running.server.stop()

    async def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[SampledResponse]:
        return await started(self._running).sample(prompts, params, deterministic=self._deterministic)

    async def forward(
        self, sequences: Sequence[TrainingSequence], *, temperature: float = 1.0, values: bool = False
    ) -> ForwardResult:
        check_number("temperature", temperature, above=0)
        if values and not self._value_head:
            raise ConfigError(f"{type(self).__name__} has no value head for values=True; make it with value_head=True")
        return await started(self._running).train(
            lambda running: running.learner.forward(sequences, temperature, values=values)
        )

    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Loss, *, temperature: float = 1.0
    ) -> ForwardBackwardResult:
        check_number("temperature", temperature, above=0)
        self.check_loss(loss)
        return await started(self._running).train(
            lambda running: running.learner.forward_backward(sequences, loss, temperature)
        )

    async def optim_step(self, params: OptimParams) -> OptimStepResult:
        return await started(self._running).train(lambda running: running.optim_step(params))

    async def publish_weights(self) -> int:
        return started(self._running).decoder.policy_version  # each step was published when it was made

    async def save_state(self, path: Path) -> None:
        await started(self._running).train(lambda running: running.save_state(path))

    async def snapshot_state(self, path: Path) -> bool:
        await started(self._running).train(lambda running: running.snapshot(path))
        return True

    async def state_written(self, path: Path) -> None:
        writing = started(self._running).writing.pop(path, None)
        if writing is not None:
            await asyncio.wrap_future(writing)

    async def load_state(self, path: Path, *, as_version: int | None = None) -> None:
        await started(self._running).train(lambda running: running.load_state(path, as_version))

    async def save_pretrained(self, path: Path) -> None:
        from leyden.engine.loading import write_pretrained

        whole = self._lora is not None and self._lora.merge
        await started(self._running).train(lambda running: write_pretrained(running.policy, path, whole=whole))

    async def save_adapter(self, path: Path) -> None:
        if self._lora is None:
            return await super().save_adapter(path)
        from leyden.engine.lora import write_adapter

        return await started(self._running).train(lambda running: write_adapter(running.policy.model, path))

    async def device(self) -> str:
        return str(next(started(self._running).policy.model.parameters()).device)

    async def share_weights(self) -> SharedWeights:
        from leyden.engine.loading import share_weights

        if self._lora is not None:
            raise ConfigError(f"{type(self).__name__} with lora= shares no weights; call save_adapter")
        return await started(self._running).train(lambda running: share_weights(running.policy))

    async def statistics(self) -> EngineStatistics:
        return started(self._running).statistics()

    def _start(self) -> None:
        """Build the engine unless it is running. On failure, end its thread and restore torch's settings."""
        with self._lock:
            if self._running is not None:
                return
            for package in ("safetensors", "torch", "transformers"):
                import_optional(package, extra="torch", needed_by="the embedded engine")
            executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="leyden-trainer")
            try:
                # On the training thread, so that torch's settings for it are made where they are
                # used.
                self._running = executor.submit(self._build, executor).result()
            except BaseException:
                executor.shutdown()
                self._restore_torch()
                raise

    def _build(self, executor: ThreadPoolExecutor) -> RunningPolicy:
        """Load the policy, build its learner, decoder and endpoint, and start the decoder and the endpoint.

        Runs on the training thread, the only thread of `executor`.
        """
        import torch

        from leyden._lib.host.asgi import AsgiThread
        from leyden._lib.host.http import SiteGuard
        from leyden.engine.control import control_handlers
        from leyden.engine.decoder import Decoder
        from leyden.engine.endpoint import Endpoint, EndpointOptions
        from leyden.engine.forward.choose import choose_forward
        from leyden.engine.forward.graph import fixed_steps
        from leyden.engine.forward.products import use_faster_products
        from leyden.engine.learner import TorchLearner
        from leyden.engine.running_policy import RunningPolicy

        if self._deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required for deterministic products on CUDA
            self._was_deterministic = torch.are_deterministic_algorithms_enabled()
            torch.use_deterministic_algorithms(True)
        policy, threads = self._load()
        max_length = self._max_length or min(policy.context, 4096)
        if max_length > policy.context:
            raise ConfigError(f"max_length is {max_length}, but {policy.context_reason}; give at most {policy.context}")
        slots = Decoder.n_slots(self._max_batch_rows, self._deterministic)
        use_faster_products(policy.model)
        forward = choose_forward(policy.model, max_rows=slots, max_length=max_length)
        if self._gradient_checkpointing:
            forward.recompute_layers()
        learner = TorchLearner(
            policy.model,
            forward,
            max_tokens_per_microbatch=self._max_tokens_per_microbatch,
            value_head=self._value_head,
            offload=self._offload,
        )
        fixed = None
        if self._cuda_graphs:
            fixed = fixed_steps(forward, max_rows=self._max_batch_rows, n_vocabulary=policy.n_vocabulary)
        decoder = Decoder(
            forward,
            max_batch_rows=self._max_batch_rows,
            max_prefill_tokens=self._max_tokens_per_microbatch,
            deterministic=self._deterministic,
            seed=self._seed,
            threads=threads,
            min_copied=max(
                _MIN_COPIED_TOKENS, _MIN_COPIED_WORK // sum(each.numel() for each in policy.model.parameters())
            ),
            fixed=fixed,
        )
        options = EndpointOptions(
            model_name=self.model_name,
            max_length=max_length,
            deterministic=self._deterministic,
            api_key=self._api_key,
            tool_parser=self._tool_parser,
            control_key=self._control_key,
        )
        handlers = control_handlers(self) if self._control_key else {}
        listener = engine_listener("engine", *self._address)
        port = int(listener.getsockname()[1])
        guard = SiteGuard(local_only=self._api_key is None and is_loopback(self._address[0]))
        endpoint = Endpoint(decoder, policy, options, handlers, guard=guard)
        companion, url = self._companion, f"http://{netloc(self._address[0], port)}/v1"
        lifespan = nullcontext if companion is None else partial(companion, endpoint, url)
        server = AsgiThread(endpoint, name="leyden-engine-http", lifespan=lifespan)
        server.start(listener)
        decoder.start()
        return RunningPolicy(
            policy, learner, decoder, server, executor, port, max_length, threads or torch.get_num_threads()
        )

    def _load(self) -> tuple[LoadedPolicy, int | None]:
        """Load the model, with adapters if `lora` is set, and set torch's threads. Return the model and the number of
        threads; None if torch's default was left.
        """
        import torch

        from leyden.engine.loading import load_policy
        from leyden.engine.lora import add_adapter, check_mergeable

        threads = 1 if isinstance(self._threads, str) else self._threads  # "auto": one, until the size is known
        if threads is not None:
            torch.set_num_threads(threads)
        model, tokenizer, device, dtype = self._source
        policy = load_policy(model, tokenizer, device=device, dtype=dtype, chat_template=self._chat_template)
        if self._lora is not None:
            policy = replace(policy, model=add_adapter(policy.model, self._lora, seed=self._seed))
        check_mergeable(policy.model)
        on_cpu = policy.device_type == "cpu"
        if policy.device_type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled():
            # cuDNN plans its attention again for each shape, and each token makes another one.
            self._had_cudnn_attention = True
            torch.backends.cuda.enable_cudnn_sdp(False)
        if self._threads == "auto" and on_cpu:
            threads = threads_for(sum(each.numel() for each in policy.model.parameters()), n_cores())
            torch.set_num_threads(threads)
        if self._offload and on_cpu:
            logger.warning("offload=True does nothing: the model is on the CPU already")
        return policy, threads

    def _stop(self) -> None:
        with self._lock:
            running, self._running = self._running, None
            if running is None:
                return
            from leyden.engine.memory import free_cached_memory

            running.stop()
            del running
            self._restore_torch()
            free_cached_memory()

    def _restore_torch(self) -> None:
        import torch

        if self._deterministic:
            torch.use_deterministic_algorithms(self._was_deterministic)
        if self._had_cudnn_attention:
            torch.backends.cuda.enable_cudnn_sdp(True)
            self._had_cudnn_attention = False
