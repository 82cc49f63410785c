"""The protocol of a driver, which runs operations on a database. To add a database, implement it together with a
Transaction, and write migrations.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

T = TypeVar("T")

Operation = Callable[..., T]
"""A function of `body`. It takes a Transaction, then the arguments of the store's method."""


Durability = Literal["process", "power"]
"""The event that a write survives once its call has returned. `process`: the death of any process.
`power`: a power cut too."""


class Driver(Protocol):
    """Runs each operation in its own transaction, from any thread and any event loop."""

    @property
    def url(self) -> str:
        """The address of the database."""
        ...

    def read(self, operation: Operation[T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Coroutine[Any, Any, T]:
        """Run an operation that only reads. It sees every acknowledged write."""
        ...

    def write(
        self,
        operation: Operation[T],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        undo: Operation[None] | None = None,
    ) -> Coroutine[Any, Any, T]:
        """Run an operation, return its result after the commit, and publish the operation's news.

        undo: runs with the result as its argument if the operation was committed and its caller was cancelled
            meanwhile.
        """
        ...

    async def close(self) -> None:
        """Finish the accepted operations and release the database. Later calls raise StoreClosed. Safe to repeat."""
        ...
