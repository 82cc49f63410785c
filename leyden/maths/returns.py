"""Returns and advantages of episodes on NumPy arrays, and running statistics to scale them by.

Importing this module imports NumPy. It knows no policy and no buffer: shapes are (T, N),
time-major, with a mask of what happened, so that episodes may end, begin and leave an environment
idle anywhere.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


def gae(
    rewards_TN: Floats,
    values_TN: Floats,
    ends_TN: Bools,
    bootstrap_TN: Floats,
    mask_TN: Bools,
    *,
    discount: float,
    gae_lambda: float,
) -> Floats:
    """Return generalised advantage estimates (arXiv:1506.02438, eq. 16), shape (T, N), 0 where
    the mask is False.

    A_t = delta_t + discount * gae_lambda * A_{t+1}, delta_t = r_t + discount * V_{t+1} - V_t, where
    t + 1 is the episode's next step. At its last step the sum stops and V_{t+1} is `bootstrap_TN`:
    0 if the task ended, the value of the final observation if a limit cut it off. Advantages +
    values are the returns (TD(lambda)) that a value function learns.

    ends_TN: the step was its episode's last. A column's last valid step that is none
        is bootstrapped too.
    mask_TN: False where the environment was idle; such entries may hold anything.
    """
    n_steps, n_envs = rewards_TN.shape
    following_TN = np.empty_like(values_TN)
    after_N = np.zeros(n_envs)
    if mask_TN.all():
        following_TN[:-1] = values_TN[1:]
    else:
        for t in range(n_steps - 1, -1, -1):
            following_TN[t] = after_N
            after_N = np.where(mask_TN[t], values_TN[t], after_N)
    last_TN = ends_TN.copy()
    if n_steps:
        rows = n_steps - 1 - np.argmax(mask_TN[::-1], axis=0)  # each column's last valid step
        last_TN[rows, np.arange(n_envs)] = True
    delta_TN = np.where(mask_TN, rewards_TN + discount * np.where(last_TN, bootstrap_TN, following_TN) - values_TN, 0.0)
    # idle rows hand the sum on unchanged
    decay_TN = np.where(mask_TN, np.where(last_TN, 0.0, discount * gae_lambda), 1.0)
    sums_TN = np.empty_like(delta_TN)
    carry_N = np.zeros(n_envs)
    for t in range(n_steps - 1, -1, -1):
        carry_N *= decay_TN[t]
        carry_N += delta_TN[t]
        sums_TN[t] = carry_N
    return np.where(mask_TN, sums_TN, 0.0)


def n_step(
    rewards_S: Floats, successor_S: Ints, starts_B: Ints, *, n: int, discount: float
) -> tuple[Floats, Ints, Floats]:
    """Return discounted rewards of up to `n` steps from each start (Sutton and Barto, 2nd ed., eq.
    7.1, without its bootstrap).

    successor_S: for each of the S stored steps the one that follows in its episode, -1 where the
        episode ends or is not known further.
    starts_B: the steps to begin at.
    Return sums of r_0 + ... + discount^(k-1) r_{k-1} (B,), the last step summed (B,), and
    discount^k (B,), where k <= n steps were left.
    """
    last_B = starts_B
    sums_B = rewards_S[last_B].astype(np.float64)
    factor_B = np.full(len(starts_B), discount)
    for _ in range(n - 1):
        next_B = successor_S[last_B]
        more_B = next_B >= 0
        last_B = np.where(more_B, next_B, last_B)
        sums_B += np.where(more_B, factor_B * rewards_S[last_B], 0.0)
        factor_B = np.where(more_B, factor_B * discount, factor_B)
    return sums_B, last_B, factor_B


class RunningMoments:
    """Mean and variance of all numbers seen, batch by batch (Chan, Golub and LeVeque 1979)."""

    def __init__(self) -> None:
        self.mean = 0.0
        self.variance = 1.0
        """Variance of the population; 1.0 before the first value."""
        self.count = 0

    def update(self, values: Floats) -> None:
        """Take a batch of any shape in."""
        n = int(values.size)
        if not n:
            return
        mean, variance = float(values.mean()), float(values.var())
        total = self.count + n
        shift = mean - self.mean
        summed = self.variance * self.count + variance * n + shift * shift * self.count * n / total
        self.mean += shift * n / total
        self.variance = summed / total
        self.count = total

    @property
    def scale(self) -> float:
        """The standard deviation, never 0."""
        return math.sqrt(self.variance + 1e-8)

    def state_dict(self) -> dict[str, Any]:
        """Return mean, variance and count as plain numbers."""
        return {"mean": self.mean, "variance": self.variance, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.mean, self.variance, self.count = float(state["mean"]), float(state["variance"]), int(state["count"])
