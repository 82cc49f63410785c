"""`take_work`: what a program left in its folder, as far as a checker may trust it."""

from __future__ import annotations

import fnmatch
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from leyden.execution.runner.process.supervisor import remove_tree

_COMPILED = "__pycache__"
"""A folder that is never taken: a module's compiled form can differ from its source, and is run in its place."""


def take_work(
    source: str | os.PathLike[str],
    into: str | os.PathLike[str],
    *,
    only: Sequence[str] | None = None,
    limit_bytes: int = 2**31,
    limit_files: int = 100_000,
) -> list[str]:
    """Copy what a program left in `source` over what is in `into`; return what was left out, and why.

    Call it when the program has ended. Left out are links that lead out of `source`, because a checker that read or
    wrote there would use files of its own; and devices, sockets, pipes and compiled Python.
    only: patterns (`fnmatch`) of the paths below `source` that the program was asked for. No other file of the program,
        such as a conftest.py, then has a part in the check. None: all.
    limit_bytes, limit_files: how much is taken and read at most.
    """
    root, target = Path(source).resolve(), Path(into).resolve()
    target.mkdir(parents=True, exist_ok=True)
    folders, left_out, files, size = [root], list[str](), 0, 0
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as found:
                entries = sorted(
                    ((entry, entry.stat(follow_symlinks=False)) for entry in found), key=lambda each: each[0].name
                )
        except OSError as error:  # unreadable, or deeper than a path can be long
            left_out.append(f"{folder.relative_to(root)!s:.200}: {error.strerror}")
            continue
        for entry, status in entries:
            path, is_folder = Path(entry.path), stat.S_ISDIR(status.st_mode)
            name = str(path.relative_to(root))
            files += 1
            if files > limit_files:
                return [*left_out, f"{name:.200} and all after it: more than {limit_files:,} files"]
            if is_folder:
                folders += [path] * (entry.name != _COMPILED)
            if only is None:
                wanted = entry.name != _COMPILED
            else:
                wanted = not is_folder and any(fnmatch.fnmatchcase(name, pattern) for pattern in only)
            if not wanted:
                continue
            why = None
            if stat.S_ISLNK(status.st_mode):
                why = None if _stays_inside(root, path) else "a link that leads out of the folder"
            elif stat.S_ISREG(status.st_mode):
                size += status.st_size
                why = None if size <= limit_bytes else f"more than {limit_bytes:,} bytes"
            elif not is_folder:
                why = "neither a file, a folder nor a link"
            try:
                if why is None:
                    _place(path, target, name)
            except OSError as error:
                why = error.strerror
            if why is not None:
                left_out.append(f"{name:.200}: {why}")
    return left_out


def _stays_inside(root: Path, link: Path) -> bool:
    """Return whether a link, and each further one on its way, is relative and leads to a place below `root`."""
    for _ in range(20):
        text = link.readlink()
        step = Path(os.path.normpath(link.parent / text))
        # the second: a folder on its way is a link
        if text.is_absolute() or root not in step.parents or step.parent.resolve() != step.parent:
            return False
        if not step.is_symlink():
            return True
        link = step
    return False


def _place(source: Path, into: Path, name: str) -> None:
    """Copy a folder (without what is in it), a file or a link. What is in the way is replaced."""
    target, mode = into / name, source.lstat().st_mode
    for each in (*reversed(Path(name).parents[:-1]), Path(name)):
        there = into / each
        if there.is_symlink() or (there.exists() and there.is_dir() != (each != Path(name) or stat.S_ISDIR(mode))):
            remove_tree(there)
    if stat.S_ISDIR(mode):
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISLNK(mode):
        target.unlink(missing_ok=True)
        target.symlink_to(source.readlink())
        return
    shutil.copyfile(source, target, follow_symlinks=False)
    target.chmod(stat.S_IMODE(mode) & 0o777 | 0o600)
