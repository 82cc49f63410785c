"""The endpoint as an official client sees it, and what it refuses."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from leyden.engine import EmbeddedBackend, SamplingParams
from leyden.errors import ConfigError, EngineError
from tests.engine import tiny
from tests.engine.waiting import until_idle, until_sampling

MESSAGES = [{"role": "user", "content": "guess"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def backend(folder: Path) -> AsyncIterator[EmbeddedBackend]:
    async with EmbeddedBackend(folder) as backend:
        yield backend


@pytest.fixture
async def client(backend: EmbeddedBackend) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=backend.endpoint().endpoint, api_key="none", max_retries=0) as client:
        yield client


async def post(backend: EmbeddedBackend, body: Any, path: str = "/chat/completions", **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = backend.endpoint().endpoint + path
    async with aiohttp.ClientSession() as session, session.post(url, data=io.BytesIO(data), headers=headers) as answer:
        return answer.status, await answer.json()


async def test_the_official_client_gets_an_answer_with_ids_and_logprobs(client: openai.AsyncOpenAI):
    answer = await client.chat.completions.create(
        model="policy", messages=MESSAGES, max_tokens=6, logprobs=True, seed=3, extra_body={"return_token_ids": True}
    )
    tokenizer = tiny.tokenizer()
    choice = answer.choices[0]
    assert answer.id.startswith("chatcmpl-")
    assert answer.prompt_token_ids == tokenizer.encode(
        tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True), add_special_tokens=False
    )
    assert choice.message.role == "assistant"
    assert choice.message.content == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
    assert choice.logprobs is not None
    assert len(choice.logprobs.content) == len(choice.token_ids) == answer.usage.completion_tokens
    assert choice.policy_versions == [0] * len(choice.token_ids)


async def test_the_synchronous_client_too(backend: EmbeddedBackend):
    def ask() -> str:
        with openai.OpenAI(base_url=backend.endpoint().endpoint, api_key="none", max_retries=0) as client:
            return (
                client.chat.completions.create(model="policy", messages=MESSAGES, max_tokens=3).choices[0].finish_reason
            )

    assert await asyncio.to_thread(ask) in ("length", "stop")


async def test_a_stream_says_the_same_as_the_whole_answer(client: openai.AsyncOpenAI):
    asked: dict[str, Any] = {
        "model": "policy",
        "messages": MESSAGES,
        "max_tokens": 40,
        "seed": 11,
        "logprobs": True,
        "extra_body": {"return_token_ids": True},
    }
    whole = await client.chat.completions.create(**asked)
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    ]
    *parts, last = chunks
    assert last.choices == []
    assert last.usage == whole.usage
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[0].prompt_token_ids == whole.prompt_token_ids
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in parts[1:])
    choice = whole.choices[0]
    assert [token for chunk in parts for token in chunk.choices[0].token_ids] == choice.token_ids
    assert "".join(chunk.choices[0].delta.content for chunk in parts) == choice.message.content
    streamed = [token.logprob for chunk in parts for token in chunk.choices[0].logprobs.content]
    assert streamed == pytest.approx([token.logprob for token in choice.logprobs.content], abs=1e-5)
    assert [chunk.choices[0].finish_reason for chunk in parts][-1] == choice.finish_reason
    assert {chunk.choices[0].finish_reason for chunk in parts[:-1]} <= {None}


async def test_each_token_has_its_bytes_and_its_place_whole_and_streamed(client: openai.AsyncOpenAI):
    """A random model writes many parts of characters, which no text can show."""
    asked: dict[str, Any] = {"model": "policy", "prompt": "abc", "max_tokens": 40, "seed": 5, "logprobs": 0}
    choice = (await client.completions.create(**asked)).choices[0]
    offsets = choice.logprobs.text_offset
    assert len(offsets) == len(choice.logprobs.tokens) == 40
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert 0 < offsets[-1] <= len(choice.text)
    parts = [chunk.choices[0] async for chunk in await client.completions.create(**asked, stream=True)]
    assert [place for part in parts for place in part.logprobs.text_offset] == offsets
    chat = await client.chat.completions.create(
        model="policy", messages=MESSAGES, max_tokens=40, seed=5, logprobs=True, extra_body={"return_token_ids": True}
    )
    tokenizer, tokens = tiny.tokenizer(), chat.choices[0].logprobs.content
    special = {*tokenizer.all_special_ids}
    said = [token.bytes for token, id_ in zip(tokens, chat.choices[0].token_ids, strict=True) if id_ not in special]
    assert b"".join(map(bytes, said)).decode(errors="replace") == chat.choices[0].message.content
    assert all(len(each) == 1 for each in said)


async def test_without_asking_there_are_no_ids_and_no_logprobs(backend: EmbeddedBackend):
    _, answer = await post(backend, {"model": "policy", "messages": MESSAGES, "max_tokens": 2})
    assert "prompt_token_ids" not in answer
    assert set(answer["choices"][0]) == {"index", "finish_reason", "logprobs", "message"}
    assert answer["choices"][0]["logprobs"] is None


async def test_several_choices_differ_and_are_the_same_every_time(client: openai.AsyncOpenAI):
    async def ask() -> list[Any]:
        answer = await client.chat.completions.create(
            model="policy", messages=MESSAGES, n=3, max_tokens=8, seed=1, extra_body={"return_token_ids": True}
        )
        return [choice.token_ids for choice in answer.choices]

    first = await ask()
    assert len({tuple(ids) for ids in first}) == 3
    assert await ask() == first


async def test_completions_take_text_or_token_ids(client: openai.AsyncOpenAI):
    options: dict[str, Any] = {
        "model": "policy",
        "max_tokens": 5,
        "temperature": 0,
        "extra_body": {"return_token_ids": True},
    }
    by_text = await client.completions.create(prompt="hello", **options)
    by_ids = await client.completions.create(prompt=tiny.tokenizer().encode("hello"), **options)
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == tiny.tokenizer().encode("hello")
    assert by_text.choices[0].token_ids == by_ids.choices[0].token_ids
    assert by_text.choices[0].text == by_ids.choices[0].text
    text = "".join(
        [c.choices[0].text async for c in await client.completions.create(prompt="hello", stream=True, **options)]
    )
    assert text == by_text.choices[0].text


async def test_a_stop_string_ends_the_text_before_it_and_the_ids_after_it(client: openai.AsyncOpenAI):
    asked: dict[str, Any] = {
        "model": "policy",
        "messages": MESSAGES,
        "max_tokens": 120,
        "seed": 2,
        "extra_body": {"return_token_ids": True},
    }
    free = (await client.chat.completions.create(**asked)).choices[0].message.content
    printable = [c for c in free if c.isascii() and c.isalnum()]
    stop = printable[3]
    held = (await client.chat.completions.create(**asked, stop=[stop, "never this"])).choices[0]
    assert held.message.content == free[: free.index(stop)]
    assert held.finish_reason == "stop"
    assert tiny.tokenizer().decode(held.token_ids).endswith(stop)
    pieces = [
        c.choices[0].delta.content async for c in await client.chat.completions.create(**asked, stop=stop, stream=True)
    ]
    assert "".join(pieces) == held.message.content


async def test_content_in_text_parts_is_one_text(backend: EmbeddedBackend):
    parts = [{"role": "user", "content": [{"type": "text", "text": "gu"}, {"type": "text", "text": "ess"}]}]
    ids = []
    for messages in (MESSAGES, parts):
        _, answer = await post(
            backend, {"model": "policy", "messages": messages, "max_tokens": 1, "return_token_ids": True}
        )
        ids.append(answer["prompt_token_ids"])
    assert ids[0] == ids[1]


async def test_an_answer_stops_at_the_end_of_the_context(folder: Path):
    async with EmbeddedBackend(folder, max_length=30) as backend:
        status, answer = await post(backend, {"model": "policy", "prompt": [1] * 25, "max_tokens": 50}, "/completions")
        assert status == 200
        assert answer["usage"]["completion_tokens"] <= 5


BAD: list[tuple[Any, int, str]] = [
    (b"{", 400, "not JSON"),
    (b"[1]", 400, "list"),
    ({"messages": MESSAGES}, 400, "'model' is missing"),
    ({"model": "policy"}, 400, "'messages' is missing"),
    ({"model": "gpt-9", "messages": MESSAGES}, 404, "'gpt-9' is not served here; this endpoint serves 'policy'"),
    ({"model": "policy", "messages": []}, 400, "at least one message, got []"),
    ({"model": "policy", "messages": ["hi"]}, 400, 'messages[0] must be an object, got "hi"'),
    ({"model": "policy", "messages": [{"content": "hi"}]}, 400, "messages[0].role must be a string, got null"),
    ({"model": "policy", "messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content must be a string or"),
    (
        {"model": "policy", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        400,
        "must be a text part",
    ),
    ({"model": "policy", "messages": MESSAGES, "temperature": "hot"}, 400, "'temperature' must be a number from 0"),
    ({"model": "policy", "messages": MESSAGES, "temperature": -1}, 400, "got -1"),
    ({"model": "policy", "messages": MESSAGES, "top_p": 0}, 400, "'top_p'"),
    ({"model": "policy", "messages": MESSAGES, "max_tokens": 0}, 400, "'max_tokens' must be an integer of at least 1"),
    ({"model": "policy", "messages": MESSAGES, "max_tokens": 1.5}, 400, "got 1.5"),
    ({"model": "policy", "messages": MESSAGES, "n": True}, 400, "'n'"),
    ({"model": "policy", "messages": MESSAGES, "seed": "x"}, 400, "'seed'"),
    ({"model": "policy", "messages": MESSAGES, "stream": 1}, 400, "'stream'"),
    ({"model": "policy", "messages": MESSAGES, "stop": [3]}, 400, "'stop'"),
    (
        {"model": "policy", "messages": MESSAGES, "response_format": {"type": "xml"}},
        400,
        "response_format.type must be",
    ),
    ({"model": "policy", "messages": MESSAGES, "best_of_breed": 1}, 400, "'best_of_breed' is not supported"),
    ({"model": "policy", "messages": [{"role": "user", "content": "x" * 600}]}, 400, "the context has 512"),
]


@pytest.mark.parametrize(("body", "status", "says"), BAD, ids=[says for _, _, says in BAD])
async def test_a_bad_request_is_told_what_is_wrong(backend: EmbeddedBackend, body: Any, status: int, says: str):
    got, answer = await post(backend, body)
    assert got == status
    assert says in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


async def test_the_official_client_shows_the_reason(client: openai.AsyncOpenAI):
    with pytest.raises(openai.BadRequestError, match="'frequency_penalty' must be 0"):
        await client.chat.completions.create(model="policy", messages=MESSAGES, frequency_penalty=1.5)
    with pytest.raises(openai.NotFoundError, match="serves 'policy'"):
        await client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="999"):
        await client.completions.create(model="policy", prompt=[999])


async def test_models_health_and_unknown_places(backend: EmbeddedBackend, client: openai.AsyncOpenAI):
    assert [model.id async for model in client.models.list()] == ["policy"]
    root = backend.endpoint().endpoint.removesuffix("/v1")
    async with aiohttp.ClientSession() as session:
        async with session.get(root + "/health") as answer:
            assert await answer.json() == {"status": "ok"}
        for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
            async with session.request(method, root + path) as answer:
                assert answer.status == status
                assert path in (await answer.json())["error"]["message"]


async def test_a_page_of_another_site_samples_nothing(backend: EmbeddedBackend):
    body = {"model": "policy", "messages": MESSAGES, "max_tokens": 1}
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Host": "evil.example"}):
        status, told = await post(backend, body, **headers)
        assert (status, told["error"]["code"]) == (403, "foreign_request")
    assert (await backend.statistics()).requests == 0
    assert (await post(backend, body, Origin=backend.endpoint().endpoint.removesuffix("/v1")))[0] == 200


async def test_an_api_key_is_demanded_when_there_is_one(folder: Path):
    async with EmbeddedBackend(folder, api_key="secret") as backend:
        assert backend.endpoint().api_key == "secret"
        body = {"model": "policy", "messages": MESSAGES, "max_tokens": 1}
        assert (await post(backend, body))[0] == 401
        assert (await post(backend, body, Authorization="Bearer wrong"))[0] == 401
        assert (await post(backend, body, Authorization="Bearer secret"))[0] == 200


async def test_a_deterministic_endpoint_demands_a_seed(folder: Path):
    async with EmbeddedBackend(folder, deterministic=True) as backend:
        status, answer = await post(backend, {"model": "policy", "messages": MESSAGES})
        assert status == 400
        assert "'seed' is missing" in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_takes_its_row_with_it(stream: bool):
    model = tiny.model(max_position_embeddings=4096)
    model.generation_config.eos_token_id = None
    async with EmbeddedBackend(model) as backend:
        body = {"model": "policy", "prompt": [1, 2], "max_tokens": 4000, "stream": stream}
        asking = asyncio.create_task(post(backend, body, "/completions"))
        await until_sampling(backend)
        asking.cancel()
        await until_idle(backend)
        assert (await backend.statistics()).response_tokens < 3000


async def test_without_a_tokenizer_token_ids_still_work():
    async with EmbeddedBackend(tiny.model()) as backend:
        status, answer = await post(
            backend, {"model": "policy", "prompt": [1, 2], "max_tokens": 2, "return_token_ids": True}, "/completions"
        )
        assert status == 200
        assert answer["choices"][0]["token_ids"]
        status, answer = await post(backend, {"model": "policy", "messages": MESSAGES})
        assert status == 400
        assert "no tokenizer" in answer["error"]["message"]


async def test_many_clients_at_once_each_get_their_own_answer(backend: EmbeddedBackend):
    url = backend.endpoint().endpoint + "/completions"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(i: int) -> None:
            body = {"model": "policy", "prompt": [1, i, 3], "max_tokens": 3, "temperature": 0, "return_token_ids": True}
            async with session.post(url, json=body) as answer:
                data = await answer.json()
                assert data["prompt_token_ids"] == [1, i, 3]
                got[i] = data["choices"][0]["token_ids"]

        got: dict[int, list[int]] = {}
        await asyncio.gather(*(ask(i) for i in range(200)))
    samples = await backend.sample([[1, i, 3] for i in range(200)], SamplingParams(max_tokens=3, temperature=0))
    assert [got[i] for i in range(200)] == [sample.token_ids for sample in samples]


async def test_a_taken_port_is_named(backend: EmbeddedBackend, folder: Path):
    port = int(backend.endpoint().endpoint.rsplit(":", 1)[1].removesuffix("/v1"))
    second = EmbeddedBackend(folder, port=port)
    with pytest.raises(EngineError, match=f"port={port}"):
        await second.start()
    await second.stop()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"host": "0.0.0.0"}, "give api_key"),
        ({"host": "0.0.0.0", "api_key": ""}, "api_key is empty"),
        ({"max_batch_rows": 0}, "max_batch_rows is 0"),
        ({"max_tokens_per_microbatch": 0}, "max_tokens_per_microbatch is 0"),
        ({"max_length": 1}, "max_length is 1"),
    ],
)
def test_a_wrong_option_is_refused_at_once(folder: Path, options: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        EmbeddedBackend(folder, **options)


async def test_what_cannot_be_loaded_says_why(tmp_path: Path, folder: Path):
    with pytest.raises(EngineError, match=rf"there is no folder .*nothing.* \(looked for {re.escape(str(tmp_path))}"):
        await EmbeddedBackend(tmp_path / "nothing").start()
    with pytest.raises(EngineError, match=r"there is no folder '\./models/nothing' "):
        await EmbeddedBackend("./models/nothing").start()
    with pytest.raises(ConfigError, match="float99"):
        await EmbeddedBackend(folder, dtype="float99").start()
    with pytest.raises(ConfigError, match="context of 512"):
        await EmbeddedBackend(folder, max_length=1000).start()


@pytest.mark.parametrize("values", [b"[],", b"1,0,", b'"",', b"[" * 300])
async def test_a_request_of_too_much_work_is_refused_before_it_is_parsed(backend: EmbeddedBackend, values: bytes):
    body = b'{"model": "policy", "prompt": [' + values * (2**23 // len(values)) + b"1]}"
    for path in ("/completions", "/chat/completions"):
        status, told = await post(backend, body, path)
        assert status == 413
        assert "too much work" in told["error"]["message"]
