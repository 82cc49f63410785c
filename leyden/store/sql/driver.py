"""The protocol by which operations reach a database. A new backend implements it, with a
Transaction and migrations.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

T = TypeVar("T")

Operation = Callable[..., T]
"""A function of `body`: a Transaction first, then the method's own arguments."""


Durability = Literal["process", "power"]
"""The event that an acknowledged write survives: the death of any process, or a power cut too."""


class Driver(Protocol):
    """Runs each operation in a transaction of its own, from any thread and any event loop."""

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

        undo: runs with the result as its argument if the operation was committed and its caller was
            cancelled meanwhile.
        """
        ...

    async def close(self) -> None:
        """Finish the accepted operations and release the database. Later calls raise StoreClosed.
        Safe to repeat.
        """
        ...
