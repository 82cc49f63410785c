"""`Costs`: how many rollouts a round may take, and how many candidates a budget allows."""

from __future__ import annotations

from dataclasses import dataclass

from leyden.algorithm.apo.search import Search
from leyden.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Costs:
    """How many rollouts the parts of a run take."""

    gradient: int
    """Training tasks that a candidate runs in a round."""
    sample: int
    """Validation tasks on which a candidate is compared with the best one."""
    val: int
    """Tasks of the whole validation set."""
    test: int
    """Tasks of the test set."""

    @property
    def first(self) -> int:
        """Return the number of training tasks that the first prompts run before round 1.

        They are more than in a round, so that the first critics see various failures.
        """
        return 2 * self.gradient

    @property
    def reserve(self) -> int:
        """The rollouts that are reserved for the end: to measure the best candidate on the whole validation set, and
        two candidates on the test set.
        """
        return self.val - self.sample + 2 * self.test

    def check(self, limit: int | None) -> None:
        """Raise ConfigError if a budget has no room for the first prompts and a single new one.

        limit: the budget's rollouts; None: no limit.
        """
        least = self.val + self.first + self.gradient + self.val + 2 * self.test
        if limit is not None and limit < least:
            raise ConfigError(
                f"budget has {limit:,} rollouts, and measuring the first prompts and one new one takes up to {least:,}; "
                "give more, or a smaller val_dataset, val_batch_size, gradient_batch_size or test_dataset"
            )

    def affordable(self, wanted: int, left: int, search: Search) -> int:
        """Return how many candidates a round can run, at most `wanted`, if it takes as many rollouts as it can.

        left: the rollouts that the budget has left.
        """
        first = 0 if search.train[0] else self.first
        has_best = search.best is not None and len(search.val[search.best]) >= self.sample
        compared = self.sample if has_best else 2 * self.sample
        return max(0, min(wanted, (left - self.reserve - first - compared) // self.gradient))
