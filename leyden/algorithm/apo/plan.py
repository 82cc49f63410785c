"""`Costs`: what a round may cost, and how many branches a budget has room for."""

from __future__ import annotations

from dataclasses import dataclass

from leyden.algorithm.apo.search import Search
from leyden.errors import ConfigError

DRAWS = 2
"""How many batches of training tasks a parent runs at most: another one if it has solved all
tasks of the first."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Numbers of rollouts."""

    gradient: int
    """Rollouts that run a parent prompt on one batch of training tasks."""
    sample: int
    """Rollouts that measure a new prompt on the tasks on which all prompts are compared."""
    val: int
    """Tasks of the whole validation set."""
    test: int
    """Tasks of the test set."""

    @property
    def branch(self) -> int:
        """Return the most rollouts that a branch costs."""
        return DRAWS * self.gradient + self.sample

    @property
    def reserve(self) -> int:
        """Return the rollouts that are reserved for the first prompt of a beam on the whole
        validation set, and for the test set.
        """
        return self.val - self.sample + 2 * self.test

    def check(self, limit: int | None) -> None:
        """Raise ConfigError if a budget has no room for the first prompts and a single new one."""
        least = 2 * self.reserve - 2 * self.test + self.sample + self.branch
        if limit is not None and limit < least:
            raise ConfigError(
                f"budget has {limit:,} rollouts, and measuring the first prompts and one new one takes up to {least:,}; "
                "give more, or a smaller val_dataset, val_batch_size, gradient_batch_size or test_dataset"
            )

    def affordable(self, wanted: int, left: int, search: Search) -> int:
        """Return how many branches of a round `left` rollouts pay for, at their highest cost."""
        unmeasured = sum(self.sample for each in search.beam if each.key not in search.rewards)
        return max(0, min(wanted, (left - unmeasured - self.reserve) // self.branch))
