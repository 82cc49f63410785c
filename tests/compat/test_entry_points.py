"""The commands of the other packages: each works, or says what to write."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from leyden.store import open_store
from leyden_compat.__main__ import main
from leyden_compat.agentlightning.store import LightningStoreClient

COMMAND = [sys.executable, "-m", "leyden.compat"]
ANSWERED = [
    ("agl vllm serve MODEL", "start vLLM unpatched"),
    ("agl prometheus --port 4748", "/metrics"),
    ("agl agentops", "calls no AgentOps service"),
    ("agl store --backend mongo", "postgresql://"),
    ("-m agentlightning.cli.vllm serve MODEL", "start vLLM unpatched"),
    ("-m agentlightning.cli.agentops_server", "calls no AgentOps service"),
    ("-m agentlightning.types", "is no program"),
    ("-m qlib.rl.contrib.backtest --config_path c.yml", "leyden rl backtest"),
    ("qrun workflow.yaml", "call `qrun` as it is"),
    ("agi store", "no such file"),
]


@pytest.mark.parametrize(("command", "said"), [pytest.param(*case, id=case[0]) for case in ANSWERED])
def test_a_command_without_a_counterpart_says_what_to_write(
    command: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    status = ended.value.code
    assert status == 1 or isinstance(status, str), "Python prints a text, and exits with 1"
    assert said in f"{status} {capsys.readouterr().err}"


@pytest.mark.slow
@pytest.mark.merge
def test_the_program_of_verl_is_leydens() -> None:
    command = [*COMMAND, "-m", "agentlightning.verl", "--help"]
    assert (
        "python -m leyden.algorithm.verl" in subprocess.run(command, text=True, capture_output=True, check=True).stdout
    )


@pytest.mark.parametrize("command", ["agl store", pytest.param("-m agentlightning.cli.store", marks=pytest.mark.slow)])
async def test_agl_store_serves_until_it_is_told_to_end(tmp_path: Path, command: str) -> None:
    options = ["--port", "0", "--url", str(tmp_path / "store.db"), "--tracker", "prometheus"]
    serving = await asyncio.to_thread(
        subprocess.Popen, [*COMMAND, *command.split(), *options], stdout=subprocess.PIPE, text=True
    )
    try:
        assert serving.stdout is not None
        address = (await asyncio.to_thread(serving.stdout.readline)).split()[0]
        store = LightningStoreClient(address)
        rollout = await store.enqueue_rollout({"n": 1})
        assert await store.get_rollout_by_id("ro-none") is None
        await store.close()
        os.kill(serving.pid, signal.SIGTERM)
        assert await asyncio.to_thread(serving.wait, 20) == 0
    finally:
        serving.kill()
        serving.communicate()
    async with open_store(str(tmp_path / "store.db")) as kept:
        assert (await kept.get_rollout_by_id(rollout.rollout_id)).input == {"n": 1}
