"""No password and no key of the gateway's is left behind: not in what a run prints, nor in what it stores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SECRETS = ("UPSTREAMPASSWORD", "UPSTREAMKEY", "STORETOKEN", "GATEWAYTOKEN", "AGENTPASSWORD")

RUN = '''
import asyncio, logging, sys
from pathlib import Path
from aiohttp import web
import leyden as ly
from leyden.store import LightningStoreServer, SqliteLightningStore
from openai import AsyncOpenAI, OpenAIError

logging.basicConfig(level=logging.DEBUG)
logging.getLogger("aiosqlite").setLevel(logging.WARNING)

async def echo_credentials(request):
    """A server that quotes the credentials of a call in its error."""
    return web.json_response({"error": {"message": "bad: " + request.headers["Authorization"]}}, status=401)

async def needs_login(request):
    given = request.headers.get("Authorization", "")
    expected = "Basic bWU6VVBTVFJFQU1QQVNTV09SRA=="  # me:UPSTREAMPASSWORD
    return web.json_response({"choices": []} if given == expected else {"error": given}, status=200 if given == expected else 500)

async def serve(handler):
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner.addresses[0][1]

async def main(folder):
    echo, login = await serve(echo_credentials), await serve(needs_login)
    models = [
        {"model_name": "echo", "endpoint": f"http://127.0.0.1:{echo}/v1", "api_key": "UPSTREAMKEY"},
        {"model_name": "login", "endpoint": f"http://me:UPSTREAMPASSWORD@127.0.0.1:{login}/v1"},
        {"model_name": "away", "endpoint": "http://me:UPSTREAMPASSWORD@127.0.0.1:9/v1"},
    ]
    statuses = {}

    @ly.rollout
    async def agent(task, rollout):
        llm = proxy.as_resource(rollout.rollout_id, rollout.attempt.attempt_id, model=task)
        try:
            async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key, max_retries=0) as client:
                await client.chat.completions.create(model=task, messages=[{"role": "user", "content": "hello"}])
        except OpenAIError as error:
            statuses[task] = error.status_code
            print(error)
            raise RuntimeError(f"no answer of {error} (http://me:AGENTPASSWORD@somewhere/)")
        statuses[task] = 200

    async with SqliteLightningStore(folder / "store.sqlite") as store:
        async with LightningStoreServer(store, token="STORETOKEN"):
            proxy = ly.LLMProxy(model_list=models, token="GATEWAYTOKEN", upstream_retries=0, store=store)
            trainer = ly.Trainer(algorithm=ly.Baseline(), llm_proxy=proxy, store=store, run_dir=folder / "run")
            print(await trainer.afit(agent, ["echo", "login", "away"]))
            failures = [span for rollout in await store.query_rollouts() for span in await store.query_spans(rollout.rollout_id)]
            print(len(failures), "spans", proxy, models[0]["model_name"])
    assert statuses == {"echo": 401, "login": 200, "away": 502}, statuses

asyncio.run(main(Path(sys.argv[1])))
'''


def test_a_run_leaves_no_password_and_no_key_behind(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(RUN)
    folder = tmp_path / "left"
    done = subprocess.run(
        [sys.executable, str(script), str(folder)],
        capture_output=True,
        timeout=50,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr.decode()
    left = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert any(
        b"UnknownModel" in content or b"upstream_unreachable" in content or b"cannot reach" in content
        for content in left.values()
    )
    for place, content in {"stdout": done.stdout, "stderr": done.stderr, **left}.items():
        for secret in SECRETS:
            assert secret.encode() not in content, f"{secret} is in {place}"
