"""Make one of the project's environments and fill it from its pins: `python constraints/install.py dev`.

`NAME.in` lists what an environment is for, `NAME.txt` the exact version of everything in it, and `NAME-without.in`, where
there is one, what is removed again because it breaks what it came with. `dev` (tests and checks)
and `demo` (less, so that a first demo starts sooner) share `.venv`; every other environment is `.venvs/NAME`.

A stamp, `.installed-NAME`, is written last and holds a digest of all that went in. While packages are being installed
the environment holds `.installing` and no stamp; whoever finds that file starts the environment afresh, so an
interrupted set-up is never mistaken for a finished one. A lock keeps two of these from working at once.

Only the standard library is used: this runs before anything is installed. It does not know what the environments are
used for. To add one, write `NAME.in` and run `make lock ENV=NAME`.

It is pip and not uv: uv takes torch's build with CUDA where pip is offered the one for CPUs (uv 0.13.9, torch 2.13.0).
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BUILD_TOOLS = ["hatchling", "editables"]
TORCH = "torch==2.13.0"
UNWANTED = {"torchvision": "nothing here reads images, and its pins follow torch's"}
HEADER = """\
# Every package of one environment, exactly. Written by `make lock ENV={name}` from {sources}; do not edit.
# torch's own requirements differ from one build to another (CPU, CUDA); each build pins them itself.
"""
SOURCE_ONLY = ("antlr4-python3-runtime", "gpustat", "gym", "wget")
"""Packages without a wheel. They are built in isolation, because their build needs tools of its own."""
LOG_LINES_SHOWN = 25


class SetUpFailed(Exception):
    """An environment could not be made; the message says what to do."""


@dataclass(frozen=True)
class Environment:
    """An environment's folder, and the files that say what belongs in it."""

    name: str
    folder: Path
    pins: Path
    includes: tuple[str, ...] = ()
    """Environments in the same folder that this one is a superset of."""

    @property
    def wanted(self) -> Path:
        return HERE / f"{self.name}.in"

    @property
    def optional(self) -> Path:
        """What may fail to install, for want of a compiler; often absent."""
        return HERE / f"{self.name}-optional.in"

    @property
    def without(self) -> Path:
        """What others bring along and must not stay; often absent."""
        return HERE / f"{self.name}-without.in"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def stamp(self) -> Path:
        return self.folder / f".installed-{self.name}"

    @property
    def installing(self) -> Path:
        return self.folder / ".installing"

    @property
    def log(self) -> Path:
        return self.folder / "install.log"

    def digest(self) -> str:
        """What decides the environment's content; equal digests need no work."""
        digest = hashlib.sha256(f"{ROOT}\n".encode())
        for file in (ROOT / "pyproject.toml", *sorted(ROOT.glob("packages/*/pyproject.toml"))):
            project = tomllib.loads(file.read_text())
            digest.update(f"{project['build-system']}\n{project['project']}\n".encode())
        for path in (self.wanted, self.pins, self.optional, self.without, Path(__file__)):
            digest.update(path.read_bytes() if path.exists() else b"-")
        return digest.hexdigest()


def environment(name: str) -> Environment:
    """The environment called `name`. Raises SetUpFailed, naming the others, if its files are missing."""
    if name == "demo":
        found = Environment(name, ROOT / ".venv", HERE / "dev.txt")
    elif name == "dev":
        found = Environment(name, ROOT / ".venv", HERE / "dev.txt", includes=("demo",))
    else:
        found = Environment(name, ROOT / ".venvs" / name, HERE / f"{name}.txt")
    for path in (found.wanted, found.pins):
        if not path.exists():
            known = sorted(p.stem for p in HERE.glob("*.in") if not p.stem.endswith(("-optional", "-without")))
            raise SetUpFailed(
                f"no environment {name!r}: {path.relative_to(ROOT)} is missing (known: {', '.join(known)})"
            )
    return found


def is_installed(name: str) -> bool:
    """Whether `name` is complete and made from the files as they are now."""
    env = environment(name)
    return env.python.exists() and env.stamp.exists() and env.stamp.read_text() == env.digest()


def install(name: str) -> Path:
    """Bring the environment up to date, if it is not, and return its Python. Safe to repeat and to interrupt."""
    env = environment(name)
    with locked(env.folder):
        if is_installed(name):
            env.stamp.touch()  # newer than the files that make compares it with
            return env.python
        began = time.monotonic()
        print(f"Setting up {env.folder.relative_to(ROOT)} for {name}, this takes a minute or a few ...", flush=True)
        prepare_folder(env)
        install_packages(env)
        finish(env)
        print(f"Set up {env.folder.relative_to(ROOT)} in {time.monotonic() - began:.0f} s.", flush=True)
    return env.python


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Hold the folder's lock, which lies beside it: the folder itself may be deleted and made again."""
    lock_file = ROOT / ".venvs" / f"{folder.name.lstrip('.')}.lock"
    lock_file.parent.mkdir(exist_ok=True)
    with lock_file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def prepare_folder(env: Environment) -> None:
    """Leave a virtual environment marked as unfinished; a half-made one is replaced, a foreign one kept."""
    if env.installing.exists() or not runs(env.python):
        shutil.rmtree(env.folder, ignore_errors=True)
        env.folder.mkdir(parents=True)
        env.installing.touch()
        venv.create(env.folder, with_pip=True, symlinks=True)
    env.installing.touch()
    for stamp in env.folder.glob(".installed-*"):
        stamp.unlink()


def runs(python: Path) -> bool:
    try:
        return subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def install_packages(env: Environment) -> None:
    editable = any(line.startswith("-e ") for line in env.wanted.read_text().splitlines())
    if editable:
        # pinned like everything else, which a build in isolation would not be
        pinned = {line.partition("==")[0] for line in env.pins.read_text().splitlines()}
        pip_install(env, ["--no-compile", *BUILD_TOOLS, *(name for name in SOURCE_ONLY if name in pinned)])
    # bytecode of everything would double the time; Python writes it for what is used
    isolation = ["--no-build-isolation"] if editable else []
    pip_install(env, ["--no-compile", *isolation, "--requirement", str(env.wanted)])
    if env.optional.exists():
        try:
            # compiled now: one of these has SyntaxWarnings, which are errors when tests compile it
            pip_install(env, ["--requirement", str(env.optional)])
        except SetUpFailed:
            print(f"Left out what {env.optional.relative_to(ROOT)} lists: see {env.log.relative_to(ROOT)}.", flush=True)
    if env.without.exists():
        pip(env, ["uninstall", "--yes", "--requirement", str(env.without)])


def pip_install(env: Environment, arguments: list[str]) -> None:
    """Install under the environment's pins."""
    pip(env, ["install", "--progress-bar", "off", "--constraint", str(env.pins), *arguments])


def pip(env: Environment, arguments: list[str]) -> None:
    """Run pip; its output goes to the log, its end also to an error's message."""
    command = [env.python, "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]
    with env.log.open("a") as log:
        done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
    if done.returncode:
        tail = "\n".join(env.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
        raise SetUpFailed(
            f"{tail}\npip could not {arguments[0]} {env.name} (exit {done.returncode}); the whole log: {env.log}"
        )


def finish(env: Environment) -> None:
    """Write the stamps, each whole or not at all; the one that was asked for comes last."""
    env.installing.unlink()
    for each in (*map(environment, env.includes), env):
        aside = each.stamp.with_suffix(".new")
        aside.write_text(each.digest())
        aside.replace(each.stamp)


def lock(name: str) -> Path:
    """Resolve an environment anew and write down every version. Return the file.

    The resolve happens in an empty environment, so nothing depends on what was installed before. Leyden itself is left
    out, and a version's local part too (`2.13.0+cpu` is pinned as `2.13.0`): which build is taken is the package index's
    affair. What `NAME-without.in` lists is removed before the versions are written down.
    """
    sources = [path for path in (HERE / f"{name}.in", HERE / f"{name}-optional.in") if path.exists()]
    if not sources:
        raise SetUpFailed(f"constraints/{name}.in is missing: write there what the environment is for")
    editable = any(line.startswith("-e ") for path in sources for line in path.read_text().splitlines())
    requirements = [argument for path in sources for argument in ("--requirement", str(path))]
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True, symlinks=True)
        pip = [f"{folder}/bin/python", "-m", "pip"]
        guard = Path(folder) / "guard.txt"
        guard.write_text(TORCH + "\n")
        tools = BUILD_TOOLS if editable else []
        subprocess.run([*pip, "install", "--quiet", "--no-compile", "--constraint", guard, *tools, *requirements],
                       cwd=ROOT, check=True)  # fmt: skip
        if (without := HERE / f"{name}-without.in").exists():
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", "--requirement", str(without)], check=True)
        frozen = subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True).stdout
    pins = [
        re.sub(r"\+[\w.]+$", "", line)
        for line in frozen.splitlines()
        if "==" in line and not line.startswith(("-e", "#"))
    ]
    for package, why in UNWANTED.items():
        if any(pin.startswith(f"{package}==") for pin in pins):
            raise SetUpFailed(f"{name} would contain {package}: {why}; find what asks for it")
    target = HERE / f"{name}.txt"
    header = HEADER.format(name=name, sources=" and ".join(path.name for path in sources))
    target.write_text(header + "\n".join(sorted(pins, key=str.lower)) + "\n")
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description="Make one of the project's environments from its pins.")
    parser.add_argument("name", help="dev, demo, or the name of another constraints/NAME.in")
    parser.add_argument("--lock", action="store_true", help="resolve it anew and write its pins, instead of making it")
    options = parser.parse_args()
    try:
        if options.lock:
            print(f"wrote {lock(options.name).relative_to(ROOT)}")
        else:
            install(options.name)
    except SetUpFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted; the next run starts this set-up afresh.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
