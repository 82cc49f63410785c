"""What is in the tree was finished before it was committed."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_file_holds_the_marks_of_a_merge_that_was_not_finished():
    marks = r"^(<<<<<<< |>>>>>>> )"
    found = subprocess.run(["git", "grep", "-nE", marks], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode in (0, 1, 128), found.stderr  # 128: not a clone
    assert found.stdout == ""
