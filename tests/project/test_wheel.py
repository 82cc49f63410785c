"""What `pip install leyden` brings."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[2]


def test_the_wheel_holds_every_file_of_the_package_and_nothing_beside_it(tmp_path: Path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("leyden-*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(["git", "ls-files", "leyden"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("this is not a git checkout")
    assert "leyden/py.typed" in shipped
    assert set(tracked.stdout.split()) <= shipped
    assert all(name.startswith("leyden/") for name in shipped)
