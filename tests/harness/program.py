"""Run a harness against the fake model, four rollouts at a time, and print what was recorded as JSON. Run without a
network, by test_programs.py.

Arguments: the harness, the path of its command, how many rollouts at most, and after how many seconds no more begin.
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from leyden.execution.harness import harness_program
from leyden.execution.harness.check import check

AT_ONCE = 4


def added(total: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return the sums of numbers and lists, and the first text that is not empty."""
    return {
        name: value or more[name] if isinstance(value, str) else value + more[name] for name, value in total.items()
    }


async def main(name: str, program: str, rollouts: int, seconds: float) -> dict[str, Any]:
    kind, total, began = harness_program(name), dict[str, Any](), time.monotonic()
    while not total or (total["rollouts"] < rollouts and time.monotonic() < began + seconds and not total["trouble"]):
        checked = await check(kind, Path(program), timeout_seconds=300, rollouts=AT_ONCE, concurrency=AT_ONCE)
        found = {**asdict(checked), "trouble": checked.trouble}
        total = added(total, found) if total else found
    return total


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))))
