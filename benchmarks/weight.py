"""What a bare install of Leyden weighs: packages and megabytes beyond pip, and the time until `import leyden` and `leyden --help` are done.

The wheel is built from the working tree and installed into an empty environment, with the newest dependencies of the index. Sizes are
those of all files of site-packages, less pip's; bytecode is left out beside the peer, whose environment was installed without. Every
timed program is a process of its own and had run once before, so that bytecode and files are at hand; the sides take turns. The floor is
Python itself, `python -c pass`. The peer is all that its bare install brings, at its pinned versions.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.fit import paired
from benchmarks.harness import Peer, PeerFailed, Row, Sample, cpu_seconds, summary
from tools import release

PEER = "bench-agentlightning"
RUNS = 15
HEADLINES = ()
WEIGHED = """
import json, sysconfig
from importlib.metadata import distributions
from pathlib import Path
pip = {"pip", "setuptools", "wheel"}
beyond = {d.name: d for d in distributions() if d.name.lower() not in pip}
root = Path(sysconfig.get_path("purelib"))
own = ("pip", "setuptools", "_distutils_hack", "pkg_resources", "wheel")
files = [f for f in root.rglob("*") if f.is_file() and not f.relative_to(root).parts[0].startswith(own)]
sizes = [(f.stat().st_size, "__pycache__" in f.parts) for f in files]
print(json.dumps([len(beyond), sum(n for n, _ in sizes), sum(n for n, code in sizes if not code)]))
"""


def main(peer: Peer | None) -> list[Row]:
    with tempfile.TemporaryDirectory() as temporary:
        python = bare_install(Path(temporary))
        return [*weights(python, peer), *times(python, peer)]


def bare_install(folder: Path) -> Path:
    """Install the working tree's wheel as a user would, and return the environment's Python."""
    tree, files, environment = folder / "source", folder / "files", folder / "environment"
    release.copy_source(release.ROOT, tree)
    (wheel,) = release.build(tree, files, "wheel")
    venv.create(environment, with_pip=True, symlinks=True)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel], check=True)
    return python


def weights(python: Path, peer: Peer | None) -> list[Row]:
    packages, all_bytes, n_bytes = weighed(python)
    theirs = weighed(peer.python) if peer else None

    def row(name: str, unit: str, ours: float, other: float | None) -> Row:
        sides = ([Sample(value, 0.0)] for value in (ours, other) if value is not None)
        return summary(name, unit, next(sides), next(sides, []), peer and peer.name, higher_is_better=False)

    return [
        row("bare install, beyond pip", "packages", packages, theirs and theirs[0]),
        row("bare install, beyond pip", "MB", all_bytes / 1e6, None),
        row("bare install, without bytecode", "MB", n_bytes / 1e6, theirs and theirs[2] / 1e6),
    ]


def weighed(python: Path) -> tuple[int, int, int]:
    """Packages, bytes, and bytes without bytecode, all without pip."""
    packages, all_bytes, n_bytes = json.loads(subprocess.check_output([python, "-I", "-c", WEIGHED], text=True))
    return packages, all_bytes, n_bytes


def times(python: Path, peer: Peer | None) -> list[Row]:
    programs = {
        "python -c pass": [python, "-c", "pass"],
        "import leyden": [python, "-c", "import leyden"],
        "import leyden.rl": [python, "-c", "import leyden.rl"],
        "leyden --help": [python.with_name("leyden"), "--help"],
    }
    wall: dict[str, list[Sample]] = {}
    sides = {name: starter(command, wall.setdefault(name, [])) for name, command in programs.items()}
    if peer is not None:
        other = {
            "import leyden": [peer.python, "-c", "import agentlightning"],
            "leyden --help": [peer.python.with_name("agl"), "--help"],
        }
        sides |= {f"{name}, peer": starter(each, wall.setdefault(f"{name}, peer", [])) for name, each in other.items()}
    cpu = paired(sides, runs=RUNS)
    rows: list[Row] = []
    for name in programs:
        shown = f"`{name}`" + (", the floor" if name == "python -c pass" else "")
        for unit, samples in (("CPU s", cpu), ("s", wall)):
            theirs = samples[f"{name}, peer"] if f"{name}, peer" in cpu else []
            rows.append(summary(shown, unit, samples[name], theirs, peer and peer.name, higher_is_better=False))
    return rows


def starter(command: Sequence[str | Path], wall: list[Sample]) -> Callable[[], Sample]:
    """Return a function that runs a program, adds its seconds to `wall` and returns its CPU seconds."""

    def run() -> Sample:
        taken, used = seconds(command)
        wall.append(Sample(taken, used))
        return Sample(used, used)

    with contextlib.suppress(PeerFailed):
        seconds(command)  # the first start writes bytecode
    return run


def seconds(command: Sequence[str | Path]) -> tuple[float, float]:
    """Run a program, and return its seconds and CPU seconds. Raises PeerFailed if it fails."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    began, cpu = time.perf_counter(), cpu_seconds()
    done = subprocess.run(command, cwd="/", env=environ, capture_output=True, text=True, check=False)
    taken, used = time.perf_counter() - began, cpu_seconds() - cpu
    if done.returncode:
        raise PeerFailed(f"{command[0]} exits {done.returncode}\n{done.stderr[-2000:]}")
    return taken, used
