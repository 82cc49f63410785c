"""`leyden serve` over HTTP: a request, its end and feedback, and what is refused."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from leyden.gateway import LLMProxy
from leyden.store import LightningStoreServer, SqliteLightningStore
from leyden.testing import FakeUpstream
from tests.serving.test_session import KEY, recorded, resources, until
from tests.store.ports import free_port


@pytest.mark.slow
@pytest.mark.merge
async def test_an_application_in_any_language_is_served(tmp_path: Path) -> None:
    async with FakeUpstream() as upstream, SqliteLightningStore(tmp_path / "store.db") as store:
        await store.update_resources("rs", resources("old"))
        await store.set_label("production", "rs", 1)
        server = LightningStoreServer(store)
        async with server, LLMProxy(model_list=[upstream.llm()], store=store, live_key=KEY) as gateway:
            port = free_port()
            command = [
                sys.executable,
                "-m",
                "leyden",
                "serve",
                "--gateway",
                gateway.endpoint,
            ]
            command += ["--port", str(port), "--folder", str(tmp_path / "serving"), "--token", "sesame"]
            environment = {**os.environ, "LEYDEN_LIVE_KEY": KEY, "LEYDEN_STORE": server.endpoint}
            with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
                try:
                    await _use(f"http://127.0.0.1:{port}", store)
                finally:
                    process.send_signal(signal.SIGTERM)
                assert process.stdout is not None
                assert "production: rs 1" in process.stdout.read()
                assert process.wait(20) == 0


async def _use(url: str, store: SqliteLightningStore) -> None:
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer sesame"}) as http:

        async def post(what: str, body: Any) -> tuple[int, Any]:
            async with http.post(f"{url}/v1/serving/{what}", json=body) as response:
                return response.status, await response.json()

        async def up() -> bool:
            try:
                async with http.get(f"{url}/health") as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

        await until(up, 60.0)
        status, begun = await post("begin", {"input": "hello", "user": "ada"})
        assert (status, begun["arm"], begun["version"]) == (200, "control", ["rs", 1])
        assert begun["resources"]["prompt"]["template"] == "old"
        llm = begun["resources"]["llm"]
        async with openai.AsyncOpenAI(base_url=llm["endpoint"], api_key=llm["api_key"]) as client:
            await client.chat.completions.create(model=llm["model"], messages=[{"role": "user", "content": "hi"}])
        said = {
            "rollout": begun["rollout_id"],
            "source": "user",
            "kind": "label",
            "value": "thumbs_up",
            "feedback_id": "fb",
        }
        for _ in range(2):
            assert await post("feedback", said) == (200, {"feedback_id": "fb"})
        assert (await post("end", {"claim": begun["claim"]}))[0] == 200
        await recorded(store, begun["rollout_id"])
        await until(lambda: _n_feedback(store, 1))
        for what, body, named in (
            ("begin", {"user": 5}, "user"),
            ("end", {"claim": "forged.x"}, "claim"),
            ("feedback", {"rollout": "r", "source": "u", "value": "NaN"}, "no number"),
            ("feedback", {"rollout": "r", "source": "u", "value": None}, "reward"),
        ):
            status, refused = await post(what, body)
            assert status == 400
            assert named in refused["error"]
        for what, field in (("begin", "input"), ("feedback", "value"), ("end", "reason")):
            for values in ("{},", '"",', "[" * 300):
                bomb = gzip.compress(f'{{"user": "ada", "{field}": [{values * (2**23 // len(values))}1]}}'.encode(), 1)
                async with http.post(
                    f"{url}/v1/serving/{what}", data=bomb, headers={"Content-Encoding": "gzip"}
                ) as response:
                    assert response.status == 413
                    assert "too much work" in (await response.json())["error"]
        async with http.get(f"{url}/v1/serving/status", headers={"Authorization": "Bearer wrong"}) as response:
            assert response.status == 401
        async with http.get(f"{url}/v1/serving/status") as response:
            assert (await response.json())["served"] == {"control": 1}


async def _n_feedback(store: SqliteLightningStore, n: int) -> bool:
    return (await store.query_feedback()).total == n
