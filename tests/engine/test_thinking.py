"""What a request says of thinking reaches the chat template in every API, and the record has the prompt that it gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp

from leyden.engine import EmbeddedBackend
from leyden.gateway import LLMProxy
from leyden.store import InMemoryLightningStore
from tests.engine import tiny
from tests.gateway.caller import new_caller

QWEN3 = (Path(__file__).parent / "templates/qwen3.jinja").read_text()
SHOWS = "{% if reasoning_effort %}<{{ reasoning_effort }}>{% endif %}{% if thinking_budget %}<{{ thinking_budget }}>{% endif %}"
TOKENIZER = tiny.tokenizer(QWEN3 + SHOWS)
SAID = [{"role": "user", "content": "hi"}]
OFF, ON = "<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|im_start|>assistant\n"
THINKING: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {}, ON),
    ("chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}, OFF),
    ("chat/completions", {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, ON),
    ("chat/completions", {"reasoning_effort": "none"}, OFF),
    ("chat/completions", {"reasoning_effort": "low"}, ON + "<low>"),
    ("chat/completions", {"verbosity": "low", "functions": [], "function_call": "none"}, ON),
    ("messages", {"thinking": {"type": "disabled"}}, OFF),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, ON + "<1024>"),
    ("messages", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, ON + "<max>"),
    ("messages", {"output_config": {"effort": "low"}}, ON + "<low>"),
    ("messages", {"context_management": {"edits": []}, "metadata": {"user_id": "u"}, "service_tier": "auto"}, ON),
    ("messages", {"chat_template_kwargs": {"enable_thinking": False}}, OFF),
    ("responses", {"reasoning": {"effort": "none"}}, OFF),
    ("responses", {"reasoning": {"effort": "high", "summary": "auto"}}, ON + "<high>"),
    ("responses", {"text": {"verbosity": "medium"}, "store": True, "prompt_cache_key": "k"}, ON),
    ("responses", {"chat_template_kwargs": {"enable_thinking": False}}, OFF),
]


async def test_the_record_has_the_prompt_that_the_template_gave() -> None:
    async with (
        EmbeddedBackend(tiny.model(max_position_embeddings=512), tokenizer=TOKENIZER) as backend,
        InMemoryLightningStore() as store,
        LLMProxy(model_list=[backend.endpoint()], store=store) as proxy,
    ):
        caller = await new_caller(proxy, store)
        headers = {"Authorization": f"Bearer {caller.llm.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            for path, fields, _ in THINKING:
                said = (
                    {"input": "hi", "max_output_tokens": 1}
                    if path == "responses"
                    else {"messages": SAID, "max_tokens": 1}
                )
                body = {"model": "policy", **said, **fields}
                async with session.post(f"{caller.llm.endpoint}/{path}", json=body) as answer:
                    assert answer.status == 200, (fields, await answer.text())
        tokens = [span.tokens for span in await caller.spans()]
    for (_, fields, ends), record in zip(THINKING, tokens, strict=True):
        assert record is not None
        assert TOKENIZER.decode(record.prompt_ids) == f"<|im_start|>user\nhi<|im_end|>\n{ends}", fields
