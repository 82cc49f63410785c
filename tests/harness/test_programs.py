"""Each harness at its tested version, unchanged, without a network, against a model that knows what it said.

The programs are packages of npm and of the Python index. They are installed once, into a folder that is kept.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from leyden.errors import ConfigError
from leyden.execution.harness import harness_program
from leyden.execution.harness.installed import find_program, harness_folder, install, installed_version
from leyden.execution.harness.programs import PROGRAMS

pytestmark = [pytest.mark.harness, pytest.mark.timeout(1800)]
WORKING = [kind.name for kind in PROGRAMS.values() if not kind.unsupported]
ROLLOUTS = os.environ.get("LEYDEN_HARNESS_ROLLOUTS", "50")
"""How many of each program at most, four at a time."""
SECONDS = os.environ.get("LEYDEN_HARNESS_SECONDS", "20")
"""After how many seconds no more of them begin, so that the group has room in its 20 minutes on two cores. With 1000, each
program gets all its rollouts."""
REWRITES = {
    "gptme": "messages[0] is not the earlier call's",
    "code-puppy": "is not the answer that the model gave",
}
"""The harnesses that rewrite what was said, so that turns are separate sequences, and what they rewrite."""
HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / ".harness"
"""Where the group leaves what each program came to, for the table of docs/how-to/coding-agents.md."""


def run_alone(*line: str) -> dict[str, Any]:
    """Run a script of this folder in a network namespace of its own, where there is only loopback, and return what it
    printed.
    """
    ran = subprocess.run(
        [
            "unshare",
            "-rn",
            "sh",
            "-c",
            'ip link set lo up; exec "$@"',
            "sh",
            sys.executable,
            str(HERE / line[0]),
            *line[1:],
        ],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def ready(name: str) -> Path:
    kind = harness_program(name)
    if kind.installer == "npm" and shutil.which("npm") is None:
        pytest.skip("npm is not installed here")
    try:
        program = find_program(kind)
    except ConfigError:
        program = install(kind)
    assert program.is_relative_to(harness_folder())
    assert installed_version(kind, program) == kind.version
    return program


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.merge] * (name == "pi")) for name in WORKING])
def test_a_harness_is_recorded_exactly(name: str) -> None:
    program = ready(name)
    found = run_alone("program.py", name, str(program), ROLLOUTS, SECONDS)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(found))
    assert not found["trouble"], (found["trouble"], found["output"])
    assert found["wrote"] == found["rollouts"]
    assert len(found["calls"]) >= found["served"] >= found["rollouts"]
    assert found["wrong_ids"] == 0
    known = REWRITES.get(name)
    assert found["merged"] >= 0.95 * found["continued"] or known, found["splits"]
    assert all(known is not None and known in split for split in found["splits"]), found["splits"]
