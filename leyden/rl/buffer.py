"""Buffers that policies learn from.

A `RolloutBuffer` holds all transitions of one collect, a `ReplayBuffer` the newest ones of many.

Both are filled twice for each step: by `add_actions` before the step, because it overwrites the observations, and by
`add_outcomes` after it. Arrays are allocated at the first step, in the shapes and types that the environment and the
policy give. This module knows no policy and no algorithm.

Shapes: T vector steps, N environments, n of them acting, S stored transitions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from leyden._lib.json import is_object
from leyden._lib.options import check_number
from leyden.errors import CheckpointError, ConfigError
from leyden.rl.batch import Array, Batch, allocate, copied, mapped, same_shape, select, stacked, write

Ids = NDArray[np.int64]
_FIRST_SIZE = 1024
"""Transitions that a rollout buffer without a limit holds before it grows."""
_REPLAY_SIZE = 20_000
"""Transitions of a replay buffer whose size is not given."""


class Buffer(Protocol):
    """The methods of a buffer that a `Collector` calls."""

    num_envs: int

    def begin_collect(self) -> None:
        """Begin a collect, in which every episode begins again."""
        ...

    def add_actions(self, obs: Batch, actions: Array, extras: Mapping[str, Array], ids: Ids | None) -> None:
        """Store the observations and the policy's actions of a step, which `add_outcomes` completes.

        obs: (N, ...), of all environments; copied.
        actions, extras: (n, ...), one row for each acting environment.
        extras: from `PolicyOutput`.
        ids: (n,), the acting environments; None: all.
        """
        ...

    def add_outcomes(
        self, rewards: Array, terminated: Array, truncated: Array, obs: Batch, lost: Sequence[int] = ()
    ) -> None:
        """Add the results of the actions that `add_actions` stored. All arrays have shape (N, ...).

        Rows of environments that did not act are ignored.
        obs: the observations after the step.
        lost: environments whose simulator failed, so that they made no step.
        """
        ...


class FinalObservations(NamedTuple):
    """The last observations of k episodes that a limit cut off."""

    rows: Ids
    """(k,): the vector step at which each episode was cut off."""
    envs: Ids
    """(k,): the environment of each episode."""
    obs: Batch
    """(k, ...): the last observation of each episode."""


class RolloutBuffer:
    """All transitions of one collect, in arrays (capacity, N, ...) by vector step and environment.

    `mask` says which entries are transitions, because idle environments make no step. The first `n_rows` rows are in
    use. The buffer grows with the collect, or raises ConfigError at a limit, and never drops a transition of a finished
    episode. The next collect empties it.
    """

    def __init__(self, size: int | None, num_envs: int) -> None:
        """Make an empty buffer.

        size: the most transitions of one collect, over all environments; None: no limit.
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
        """Row, environment and last observation of each episode that a limit cut off."""
        self._ids: Ids | None = None
        """The environments that act in the current step; None: all."""
        self._allocated = False

    def __len__(self) -> int:
        return self.n_steps

    def begin_collect(self) -> None:
        self.mask[: self.n_rows] = False
        self.n_rows = self.n_steps = 0
        self._final.clear()

    def add_actions(self, obs: Batch, actions: Array, extras: Mapping[str, Array], ids: Ids | None) -> None:
        """Store the observations and actions of a step, which `add_outcomes` completes. Raise ConfigError if the buffer
        would hold more than `size` transitions.
        """
        if self.size is not None and self.n_steps + len(actions) > self.size:
            raise ConfigError(
                f"the rollout buffer is full: its size is {self.size} transitions and this collect has more. Leave buffer_size out so that "
                "it grows, raise it to at least the steps of all episodes of one collect, or collect fewer episodes"
            )
        if not self._allocated:
            rows = (self.capacity, self.num_envs)
            self.obs = allocate(obs, rows)
            self.actions = np.zeros((*rows, *actions.shape[1:]), actions.dtype)
            self.extras = {name: np.zeros((*rows, *array.shape[1:]), array.dtype) for name, array in extras.items()}
            self._allocated = True
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
        """Add the results of the actions that `add_actions` stored. All arrays have shape (N, ...).

        A lost episode is dropped whole, because its end is missing and its seed may be run again.
        obs: the observations after the step, of which those of truncated episodes are copied.
        lost: environments whose simulator failed.
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
            self._final = [final for final in self._final if final[:2] != (row, env)]
            ended = self.terminated[:row, env] | self.truncated[:row, env] | ~self.mask[:row, env]
            begin = int(np.flatnonzero(ended)[-1]) + 1 if ended.any() else 0
            self.n_steps -= int(np.count_nonzero(self.mask[begin : row + 1, env]))
            self.mask[begin : row + 1, env] = False

    def final_observations(self) -> FinalObservations | None:
        """Return the last observations of the episodes that were truncated but not terminated; None without any."""
        if not self._final:
            return None
        rows, envs, obs = zip(*self._final, strict=True)
        return FinalObservations(np.array(rows, np.int64), np.array(envs, np.int64), stacked(list(obs)))

    def indices(self) -> Ids | None:
        """Return the indices of the transitions among the T * N entries, (n_steps,), in order of time. Return None if
        all entries are transitions.
        """
        if self.n_steps == self.n_rows * self.num_envs:
            return None
        return np.flatnonzero(self.mask[: self.n_rows].reshape(-1))

    def flat(self, batch: Batch) -> Batch:
        """Return the transitions of a batch (capacity, N, ...) as a batch (n_steps, ...).

        The result is a view if all entries are transitions, else a copy.
        """
        at = self.indices()

        def rows(array: Array) -> Array:
            merged = array[: self.n_rows].reshape(-1, *array.shape[2:])
            return merged if at is None else merged[at]

        return mapped(batch, rows)

    def _grow(self) -> None:
        """Double the rows. This can happen below `size`, because idle environments leave gaps."""
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

    Each transition is linked to the one that followed it in its episode. `state_dict` holds all transitions, so that a
    resumed run draws the same samples.
    """

    def __init__(self, size: int | None, num_envs: int) -> None:
        """Make an empty buffer.

        size: the number of transitions, over all environments; None: 20,000.
        Raise ConfigError for a size of less than two transitions for each environment.
        """
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
        """(S,): the slot of the next transition of the episode; -1 if the episode ended there, or if the next
        transition is unknown.
        """
        self._position = 0
        """The slot of the next transition."""
        self._count = 0
        """The number of slots in use."""
        self._latest = np.full(num_envs, -1, np.int64)
        """(N,): the slot of each environment's last transition; -1 if its episode has ended."""
        self._slots: Ids = np.empty(0, np.int64)
        """(n,): the slots of the current step's actions."""
        self._ids: Ids = np.empty(0, np.int64)
        """(n,): the environments that act in the current step."""
        self._everyone = np.arange(num_envs)
        self._allocated = False

    def __len__(self) -> int:
        return self._count

    def begin_collect(self) -> None:
        """Begin a collect. Its episodes do not continue those of the last one."""
        self.n_new = 0
        self._latest[:] = -1

    def add_actions(self, obs: Batch, actions: Array, extras: Mapping[str, Array], ids: Ids | None) -> None:
        """Store the observations and actions of a step, which `add_outcomes` completes. Extras are not kept."""
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
        """Add the results of the actions that `add_actions` stored. All arrays have shape (N, ...).

        The earlier steps of a lost episode are kept, as if a limit had ended it there.
        obs: the observations after the step, which are copied.
        lost: environments whose simulator failed.
        """
        if lost:
            self._latest[list(lost)] = -1
            kept = ~np.isin(self._ids, lost)  # they move to the first of the slots that were just filled
            old, self._ids, self._slots = self._slots[kept], self._ids[kept], self._slots[: int(kept.sum())]
            write(self.obs, self._slots, copied(select(self.obs, old)))
            self.actions[self._slots] = self.actions[old].copy()
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

    def set_num_envs(self, num_envs: int) -> None:
        """Set the number of environments of the next collect, and keep the transitions. Raise ConfigError if the buffer
        is too small for that many environments.
        """
        if num_envs != self.num_envs:
            _check_size(self.size, num_envs)
            self.num_envs = num_envs
            self._everyone = np.arange(num_envs)
            self._latest = np.full(num_envs, -1, np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all transitions, and the counters, which a checkpoint saves without pickle."""
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
        """Replace the content by that of `state_dict`. Raise CheckpointError, and change nothing, for another size,
        another number of environments or observations of another space.
        """
        for name in ("size", "num_envs"):
            if state[name] != getattr(self, name):
                raise CheckpointError(
                    f"the saved replay buffer has {name} {state[name]}, this one {getattr(self, name)}; make it with the same {name}"
                )
        n = int(state["count"])
        obs = _as_batch(state["obs"])
        if self._allocated and n and not same_shape(select(obs, 0), select(self.obs, 0)):
            raise CheckpointError(
                "the saved replay buffer holds observations of another space; resume with the same state interpreter"
            )
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
    """Return a batch as a checkpoint holds it, with arrays in place of tensors and tuples of lists."""
    if is_object(value):
        return {name: _as_batch(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_as_batch(part) for part in cast("Sequence[Any]", value))
    return np.asarray(value)
