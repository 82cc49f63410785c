"""256 rollouts of an example agent at once, in each way that an agent can run, and what must be true of the record.

The agent runs in a process of its own, where nothing reaches another machine: `measure.py`, `guard/`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COUNT = 256
Report = dict[str, Any]


def measure(name: str, ways: list[str], folder: Path, *, count: int = COUNT) -> dict[str, Report]:
    """Run `examples/frameworks/NAME_agent.py`; the report of each way. Nobody outside this machine was asked for anything."""
    outside = folder / "outside"
    done = python("tests/frameworks/measure.py", f"{name}_agent", str(count), *ways, outside=outside)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not outside.exists(), outside.read_text()
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"way"')]
    assert [report["way"] for report in reports] == ways, done.stdout[-4000:] + done.stderr[-4000:]
    return {report["way"]: report for report in reports}


def python(*arguments: str, outside: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the guard in place."""
    paths = [str(ROOT), str(ROOT / "tests" / "frameworks" / "guard")]
    keys = {"OPENAI_API_KEY": "sk-the-users-own", "ANTHROPIC_API_KEY": "sk-the-users-own"}
    guard = {"PYTHONPATH": os.pathsep.join(paths), "LEYDEN_TEST_OUTSIDE": str(outside)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": str(outside.parent), **keys, **guard, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def check(report: Report, *, seen_by: list[str], tool: bool, agents: list[str], count: int = COUNT) -> None:
    """All at once, every call in its own rollout, none lost, none twice, each to the exact token; nothing left behind.

    seen_by: the names of the spans as which each call was seen, the gateway's included. tool: whether the tool's call was recorded.
    """
    assert report["left"] == []
    assert report["asked"] == 2 * count
    assert len(report["rollouts"]) == count
    assert report["together"] >= count // 2
    for rollout in report["rollouts"]:
        city = rollout["city"]
        assert (rollout["status"], rollout["reward"], rollout["errors"]) == ("succeeded", 1.0, []), rollout
        assert rollout["recorded"] == len(rollout["calls"]) == 2, rollout
        assert rollout["exact"] == [True, True], rollout
        assert all(city in call for call in rollout["calls"]), rollout
        assert rollout["sightings"] == [sorted(seen_by)] * 2, rollout
        assert rollout["agents"] == agents, rollout
        if tool:
            ((name, arguments, result),) = rollout["tools"]
            assert (name, city in arguments, city in result) == ("get_weather", True, True), rollout


def check_training(name: str, folder: Path) -> None:
    """The reward and the share of right tool calls rise within three steps of the page's command."""
    rewards, right_calls = train(name, folder, steps=3)
    assert rewards[1] - rewards[0] > 0.15, rewards
    assert right_calls[1] - right_calls[0] > 0.15, right_calls


def train(name: str, folder: Path, *, steps: int) -> tuple[list[float], list[float]]:
    """Run `train.py NAME`; return the rewards and the shares of right calls, each before and after.

    The command calls no other machine.
    """
    outside = folder / "outside"
    arguments = [name, "--steps", str(steps), "--repeats", "4", "--run-dir", str(folder / "run")]
    done = python(
        "examples/frameworks/train.py", *arguments, outside=outside, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive"
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert not outside.exists(), outside.read_text()
    reward, right = done.stdout.splitlines()[:2]
    rewards = [float(share) for share in re.findall(r"(\d\.\d\d) (?:before|after)", reward)]
    right_calls = [int(share) / 100 for share in re.findall(r"(\d+)% (?:before|after)", right)]
    assert (len(rewards), len(right_calls)) == (2, 2), done.stdout
    return rewards, right_calls


def check_page(name: str, folder: Path) -> None:
    """The snippets of `docs/frameworks/NAME.md` run, and nobody outside this machine is asked for anything."""
    outside = folder / "outside"
    done = python("-c", RUN_PAGE, str(ROOT / "docs" / "frameworks" / f"{name}.md"), outside=outside)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.splitlines()[-1]) == 2
    assert not outside.exists(), outside.read_text()


RUN_PAGE = """
import sys
from pathlib import Path
from types import ModuleType
from tests.docs.snippets import run_document
sys.modules["page"] = module = ModuleType("page")
print(run_document(Path(sys.argv[1]), module))
"""
