"""Tell the user's frames of a traceback from those of Leyden, the standard library and packages."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

_LEYDEN = Path(__file__).parents[1]
_COMPAT = f"{os.sep}leyden_compat{os.sep}"
"""The package of leyden-compat, which a clone has in another folder."""
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_AGENTS = tuple(f"{_LEYDEN}{os.sep}{name}{os.sep}" for name in (f"cli{os.sep}demo", "testing"))
"""Leyden's own agents count as a user's."""


def current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by the thread's id."""
    return sys._current_frames()  # pyright: ignore[reportPrivateUsage] -- documented under this name


def is_users_file(filename: str) -> bool:
    """Return whether a frame's file is neither Leyden's nor a library's."""
    if filename.startswith(("<frozen", *_LIBRARIES)) or _COMPAT in filename:
        return False
    return not filename.startswith(f"{_LEYDEN}{os.sep}") or filename.startswith(_AGENTS)


def users_part(traceback: TracebackType | None, *, and_below: bool = True) -> TracebackType | None:
    """Return the traceback from its first frame in a user's file on; None without such a frame.

    and_below: keep what lies below the user's last frame.
    """
    steps = list(_steps(traceback))
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


def _steps(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
