"""The program before of docs/migrating/trl.md runs with TRL, on the model that the program after trains."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(180)
def test_the_program_before_trains_with_trl(tmp_path: Path) -> None:
    program = re.findall(r"```python\n(.*?)```", (ROOT / "docs/migrating/trl.md").read_text(), re.DOTALL)[0]
    assert "GRPOTrainer(" in program
    (tmp_path / "before.py").write_text(program)
    (tmp_path / "leyden").symlink_to(ROOT / "leyden")
    ran = subprocess.run(
        [sys.executable, "before.py"],
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path / "hub")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "train_runtime" in ran.stdout and (tmp_path / "run" / "checkpoint-12").is_dir()
