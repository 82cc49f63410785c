"""Coding agents of the command line, as agents: `harness.py`, what is known of each in `programs/`, where they are
installed in `installed.py`, and one rollout that tries one in `check.py`."""

from leyden.execution.harness.harness import Harness as Harness
from leyden.execution.harness.harness import HarnessProgram as HarnessProgram
from leyden.execution.harness.harness import Start as Start
from leyden.execution.harness.harness import harness_program as harness_program
