"""What `pip install leyden` and `pip install leyden-compat` bring."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[2]
PROGRAM = """
import agentlightning as agl

store = agl.InMemoryLightningStore()
print(type(store).__name__, agl.__name__)
"""


def build(folder: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)]
    released = {**os.environ, "LEYDEN_RELEASE": "1"}
    before = set(target.glob("*.whl"))
    subprocess.run(command, cwd=folder, env=released, check=True, capture_output=True)
    (wheel,) = set(target.glob("*.whl")) - before
    return wheel


@pytest.mark.parametrize(
    ("folder", "package"), [(ROOT, "leyden"), (ROOT / "packages" / "leyden-compat", "leyden_compat")]
)
def test_a_wheel_holds_every_file_of_its_package_and_nothing_beside_it(folder: Path, package: str, tmp_path: Path):
    wheel = build(folder, tmp_path)
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(["git", "ls-files", package], cwd=folder, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("this is not a git checkout")
    assert f"{package}/py.typed" in shipped
    assert set(tracked.stdout.split()) <= shipped
    assert all(name.startswith(f"{package}/") for name in shipped)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_core_works_alone_and_says_what_brings_the_aliases(tmp_path: Path):
    dist, program = tmp_path / "dist", tmp_path / "program.py"
    dist.mkdir()
    core, _ = build(ROOT, dist), build(ROOT / "packages" / "leyden-compat", dist)
    program.write_text(PROGRAM)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = str(tmp_path / "env" / "bin" / "python")

    def run(*command: str, status: int = 0) -> list[str]:
        done = subprocess.run([python, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        return (done.stdout + done.stderr).splitlines()

    run("-m", "pip", "install", "--quiet", str(core))
    rl = ["-m", "leyden", "rl"]
    for command in (["-m", "leyden.compat", "program.py"], [*rl, "train", "ppo.yaml"], [*rl, "--help"], rl):
        (line,) = run(*command, status=1)
        assert "leyden-compat, which is not installed" in line and "pip install" in line
    for module in ("leyden.compat", "leyden.compat.qlib"):
        assert "leyden-compat, which is not installed" in run("-c", f"import {module}", status=1)[-1]

    run("-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(dist), "leyden[compat]")
    assert run("-m", "leyden.compat", "program.py") == ["InMemoryLightningStore agentlightning"]
    assert "backtest" in "\n".join(run("-m", "leyden", "rl", "--help"))

    (folder,) = (tmp_path / "env" / "lib").glob("python*/site-packages/leyden_compat")
    shutil.rmtree(folder)
    assert "runs" in "\n".join(run("-m", "leyden", "--help")), "other commands do not need it"
    for command in (["-m", "leyden.compat", "program.py"], [*rl, "train", "ppo.yaml"]):
        (line,) = run(*command, status=1)
        assert "leyden-compat, which is installed and cannot be loaded (No module named 'leyden_compat')" in line
