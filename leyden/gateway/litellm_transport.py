"""Call models through LiteLLM, for providers whose API is neither OpenAI's nor Anthropic's.

This is the only module that imports LiteLLM, and it does so at the first call, because the import takes seconds and 180
MB. LiteLLM only translates: its retries, its logging and its price list from the network are switched off. Calls are
recorded as text, because providers return no token ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from leyden.dialects import CHAT, DONE, Translation, sse_event
from leyden.dialects.sampling import SAMPLING_PARAMETERS, WITH_ANOTHER, is_neutral
from leyden.gateway.asgi import Headers, Scope
from leyden.gateway.transport import ServerGone, UpstreamResponse
from leyden.gateway.upstream import UpstreamModel

_FIELDS_OF_OPENAI = (
    "messages prompt suffix input encoding_format dimensions stream stream_options n best_of echo seed stop max_tokens "
    "max_completion_tokens temperature top_p presence_penalty frequency_penalty logit_bias logprobs top_logprobs tools tool_choice "
    "parallel_tool_calls functions function_call response_format web_search_options reasoning_effort verbosity modalities audio "
    "prediction model user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention"
)
_OTHER_FIELDS = (
    "top_k min_p min_tokens repetition_penalty stop_token_ids thinking chat_template_kwargs return_token_ids"
)
_ALLOWED = {*_FIELDS_OF_OPENAI.split(), *_OTHER_FIELDS.split()}
"""The fields that an agent may set in its request.

Others are LiteLLM's own options: `api_base`, for instance, would send the operator's key to an address of the agent's
choice. Only `litellm_params` may set those.
"""
_FUNCTIONS = {"chat": "acompletion", "completions": "atext_completion", "embeddings": "aembedding"}
"""LiteLLM's function for each dialect."""
_BAD_REQUEST = 400
_SERVER_ERROR = 500


class LitellmTransport:
    """Calls `litellm.acompletion`, `atext_completion` or `aembedding`, as a `Transport`."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._litellm: Any = None

    async def close(self) -> None:
        """Close the connections of this event loop, which LiteLLM keeps by the loop's id."""
        if self._litellm is None:
            return
        clients: dict[str, Any] = self._litellm.in_memory_llm_clients_cache.cache_dict
        loop = f"-{id(asyncio.get_running_loop())}"
        for key in [key for key in clients if key.endswith(loop)]:
            client = clients.pop(key)
            with contextlib.suppress(Exception):
                await client.close()

    async def is_up(self, model: UpstreamModel) -> bool:
        """Return True: a provider is never the run's own engine, so its absence ends no run."""
        return True

    @asynccontextmanager
    async def ask(
        self, model: UpstreamModel, translation: Translation, body: bytes, scope: Scope, *, route: str | None = None
    ) -> AsyncGenerator[UpstreamResponse]:
        """Send the request through LiteLLM, and yield the response. A request with a field that agents may not set gets
        an error (status 400) without a call.

        Raise ServerGone or TimeoutError, also while the response is read.
        """
        wished: dict[str, Any] = json.loads(body)
        for name, value in sorted(wished.items()):
            if name in _ALLOWED or value is None or name in WITH_ANOTHER:
                continue
            if name not in SAMPLING_PARAMETERS or not is_neutral(name, value, wished):
                message = f"an agent may not set {name} for LiteLLM; the gateway's operator can set it in the model's litellm_params"
                error = CHAT.error(_BAD_REQUEST, message, code="unsupported_parameter", param=name)
                yield _Whole(error, status=_BAD_REQUEST)
                return
        self._litellm, openai = await asyncio.to_thread(_imported)  # LiteLLM's errors derive from OpenAI's
        asked = {name: value for name, value in wished.items() if name in _ALLOWED}
        given: dict[str, Any] = {**(model.litellm_params or {}), **asked, "model": model.name_there}
        function = getattr(self._litellm, _FUNCTIONS[translation.upstream.name])
        began = False
        try:
            async with asyncio.timeout(self._timeout_seconds):
                try:
                    result = await function(**given, timeout=self._timeout_seconds, max_retries=0, num_retries=0)
                except openai.APIStatusError as error:
                    status = int(getattr(error, "status_code", None) or _SERVER_ERROR)
                    answer: UpstreamResponse = _Whole(CHAT.error(status, str(error)), status=status)
                else:
                    answer = _Streamed(result) if given.get("stream") is True else _Whole(_json(result))
                began = True
                yield answer
        except openai.APITimeoutError as error:
            raise TimeoutError(str(error)) from error
        except openai.OpenAIError as error:
            raise ServerGone(error, began=began) from error


class _Whole:
    """A response in one piece, as an `UpstreamResponse`."""

    content_type = "application/json"

    def __init__(self, body: bytes, *, status: int = 200) -> None:
        self.status = status
        self._body = body

    @property
    def headers(self) -> Headers:
        return [(b"content-type", self.content_type.encode())]

    async def read(self) -> bytes:
        return self._body

    async def pieces(self) -> AsyncIterator[bytes]:
        yield self._body


class _Streamed:
    """A stream of LiteLLM's chunks, as an `UpstreamResponse`."""

    status = 200
    content_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[Any]) -> None:
        self._chunks = chunks

    @property
    def headers(self) -> Headers:
        return [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def pieces(self) -> AsyncIterator[bytes]:
        async for chunk in self._chunks:
            yield sse_event(_json(chunk))
        yield sse_event(DONE)


def _imported() -> tuple[Any, Any]:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # read when litellm is imported
    litellm: Any = importlib.import_module("litellm")
    litellm.telemetry = False
    litellm.suppress_debug_info = True  # else it prints hints to standard output
    return litellm, importlib.import_module("openai")


def _json(model: Any) -> bytes:
    return model.model_dump_json(exclude_none=True, exclude_unset=True).encode()
