"""`Sandbox`: what a program sees of the machine, and how much it may use.

`namespaces.py`, a separate program, builds it. For another limit, add a field here and its check there.
"""

from __future__ import annotations

import asyncio
import functools
import marshal
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from leyden._lib.options import check_number
from leyden.errors import ConfigError, ProcessFailed
from leyden.execution.sandbox import namespaces

if TYPE_CHECKING:
    from leyden.execution.runner.process import ProcessOutput

_ENTER = "import sys; sys.path.append(sys.argv[1]); from namespaces import main; main(sys.argv[2])"
ENTRY: Final = [sys.executable, "-I", "-S", "-c", _ENTER]
"""How the command of a sandbox begins; the folder of `namespaces.py` and the path of the description follow."""
_SPEC = "sandbox"
"""The file name of the sandbox's description, in the folder given to `wrap`."""
HOME: Final = "/home/agent"
"""The home folder inside, empty at the start."""
_OWN: Final = ("/proc", "/sys", "/dev")
_INHERITED = ("PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TERM", "COLORTERM", "NO_COLOR")
"""Variables of the runner that the program keeps. The others may hold keys, or tell where the answers are."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Linux namespaces for one program, or Docker: private processes, files and network.

    The program sees /usr, /bin and /lib of the machine, harmless files of /etc, the folder that it was installed in and
    its working directory. It can write to its working directory, its private folder, its home and /tmp. It reaches the
    gateway and the address for its reports. It has no capability and cannot gain one, and ends with all that it has
    started. Needs Linux 5.12 with user namespaces; neither root nor a daemon.
    """

    read: Mapping[str, str] | Sequence[str] = ()
    """Further files and folders that the program may read: paths, or {path inside: path of the machine}."""
    write: Mapping[str, str] | Sequence[str] = ()
    """Further folders that it may change."""
    hide: Sequence[str] = ()
    """Files and folders that are empty inside, such as a `.git` whose history holds the answer: absolute paths, or
    paths below the working directory."""
    disk_bytes: int | None = 2**31
    """The limit of each file; of its home and /tmp together, which are in memory; and, checked twice a second, of what
    each folder that the program can change grows by and of deleted files that it holds open. None: no limit."""
    max_processes: int | None = 512
    """The limit of processes and threads. For root on Linux before 6.14 the kernel has none, and processes are counted
    twice a second."""
    cpu_seconds: int | None = None
    """The limit of CPU seconds of all processes together, checked twice a second, and of each process."""
    image: str | None = None
    """Docker's image whose files the program has, in place of the machine's; None: no Docker, namespaces."""

    def __post_init__(self) -> None:
        for name in ("disk_bytes", "max_processes", "cpu_seconds"):
            if (value := getattr(self, name)) is not None:
                check_number(name, value, at_least=1)
        for name in ("read", "write"):
            for inside, path in mapping(getattr(self, name)).items():
                if not inside.startswith("/") or not path.startswith("/"):
                    raise ConfigError(f"{name} of the sandbox has {inside!r}: {path!r}; both must be absolute paths")
                if not Path(path).exists():
                    raise ConfigError(f"{name} of the sandbox has {path!r}, which does not exist")
                _check_place(name, inside)

    async def run(
        self,
        command: Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        urls: Iterable[str] = (),
        timeout_seconds: float | None = None,
        memory_bytes: int | None = None,
        output_bytes: int = 2**20,
    ) -> ProcessOutput:
        """Run a program in a new sandbox to its end, such as the tests of what an agent has left (`take_work`).

        cwd: a folder that `read` or `write` shows, or one of the machine, which the program can then change; None: an
            empty one.
        env: variables to add to those of the runner that a sandbox keeps.
        urls: the HTTP addresses that it may reach.
        timeout_seconds: the time after which it is ended; `cause` of the output is then "request".
        memory_bytes, output_bytes: as of `ProcessAgent`.
        Raise ProcessFailed if the program could not be started.
        """
        from leyden.execution.runner.process.program import DIRECTORY, Program, RunningProgram
        from leyden.execution.runner.process.supervisor import remove_tree

        folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="leyden-")
        try:
            variables = {**harmless_variables(os.environ), **(env or {}), DIRECTORY: folder}
            where = None if cwd is None else os.fspath(cwd)
            line = await asyncio.to_thread(
                lambda: self.wrap(
                    command, directory=folder, cwd=where, env=variables, urls=urls, memory_bytes=memory_bytes
                )
            )
            running = RunningProgram(
                Program(
                    command=line, env={DIRECTORY: folder}, cwd="/", directory=folder, stdin=None, grace_seconds=0.5,
                    memory_bytes=memory_bytes, output_bytes=output_bytes,
                )
            )  # fmt: skip
            try:
                async with asyncio.timeout(timeout_seconds):
                    output = await running.output()
            except (TimeoutError, asyncio.CancelledError) as ended:
                output = await running.stop()
                if not isinstance(ended, TimeoutError):
                    raise
        finally:
            await asyncio.to_thread(remove_tree, folder)
        if output.signal == f"signal {namespaces.REFUSED}":
            raise ProcessFailed(f"{command[0]!r} was not started: {output.stderr.strip()[-1000:]}")
        return output

    def wrap(
        self,
        command: Sequence[str],
        *,
        directory: str,
        cwd: str | None,
        env: Mapping[str, str],
        urls: Iterable[str],
        memory_bytes: int | None = None,
    ) -> list[str]:
        """Return the command that runs `command` in this sandbox, once.

        directory: the program's private folder, in which the description is written and which the program can change.
        cwd: its working directory: a path that `read` or `write` shows, or a folder of the machine, which it can then
            change; None: the private folder.
        env: the program's whole environment.
        urls: the HTTP addresses that it may reach.
        memory_bytes: the limit of memory of all that is inside, with files in memory, where this machine lets this user
            make control groups.
        Raise ConfigError if this machine has no such sandbox, or an address cannot be reached from one.
        """
        self.check()
        cwd = os.path.normpath(Path(cwd or directory).absolute())
        read, write = mapping(self.read), mapping(self.write)
        own = [directory]
        if not any(Path(cwd).is_relative_to(seen) for seen in (*read, *write)):
            _check_place("cwd", cwd)
            own.append(cwd)
        own_files = {} if self.image else _own_files(command[0], env.get("PATH", os.defpath))
        places = {
            "read": _real({**own_files, **read}),
            "write": _real({**mapping(own), **write}),
        }
        hidden = [os.path.normpath(Path(cwd, path)) for path in self.hide]
        spec = {
            "command": list(command),
            "env": dict(env),
            "cwd": cwd,
            "home": HOME,
            "addresses": sorted({_address(url) for url in urls}),
            **places,
            "hide": sorted(each for path in hidden for each in _seen_at(path, {**places["read"], **places["write"]})),
            "disk_bytes": self.disk_bytes,
            "max_processes": self.max_processes,
            "cpu_seconds": self.cpu_seconds,
            "memory_bytes": memory_bytes,
        }
        if self.image is not None:
            return _docker(self.image, spec, Path(directory) / _SPEC)
        return _enter(spec, Path(directory) / _SPEC)

    def check(self) -> None:
        """Raise ConfigError unless this machine has what the sandbox needs."""
        if self.image is None:
            check_namespaces()
        elif shutil.which("docker") is None:
            raise ConfigError(
                f"a sandbox with image={self.image!r} needs the program docker, which is not in PATH; install it, or use "
                "sandbox='namespace' (Linux), or run programs that you trust with sandbox='none'"
            )


def harmless_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the runner that a program in a sandbox keeps, and those that its files change."""
    kept = {name: value for name, value in variables.items() if name in _INHERITED}
    return {"PATH": os.defpath, **kept, "HOME": HOME, "TMPDIR": "/tmp", "USER": "agent"}


@functools.cache
def check_namespaces() -> None:
    """Raise ConfigError unless this machine lets this user make a sandbox. It starts one, once in this process."""
    why = None
    if sys.platform != "linux":
        why = f"it needs Linux, and this is {sys.platform}"
    else:
        with tempfile.TemporaryDirectory(prefix="leyden-") as folder:
            spec = {
                "command": ["true"],
                "env": {"PATH": "/usr/bin:/bin"},
                "cwd": "/",
                "home": HOME,
                "addresses": [],
                "read": {},
                "write": {},
                "hide": [],
            }
            limits: dict[str, Any] = {
                "disk_bytes": 2**20,
                "max_processes": None,
                "cpu_seconds": None,
                "memory_bytes": None,
            }
            ended = subprocess.run(
                _enter({**spec, **limits}, Path(folder) / _SPEC),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
        if ended.returncode:
            why = ended.stderr.strip().removeprefix(namespaces.REASON) or f"it ended with code {ended.returncode}"
    if why:
        raise ConfigError(
            f"sandbox='namespace' does not work on this machine: {why}. Let users make namespaces (sysctl user.max_user_namespaces, "
            "kernel.apparmor_restrict_unprivileged_userns=0), use sandbox='docker' if you have Docker, or run programs that "
            "you trust with sandbox='none'"
        )


def _enter(spec: Mapping[str, Any], path: Path) -> list[str]:
    path.touch(mode=0o600)
    path.write_bytes(marshal.dumps(dict(spec)))
    return [*ENTRY, str(Path(__file__).parent), str(path)]


def _docker(image: str, spec: Mapping[str, Any], env_file: Path) -> list[str]:
    """Return Docker's command line. The variables, which hold keys, stand in a file, which `ps` does not show."""
    variables: dict[str, str] = {name: value for name, value in spec["env"].items() if name != "PATH"}
    if broken := [name for name, value in variables.items() if "\n" in value]:
        raise ConfigError(f"the variable {broken[0]} has more than one line, which Docker's --env-file cannot pass on")
    env_file.touch(mode=0o600)
    env_file.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    client = [f"{name}={value}" for name, value in os.environ.items() if name in ("HOME", "PATH") or "DOCKER" in name]
    shown: dict[str, str] = {**spec["read"], **spec["write"]}
    mounts = [["type=bind", f"source={path}", f"target={inside}", *["readonly"] * (inside not in spec["write"])]
              for inside, path in shown.items()]  # fmt: skip
    for inside in spec["hide"]:
        there = [
            Path(path, Path(inside).relative_to(of)) for of, path in shown.items() if Path(inside).is_relative_to(of)
        ]
        if any(each.is_dir() for each in there):
            mounts.append(["type=tmpfs", f"target={inside}", "tmpfs-size=4096", "tmpfs-mode=0555"])
        elif any(each.exists() for each in there):
            mounts.append(["type=bind", "source=/dev/null", f"target={inside}"])
    disk, owner = spec["disk_bytes"], f"{os.getuid()}:{os.getgid()}"
    limits = {
        "--pids-limit": spec["max_processes"],
        "--memory": spec["memory_bytes"],
        "--memory-swap": spec["memory_bytes"],
        "--ulimit=fsize": disk,
        "--ulimit=cpu": spec["cpu_seconds"],
        "--ulimit=core": 0,
    }
    size = "" if disk is None else f",size={disk}"
    return [
        "/usr/bin/env", *client, str(shutil.which("docker")), "run", "--rm", "--init", "--interactive", "--label=leyden",
        "--cap-drop=ALL", "--security-opt=no-new-privileges", "--read-only", "--hostname=sandbox", f"--user={owner}",
        f"--network={'host' if spec['addresses'] else 'none'}", f"--workdir={spec['cwd']}", f"--env-file={env_file}",
        f"--tmpfs=/tmp:exec,mode=1777{size}", f"--tmpfs={spec['home']}:exec,mode=0777{size}",
        *(f"--mount={','.join(_field(each) for each in mount)}" for mount in mounts),
        *(f"{name}={most}" for name, most in limits.items() if most is not None), image, *spec["command"],
    ]  # fmt: skip


def _field(text: str) -> str:
    """Return a field of a mount, which Docker reads as comma-separated values."""
    return '"' + text.replace('"', '""') + '"' if "," in text or '"' in text else text


def mapping(paths: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    pairs = paths.items() if isinstance(paths, Mapping) else ((path, path) for path in paths)
    return {os.path.normpath(inside): path for inside, path in pairs}


def _real(paths: Mapping[str, str]) -> dict[str, str]:
    return {inside: os.path.realpath(path) for inside, path in paths.items()}


def _seen_at(path: str, shown: Mapping[str, str]) -> set[str]:
    """Return all places inside where a place inside is seen, because a folder may be shown twice."""

    def moved(path: str, pairs: Iterable[tuple[str, str]]) -> set[str]:
        return {str(Path(to, Path(path).relative_to(of))) for of, to in pairs if Path(path).is_relative_to(of)}

    sources = moved(path, shown.items())
    return {path}.union(*(moved(source, ((path, inside) for inside, path in shown.items())) for source in sources))


def _check_place(name: str, inside: str) -> None:
    """Raise ConfigError for a folder that would replace the sandbox's own."""
    place = Path(os.path.normpath(inside))
    if any(place == Path(own) or place in Path(own).parents or Path(own) in place.parents for own in _OWN):
        raise ConfigError(
            f"{name} of the sandbox has {inside!r}, in whose place it has its own {', '.join(_OWN)}; give a folder elsewhere"
        )


def _address(url: str) -> tuple[str, int]:
    """Return host and port of a URL. Raise ConfigError for an IPv6 address, and without host or port."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    if parts.hostname is None or port is None or ":" in parts.hostname:
        raise ConfigError(
            f"a program in a sandbox cannot reach {url!r}: it must be an HTTP address with a name or an IPv4 address"
        )
    return parts.hostname, port


def _own_files(program: str, path: str) -> dict[str, str]:
    """Return the folder that a program was installed in, PREFIX of PREFIX/bin/NAME, for each link on the way to it."""
    found: dict[str, str] = {}
    step = shutil.which(program, path=path)
    home = Path.home()
    for _ in range(10):
        if step is None:
            break
        file = Path(step).absolute()
        folder = file.parent.parent if file.parent.name in ("bin", ".bin", "Scripts") else file.parent
        shared = folder in (home, *home.parents) or folder == Path("/")
        if not any(file.is_relative_to(seen) for seen in namespaces.SYSTEM):
            found[str(file if shared else folder)] = str(file if shared else folder)
        step = str(file.parent / file.readlink()) if file.is_symlink() else None
    return found
