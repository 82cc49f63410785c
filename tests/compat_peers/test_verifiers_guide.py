"""The programs of docs/migrating/verifiers.md that need verifiers run with it."""

import asyncio
import os
import re
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest

from leyden.testing import FakeUpstream

PAGE = Path(__file__).parents[2] / "docs/migrating/verifiers.md"
BEFORE, AS_IT_IS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[:2]
pytestmark = pytest.mark.timeout(180)

MEASURE = """
if __name__ == "__main__":
    served = {"main_llm": ly.LLM(endpoint=os.environ["OPENAI_BASE_URL"], model="m", api_key="k")}
    trainer = ly.Trainer(algorithm="baseline", initial_resources=served, progress=False)
    summary = trainer.fit(agent, tasks)
    print(summary.rollouts["succeeded"], summary.reward.last)
"""


def run(program, url, folder):
    (folder / "program.py").write_text(program)
    environment = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "k", "HF_HOME": str(folder)}
    ran = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()[-1]


async def answered(program, folder):
    """The program's last line, where the model says 4 and 7 in turn."""
    said = cycle("47")
    async with FakeUpstream(model="m", reply=lambda _: next(said)) as upstream:
        return await asyncio.to_thread(run, program, upstream.endpoint, folder)


async def test_the_program_before_runs_with_verifiers(tmp_path):
    assert await answered(BEFORE, tmp_path) == "0.5"


async def test_an_environment_runs_as_an_agent(tmp_path):
    definitions = BEFORE.partition("if __name__")[0]
    assert await answered(definitions + AS_IT_IS + MEASURE, tmp_path) == "2 0.5"
