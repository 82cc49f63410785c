"""Tell the user's frames of a traceback from those of Leyden, the standard library and packages."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType

_LEYDEN = f"{Path(__file__).parents[1]}{os.sep}"
_COMPAT = f"{os.sep}leyden_compat{os.sep}"
"""The package of leyden-compat, which a clone has in another folder."""
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Folders of installed packages: of an environment, a user or a distribution."""
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_AGENTS = tuple(f"{_LEYDEN}{name}{os.sep}" for name in (f"cli{os.sep}demo", "testing"))
"""Leyden's own agents count as a user's."""
_IMPORT_MACHINERY = ("<frozen importlib", "<frozen zipimport")
_TYPED = ("<stdin>", "<console>", "<ipython-input", "<python-input")
"""Beginnings of the file names of what a user types. Other names in angle brackets belong to generated code."""


def current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by the thread's id."""
    return sys._current_frames()  # pyright: ignore[reportPrivateUsage] -- documented under this name


def is_users_file(filename: str) -> bool:
    """Return whether a frame's file is neither Leyden's nor a library's nor generated, as a dataclass's methods are."""
    if filename.startswith(_AGENTS):
        return True
    if filename.startswith("<"):
        return filename.startswith(_TYPED) or (filename == "<string>" and sys.argv[:1] == ["-c"])
    return not filename.startswith((_LEYDEN, *_LIBRARIES)) and not any(
        folder in filename for folder in (_COMPAT, *_PACKAGES)
    )


def users_frame(frames: Sequence[FrameType]) -> FrameType | None:
    """Return the innermost frame in a user's file. Without one, return the outermost frame of an installed package
    other than Leyden, which is where an installed agent begins. None if there is neither.

    frames: the innermost last.
    """
    users = [frame for frame in reversed(frames) if is_users_file(frame.f_code.co_filename)]
    if users:  # with `python -c`, generated code has the same file name as the user's
        return next((frame for frame in users if frame.f_code.co_filename != "<string>"), users[0])
    names = ((frame, frame.f_code.co_filename) for frame in frames)
    return next(
        (
            frame
            for frame, name in names
            if not name.startswith(_LEYDEN) and any(folder in name for folder in _PACKAGES)
        ),
        None,
    )


def importing(frames: Sequence[FrameType]) -> str | None:
    """Return the name of the module that a thread is importing, or whose import by another thread it waits for; the
    outermost one of several. None outside an import.

    frames: of the thread, the innermost last.
    """
    imports = [frame for frame in frames if frame.f_code.co_filename.startswith(_IMPORT_MACHINERY)]
    names = (frame.f_locals.get("name") for frame in imports if frame.f_code.co_name == "_find_and_load")
    return str(next(names, "a module")) if imports else None


def users_part(traceback: TracebackType | None, *, and_below: bool = True) -> TracebackType | None:
    """Return the traceback from its first frame in a user's file on; None without such a frame.

    and_below: keep what lies below the user's last frame.
    """
    steps: list[TracebackType] = []
    while traceback is not None:
        steps.append(traceback)
        traceback = traceback.tb_next
    users = [index for index, step in enumerate(steps) if is_users_file(step.tb_frame.f_code.co_filename)]
    if not users:
        return None
    part: TracebackType | None = None
    for step in reversed(steps[users[0] :] if and_below else steps[users[0] : users[-1] + 1]):
        part = TracebackType(part, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return part


def users_stacklevel() -> int:
    """Return the `stacklevel` with which the caller's `warnings.warn` names the nearest frame in a user's file, or the
    outermost frame if there is none.
    """
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_back is not None and not is_users_file(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level
