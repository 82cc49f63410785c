"""Files and directories that exist whole or not at all, even if the process is killed, and that only this user can
read.

Records hold prompts, answers and keys, so every file of theirs is written here, with mode 0600 whatever the umask. The
recipe is always the same: write aside in the same directory, make it durable (fsync), rename, make the rename durable.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal

ASIDE = ".tmp-"
"""The prefix of unfinished files. A process may remove such a file once its writer is gone."""


@contextlib.contextmanager
def open_aside(path: Path, mode: Literal["w", "wb"] = "w", *, private: bool = True) -> Generator[IO[Any]]:
    """Open a file that replaces `path` when the block ends, and vanishes if it raises.

    Text is UTF-8, with newlines as written.
    private: only this user can read the file; False: the umask decides.
    """
    aside = path.with_name(ASIDE + path.name)
    opener = _private if private else None
    text: dict[str, Any] = {} if mode == "wb" else {"encoding": "utf-8", "newline": ""}
    try:
        with open(aside, mode, opener=opener, **text) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def append_privately(path: Path) -> BinaryIO:
    """Open a file for appending; a new one can only be read by this user."""
    return open(path, "ab", opener=_private)


def append_locked(path: Path, lines: Callable[[], str]) -> None:
    """Append whole lines to a file under a lock, and wait until the disk has them. Half of a line at the end of the
    file, which a kill has left there, is removed first. A failure leaves every earlier line as it was.

    lines: returns the lines; called while the file is locked.
    """
    import fcntl  # not on Windows

    with append_privately(path) as file:
        descriptor = file.fileno()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.geteuid() == 0:  # the owner of the folder must be able to read a file that root makes
            folder = path.parent.stat()
            os.fchown(descriptor, folder.st_uid, folder.st_gid)
        text, end = lines().encode("utf-8", "backslashreplace"), path.read_bytes().rfind(b"\n") + 1
        try:
            os.ftruncate(descriptor, end)
            if os.write(descriptor, text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, end)
            raise


def _private(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    if not flags & os.O_APPEND:
        os.fchmod(descriptor, 0o600)  # an unfinished file of an earlier process may have another mode
    return descriptor


def private_directory(path: Path) -> None:
    """Make a directory, and those above it that are missing, which only this user can enter.

    A directory that exists keeps its permissions.
    """
    if not path.is_dir():
        if path.parent != path:
            private_directory(path.parent)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:  # made by another process meanwhile, or a file
            if not path.is_dir():
                raise
        else:
            path.chmod(0o700)  # the umask may have taken away the user's own permissions


def write_file(path: Path, text: str) -> None:
    """Replace the content of `path` as a whole. A crash leaves the old content or the new one."""
    with open_aside(path) as file:
        file.write(text)


def commit_directory(aside: Path, path: Path) -> None:
    """Make everything under `aside` durable, then rename it to `path`, which must not exist and which only this user
    can enter.

    Both lie in the same directory.
    """
    for folder, _, names in os.walk(aside):
        for name in names:
            _fsync(Path(folder, name))
        fsync_directory(Path(folder))
    aside.chmod(0o700)
    aside.rename(path)
    fsync_directory(path.parent)


def remove_directory(path: Path) -> None:
    """Remove a directory, if it exists, so that a crash leaves no half of it under its own name."""
    aside = path.with_name(f"{ASIDE}removed-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def fsync_directory(path: Path) -> None:
    """Make names created or removed in this directory durable. Windows has no such call and needs none."""
    if os.name != "nt":
        _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
