"""`VLLMBackend`: Leyden's learner beside a vLLM server that samples.

The learner computes gradients in this process or in a child process. The server samples, for `sample()` and for agents.
`publish_weights` loads the learner's weights into the server, and compares the log-probabilities of fixed probes before
any rollout uses the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, cast, get_args

from leyden._lib.host.listening import check_token
from leyden._lib.options import check_choice, check_flag, check_names, check_number, check_path, check_port
from leyden.engine.context import context_of
from leyden.engine.control import Method
from leyden.engine.embedded import EmbeddedBackend
from leyden.engine.isolated import IsolatedBackend, reachable
from leyden.engine.policy_backend import (
    EngineCapabilities,
    EngineStatistics,
    LoRA,
    PolicyBackend,
    SampledResponse,
    SamplingParams,
    started,
)
from leyden.engine.refusal import check_prompts
from leyden.engine.source import BaseModel
from leyden.engine.vllm.folder import OUTPUT_HEAD, read_config, text_config, untie_embeddings
from leyden.engine.vllm.parity import largest_difference, learner_scores, probes_for, stale_weights
from leyden.engine.vllm.process import DEFAULT_PYTHON, FoundServer, Server, ServerOptions, StartedServer
from leyden.engine.vllm.vllm_client import Unreachable, VLLMClient
from leyden.errors import ConfigError, EngineError
from leyden.objectives.losses import Loss
from leyden.types import LLM

Transfer = Literal["folder", "ipc"]

_LEARNER_OPTIONS: Final = (
    "tokenizer",
    "device",
    "max_tokens_per_microbatch",
    "value_head",
    "gradient_checkpointing",
    "offload",
    "seed",
    "threads",
)
_TOLERANCES: Final = {"float64": 1e-3, "float32": 1e-3}
"""The largest difference of the probes' log-probabilities, by the type of the weights."""
_TOLERANCE_OF_NARROW_TYPES: Final = 0.25
_INITIAL: Final = "initial"
"""The name of the folder with the weights that a server is started with."""
_SEVERAL_GPUS: Final = ("--tensor-parallel", "-tp", "--pipeline-parallel", "-pp", "--data-parallel", "-dp")
"""The beginnings of vLLM's arguments by which a server uses several GPUs."""
_CHECK_SECONDS: Final = 20.0
"""Seconds between two checks, while rollouts run, that the server still reports token ids."""


@dataclass(slots=True)
class _StartedBackend:
    """The parts of a started backend."""

    server: Server
    client: VLLMClient
    exchange: Path
    """The directory through which weights reach the server."""
    n_vocabulary: int
    max_length: int
    """The most tokens of a prompt and its response together."""
    stop_ids: list[int]
    """The model's end-of-turn tokens."""
    probes: list[list[int]]
    """The token ids that learner and server score after each push."""
    transfers: bool
    """Whether weights reach the server by vLLM's own transfer, and not through `exchange`."""
    mark: str | None = None
    """The name that the server keeps in its memory for the published weights, by which a restart is noticed; None if it
    keeps none."""
    n_pushes: int = 0
    """How often weights were loaded into the server."""
    published: list[Path] = field(default_factory=list[Path])
    """The folders of the last push, which are removed after the next one."""
    checked_at: float = field(default_factory=time.monotonic)
    """When a probe was last scored, by the monotonic clock."""


def _by_learner(method: Method) -> Method:
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        started(self._running)
        return await getattr(self.learner, method.__name__)(*args, **kwargs)

    return cast(Method, call)


class VLLMBackend(PolicyBackend):
    """A policy that vLLM samples and Leyden trains."""

    further_options: ClassVar = (EmbeddedBackend, _LEARNER_OPTIONS)

    def __init__(
        self,
        model: str | Path,
        *,
        url: str | None = None,
        model_name: str = "policy",
        isolate: bool = True,
        lora: LoRA | Mapping[str, Any] | None = None,
        dtype: str | None = None,
        max_length: int | None = None,
        untie: bool = True,
        transfer: Transfer | None = None,
        tolerance: float | None = None,
        exchange_dir: str | Path | None = None,
        max_requests: int = 256,
        api_key: str | None = None,
        python: str | Path | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        kv_cache_gib: float | None = 1.0,
        gpu_memory_utilization: float | None = None,
        start_timeout_seconds: float = 600.0,
        extra_arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        **learner: Any,
    ) -> None:
        """model: a folder or a hub name, for learner and server.
        url: the address of a running server, such as "http://127.0.0.1:8000". None starts a server, which ends with
            this process.
        model_name: the name under which the server serves the policy.
        isolate: run the learner in a child process, so that training does not hold up the agents.
        lora: train adapters, and load only these into the server, which is started with the model itself. None: train
            all weights.
        dtype: the type of the weights in learner and server; None is float32.
        max_length: the longest sequence; None is the model's context, at most 4,096.
        untie: give a model with tied embeddings its own output head at the server, which costs the memory of the
            embeddings. vLLM 0.32 on a CPU does not reload a tied head; the probes show whether another version does.
        transfer: how full weights reach the server: "folder" through exchange_dir, "ipc" by vLLM's own transfer within
            one GPU's memory, without a copy on a disk. None is "ipc" if the learner and a server that is started share
            the first GPU, else "folder". Any program that reaches the routes of a server with "ipc" can run code there.
        tolerance: the largest difference between the server's and the learner's log-probabilities of the probes; None
            is 1e-3 for float32, and 0.25 for bfloat16, which rounds that much.
        exchange_dir: a directory that learner and server both read under this path; None makes a temporary one. A
            directory in memory ("/dev/shm/policy") saves writing to a disk.
        max_requests: the most requests of `sample` that are at the server at once.
        api_key: the key that the server requires, also a server that is started; None: none.
        python: the interpreter that has vLLM; None is this one.
        host, port: the address of a server that is started; port 0 takes a free one. The server's routes change its
            weights, so any address but loopback needs an api_key.
        kv_cache_gib: GiB of memory for keys and values of a server on the CPU; None leaves vLLM's default. A GPU
            ignores it.
        gpu_memory_utilization: the share of the GPU's memory for the server; None leaves vLLM's default, which leaves
            no room for a learner on the same GPU.
        start_timeout_seconds: how long the server may take to start.
        extra_arguments: further arguments of vLLM's command line, such as ("--tensor-parallel-size", "2").
        environment: further environment variables of the server.
        learner: options of `EmbeddedBackend`: tokenizer, device, max_tokens_per_microbatch, value_head,
            gradient_checkpointing, offload, seed, threads.
        Raise ConfigError for an option out of its range.
        """
        if not isinstance(model, str | Path):
            raise ConfigError(
                f"model is a {type(model).__name__}, which no server can load; save it to a folder and pass the path"
            )
        check_names(type(self).__name__, learner, [*inspect.signature(type(self)).parameters, *_LEARNER_OPTIONS])
        check_flag("untie", untie)
        if transfer is not None:
            check_choice("transfer", transfer, get_args(Transfer))
            if transfer == "ipc" and lora is not None:
                raise ConfigError(
                    "transfer='ipc' is for full weights, and lora= pushes adapters: leave one of them out"
                )
        check_number("tolerance", tolerance, above=0, or_none="the default of the type")
        check_number("max_requests", max_requests, at_least=1, whole=True)
        check_number("kv_cache_gib", kv_cache_gib, above=0, or_none="vLLM's default")
        check_number("gpu_memory_utilization", gpu_memory_utilization, above=0, at_most=1, or_none="vLLM's default")
        check_number("start_timeout_seconds", start_timeout_seconds, above=0)
        check_port("port", port or None)
        check_token("api_key", api_key, host=host)
        if exchange_dir is not None:
            check_path("exchange_dir", exchange_dir, example="/dev/shm/policy")
        if url is not None and not url.startswith(("http://", "https://")):
            raise ConfigError(f"url is {url!r}; give the address of a vLLM server, such as 'http://127.0.0.1:8000'")
        made = IsolatedBackend if isolate else EmbeddedBackend
        options: dict[str, Any] = {**learner, "lora": lora, "dtype": dtype, "max_length": max_length}
        self._learner: PolicyBackend = made(
            model, model_name=model_name, max_batch_rows=1, **{k: v for k, v in options.items() if v is not None}
        )
        self.model_name, self._untie, self._transfer = model_name, untie, transfer
        self._model, self._url, self._dtype, self._max_length = model, url, dtype or "float32", max_length
        self._trains_adapter = lora is not None
        self._tolerance = tolerance or _TOLERANCES.get(self._dtype, _TOLERANCE_OF_NARROW_TYPES)
        self._exchange_dir = None if exchange_dir is None else Path(exchange_dir)
        self._max_requests, self._api_key = max_requests, api_key
        self._server_options: dict[str, Any] = {
            "python": str(python or DEFAULT_PYTHON),
            "host": host,
            "port": port,
            "dtype": self._dtype,
            "kv_cache_gib": kv_cache_gib,
            "gpu_memory_utilization": gpu_memory_utilization,
            "start_timeout_seconds": start_timeout_seconds,
            "api_key": api_key,
            "lora_rank": (adapter := LoRA.of(lora)) and adapter.rank,
            "extra_arguments": tuple(extra_arguments),
            "environment": dict(environment or {}),
        }
        self._running: _StartedBackend | None = None
        self._policy_version = 0

    @property
    def capabilities(self) -> EngineCapabilities:
        return replace(self._learner.capabilities, shared_weights=False, reports_versions=False)

    @property
    def learner(self) -> PolicyBackend:
        return self._learner

    @property
    def policy_version(self) -> int:
        return self._policy_version

    def check_loss(self, loss: Loss) -> None:
        super().check_loss(loss)
        self._learner.check_loss(loss)  # a learner in another process imports its module

    # ---- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the learner and the server, and give the server the weights. On failure, stop what was started."""
        if self._running is not None:
            return
        async with contextlib.AsyncExitStack() as undo:
            await self._learner.start()
            undo.push_async_callback(self._learner.stop)
            exchange = await asyncio.to_thread(self._make_exchange)
            undo.push_async_callback(asyncio.to_thread, shutil.rmtree, exchange, ignore_errors=True)
            initial = exchange / _INITIAL
            await self._write(initial)
            described = Path(base.folder) if (base := BaseModel.of(initial)) is not None else initial
            max_length = self._max_length or min(context_of(text_config(read_config(described)))[0], 4096)
            transfers = self._uses_transfer(await self._learner.device())
            server = await self._new_server(initial, max_length, transfers=transfers)
            undo.push_async_callback(asyncio.to_thread, server.close)
            client = VLLMClient(server.url, self._api_key, most_at_once=self._max_requests)
            undo.push_async_callback(client.close)
            n_vocabulary = int(text_config(read_config(described))["vocab_size"])
            probes = probes_for(n_vocabulary, max_length)
            stop_ids = _stop_ids(described)
            running = _StartedBackend(server, client, exchange, n_vocabulary, max_length, stop_ids, probes, transfers)
            await asyncio.to_thread(server.wait_until_ready)
            async with self._explained(running):
                await self._adopt(running, initial)
            self._policy_version = self._learner.policy_version
            self._undo = undo.pop_all()
            self._running = running

    async def stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            await self._undo.aclose()

    def _make_exchange(self) -> Path:
        """Make and return the directory by which weights reach the server: in `exchange_dir`, or a temporary one."""
        if self._exchange_dir is None:
            return Path(tempfile.mkdtemp(prefix="leyden-vllm-"))
        path = self._exchange_dir.absolute() / f"leyden-{uuid.uuid4().hex[:8]}"
        try:
            path.mkdir(parents=True)
        except OSError as error:
            raise EngineError(
                f"exchange_dir={str(self._exchange_dir)!r} cannot be used: {error}; give a directory that can be written"
            ) from error
        return path

    def _uses_transfer(self, device: str) -> bool:
        """Return whether weights reach the server by vLLM's own transfer: as the option `transfer` says, or else if a
        learner on `device` and a server that is started use the same GPU.
        """
        if self._transfer is not None:
            return self._transfer == "ipc"
        if (
            self._url is not None
            or self._trains_adapter
            or "CUDA_VISIBLE_DEVICES" in self._server_options["environment"]
        ):
            return False
        on_several = any(each.startswith(_SEVERAL_GPUS) for each in self._server_options["extra_arguments"])
        return device == "cuda:0" and not on_several

    async def _new_server(self, initial: Path, max_length: int, *, transfers: bool) -> Server:
        """Return the server at the URL, or start one: with the weights in `initial` or, for adapters, with the model
        itself. A model that is an adapter itself is whole in `initial`, because new adapters change nothing at first.
        """
        if self._url is not None:
            return FoundServer(self._url.rstrip("/").removesuffix("/v1"))
        options = ServerOptions(max_length=max_length, transfers=transfers, **self._server_options)
        if not self._trains_adapter:
            return await asyncio.to_thread(StartedServer, initial, self.model_name, options)
        base = reachable(self._model) if BaseModel.of(self._model) is None else initial
        return await asyncio.to_thread(StartedServer, base, f"{self.model_name}-base", options)

    async def _adopt(self, running: _StartedBackend, initial: Path) -> None:
        """Make sure that a server that is ready samples with the learner's weights.

        A server that Leyden did not start, or one that needs the adapter, gets the learner's weights. A server that was
        started with them is only checked. Raise EngineError if the server does not serve the policy, or samples with
        other weights.
        """
        if self._url is not None:
            models = await running.client.models()
            if not self._trains_adapter and self.model_name not in models:
                raise EngineError(
                    f"{running.server.url} serves {', '.join(map(repr, models)) or 'no model'} and not {self.model_name!r}; "
                    "start it with --served-model-name, or give model_name="
                )
            contexts = [int(model.get("max_model_len") or running.max_length) for model in models.values()]
            running.max_length = min([running.max_length, *contexts])
        if running.transfers:
            await running.client.begin_transfers()
        if self._url is not None or self._trains_adapter:
            await self._push(running)
            return
        running.published = [initial]
        await self._verify(running, initial)
        await self._mark(running)

    # ---- the learner -----------------------------------------------------------------------------

    forward = _by_learner(PolicyBackend.forward)
    forward_backward = _by_learner(PolicyBackend.forward_backward)
    optim_step = _by_learner(PolicyBackend.optim_step)
    device = _by_learner(PolicyBackend.device)
    save_state = _by_learner(PolicyBackend.save_state)
    snapshot_state = _by_learner(PolicyBackend.snapshot_state)
    state_written = _by_learner(PolicyBackend.state_written)
    save_pretrained = _by_learner(PolicyBackend.save_pretrained)
    save_adapter = _by_learner(PolicyBackend.save_adapter)

    async def load_state(self, path: Path, *, as_version: int | None = None) -> None:
        running = started(self._running)
        await self._learner.load_state(path, as_version=as_version)
        async with self._explained(running):
            await self._push(running)

    # ---- the sampler -----------------------------------------------------------------------------

    def endpoint(self) -> LLM:
        running = started(self._running)
        return LLM(endpoint=f"{running.server.url}/v1", model=self.model_name, api_key=self._api_key)

    async def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[SampledResponse]:
        running = started(self._running)
        check_prompts(prompts, running.n_vocabulary, running.max_length)
        stop_ids = sorted({*running.stop_ids, *params.stop_token_ids})
        async with self._explained(running):
            return await running.client.sample(
                self.model_name, prompts, params, version=self._policy_version, stop_ids=stop_ids
            )

    async def publish_weights(self) -> int:
        running = started(self._running)
        if self._learner.policy_version != self._policy_version:
            async with self._explained(running):
                await self._push(running)
        return self._policy_version

    async def statistics(self) -> EngineStatistics:
        """Return the server's counters, and check the server.

        At most every 20 seconds a probe is scored, because a proxy may have begun to drop token ids. Raise EngineError
        if the server has died, was restarted, or reports no token ids.
        """
        running = started(self._running)
        running.server.check()
        async with self._explained(running):
            counters = await running.client.counters()
            await self._check_mark(running)
            if time.monotonic() - running.checked_at > _CHECK_SECONDS:
                running.checked_at = time.monotonic()
                await running.client.score(self.model_name, running.probes[:1])

        def total(name: str) -> int:
            return int(counters.get(name, 0.0))

        return EngineStatistics(
            requests=total("request_success_total"),
            prompt_tokens=total("prompt_tokens_total"),
            response_tokens=total("generation_tokens_total"),
            decode_steps=total("iteration_tokens_total_count"),
            decode_seconds=counters.get("request_decode_time_seconds_sum", 0.0),
            extra={"waiting": counters.get("num_requests_waiting", 0.0), "pushes": float(running.n_pushes)},
        )

    # ---- weights ---------------------------------------------------------------------------------

    async def _push(self, running: _StartedBackend) -> None:
        """Load the learner's weights into the server.

        Raise EngineError, which names the weights that the server ignores, if the server's log-probabilities of the
        probes differ from the learner's.
        """
        running.n_pushes += 1
        folder = running.exchange / f"push-{running.n_pushes}"
        if running.transfers:
            weights = await self._learner.share_weights()
            async with running.client.paused():
                await running.client.transfer(weights)
        else:
            if self._trains_adapter:
                await self._learner.save_adapter(folder)
            else:
                await self._write(folder)
            await self._load(running, folder)
        await self._verify(running, folder)
        await self._mark(running)
        self._policy_version = self._learner.policy_version
        old, running.published = running.published, [folder]
        for path in old:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    async def _write(self, folder: Path) -> None:
        await self._learner.save_pretrained(folder)
        if self._untie:
            await asyncio.to_thread(untie_embeddings, folder)

    async def _load(self, running: _StartedBackend, folder: Path) -> None:
        async with running.client.paused():
            if self._trains_adapter:
                await running.client.load_adapter(self.model_name, str(folder))
            else:
                await running.client.reload(str(folder))

    async def _verify(self, running: _StartedBackend, folder: Path) -> None:
        """Raise EngineError if the server's log-probabilities of the probes differ from the learner's by more than
        `tolerance`.

        Before raising, find the tensors that the server ignores: change one group at a time and check whether its
        scores change.
        folder: the folder of the weights that were just published.
        """
        wanted = await learner_scores(self._learner, running.probes)
        score = functools.partial(running.client.score, self.model_name, running.probes)
        difference = largest_difference(await score(), wanted)
        if difference <= self._tolerance:
            return
        if running.transfers and folder.name != _INITIAL:
            await self._write(folder)
            await self._load(running, folder)
            if largest_difference(await score(), wanted) <= self._tolerance:
                raise EngineError(
                    f"vLLM's own transfer left other weights than were published: the log-probabilities of "
                    f"{len(running.probes)} probes differ by up to {difference:.4g} (tolerance={self._tolerance:g}), and "
                    "from a folder the server takes them all: give transfer='folder'"
                )
        stale = await stale_weights(
            folder,
            running.exchange / "check",
            publish=functools.partial(self._load, running),
            score=score,
            wanted=wanted,
            tolerance=self._tolerance,
        )
        raise EngineError(
            f"the server does not sample with the weights that were published: the log-probabilities of "
            f"{len(running.probes)} probes differ by up to {difference:.4g} (tolerance={self._tolerance:g}). "
            + _remedy(stale, trains_adapter=self._trains_adapter)
        )

    async def _mark(self, running: _StartedBackend) -> None:
        """Name the server's loaded weights, until it restarts. A server for adapters may have no such route."""
        mark = f"leyden-{uuid.uuid4().hex}"
        try:
            await running.client.set_mark(mark)
        except EngineError:
            if not self._trains_adapter:
                raise
            return  # adapters need no route of the development mode, and a new process has lost them
        running.mark = mark

    async def _check_mark(self, running: _StartedBackend) -> None:
        """Raise EngineError if the server's weights no longer have the name that the last push gave them.

        A push during the query changes the name, which is no error.
        """
        mark = running.mark
        if mark is None:
            return
        found = await running.client.mark()
        if found != mark and running.mark == mark:
            raise EngineError(
                f"{running.server.url} has other weights ({found}) than those that were published: the server was started "
                "again, or another program changed its weights. Give each run a server of its own, and resume the run"
            )

    @contextlib.asynccontextmanager
    async def _explained(self, running: _StartedBackend) -> AsyncGenerator[None]:
        """Add the last lines of the server's log to an EngineError of the block, or the reason why the server cannot be
        reached.
        """
        try:
            yield
        except Unreachable as error:
            raise EngineError(f"{await asyncio.to_thread(running.server.describe_end)}\n({error})") from error
        except EngineError as error:
            raise EngineError(f"{error}\nOf the vLLM server: {running.server.last_words()}") from error


def _remedy(stale: Sequence[str], *, trains_adapter: bool) -> str:
    """Return the end of an error message: the weights that the server ignores, and a remedy.

    stale: the names of the tensors that the server ignores; empty if it takes all of them.
    """
    if not stale:
        return (
            "It takes every weight that was tested, so the model itself differs: compare dtype, the model that the "
            "server was started with, and its arguments with the learner's"
        )
    names = f"It ignores: {', '.join(stale)}. "
    if trains_adapter:
        return f"{names}Use another version of vLLM, or train full weights: leave lora out"
    if OUTPUT_HEAD in stale:
        return f"{names}The output head is tied to the embeddings: leave untie at True, or train with lora=LoRA()"
    return f"{names}Use another version of vLLM, or train with lora=LoRA()"


def _stop_ids(folder: Path) -> list[int]:
    """Return the ids of the end-of-turn tokens that the folder's generation config names."""
    path = folder / "generation_config.json"
    declared: Any = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    return [] if declared is None else [int(each) for each in ([declared] if isinstance(declared, int) else declared)]
