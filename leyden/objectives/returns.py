"""Returns and advantages of episodes on NumPy arrays, and running statistics to scale them by.

Importing this module imports NumPy. It knows no policy and no buffer. Arrays have the shape (T, N): T steps of N
environments, with a mask of valid entries, so that episodes may begin and end at any step, and an environment may be
idle.
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
    """Return generalised advantage estimates (arXiv:1506.02438, eq. 16), shape (T, N), 0 where the mask is False.

    A_t = delta_t + discount * gae_lambda * A_{t+1}, delta_t = r_t + discount * V_{t+1} - V_t, where t + 1 is the
    episode's next step. At its last step the sum stops and V_{t+1} is `bootstrap_TN`: 0 if the task ended, the value of
    the final observation if a limit cut it off. Advantages + values are the returns (TD(lambda)) that a value function
    learns.

    ends_TN: True where the step was its episode's last. The last valid step of an environment is bootstrapped too if
        its episode goes on after these T steps.
    mask_TN: False where the environment was idle; the other arrays may hold anything there.
    """
    n_steps, n_envs = rewards_TN.shape
    following_TN = np.empty_like(values_TN)  # the value of the environment's next valid step
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
    # At an idle step the sum stays as it is.
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
    """Return discounted rewards of up to `n` steps from each start (Sutton and Barto, 2nd ed., eq. 7.1, without its
    bootstrap).

    rewards_S: the rewards of S stored steps.
    successor_S: the index of the step that follows each stored step in its episode; -1 if the episode ends there or its
        next step is not stored.
    starts_B: the indices of the steps to begin at.
    Return three arrays of shape (B,), with k <= n the number of steps that are summed: the sums
    r_0 + ... + discount^(k-1) r_{k-1}, the index of the last step summed, and discount^k.
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
        """Include a batch of values, of any shape."""
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
        """The standard deviation of the values, at least 1e-4, so that dividing by it is safe."""
        return math.sqrt(self.variance + 1e-8)

    def state_dict(self) -> dict[str, Any]:
        """Return mean, variance and count as plain numbers."""
        return {"mean": self.mean, "variance": self.variance, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.variance, self.count = float(state["mean"]), float(state["variance"]), int(state["count"])
