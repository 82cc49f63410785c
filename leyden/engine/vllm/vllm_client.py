"""`VLLMClient`: calls a vLLM server by OpenAI's routes, with token ids, and by the routes that change the server's
weights.

The module knows requests and answers. An answer without the requested token ids or log-probabilities raises
EngineError. It knows no process: the caller explains why a server cannot be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from leyden._lib.per_loop import PerLoop
from leyden.engine.policy_backend import SampledResponse, SamplingParams, SharedWeights
from leyden.errors import EngineError

if TYPE_CHECKING:
    import aiohttp

_METRIC = re.compile(r"^vllm:(\w+)(?:\{[^\n]*\})? (\S+)$", re.MULTILINE)
_NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Parameters that `SamplingParams` lacks. A server may have other defaults, which it reads from the model's folder."""
_ANSWER_CHARACTERS = 500
"""The most characters of an answer in an error message."""
_ROUTES_WITH_404 = ("/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Routes whose 404 means that a model or an adapter is missing, and not the route."""


class Unreachable(Exception):
    """Raised when the server refused or broke the connection."""


class VLLMClient:
    """Calls of one server, from any event loop."""

    def __init__(self, url: str, api_key: str | None, *, most_at_once: int) -> None:
        """most_at_once: requests for samples that are under way at once; others wait."""
        self.url = url
        self._most_at_once = most_at_once
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

        def session() -> aiohttp.ClientSession:
            """Return a new HTTP session, for one event loop."""
            import aiohttp

            return aiohttp.ClientSession(
                headers=headers,
                connector=aiohttp.TCPConnector(limit=most_at_once + 8),  # 8 for other calls while samples are drawn
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            )

        self._sessions = PerLoop(session)

    async def close(self) -> None:
        """Close the connections of every event loop."""
        await self._sessions.close()

    # ---- tokens ----------------------------------------------------------------------------------

    async def sample(
        self,
        model: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        version: int,
        stop_ids: Sequence[int],
    ) -> list[SampledResponse]:
        """Return one response for each prompt of token ids. With a seed, prompt i is sampled with `seed + i`.

        version: the version of the server's weights.
        stop_ids: all tokens that end a response.
        Raise EngineError if an answer lacks token ids or log-probabilities.
        """
        room = asyncio.Semaphore(self._most_at_once)

        async def one(index: int, prompt: Sequence[int]) -> SampledResponse:
            """Sample the response to the prompt number `index`. Raise EngineError if the server leaves out token ids or
            log-probabilities.
            """
            body: dict[str, Any] = {
                "model": model,
                "prompt": list(prompt),
                "max_tokens": params.max_tokens,
                "temperature": params.temperature,
                "top_p": params.top_p,
                **_NEUTRAL,
                "stop_token_ids": list(stop_ids),
            }
            if params.seed is not None:
                body["seed"] = params.seed + index
            async with room:
                choice, token_ids = await self._complete(body)
            reported: dict[str, Any] = choice.get("logprobs") or {}
            logprobs = [float(value) for value in reported.get("token_logprobs") or ()]
            if len(logprobs) != len(token_ids):
                raise EngineError(
                    f"{self.url} returned {len(logprobs)} log-probabilities for {len(token_ids)} tokens; "
                    "it must honour `logprobs`"
                )
            reason = "length" if choice.get("finish_reason") == "length" else "stop"
            return SampledResponse(token_ids, logprobs, [version] * len(token_ids), reason)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(index, prompt)) for index, prompt in enumerate(prompts)]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def score(self, model: str, probes: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probability of each token of each probe except the first.

        Raise EngineError if an answer lacks token ids, or log-probabilities of the prompt.
        """

        async def one(probe: Sequence[int]) -> list[float]:
            """Return the log-probability of each token of a probe except the first. Raise EngineError if the server
            does not report them.
            """
            body = {"model": model, "prompt": list(probe), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
            choice, _ = await self._complete(body)
            found: list[Mapping[str, Any] | None] = choice.get("prompt_logprobs") or []
            if len(found) != len(probe):
                raise EngineError(
                    f"{self.url} returns no log-probabilities of prompts; it must honour vLLM's `prompt_logprobs`"
                )
            return [
                float((each or {})[str(token)]["logprob"]) for token, each in zip(probe[1:], found[1:], strict=True)
            ]

        return [await one(probe) for probe in probes]  # one after another, so that no batch changes the last bits

    async def _complete(self, body: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[int]]:
        """Return the only choice of a completion, and its token ids. Raise EngineError if the server reports none."""
        answer = await self.post("/v1/completions", {**body, "logprobs": 0, "return_token_ids": True})
        choices: list[Mapping[str, Any]] = answer.get("choices") or []
        if not choices:
            raise EngineError(f"{self.url} returned no choice: {str(answer)[:_ANSWER_CHARACTERS]}")
        ids: Any = choices[0].get("token_ids")
        if not isinstance(ids, list):
            raise EngineError(
                f"{self.url} reports no token ids; it must honour `return_token_ids` (vLLM 0.10.2 and later)"
            )
        return choices[0], [int(each) for each in cast("list[Any]", ids)]

    async def models(self) -> dict[str, dict[str, Any]]:
        return {model["id"]: model for model in (await self.get("/v1/models"))["data"]}

    async def counters(self) -> dict[str, float]:
        """Return the server's metrics by name, without `vllm:`, summed over their labels."""
        sums: dict[str, float] = {}
        for name, value in _METRIC.findall(await self._text("GET", "/metrics", None)):
            sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    # ---- weights ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncGenerator[None]:
        """Hold new requests during the block, which begins when the running ones have ended."""
        await self.post("/pause?mode=wait", {})
        try:
            yield
        finally:
            await self.post("/resume", {})

    async def reload(self, folder: str) -> None:
        """Load the weights of a folder that the server's machine can read, and drop the prefix cache."""
        await self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        await self.post("/reset_prefix_cache", {})

    async def begin_transfers(self) -> None:
        """Prepare vLLM's own transfer of weights, for which the server needs `--weight-transfer-config`."""
        await self.post("/init_weight_transfer_engine", {"init_info": {"packed": False}})

    async def transfer(self, weights: SharedWeights) -> None:
        """Load weights that another process shares, and drop the prefix cache. The sharing process must keep them until
        this returns.
        """
        update = {"names": weights.names, "dtype_names": weights.dtypes, "shapes": weights.shapes}
        await self.post("/start_weight_update", {})
        await self.post("/update_weights", {"update_info": {**update, "ipc_handles_pickled": weights.handles}})
        await self.post("/finish_weight_update", {})
        await self.post("/reset_prefix_cache", {})

    async def load_adapter(self, name: str, folder: str) -> None:
        """Serve the adapter in a folder under a name, and drop the prefix cache.

        An earlier adapter of that name is unloaded first; calls of the name fail meanwhile. vLLM's option
        `load_inplace` is not used, because with it vLLM 0.32 reads the folder again at every step of every request.
        """
        if (await self.models()).get(name, {}).get("parent"):  # an adapter, and not the model itself
            await self._text("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        await self._text("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        await self.post("/reset_prefix_cache", {})

    async def set_mark(self, mark: str) -> None:
        """Give the loaded weights a name, which `mark` returns until the server is restarted."""
        await self.post("/update_weight_version", {"new_version": mark})

    async def mark(self) -> str | None:
        """Return the name that `set_mark` gave the loaded weights; another one, or None, after a restart."""
        return (await self.get("/weight_info")).get("weight_version")

    # ---- requests --------------------------------------------------------------------------------

    async def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path. Raise Unreachable if the server does not answer, and EngineError if it
        refuses the request.
        """
        return _json(path, await self._text("GET", path, None))

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a JSON object and return the answer.

        Raise Unreachable if the server does not answer, and EngineError if it refuses the request.
        """
        return _json(path, await self._text("POST", path, body))

    async def _text(self, method: str, path: str, body: Mapping[str, Any] | None) -> str:
        """Send one request and return the response's body. Raise Unreachable if the server does not respond,
        EngineError for an error status.
        """
        import aiohttp

        session = await self._sessions.get()
        try:
            async with session.request(method, self.url + path, json=body) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unreachable(f"{method} {self.url}{path}: {type(error).__name__}: {error}") from error
        if answer.status == 404 and path.partition("?")[0] not in _ROUTES_WITH_404:
            raise EngineError(
                f"{self.url} has no {path.partition('?')[0]}; start it with VLLM_SERVER_DEV_MODE=1, and only on an "
                "address that you trust: these routes change the server"
            )
        if answer.status >= 400:
            raise EngineError(
                f"{self.url}{path} answered {answer.status}: {text[:_ANSWER_CHARACTERS]}{_hint(path, answer.status)}"
            )
        return text


def _json(path: str, text: str) -> dict[str, Any]:
    """Return an answer's JSON object; {} for no text, {"value": ...} for other JSON. Raise EngineError otherwise."""
    if not text.strip():
        return {}
    try:
        found: Any = json.loads(text)
    except ValueError as error:
        raise EngineError(
            f"{path} did not answer with JSON (is the URL that of a vLLM server?): {text[:_ANSWER_CHARACTERS]}"
        ) from error
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {"value": found}


def _hint(path: str, status: int) -> str:
    """Return the end of an error message: the remedy for an error status of this route; "" if none is known."""
    if path.endswith(("weight_transfer_engine", "weight_update", "/update_weights")):
        return (
            "; transfer='ipc' needs learner and server on one GPU, and a server started with --weight-transfer-config "
            '\'{"backend": "ipc"}\' and VLLM_ALLOW_INSECURE_SERIALIZATION=1; transfer="folder" needs neither'
        )
    if path == "/v1/load_lora_adapter":
        return "; start it with --enable-lora, --max-lora-rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    return "; give api_key=" if status in (401, 403) else ""
