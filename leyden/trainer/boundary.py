"""The border between Leyden and a user's script: errors leave it short, and with the user's own
frames.

A traceback of `fit` would hold dozens of frames of event loops and threads, which say nothing about
the user's mistake. The whole traceback is in the log at DEBUG.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Awaitable, Callable
from types import CodeType, TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from leyden.errors import LeydenError, RunInterrupted
from leyden.utils.frames import users_part

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_EXIT_STATUS = 130
"""The exit status of a program that SIGINT ended, by the convention of shells."""


def short_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Let errors leave `function`, sync or async, without Leyden's frames around those of the user.

    A LeydenError keeps the user's frames alone. Another error that came through a user's agent or
    algorithm keeps its frames from the user's first one on. An error that met no user's code is a
    fault of Leyden or of a library, and stays whole.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 -- raised again
            leaving = _shortened(error)
        raise leaving

    @functools.wraps(function)
    async def wait(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            return await cast(Awaitable[Any], function(*args, **kwargs))
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 -- raised again
            leaving = _shortened(error)
        raise leaving

    wrapper: Any = wait if inspect.iscoroutinefunction(function) else call
    code: CodeType = wrapper.__code__
    wrapper.__code__ = code.replace(co_name=function.__name__)  # the name that a traceback shows
    return wrapper


def _shortened(error: BaseException) -> BaseException:
    logger.debug("%s leaves with this traceback", type(error).__name__, exc_info=error)
    if isinstance(error, RunInterrupted):
        _exit_quietly_if_uncaught()
    seen = set[int]()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        _shorten(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return error


def _shorten(error: BaseException) -> None:
    """Cut one link of a chain of errors, and drop what follows it if that is only Leyden's."""
    is_ours = isinstance(error, LeydenError | KeyboardInterrupt)
    part = users_part(_inside(error.__traceback__), and_below=not is_ours)
    if part is not None or is_ours:
        error.__traceback__ = part
    if not is_ours:
        return
    following = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if following is None or users_part(_inside(following.__traceback__)) is None:
        error.__cause__ = None  # which hides the context too


def _inside(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback below the frame of this module, if there is one."""
    found, step = traceback, traceback
    while step is not None:
        if step.tb_frame.f_code.co_filename == __file__:
            found = step.tb_next
        step = step.tb_next
    return found


def _exit_quietly_if_uncaught() -> None:
    """Install an excepthook that shows an uncaught RunInterrupted as its message alone, and exits
    with 130.

    Other errors, and a hook of the program's own, are left as they are.
    """
    before = sys.excepthook
    if getattr(before, "__module__", None) == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not isinstance(error, RunInterrupted) or before is not sys.__excepthook__:
            before(kind, error, traceback)
            return
        sys.stderr.write(f"\n{error}\n")
        if not (sys.flags.interactive or hasattr(sys, "ps1")):
            raise SystemExit(_EXIT_STATUS)

    sys.excepthook = hook
