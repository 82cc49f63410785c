"""What a bare install of Leyden weighs: packages and megabytes beyond pip, and the time until `import leyden` and `leyden --help` are done.

The wheel is built from the working tree. It and the peer are each installed by pip into an empty environment of one Python, with the newest
dependencies of the index. Sizes are those of all files of site-packages, less pip's. pip writes bytecode; other installers do not, so both
sizes are rows. Every timed program is a process of its own and had run once before; the sides take turns. The floor is Python itself,
`python -c pass`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.fit import paired
from benchmarks.harness import Peer, PeerFailed, Row, Sample, cpu_seconds, summary
from tools import release

PEER_PACKAGE, PEER_VERSION, PEER_COMMAND = "agentlightning", "1.0.2", "agl-server"
PYTHONS = ("python3.13", "python3.12")
"""Interpreters that the peer runs on, after the one that LEYDEN_WEIGHT_PYTHON names. Without any of them Leyden is measured alone."""
RUNS = 7
HEADLINES = ()
WEIGHED = """
import json, sysconfig
from importlib.metadata import distributions
from pathlib import Path
pip = {"pip", "setuptools", "wheel"}
beyond = [d for d in distributions() if d.name.lower() not in pip]
root = Path(sysconfig.get_path("purelib"))
own = ("pip", "setuptools", "_distutils_hack", "pkg_resources", "wheel")
files = [f for f in root.rglob("*") if f.is_file() and not f.relative_to(root).parts[0].startswith(own)]
sizes = [(f.stat().st_size, "__pycache__" in f.parts) for f in files]
print(json.dumps([len(beyond), sum(n for n, _ in sizes), sum(n for n, code in sizes if not code)]))
"""


def main(peer: Peer | None) -> list[Row]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        release.copy_source(release.ROOT, folder / "source")
        (wheel,) = release.build(folder / "source", folder / "files", "wheel")
        other = None
        interpreter = next(
            (path for name in (os.environ.get("LEYDEN_WEIGHT_PYTHON", ""), *PYTHONS) if (path := runs(name))), None
        )
        if interpreter is not None:
            try:
                python = bare_install(interpreter, folder / "peer", f"{PEER_PACKAGE}=={PEER_VERSION}")
                other = Peer(f"{PEER_PACKAGE} {PEER_VERSION}", python)
            except subprocess.CalledProcessError as failed:
                print(f"Measuring Leyden alone: {failed}", flush=True)
        python = bare_install(interpreter or sys.executable, folder / "leyden", str(wheel))
        return [*weights(python, other), *times(python, other)]


def runs(name: str) -> str | None:
    """Return the path of an interpreter that is installed and starts."""
    path = shutil.which(name)
    return path if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0 else None


def bare_install(interpreter: str, environment: Path, requirement: str) -> Path:
    """Install a package as a user would, and return the environment's Python."""
    subprocess.run([interpreter, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement], check=True)
    return python


def weights(python: Path, peer: Peer | None) -> list[Row]:
    ours, theirs = weighed(python), weighed(peer.python) if peer else None
    units = ("bare install, beyond pip", "packages"), ("bare install, beyond pip", "MB"), ("without bytecode", "MB")
    return [
        summary(
            name,
            unit,
            [Sample(ours[at], 0.0)],
            [] if theirs is None else [Sample(theirs[at], 0.0)],
            peer and peer.name,
            higher_is_better=False,
        )
        for at, (name, unit) in enumerate(units)
    ]


def weighed(python: Path) -> tuple[int, float, float]:
    """Packages, megabytes, and megabytes without bytecode, all beyond pip."""
    packages, n_bytes, without = json.loads(subprocess.check_output([python, "-I", "-c", WEIGHED], text=True))
    return packages, n_bytes / 1e6, without / 1e6


def times(python: Path, peer: Peer | None) -> list[Row]:
    programs = {
        "python -c pass": [python, "-c", "pass"],
        "import leyden": [python, "-c", "import leyden"],
        "import leyden.rl": [python, "-c", "import leyden.rl"],
        "from leyden.store import LightningStoreClient": [
            python,
            "-c",
            "from leyden.store import LightningStoreClient",
        ],
        "from leyden import Trainer, LLMProxy": [python, "-c", "from leyden import Trainer, LLMProxy"],
        "leyden --help": [python.with_name("leyden"), "--help"],
    }
    wall: dict[str, list[Sample]] = {}
    sides = {name: starter(command, wall.setdefault(name, [])) for name, command in programs.items()}
    if peer is not None:
        other = {
            "from leyden.store import LightningStoreClient": [peer.python, "-c", f"import {PEER_PACKAGE}.client"],
            "leyden --help": [peer.python.with_name(PEER_COMMAND), "--help"],
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
