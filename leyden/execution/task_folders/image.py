"""Take the place of a task's image without Docker: its working directory, its files, and what must be installed here.

A Dockerfile is read, and never built. The instructions that only install packages or copy files have their counterpart
on this machine; any other needs Docker and is named. To understand another one, add a case to `_Reader`.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Final, cast

_BASES: Final = ("debian", "ubuntu", "python")
_WITHOUT_EFFECT: Final = ("LABEL", "MAINTAINER", "CMD", "EXPOSE", "STOPSIGNAL", "SHELL", "ARG")
"""Instructions that change nothing for a program that is started in the working directory."""
_HARMLESS = re.compile(
    r"apt(-get)? (-\S+ )*(update|clean|autoremove)\b.*|rm -rf /var/lib/apt/lists/\*|pip3? install (-\S+ )*(--upgrade|-U) pip|set -\w+|true"
)
_SYSTEM: Final = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/etc",
    "/proc",
    "/dev",
    "/tmp",
    "/tests",
    "/solution",
    "/logs",
)


@dataclass(slots=True)
class Image:
    """What an image gives to a task, and why this machine cannot give it."""

    workdir: str = ""
    env: dict[str, str] = field(default_factory=dict[str, str])
    copies: list[tuple[Path, str]] = field(default_factory=list[tuple[Path, str]])
    """Files and folders of the task, and where each is inside, in the order of the Dockerfile."""
    faults: list[str] = field(default_factory=list[str])
    """Why the task cannot run here; empty if it can."""

    def copy_to(self, folder: Path) -> None:
        """Make a folder with the files of the working directory."""
        folder.mkdir()
        for source, inside in self.copies:
            target = folder / PurePosixPath(inside).relative_to(self.workdir)
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
            else:
                shutil.copy2(source, target)


def read_image(environment: Path, docker_image: str | None) -> Image:
    """Return what the image of a task is here: that of `environment`/Dockerfile, else the image of that name."""
    image = Image()
    if compose := next(environment.glob("*compose.y*ml"), None):
        image.faults.append(f"needs Docker: it has {compose.name}")
    dockerfile = environment / "Dockerfile"
    if not dockerfile.is_file():
        why = f"its image {docker_image!r} is prebuilt" if docker_image else "it has no environment/Dockerfile"
        image.faults.append(f"needs Docker: {why}, so the files in it are unknown")
        return image
    reader = _Reader(image, environment)
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(errors="replace"), flags=re.MULTILINE)
    for line in re.sub(r"\\[ \t]*\n", " ", text).splitlines():
        if line.strip():
            reader.instruction(line.strip())
    if not image.workdir and not image.faults:
        image.faults.append("its Dockerfile sets no WORKDIR, which is the folder that the agent works in")
    return image


class _Reader:
    """Reads the instructions of one Dockerfile into an image."""

    def __init__(self, image: Image, environment: Path) -> None:
        self._image, self._environment = image, environment
        self._is_started = False

    def instruction(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        name, rest = name.upper(), rest.strip()
        if name in _WITHOUT_EFFECT or (name == "USER" and rest in ("root", "0")):
            return
        if "$" in rest and name != "RUN":
            return self._needs_docker(line)
        try:
            match name:
                case "FROM":
                    self._base(rest)
                case "WORKDIR":
                    self._workdir(rest)
                case "ENV":
                    self._variables(rest)
                case "COPY" | "ADD":
                    self._copy(line, rest)
                case "RUN":
                    for command in re.split(r"&&|;", rest):
                        self._run(line, " ".join(command.split()))
                case _:
                    self._needs_docker(line)
        except ValueError:  # quotes that do not close, JSON that is none
            self._needs_docker(line)

    def _needs_docker(self, line: str) -> None:
        self._image.faults.append(f"needs Docker: this machine has no counterpart of `{line:.120}`")

    def _missing(self, what: str) -> None:
        self._image.faults.append(f"needs {what}; install it, or run the task with Docker")

    def _base(self, rest: str) -> None:
        repository, _, tag = rest.split("@")[0].removeprefix("docker.io/").removeprefix("library/").partition(":")
        if self._is_started or repository not in _BASES:
            return self._needs_docker(f"FROM {rest}")
        self._is_started = True
        wanted, here = re.match(r"3\.\d+", tag), f"3.{sys.version_info.minor}"
        if repository == "python" and wanted and wanted[0] != here:
            self._missing(f"Python {wanted[0]}, and this is {here}")

    def _workdir(self, path: str) -> None:
        path = str(PurePosixPath(self._image.workdir or "/") / path)
        if path == "/" or ".." in path or any(PurePosixPath(path).is_relative_to(each) for each in _SYSTEM):
            return self._needs_docker(f"WORKDIR {path}")
        self._image.workdir = path

    def _variables(self, rest: str) -> None:
        parts = shlex.split(rest)
        if "=" not in parts[0]:
            parts = [f"{parts[0]}={' '.join(parts[1:])}"]
        self._image.env |= dict(cast("tuple[str, str]", tuple(part.split("=", 1))) for part in parts)

    def _copy(self, line: str, rest: str) -> None:
        parts = cast("list[str]", json.loads(rest) if rest.startswith("[") else shlex.split(rest))
        *sources, target = parts
        inside = str(PurePosixPath(self._image.workdir or "/") / target)
        found = [each for source in sources for each in sorted(self._environment.glob(source.strip("/") or "."))]
        if (
            not found
            or any(part.startswith("--") or ".." in part or "://" in part for part in parts)
            or not self._image.workdir
            or not PurePosixPath(inside).is_relative_to(self._image.workdir)
            or (self._environment / ".dockerignore").exists()
            or (line.upper().startswith("ADD") and any(".tar" in each.name for each in found))
        ):
            return self._needs_docker(line)
        for each in found:
            into = not each.is_dir() and (target.endswith(("/", ".")) or len(found) > 1)
            self._image.copies.append((each, f"{inside}/{each.name}" if into else inside))

    def _run(self, line: str, command: str) -> None:
        if not command or _HARMLESS.fullmatch(command):
            return
        words = shlex.split(command)
        while words and re.fullmatch(r"\w+=\S*", words[0]):
            del words[0]
        match [word for word in words if not word.startswith("-")]:
            case ["apt-get" | "apt", "install", *packages] if packages:
                for package in packages:
                    if not _has_debian_package(package.split("=")[0]):
                        self._missing(f"the Debian package {package}")
            case ["pip" | "pip3", "install", *requirements] if "-r" not in words and "--requirement" not in words:
                self._require(line, requirements)
            case ["pip" | "pip3", "install", file] if (self._environment / file).is_file():
                lines = (self._environment / file).read_text().splitlines()
                self._require(line, [text for each in lines if (text := each.split("#")[0].strip())])
            case ["mkdir", *folders] if all(
                self._image.workdir and PurePosixPath(each).is_relative_to(self._image.workdir) for each in folders
            ) and folders == [self._image.workdir]:
                return
            case _:
                self._needs_docker(f"RUN {command}")

    def _require(self, line: str, requirements: list[str]) -> None:
        for each in requirements:
            if not (parts := re.fullmatch(r"([\w.-]+)(?:\[[\w,-]*\])?(?:==([\w.]+))?", each)):
                self._needs_docker(line)
                continue
            try:
                here = version(parts[1])
            except PackageNotFoundError:
                self._missing(f"the Python package {each}")
            else:
                if parts[2] not in (None, here):
                    self._missing(f"the Python package {each}, and {here} is here")


def _has_debian_package(name: str) -> bool:
    try:
        query = subprocess.run(
            ["dpkg-query", "-W", "-f", "${Status}", name], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return shutil.which(name) is not None
    return query.stdout.endswith("ok installed")
