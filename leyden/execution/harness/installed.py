"""Where the programs of harnesses are installed, and which version is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from leyden.errors import ConfigError
from leyden.execution.harness.harness import HarnessProgram


def harness_folder() -> Path:
    """Return the folder of all installed harnesses: $LEYDEN_HARNESSES, or one in the user's cache."""
    given = os.environ.get("LEYDEN_HARNESSES")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(given or f"{cache}/leyden/harness").expanduser()


def find_program(kind: HarnessProgram) -> Path:
    """Return the path of a harness's command. Raise ConfigError if it is not installed."""
    own = _command(kind, harness_folder() / kind.name)
    if own.exists():
        return own
    if on_path := shutil.which(kind.program):
        return Path(on_path)
    raise ConfigError(
        f"the harness {kind.name!r} is not installed: no {kind.program!r} on PATH or in {own.parent}; run `leyden harness check "
        f"{kind.name}`, which installs {kind.package} {kind.version}"
    )


def install(kind: HarnessProgram) -> Path:
    """Install a harness at its tested version into its own folder, and return the path of its command.

    Raise ConfigError, and leave nothing, if that fails.
    """
    folder = harness_folder() / kind.name
    if kind.installer == "npm":
        if (npm := shutil.which("npm")) is None:
            raise ConfigError(
                f"the harness {kind.name!r} is a package of npm, which is not on PATH; install Node.js 20"
            )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text("{}")
        wanted = [f"{kind.package}@{kind.version}", *kind.requirements]
        commands = [[npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--silent", *wanted]]
    else:
        wanted = [f"{kind.package}=={kind.version}", *kind.requirements]
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        commands = [[sys.executable, "-m", "venv", str(folder)], [*pip, *wanted]]
    for command in commands:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if ran.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            said = (ran.stderr.strip() or ran.stdout.strip() or f"exit code {ran.returncode}").splitlines()[-1]
            raise ConfigError(f"{' '.join(wanted)} cannot be installed by {kind.installer}: {said:.500}")
    program = _command(kind, folder)
    if not program.exists():
        shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(
            f"{' '.join(wanted)} has no command {kind.program!r}; the name may hold a placeholder or another project"
        )
    return program


def package_version(kind: HarnessProgram, program: Path) -> str | None:
    """Return the version of the package that a program is installed from; None if it is in no such package."""
    if kind.installer == "pip":
        folders = [str(each) for each in program.resolve().parent.parent.glob("lib/python*/site-packages")]
        return next((each.version for each in metadata.distributions(name=kind.package, path=folders)), None)
    for parent in program.resolve().parents:
        try:
            package = json.loads((parent / "package.json").read_text())
        except (OSError, ValueError):
            continue
        if package.get("name") == kind.package:
            return package.get("version")
    return None


def installed_version(kind: HarnessProgram, program: Path) -> str | None:
    """Return the version of an installed program: that of its package, or else what `--version` says; None if neither
    tells.
    """
    if (version := package_version(kind, program)) is not None:
        return version
    try:
        ran = subprocess.run(
            [str(program), "--version"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\d+\.\d+(\.\w+)*", ran.stdout + ran.stderr)
    return found and found[0]


def _command(kind: HarnessProgram, folder: Path) -> Path:
    return folder / ("node_modules/.bin" if kind.installer == "npm" else "bin") / kind.program
