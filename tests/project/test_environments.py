"""Environments: complete pins, and a set-up that an interruption cannot spoil."""

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints"
PINS = sorted(CONSTRAINTS.glob("*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pinned(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in (line.split("==") for line in lines)}


@pytest.mark.parametrize("path", PINS, ids=lambda path: path.stem)
def test_every_environment_is_pinned_exactly_and_pulls_no_other_torch(path: Path):
    pins = pinned(path)
    assert all(re.fullmatch(r"[\w.!]+", version) for version in pins.values())
    assert pins.get("torch", "2.13.0") == "2.13.0"
    assert "torchvision" not in pins


def test_the_default_environment_pins_every_core_dependency():
    names = {re.match(r"[\w-]+", dependency)[0].lower() for dependency in PROJECT["dependencies"]}
    assert names <= pinned(CONSTRAINTS / "dev.txt").keys()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A project whose one environment `tiny` wants nothing, so that making it needs no package index."""
    folder = tmp_path / "constraints"
    folder.mkdir()
    (folder / "install.py").write_text((CONSTRAINTS / "install.py").read_text())
    (folder / "tiny.in").write_text("# nothing\n")
    (folder / "tiny.txt").write_text("# nothing\n")
    (tmp_path / "pyproject.toml").write_text("[build-system]\n[project]\nname = 'tiny'\n")
    return tmp_path


def install(checkout: Path, name: str = "tiny") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "constraints/install.py", name], cwd=checkout, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_set_up_is_done_once_and_again_when_its_files_change(checkout: Path):
    assert "Set up" in install(checkout).stdout
    assert install(checkout).stdout == ""
    (checkout / "constraints/tiny.txt").write_text("# changed\n")
    assert "Set up" in install(checkout).stdout


@pytest.mark.slow
@pytest.mark.merge
def test_an_interrupted_set_up_leaves_no_stamp_and_is_started_afresh(checkout: Path):
    env = checkout / ".venvs/tiny"
    process = subprocess.Popen([sys.executable, "constraints/install.py", "tiny"], cwd=checkout, start_new_session=True)
    while not (env / "bin/python").exists() and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert (env / ".installing").exists()
    assert not (env / ".installed-tiny").exists()
    (env / "half-installed").touch()
    assert "Set up" in install(checkout).stdout
    assert not (env / "half-installed").exists()
    assert (env / ".installed-tiny").exists()


@pytest.mark.slow
@pytest.mark.merge
def test_a_failed_install_says_why_and_leaves_no_stamp(checkout: Path):
    (checkout / "constraints/tiny.in").write_text("./no-such-folder\n")
    done = install(checkout)
    assert done.returncode == 1
    assert "no-such-folder" in done.stderr
    assert not (checkout / ".venvs/tiny/.installed-tiny").exists()


@pytest.mark.slow
def test_what_must_not_stay_is_removed_again(checkout: Path):
    wheel = "stray-1.0-py3-none-any.whl"
    record = {
        "stray.py": "",
        "stray-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: stray\nVersion: 1.0\n",
        "stray-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(checkout / wheel, "w") as archive:
        for name, text in record.items():
            archive.writestr(name, text)
        archive.writestr("stray-1.0.dist-info/RECORD", "".join(f"{name},,\n" for name in record))
    (checkout / "constraints/tiny.in").write_text(f"./{wheel}\n")
    python = [checkout / ".venvs/tiny/bin/python", "-c", "import stray"]
    install(checkout)
    assert subprocess.run(python, capture_output=True, check=False).returncode == 0
    (checkout / "constraints/tiny-without.in").write_text("# stray breaks everything\nstray\n")
    assert "Set up" in install(checkout).stdout
    assert b"No module named 'stray'" in subprocess.run(python, capture_output=True, check=False).stderr
    assert install(checkout).stdout == ""


def test_an_unknown_environment_is_named_with_the_known_ones(checkout: Path):
    done = install(checkout, "tinny")
    assert done.returncode == 1
    assert "tinny" in done.stderr
    assert "known: tiny" in done.stderr


@pytest.mark.slow
@pytest.mark.merge
def test_two_set_ups_at_once_do_the_work_once(checkout: Path):
    command = [sys.executable, "constraints/install.py", "tiny"]
    both = [subprocess.Popen(command, cwd=checkout, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(bool(output) for output in outputs) == [False, True]
