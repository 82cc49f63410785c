"""Errors as text: an exception group is known by the errors in it."""

from __future__ import annotations

import asyncio

import pytest

from leyden._lib.text import describe_error, error_line, inner_errors

REFUSED, TIMED_OUT = ConnectionError("refused"), TimeoutError("read timed out")


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    """The error as it is when it has been raised, `from` a cause if there is one."""
    try:
        raise error from cause
    except BaseException as caught:  # noqa: BLE001 -- of any kind
        return caught


def following(error: BaseException, first: BaseException) -> BaseException:
    """An error that was raised while another one was handled."""
    try:
        try:
            raise first
        except BaseException:  # noqa: BLE001
            raise error  # noqa: B904 -- without `from`, which is the case here
    except BaseException as caught:  # noqa: BLE001 -- of any kind
        return caught


GROUP = "unhandled errors in a TaskGroup"


def group(*errors: BaseException) -> BaseException:
    return BaseExceptionGroup(GROUP, errors)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (REFUSED, "ConnectionError: refused"),
        (ValueError(), "ValueError"),
        (group(REFUSED), "ConnectionError: refused"),
        (group(group(group(REFUSED))), "ConnectionError: refused"),
        (group(REFUSED, ConnectionError("refused")), "ConnectionError: refused"),
        (group(TIMED_OUT, REFUSED), "ConnectionError: refused; TimeoutError: read timed out"),
        (group(REFUSED, group(TIMED_OUT)), "ConnectionError: refused; TimeoutError: read timed out"),
        (group(asyncio.CancelledError(), REFUSED), "ConnectionError: refused"),
        (group(asyncio.CancelledError()), "CancelledError"),
        (group(KeyboardInterrupt()), "KeyboardInterrupt"),
        (
            group(*(ValueError(str(n)) for n in range(7))),
            "ValueError: 0; ValueError: 1; ValueError: 2; ValueError: 3; ValueError: 4; and 2 more",
        ),
        (raised(RuntimeError("no session"), group(REFUSED)), "RuntimeError: no session (ConnectionError: refused)"),
        (raised(RuntimeError(f"{GROUP} (1 sub-exception)"), group(REFUSED)), "RuntimeError: ConnectionError: refused"),
        (
            following(RuntimeError(f"failed: {GROUP} (1 sub-exception)"), group(REFUSED)),
            "RuntimeError: failed: ConnectionError: refused",
        ),
        (following(RuntimeError("of its own"), group(REFUSED)), "RuntimeError: of its own"),
        (raised(OSError("x"), raised(RuntimeError("y"), group(REFUSED))), "OSError: x (ConnectionError: refused)"),
        (group(raised(RuntimeError("z"), group(REFUSED))), "RuntimeError: z (ConnectionError: refused)"),
        (raised(RuntimeError("plain"), REFUSED), "RuntimeError: plain"),
    ],
)
def test_a_failure_in_a_group_has_the_line_of_the_failure(error: BaseException, line: str) -> None:
    assert error_line(error) == line
    assert describe_error(error) in line


def test_a_group_that_causes_its_own_member_is_described_all_the_same() -> None:
    inner = RuntimeError("inner")
    outer = group(inner)
    inner.__cause__ = outer
    assert "inner" in error_line(outer)
    assert inner_errors(outer) == [inner]


def test_a_group_of_groups_of_any_depth_is_read() -> None:
    error: BaseException = REFUSED
    for _ in range(5000):
        error = group(error)
    assert error_line(error) == "ConnectionError: refused"
