"""How operations reach a database: the one thing that a new backend writes, beside a Transaction and its migrations."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

T = TypeVar("T")

Operation = Callable[..., T]
"""A function of `body`: a Transaction first, then the method's own arguments."""


Durability = Literal["process", "power"]
"""What an acknowledged write survives: the death of any process, or a power cut too."""


class Driver(Protocol):
    """Runs operations, each whole in a transaction of its own, from any thread and any event loop."""

    @property
    def url(self) -> str:
        """Where the database is."""
        ...

    def read(self, operation: Operation[T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Coroutine[Any, Any, T]:
        """Run an operation that only reads; it sees everything that was acknowledged."""
        ...

    def write(
        self,
        operation: Operation[T],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        undo: Operation[None] | None = None,
    ) -> Coroutine[Any, Any, T]:
        """Run an operation and answer after its commit; then publish what it said.

        `undo` is run with the answer as its argument when the operation was committed and its caller was cancelled
        meanwhile.
        """
        ...

    async def close(self) -> None:
        """Finish what was accepted and let go of the database. Later calls raise StoreClosed. Safe to repeat."""
        ...
