"""`leyden gateway`, as a user runs it."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import sys
from pathlib import Path

import anthropic
import openai
import pytest

from leyden._lib.attempt_key import attempt_key
from leyden.cli import main
from leyden.cli.gateway import _report_targets  # pyright: ignore[reportPrivateUsage] -- the command never ends by itself
from leyden.store import SqliteLightningStore
from leyden.testing import FakeUpstream
from leyden.types import semconv
from tests.engine import tiny

LEYDEN = [sys.executable, "-c", "from leyden.cli import main; main()"]


@pytest.mark.timeout(90)
async def test_it_records_calls_in_the_store_that_is_named_and_ends_by_sigterm(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    async with SqliteLightningStore(file) as store:
        rollout = await store.start_rollout({})
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    async with FakeUpstream() as upstream:
        process = await asyncio.create_subprocess_exec(
            *LEYDEN,
            "gateway",
            *("--port", "0", "--model", f"fake={upstream.endpoint}", "--durable"),
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"LEYDEN_GATEWAY_TOKEN": "sesame", "LEYDEN_STORE": str(file)},
        )
        try:
            assert process.stdout is not None
            line = (await process.stdout.readline()).decode()
            found = re.search(r"serving fake at (http://\S+/v1), with the token", line)
            assert found, line
            async with openai.AsyncOpenAI(base_url=found[1], api_key=attempt_key("sesame", *ids)) as client:
                answer = await client.chat.completions.create(
                    model="fake", messages=[{"role": "user", "content": "hi"}]
                )
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        truth = upstream.truth(answer.id)
    async with SqliteLightningStore(file) as store:
        (span,) = await store.query_spans(*ids)
    assert span.tokens is not None
    assert list(span.tokens.response_ids) == truth.response_ids


@pytest.mark.timeout(90)
async def test_a_trained_model_is_served_from_its_folder_in_every_api(tmp_path: Path) -> None:
    folder, file = tiny.make(tmp_path / "model"), tmp_path / "store.db"
    async with SqliteLightningStore(file) as store:
        rollout = await store.start_rollout({})
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    process = await asyncio.create_subprocess_exec(
        *LEYDEN,
        "gateway",
        *("--port", "0", "--model", f"policy={folder}", "--durable", "--store", str(file)),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"LEYDEN_GATEWAY_TOKEN": "sesame"},
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        found = re.search(r"serving policy at (http://\S+/v1), with the token", line)
        assert found, line
        key, said = attempt_key("sesame", *ids), [{"role": "user", "content": "hi"}]
        async with openai.AsyncOpenAI(base_url=found[1], api_key=key) as client:
            chat = await client.chat.completions.create(model="policy", messages=said, max_tokens=4)
            response = await client.responses.create(model="policy", input="hi", max_output_tokens=4)
        root = found[1].removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=root, api_key=key) as client:
            message = await client.messages.create(model="policy", messages=said, max_tokens=4)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    async with SqliteLightningStore(file) as store:
        spans = list(await store.query_spans(*ids))
    assert [span.attributes[semconv.GEN_AI_RESPONSE_ID] for span in spans] == [chat.id, response.id, message.id]
    assert len({tuple(span.tokens.prompt_ids) for span in spans if span.tokens}) == 1
    assert all(span.tokens and len(span.tokens.response_ids) <= 4 for span in spans)


async def test_a_store_and_a_model_that_do_not_answer_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        away = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with FakeUpstream() as upstream, asyncio.timeout(10):
        models = [{"model_name": name, "endpoint": url} for name, url in (("here", upstream.endpoint), ("away", away))]
        reporting = asyncio.ensure_future(_report_targets(away, models))
        said = set[str]()
        while len(said) < 3:
            await asyncio.sleep(0.01)
            said.update(capsys.readouterr().err.splitlines())
        reporting.cancel()
    assert said == {
        f"connected to model here at {upstream.endpoint}",
        f"model away at {away} does not answer (connection refused); calls to it fail, retrying ...",
        f"the store at {away} does not answer (connection refused); calls cannot be recorded, retrying ...",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "policy"], "NAME=URL or NAME=FOLDER"),
        (["--model", "policy=./nowhere"], "there is no folder ./nowhere"),
        (["--model", "a=http://x/v1", "--model", "policy=a/b/c"], "there is no folder a/b/c"),
        (["--model", "policy=localhost:80"], "http(s) base URL"),
        (["--model", "m=http://x/v1", "--host", "0.0.0.0"], "give token, or bind to 127.0.0.1"),
        (["--model", "m=http://x/v1", "--host", "0.0.0.0", "--token", ""], "token is empty"),
        (["--model", "m=http://x/v1", "--num-workers", "2", "--store", "http://x:1", "--token", " "], "token is empty"),
        ([], "--model"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["leyden", "gateway", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    for name, value in {"handlers": [], "propagate": True, "level": logging.NOTSET}.items():
        monkeypatch.setattr(logging.getLogger("leyden"), name, value)  # as they are now, when the test is over
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code != 0
    assert message in " ".join(capsys.readouterr().err.split())
