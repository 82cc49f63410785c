"""Shorten the tracebacks of errors that leave Leyden for a user's script.

A traceback of `fit` would hold dozens of frames of event loops and threads, which say nothing about the user's mistake.
Only the user's own frames are kept; the complete traceback is logged at DEBUG.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Awaitable, Callable
from types import CodeType, TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from leyden._lib.frames import users_part
from leyden.errors import LeydenError, RunInterrupted

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_EXIT_STATUS = 130
"""The exit status of a program that SIGINT ended, by the convention of shells."""


def short_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function, sync or async, so that its errors leave it without Leyden's frames around those of the user.

    A LeydenError keeps only the user's frames. Another error that passed through a user's agent or algorithm keeps its
    frames from the user's first one on. An error that passed through no user's code is a fault of Leyden or of a
    library, and keeps all frames.
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
    """Return the error after shortening the tracebacks of its whole chain, in place. Log it at DEBUG before."""
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
    """Shorten one error's traceback, in place. Drop a LeydenError's cause that has no frames of the user."""
    is_ours = isinstance(error, LeydenError | KeyboardInterrupt)
    part = users_part(_inside(error.__traceback__), and_below=not is_ours)
    if part is not None or is_ours:
        error.__traceback__ = part
    if not is_ours:
        return
    following = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if following is None or users_part(_inside(following.__traceback__)) is None:
        error.__cause__ = None  # setting it also hides the context


def _inside(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback below the frame of this module, if there is one."""
    found, step = traceback, traceback
    while step is not None:
        if step.tb_frame.f_code.co_filename == __file__:
            found = step.tb_next
        step = step.tb_next
    return found


def _exit_quietly_if_uncaught() -> None:
    """Install an excepthook that prints only the message of an uncaught RunInterrupted and exits with status 130. Other
    errors are shown as before. If the program has its own hook, that one shows all.
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
