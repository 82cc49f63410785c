"""llama.cpp in this process, asked over its own HTTP server."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import xllamacpp


class LlamaCpp:
    def __init__(self, address: str) -> None:
        self._address = address

    def tokens(self, text: str) -> list[int]:
        found = self._post("/tokenize", {"content": text, "add_special": True, "parse_special": True})
        return found["tokens"]

    def log_probabilities(self, ids: Sequence[int], n: int) -> dict[int, float]:
        """Return those of the `n` likeliest next tokens."""
        asked = {"prompt": list(ids), "n_predict": 1, "n_probs": n, "temperature": -1, "cache_prompt": False}
        found = self._post("/completion", asked)["completion_probabilities"][0]["top_logprobs"]
        return {token["id"]: token["logprob"] for token in found}

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


@contextlib.contextmanager
def llama_cpp(file: Path, *, context: int = 1024) -> Generator[LlamaCpp]:
    options = xllamacpp.CommonParams()
    options.model.path = str(file)
    options.n_ctx, options.n_parallel, options.port, options.warmup = context, 1, 0, False
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    options.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(options)
    try:
        yield LlamaCpp(server.listening_address)
    finally:
        del server
