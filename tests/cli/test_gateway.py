"""`leyden gateway`, as a user runs it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from leyden._lib.attempt_key import attempt_key
from leyden.cli import main
from leyden.cli.gateway import _report_targets  # pyright: ignore[reportPrivateUsage] -- the command never ends by itself
from leyden.cli.model_option import ModelOption
from leyden.errors import ConfigError
from leyden.store import SqliteLightningStore
from leyden.testing import FakeUpstream
from leyden.training.runs.folder import Manifest
from leyden.types import semconv
from leyden.types.run_record import RunRecord
from tests.engine import tiny

ROOT = Path(__file__).parents[2]
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


TOOL = {
    "name": "get_weather",
    "description": "Get the weather.",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
}


def make_run(
    folder: Path, *, name: str | None = None, engine: dict[str, Any] | None = None, model: bool = True
) -> Path:
    """Write what a finished run leaves, its model without content."""
    config = {"algorithm": {"name": "GRPO", "options": {"backend": {"max_length": 512, **(engine or {})}}}}
    record = RunRecord(
        run_id=f"id-of-{folder.name}",
        name=name or folder.name,
        kind="fit",
        status="succeeded",
        start_time=1.0,
        config=config,
    )
    Manifest(record).write(folder)
    if model:
        (folder / "model").mkdir()
        for file in ("config.json", "model.safetensors"):
            (folder / "model" / file).touch()
    return folder


@asynccontextmanager
async def serving(*arguments: str, cwd: Path, **environ: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run `leyden gateway`. Yield its process and the address that it prints."""
    process = await asyncio.create_subprocess_exec(
        *LEYDEN,
        "gateway",
        *("--port", "0"),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environ,
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        found = re.search(r"serving policy at (http://\S+/v1), .*; recording nothing", line)
        assert found, line
        yield process, found[1]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.timeout(120)
async def test_the_model_of_a_run_is_served_to_clients_that_know_nothing_of_leyden(tmp_path: Path) -> None:
    run = make_run(tmp_path / ".leyden" / "first", model=False)
    tiny.make(run / "model", template=tiny.TEMPLATE_WITH_TOOLS)
    said: Any = [{"role": "user", "content": "hi"}]
    token = {"LEYDEN_GATEWAY_TOKEN": "sesame"}
    async with serving("--store", "none", "--model", "policy=first", cwd=tmp_path, **token) as (process, url):
        async with openai.AsyncOpenAI(base_url=url, api_key="sesame", max_retries=0) as client:
            assert [model.id for model in (await client.models.list()).data] == ["policy"]
            chat = await client.chat.completions.create(model="policy", messages=said, max_tokens=4, temperature=0)
            text = chat.choices[0].message.content
            parts = await client.chat.completions.create(
                model="policy", messages=said, max_tokens=4, temperature=0, stream=True
            )
            assert "".join([part.choices[0].delta.content or "" async for part in parts if part.choices]) == text
            plain = await client.completions.create(model="policy", prompt="hi", max_tokens=4)
            assert plain.usage is not None and plain.usage.completion_tokens == 4
            whole = [part async for part in await client.completions.create(model="policy", prompt="hi", stream=True)]
            assert whole
            first = await client.responses.create(model="policy", input="hi", max_output_tokens=4, temperature=0)
            assert first.output_text == text
            events = await client.responses.create(
                model="policy", input="hi", max_output_tokens=4, temperature=0, stream=True
            )
            deltas = [event.delta async for event in events if event.type == "response.output_text.delta"]
            assert "".join(deltas) == text
            second = await client.responses.create(
                model="policy", input="again", previous_response_id=first.id, max_output_tokens=4
            )
            assert second.usage is not None and second.usage.input_tokens > 20
            called = await client.chat.completions.create(
                model="policy",
                messages=said,
                tools=[{"type": "function", "function": TOOL}],
                tool_choice="required",
                max_tokens=200,
            )
            calls = called.choices[0].message.tool_calls
            assert calls and {json.loads(call.function.arguments)["city"] for call in calls} <= {"Rome", "Oslo"}
        async with openai.AsyncOpenAI(base_url=url, api_key="another", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="its token as the API key"):
                await client.chat.completions.create(model="policy", messages=said, max_tokens=4)
        root = url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=root, api_key="sesame", max_retries=0) as client:
            message = await client.messages.create(
                model="policy", messages=said, max_tokens=4, extra_body={"temperature": 0}
            )
            assert [block.text for block in message.content if block.type == "text"] == [text]
            async with client.messages.stream(model="policy", messages=said, max_tokens=4) as stream:
                assert (await stream.get_final_message()).usage.output_tokens <= 4
            used = await client.messages.create(
                model="policy",
                messages=said,
                max_tokens=200,
                tools=[{"name": TOOL["name"], "input_schema": TOOL["parameters"]}],
                tool_choice={"type": "any"},
            )
            assert {block.name for block in used.content if block.type == "tool_use"} == {"get_weather"}
            counted = await client.messages.count_tokens(model="policy", messages=said)
            assert counted.input_tokens == message.usage.input_tokens
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_ctrl_c_while_a_model_is_loaded_ends_the_gateway_at_once(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    slow, pipe = tmp_path / "slow" / "transformers.py", tmp_path / "pipe"
    slow.parent.mkdir()
    slow.write_text(f"open({str(pipe)!r}).read()")  # until the writer closes it
    os.mkfifo(pipe)
    process = await asyncio.create_subprocess_exec(
        *LEYDEN,
        *("gateway", "--port", "0", "--store", "none", "--model", f"policy={make_run(tmp_path / 'run')}"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": f"{slow.parent}:{ROOT}"},
    )
    writer: int | None = None
    try:
        while writer is None and process.returncode is None:
            with contextlib.suppress(OSError):  # until it is being read
                writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            await asyncio.sleep(0.01)
        process.send_signal(number)
        out, err = await asyncio.wait_for(process.communicate(), 30)
    finally:
        if writer is not None:
            os.close(writer)
        if process.returncode is None:
            process.kill()
    assert (process.returncode, out) == (status, b"")
    assert err.decode().splitlines() == [f"loading policy from {tmp_path}/run/model ..."]


@pytest.mark.parametrize("address", ["second", "a name", "id-of-second", "latest", "{run}", "{run}/", "{run}/model"])
def test_a_run_stands_for_its_model_and_the_options_of_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / ".leyden" / "second", name="a name", engine={"tool_parser": "hermes", "device": "cuda"})
    make_run(tmp_path / ".leyden" / "prompts", model=False)
    found = ModelOption.of(f"policy={address.format(run=run)}")
    assert found.is_folder and Path(found.address).resolve() == run / "model"
    assert found.engine == {"max_length": 512, "tool_parser": "hermes", "device": "cuda"}


@pytest.mark.parametrize(
    ("address", "fault"),
    [
        ("sec", r"'sec' is no run, and the beginning of 'second'; write the whole name, or a folder"),
        ("prompts", r"run prompts has no model/ folder \(succeeded\)"),
        (".leyden/prompts", r"run prompts has no model/ folder"),
        ("damaged", r"run\.json is damaged"),
        ("latest", r"run \w+ has no model"),
    ],
)
def test_a_run_without_a_model_and_half_a_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, fault: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("second", "prompts", "damaged"):
        make_run(tmp_path / ".leyden" / name, model=False)
    (tmp_path / ".leyden" / "damaged" / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=fault):
        ModelOption.of(f"policy={address}")


@pytest.mark.parametrize("address", ["downloaded", "org/name", "http://127.0.0.1:8000/v1"])
def test_another_name_is_one_of_the_hub_or_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / ".leyden" / "first", model=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--downloaded").mkdir()
    assert ModelOption.of(f"policy={address}") == ModelOption("policy", address, is_folder="://" not in address)


@pytest.mark.parametrize("inside", [True, False])
def test_serve_says_what_serves_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], inside: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / (".leyden" if inside else "my runs") / "first", engine={"model_name": "judge"})
    monkeypatch.setattr(sys, "argv", ["leyden", "serve", "first" if inside else str(run)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    command = capsys.readouterr().err.splitlines()[-1].strip()
    assert command == f"leyden gateway --store none --model {'judge=first' if inside else shlex.quote(f'judge={run}')}"
    option = shlex.split(command)[-1]
    assert Path(ModelOption.of(option).address).resolve() == run / "model"


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
        (["--model", "policy"], "NAME=URL, NAME=FOLDER or NAME=RUN"),
        (["--model", "m=http://x/v1", "--store", "none", "--durable"], "--durable belongs to a gateway that records"),
        (["--model", "m=http://x/v1", "--store", "none", "--spool", "s.jsonl"], "--spool belongs to a gateway"),
        (["--model", "m=http://x/v1", "--store", "none", "--live-key", "k"], "--live-key belongs to a gateway"),
        (["--model", "m=http://x/v1", "--store", "none", "--num-workers", "2"], "--num-workers belongs to a gateway"),
        (["--model", "policy=./nowhere"], "there is no folder ./nowhere"),
        (["--model", "a=http://x/v1", "--model", "policy=a/b/c"], "there is no folder a/b/c"),
        (["--model", "policy=localhost:80"], "http(s) base URL"),
        (["--model", "m=http://x/v1", "--host", "0.0.0.0"], "give token, or bind to 127.0.0.1"),
        (["--model", "m=http://x/v1", "--host", "0.0.0.0", "--token", ""], "token is empty"),
        (["--model", "m=http://x/v1", "--num-workers", "2", "--store", "http://x:1", "--token", " "], "token is empty"),
        (["--model", "m=http://x/v1", "--host", "0.0.0.0", "--store", "none"], "give token, or bind to 127.0.0.1"),
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
