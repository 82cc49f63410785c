"""Seeds for the global random generators of worker processes: Python's, NumPy's and torch's.

A forked worker inherits the generators of its parent, so without their own seeds all workers would draw equal numbers.
A worker's seeds depend on the run's seeds, on the worker's number and on how often it was started. This module knows no
environments. To seed the generator of another library, add a line to `_SEEDERS`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np


@dataclass(frozen=True, slots=True)
class WorkerSeeds:
    """The numbers from which the seeds of all workers derive, one for each library."""

    random: int
    numpy: int
    torch: int

    @classmethod
    def draw(cls) -> WorkerSeeds:
        """Draw each number from this process's generator of that library.

        So the workers of a program that seeds its generators repeat their numbers, and those of another program differ
        each time.
        """
        of_numpy = int(np.random.randint(2**63 - 1, dtype=np.int64))
        torch: Any = sys.modules.get("torch")
        of_torch = of_numpy if torch is None else int(torch.empty((), dtype=torch.int64).random_().item())
        return cls(random.getrandbits(63), of_numpy, of_torch)


class WorkerGenerators:
    """Seeds the global generators of one worker process."""

    def __init__(self, seeds: WorkerSeeds, worker: int, start: int) -> None:
        """start: how often the worker was started before, so that a restarted worker draws other numbers."""
        self._seeds, self._worker, self._start = seeds, worker, start
        self._done: set[str] = set()

    def seed(self) -> None:
        """Seed every library that is imported and not seeded yet.

        Call it again when simulators may have imported another one.
        """
        for name, seeder in _SEEDERS.items():
            if name not in self._done and name in sys.modules:
                self._done.add(name)
                sequence = np.random.SeedSequence([getattr(self._seeds, name), self._worker, self._start])
                seeder(sequence)


_SEEDERS: Final[dict[str, Callable[[np.random.SeedSequence], None]]] = {
    "random": lambda sequence: random.seed(sequence.generate_state(8).tobytes()),
    "numpy": lambda sequence: np.random.seed(sequence.generate_state(8)),
    # 63 bits: torch's seeds are signed
    "torch": lambda sequence: sys.modules["torch"].manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> 1)),
}
