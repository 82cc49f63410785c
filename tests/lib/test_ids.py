"""Ids never repeat: not in one thread, not in many, and not in a forked child, whose random bytes would be its parent's."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from leyden._lib import ids


def test_ids_have_their_digits_and_differ():
    for make, n in (
        (ids.rollout_id, 27),
        (ids.attempt_id, 11),
        (ids.claim_id, 23),
        (ids.resources_id, 15),
        (ids.feedback_id, 27),
        (ids.trace_id, 32),
        (ids.span_id, 16),
    ):
        made = {make() for _ in range(100)}
        assert len(made) == 100
        assert {len(each) for each in made} == {n}


def test_threads_share_no_id():
    def some(_: int) -> list[str]:
        return [ids.trace_id() for _ in range(5000)]

    with ThreadPoolExecutor(8) as threads:
        made = [each for part in threads.map(some, range(8)) for each in part]
    assert len(set(made)) == len(made)


def test_a_forked_child_makes_ids_of_its_own():
    program = (
        "import os\n"
        "from leyden._lib import ids\n"
        "ids.trace_id()\n"  # bytes are left
        "child = os.fork()\n"
        "made = ids.trace_id()\n"
        "if child: os.waitpid(child, 0)\n"
        "os.write(1, made.encode() + b' ')\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = result.stdout.split()
    assert first != second
