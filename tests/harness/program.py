"""Run a harness against the fake model, and print what was recorded as JSON. Run without a network, by test_programs.py.

Arguments: the harness, the path of its command, how many rollouts, and how many at a time.
"""

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

from leyden.execution.harness import harness_program
from leyden.execution.harness.check import check

if __name__ == "__main__":
    name, program, rollouts, concurrency = sys.argv[1:]
    checked = asyncio.run(
        check(
            harness_program(name),
            Path(program),
            timeout_seconds=300,
            rollouts=int(rollouts),
            concurrency=int(concurrency),
        )
    )
    print(json.dumps({**asdict(checked), "trouble": checked.trouble}))
