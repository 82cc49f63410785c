"""The example programs of Agent Lightning 0.1.2, as its source distribution has them, run under the alias unchanged."""

import asyncio
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from leyden.testing import FakeUpstream

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "agentlightning"]
    subprocess.run([*pip, "--dest", folder, "agentlightning==0.1.2"], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / "agentlightning-0.1.2" / "examples"


async def under_the_alias(program: Path, upstream: FakeUpstream) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "leyden.compat", program),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OPENAI_API_BASE": upstream.endpoint, "OPENAI_API_KEY": "key", "PYTHONUNBUFFERED": "1"},
    )


async def test_the_prompt_optimiser_and_its_client_find_the_best_of_three_prompts(examples: Path):
    async with FakeUpstream(model="gpt-4.1-mini", reply=lambda _: "Paris") as upstream:
        server = await under_the_alias(examples / "apo" / "apo.py", upstream)
        assert server.stdout is not None
        begun = [await server.stdout.readline() for _ in range(2)]  # it serves by now
        client = await under_the_alias(examples / "apo" / "apo_client.py", upstream)
        try:
            said = b"".join(begun) + await server.stdout.read()
            assert await server.wait() == 0, said.decode()
        finally:
            client.kill()
            log, _ = await client.communicate()
        said = said.decode()
        assert said.count("[Algo] Received Result:") == 3, said + log.decode()
        assert "[Algo] Best prompt found: 'You are a" in said
        assert "content='Paris'" in log.decode()
        systems = [request["messages"][0]["content"] for request in upstream.requests]
        assert sorted(systems) == [
            f"You are a {who}." for who in ("friendly chatbot", "helpful assistant", "knowledgeable AI")
        ]
