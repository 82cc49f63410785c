"""Buffers that policies learn from.

A `RolloutBuffer` holds all transitions of one collect, a `ReplayBuffer` the newest ones of many.

Both are filled twice for each step, because an environment's observations are views that its next
step overwrites: `add_actions` before the step, `add_outcomes` after it. Arrays are allocated at the
first step, in the shapes and types that the environment and the policy give. This module knows no
policy and no algorithm.

Shapes: T vector steps, N environments, n of them acting, S stored transitions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from leyden.errors import CheckpointError, ConfigError
from leyden.options import check_number
from leyden.rl.batch import Array, Batch, allocate, copied, mapped, same_shape, select, stacked, write
from leyden.utils.json import is_object

Ids = NDArray[np.int64]
_FIRST_SIZE = 1024
"""Transitions that a rollout buffer without a limit holds before it grows."""
_REPLAY_SIZE = 20_000


class Buffer(Protocol):
    """The methods of a buffer that a `Collector` calls."""

    num_envs: int

    def begin_collect(self) -> None:
        """Begin a collect. No episode is under way."""
        ...

    def add_actions(self, obs: Batch, actions: Array, extras: Mapping[str, Array], ids: Ids | None) -> None:
        """Add the first half of a step: the observations and the policy's actions.

        obs: (N, ...), copied. actions, extras: (n, ...), one row for each acting environment.
        ids: (n,), the acting environments; None: all.
        """
        ...

    def add_outcomes(
        self, rewards: Array, terminated: Array, truncated: Array, obs: Batch, lost: Sequence[int] = ()
    ) -> None:
        """Add the results of the actions that `add_actions` stored, each of shape (environments,
        ...).

        obs: the observations after the step. lost: environments whose simulator failed, so that
        they made no step. Rows of environments that did not act are ignored.
        """
        ...


class FinalObservations(NamedTuple):
    """The last observations of k episodes that a limit cut off."""

    rows: Ids
    """(k,): the vector step of each."""
    envs: Ids
    """(k,): the environment of each."""
    obs: Batch
    """(k, ...): the last observation of each."""


class RolloutBuffer:
    """All transitions of one collect, time-major: arrays (T, N, ...) and a mask of the steps that
    were made.

    The buffer drops nothing. It grows with the collect, or raises ConfigError when a limit is
    reached. The next collect empties it. Arrays hold `capacity` rows; the first `n_rows` are in
    use.
    """

    def __init__(self, size: int | None, num_envs: int) -> None:
        """size: the most transitions of one collect, over all environments; None: no limit but
        memory.
        """
        check_number("size", size, at_least=1, whole=True, or_none="no limit")
        check_number("num_envs", num_envs, at_least=1, whole=True)
        self.size = size
        self.num_envs = num_envs
        self.capacity = -(-(_FIRST_SIZE if size is None else size) // num_envs)
        self.n_rows = 0
        self.n_steps = 0
        """The number of transitions, which is the number of True in the mask."""
        self.mask = np.zeros((self.capacity, num_envs), np.bool_)
        self.rewards = np.zeros((self.capacity, num_envs))
        self.terminated = np.zeros((self.capacity, num_envs), np.bool_)
        self.truncated = np.zeros((self.capacity, num_envs), np.bool_)
        self.obs: Batch = ()
        self.actions: Array = np.empty(0)
        self.extras: dict[str, Array] = {}
        self._final: list[tuple[int, int, Batch]] = []
        self._ids: Ids | None = None
        self._allocated = False

    def __len__(self) -> int:
        return self.n_steps

    def begin_collect(self) -> None:
        """Drop the transitions of the last collect."""
        self.mask[: self.n_rows] = False
        self.n_rows = self.n_steps = 0
        self._final.clear()

    def add_actions(self, obs: Batch, actions: Array, extras: Mapping[str, Array], ids: Ids | None) -> None:
        """Store the observations and actions of a step, which `add_outcomes` completes.

        Raise ConfigError if the buffer would hold more than `size` transitions.
        """
        if self.size is not None and self.n_steps + len(actions) > self.size:
            raise ConfigError(
                f"the rollout buffer is full: its size is {self.size} transitions and this collect has more. Leave buffer_size out so that "
                "it grows, raise it to at least the steps of all episodes of one collect, or collect fewer episodes"
            )
        if not self._allocated:
            self._allocate(obs, actions, extras)
        elif self.n_rows == self.capacity:
            self._grow()
        row = self.n_rows
        where: Any = row if ids is None else (row, ids)
        self._ids = ids
        write(self.obs, row, obs)
        self.actions[where] = actions
        for name, array in self.extras.items():
            array[where] = extras[name]

    def add_outcomes(
        self, rewards: Array, terminated: Array, truncated: Array, obs: Batch, lost: Sequence[int] = ()
    ) -> None:
        """Add the results of the actions that `add_actions` stored, each of shape (environments,
        ...).

        A lost episode is dropped whole, because its end is missing and its seed may be run again.
        """
        row, ids = self.n_rows, self._ids
        self.rewards[row] = rewards
        self.terminated[row] = terminated
        self.truncated[row] = truncated
        if ids is None:
            self.mask[row] = True
            self.n_steps += self.num_envs
        else:
            self.mask[row, ids] = True
            self.n_steps += len(ids)
        if truncated.any():
            for env in np.flatnonzero(truncated & ~terminated & self.mask[row]).tolist():
                self._final.append((row, env, mapped(obs, lambda array, env=env: np.copy(array[env]))))
        self.n_rows += 1
        for env in lost:
            self._drop(row, env)

    def _drop(self, row: int, env: int) -> None:
        """Drop the episode that was under way in an environment at `row`."""
        self._final = [final for final in self._final if final[:2] != (row, env)]
        ended = self.terminated[:row, env] | self.truncated[:row, env] | ~self.mask[:row, env]
        begin = int(np.flatnonzero(ended)[-1]) + 1 if ended.any() else 0
        self.n_steps -= int(np.count_nonzero(self.mask[begin : row + 1, env]))
        self.mask[begin : row + 1, env] = False

    def final_observations(self) -> FinalObservations | None:
        """Return the last observations of the episodes that were truncated but not terminated; None
        if there are none.
        """
        if not self._final:
            return None
        rows, envs, obs = zip(*self._final, strict=True)
        return FinalObservations(np.array(rows, np.int64), np.array(envs, np.int64), stacked(list(obs)))

    def indices(self) -> Ids | None:
        """Return the indices of the T * N entries that are transitions, (n_steps,), in order of
        time.

        None: all.
        """
        if self.n_steps == self.n_rows * self.num_envs:
            return None
        return np.flatnonzero(self.mask[: self.n_rows].reshape(-1))

    def flat(self, batch: Batch) -> Batch:
        """Return the transitions, (n_steps, ...), of a batch (capacity, N, ...).

        A view if all entries are transitions.
        """
        at = self.indices()

        def rows(array: Array) -> Array:
            merged = array[: self.n_rows].reshape(-1, *array.shape[2:])
            return merged if at is None else merged[at]

        return mapped(batch, rows)

    def _allocate(self, obs: Batch, actions: Array, extras: Mapping[str, Array]) -> None:
        rows = (self.capacity, self.num_envs)
        self.obs = allocate(obs, rows)
        self.actions = np.zeros((*rows, *actions.shape[1:]), actions.dtype)
        self.extras = {name: np.zeros((*rows, *array.shape[1:]), array.dtype) for name, array in extras.items()}
        self._allocated = True

    def _grow(self) -> None:
        """Double the rows. It happens below the limit too, because idle environments leave gaps."""
        more = self.capacity

        def longer(array: Array) -> Array:
            return np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)])

        self.obs = mapped(self.obs, longer)
        self.extras = {name: longer(array) for name, array in self.extras.items()}
        for name in ("actions", "mask", "rewards", "terminated", "truncated"):
            setattr(self, name, longer(getattr(self, name)))
        self.capacity += more


class ReplayBuffer:
    """The newest `size` transitions of any number of collects, in a ring.

    Each transition is linked to the one that followed it in its episode. `state_dict` holds all
    transitions, so that a resumed run draws the same samples.
    """

    def __init__(self, size: int | None, num_envs: int) -> None:
        """size: transitions, over all environments; None: 20,000."""
        size = _REPLAY_SIZE if size is None else size
        _check_size(size, num_envs)
        self.size = size
        self.num_envs: int = num_envs
        self.n_new = 0
        """The number of transitions since the last collect began."""
        self.obs: Batch = ()
        self.next_obs: Batch = ()
        self.actions: Array = np.empty(0)
        self.rewards = np.zeros(size)
        self.terminated = np.zeros(size, np.bool_)
        self.successor = np.full(size, -1, np.int64)
        """(S,): the transition that followed in the episode; -1: the episode ended, or its next
        transition is unknown.
        """
        self._position = 0
        self._count = 0
        self._latest = np.full(num_envs, -1, np.int64)
        self._slots: Ids = np.empty(0, np.int64)
        self._ids: Ids = np.empty(0, np.int64)
        self._everyone = np.arange(num_envs)
        self._allocated = False

    def __len__(self) -> int:
        return self._count

    def begin_collect(self) -> None:
        """Begin a collect. An episode that was under way is not continued."""
        self.n_new = 0
        self._latest[:] = -1

    def add_actions(self, obs: Batch, actions: Array, extras: Mapping[str, Array], ids: Ids | None) -> None:
        """Store the observations and actions of a step, which `add_outcomes` completes. Extras are
        not kept.
        """
        if not self._allocated:
            self.obs, self.next_obs = allocate(obs, (self.size,)), allocate(obs, (self.size,))
            self.actions = np.zeros((self.size, *actions.shape[1:]), actions.dtype)
            self._allocated = True
        self._ids = self._everyone if ids is None else ids
        self._slots = (self._position + self._everyone[: len(self._ids)]) % self.size
        write(self.obs, self._slots, obs if ids is None else select(obs, ids))
        self.actions[self._slots] = actions

    def add_outcomes(
        self, rewards: Array, terminated: Array, truncated: Array, obs: Batch, lost: Sequence[int] = ()
    ) -> None:
        """Add the results of the actions that `add_actions` stored, each of shape (environments,
        ...).

        The earlier steps of a lost episode are kept, as if a limit had ended it there.
        """
        if lost:
            self._latest[list(lost)] = -1
            self._keep_actions(~np.isin(self._ids, lost))
        ids, slots = self._ids, self._slots
        if not len(ids):
            return
        write(self.next_obs, slots, select(obs, ids))
        self.rewards[slots] = rewards[ids]
        self.terminated[slots] = terminated[ids]
        self.successor[slots] = -1
        before = self._latest[ids]
        goes_on = before >= 0
        self.successor[before[goes_on]] = slots[goes_on]
        self._latest[ids] = np.where(terminated[ids] | truncated[ids], -1, slots)
        self._position = int(slots[-1] + 1) % self.size
        self._count = min(self._count + len(ids), self.size)
        self.n_new += len(ids)

    def _keep_actions(self, kept: NDArray[np.bool_]) -> None:
        """Keep only these of the actions just added, in the first of their slots."""
        old, self._ids, self._slots = self._slots[kept], self._ids[kept], self._slots[: int(kept.sum())]
        write(self.obs, self._slots, copied(select(self.obs, old)))
        self.actions[self._slots] = self.actions[old].copy()

    def set_num_envs(self, num_envs: int) -> None:
        """Set the number of environments of the next collect, and keep the transitions.

        Raise ConfigError if the buffer is too small for so many environments.
        """
        if num_envs != self.num_envs:
            _check_size(self.size, num_envs)
            self.num_envs = num_envs
            self._everyone = np.arange(num_envs)
            self._latest = np.full(num_envs, -1, np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole buffer as copied arrays and numbers, which can be loaded without
        pickle.
        """
        n = self._count
        return {
            "size": self.size,
            "num_envs": self.num_envs,
            "position": self._position,
            "count": n,
            "n_new": self.n_new,
            "latest": self._latest.copy(),
            "obs": copied(select(self.obs, slice(n))),
            "next_obs": copied(select(self.next_obs, slice(n))),
            "actions": self.actions[:n].copy(),
            "rewards": self.rewards[:n].copy(),
            "terminated": self.terminated[:n].copy(),
            "successor": self.successor[:n].copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a value of `state_dict`.

        Raise CheckpointError, and change nothing, for another size or number of environments.
        """
        for name in ("size", "num_envs"):
            if state[name] != getattr(self, name):
                raise CheckpointError(
                    f"the saved replay buffer has {name} {state[name]}, this one {getattr(self, name)}; make it with the same {name}"
                )
        n = int(state["count"])
        obs = _as_batch(state["obs"])
        if self._allocated and n and not same_shape(select(obs, 0), select(self.obs, 0)):
            raise CheckpointError("the saved replay buffer holds observations of another space")
        if n:
            self.obs, self.next_obs = allocate(obs, (self.size,)), allocate(obs, (self.size,))
            write(self.obs, slice(n), obs)
            write(self.next_obs, slice(n), _as_batch(state["next_obs"]))
            actions = np.asarray(state["actions"])
            self.actions = np.zeros((self.size, *actions.shape[1:]), actions.dtype)
            self.actions[:n] = actions
            self._allocated = True
        self.rewards[:n] = np.asarray(state["rewards"])
        self.terminated[:n] = np.asarray(state["terminated"])
        self.successor[:n] = np.asarray(state["successor"])
        self._latest[:] = np.asarray(state["latest"])
        self._position, self._count, self.n_new = int(state["position"]), n, int(state["n_new"])


def _check_size(size: int, num_envs: int) -> None:
    check_number("size", size, at_least=1, whole=True)
    check_number("num_envs", num_envs, at_least=1, whole=True)
    if size < 2 * num_envs:
        raise ConfigError(
            f"a replay buffer of size {size} for {num_envs} environments; it needs room for 2 transitions of each at least"
        )


def _as_batch(value: Any) -> Batch:
    """Return a batch of arrays from a checkpoint's, which may hold lists and tensors."""
    if is_object(value):
        return {name: _as_batch(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_as_batch(part) for part in cast("Sequence[Any]", value))
    return np.asarray(value)
