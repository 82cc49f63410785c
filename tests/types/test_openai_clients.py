"""`LLM.openai`: clients of the official package, cheap to make, on connections that rollouts share."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from leyden.errors import ConfigError
from leyden.testing import FakeUpstream
from leyden.types import LLM, ProxyLLM

QUESTION = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}


def llm_at(upstream: FakeUpstream, path: str = "", api_key: str | None = None) -> LLM:
    return LLM(endpoint=upstream.endpoint + path, model="fake", api_key=api_key)


async def test_clients_of_one_loop_share_connections_and_keep_their_own_address_and_key() -> None:
    async with FakeUpstream() as upstream:
        first, second = llm_at(upstream, api_key="one").openai(), llm_at(upstream, "/other", api_key="two").openai()
        assert first._client is second._client
        assert (str(second.base_url), second.api_key) == (f"{upstream.endpoint}/other/", "two")
        answer = await first.chat.completions.create(**QUESTION)
        assert answer.choices[0].message.content


async def test_a_client_that_an_agent_closes_leaves_the_connections_to_the_others() -> None:
    async with FakeUpstream() as upstream:
        async with llm_at(upstream).openai() as client:
            await client.chat.completions.create(**QUESTION)
        await client.with_options(timeout=5).close()
        again = await llm_at(upstream).openai().chat.completions.create(**QUESTION)
        assert again.choices[0].message.content


async def test_a_synchronous_agent_in_a_thread_has_a_client_on_the_connections_of_its_process() -> None:
    async with FakeUpstream() as upstream:

        def ask() -> str | None:
            with llm_at(upstream).openai_sync() as client:
                return client.chat.completions.create(**QUESTION).choices[0].message.content

        assert all(await asyncio.gather(*(asyncio.to_thread(ask) for _ in range(4))))


def test_each_event_loop_has_connections_of_its_own() -> None:
    async def ask_and_note_pool() -> object:
        async with FakeUpstream() as upstream:
            client = llm_at(upstream).openai()
            await client.chat.completions.create(**QUESTION)
            return client._client

    one, other = asyncio.run(ask_and_note_pool()), asyncio.run(ask_and_note_pool())
    assert one is not other
    assert one.is_closed  # pyright: ignore[reportAttributeAccessIssue] -- httpx's client, closed by the end of its loop


def test_without_a_running_loop_the_error_names_the_synchronous_client() -> None:
    with pytest.raises(ConfigError, match=r"openai_sync\(\)"):
        LLM(endpoint="http://127.0.0.1:1/v1", model="m").openai()


async def test_a_proxy_without_its_attempt_is_refused_and_with_it_has_the_attempts_address() -> None:
    proxy = ProxyLLM(endpoint="http://127.0.0.1:1/v1", model="m")
    with pytest.raises(ConfigError, match="rollout_id and attempt_id"):
        proxy.openai()
    assert str(proxy.openai("r", "a").base_url).endswith("/rollout/r/attempt/a/v1/")


async def test_a_key_is_the_resources_own_or_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert LLM(endpoint="http://127.0.0.1:1/v1", model="m").openai().api_key == "EMPTY"
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    assert LLM(endpoint="http://127.0.0.1:1/v1", model="m").openai().api_key == "from-the-environment"
    assert LLM(endpoint="http://127.0.0.1:1/v1", model="m", api_key="own").openai().api_key == "own"


async def test_a_client_costs_far_less_than_a_connection_pool() -> None:
    llm = LLM(endpoint="http://127.0.0.1:1/v1", model="m")
    llm.openai()
    began = time.thread_time()
    for _ in range(100):
        llm.openai()
    assert (time.thread_time() - began) / 100 < 0.002  # a pool of its own: 0.02


PROGRAM = """
import asyncio, gc, warnings
from leyden.testing import FakeUpstream
from leyden.types import LLM

QUESTION = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}

async def main():
    async with FakeUpstream() as upstream:
        llm = LLM(endpoint=upstream.endpoint, model="fake")
        await llm.openai().chat.completions.create(**QUESTION)
        await asyncio.to_thread(lambda: llm.openai_sync().chat.completions.create(**QUESTION))

asyncio.run(main())
gc.collect()
print("done")
"""


@pytest.mark.slow
@pytest.mark.merge
def test_the_end_of_loop_and_process_closes_the_connections_without_a_warning() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", PROGRAM], capture_output=True, text=True
    )
    assert (ended.stdout, ended.stderr) == ("done\n", "")


def test_a_missing_package_is_named_with_its_extra() -> None:
    program = (
        "import asyncio, sys; sys.modules['openai'] = None\n"
        "from leyden.types import LLM\n"
        "assert 'openai.types' not in sys.modules\n"
        "LLM(endpoint='http://x/v1', model='m').openai_sync()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "LLM.openai() needs openai" in ended.stderr
    assert "install the extra 'openai'" in ended.stderr
