"""With this folder on PYTHONPATH, a Python process and those that it starts write down whom they want to reach beyond this machine.

One line for each attempt, in the file that LEYDEN_TEST_OUTSIDE names. The attempt then fails, before anything is sent.
"""

import os
import sys

OUTSIDE = os.environ.get("LEYDEN_TEST_OUTSIDE")


def guard(event: str, args: tuple) -> None:
    """Called by the interpreter for each of its events."""
    if event == "socket.getaddrinfo":
        where = args[0]
    elif event in ("socket.connect", "socket.sendto") and isinstance(args[1], tuple):
        where = args[1][0]
    else:
        return
    where = where.decode() if isinstance(where, bytes) else where
    if where in (None, "localhost", "::1") or str(where).startswith("127."):
        return
    with open(OUTSIDE, "a") as file:  # noqa: PTH123 -- in every interpreter, before anything else: nothing more than needed
        file.write(f"{event} {args[0] if event == 'socket.getaddrinfo' else args[1]}\n")
    raise OSError(f"{event}: {where} is not on this machine")


if OUTSIDE:
    sys.addaudithook(guard)
