"""Policies for Qlib's programs: an adapter for tianshou's policies, which learn by their own code, and Leyden's `PPO`,
`DQN` and `AllOne`, which can also be called with a batch.

The module never imports tianshou; a program that uses one of its policies has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from leyden.errors import ConfigError
from leyden.rl import policy as native
from leyden.rl.batch import copied, leaves, select
from leyden.rl.policy import Policy
from leyden.rl.policy.policies import PolicyOutput
from leyden_compat.qlib.spaces import as_gymnasium

DEFAULT_BUFFER_SIZE = 20_000
"""The transitions that a buffer for a tianshou policy holds, as in Qlib."""


class Called(dict[str, Any]):
    """The output of a policy that was called with a batch: `out["act"]`, or `out.act`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class CallablePolicy:
    """A mixin with which a policy of Leyden can be called as tianshou's are, and takes spaces of the old `gym`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(
            *(as_gymnasium(value) for value in args), **{name: as_gymnasium(value) for name, value in kwargs.items()}
        )
        self._explores = True

    def train(self, mode: bool = True) -> None:
        """Set whether a call with a batch samples its actions (True) or takes the likeliest ones (False), and set the
        mode of the policy's modules.
        """
        self._explores = mode
        cast(Any, super()).train(mode)

    def __call__(self, batch: Any, state: Any = None, **kwargs: Any) -> Called:
        """Return the actions for `batch.obs`, as `out.act`."""
        obs: Any = cast("Mapping[str, Any]", batch)["obs"] if isinstance(batch, Mapping) else batch.obs
        output = cast(Policy, self).act(_plain(obs), explore=self._explores)
        return Called(act=torch.as_tensor(np.asarray(output.actions)), state=state)


class AllOne(CallablePolicy, native.AllOne):
    """A policy that always returns the same action."""

    def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Called:
        """Return the actions for `batch.obs`, as `out.act`."""
        return self(batch, state)


class Observations:
    """Stands for the batch that tianshou passes to `forward`, in programs without tianshou."""

    def __init__(self, obs: Any) -> None:
        self.obs = obs
        self.info: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __len__(self) -> int:
        return len(next(leaves(self.obs)))


class Batch(Observations):
    """The batch that Qlib's strategies make, with one row for each environment."""

    def __init__(self, rows: Sequence[Mapping[str, Any]] = (), *, obs: Any = None, info: Any = None) -> None:
        super().__init__([row["obs"] for row in rows] if rows else obs)
        self.info = info or {}


class NonLearnablePolicy(native.NonLearnablePolicy):
    """The base class of policies that do not learn.

    Override `forward(batch, state)`, which returns the actions as `act`.
    """

    def __init__(self, obs_space: Any, action_space: Any) -> None:
        super().__init__(as_gymnasium(obs_space), as_gymnasium(action_space))

    def forward(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
        """Return the actions for `batch.obs`, as `out.act`."""
        raise NotImplementedError(f"{type(self).__name__} has no forward(batch, state)")

    def __call__(self, batch: Any, state: Any = None, **kwargs: Any) -> Any:
        """Call `forward`."""
        return self.forward(batch, state, **kwargs)

    def act(self, obs: Any, *, explore: bool) -> PolicyOutput:
        """Return the actions of `forward`. Exploring makes no difference."""
        data = sys.modules.get("tianshou.data")
        batch = Observations(copied(obs)) if data is None else data.Batch(obs=copied(obs), info=data.Batch())
        actions: Any = self.forward(batch, None)["act"]
        return PolicyOutput(np.asarray(actions))

    def learn(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return no metrics, without learning."""
        return {}

    def process_fn(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing with a buffer."""


def _drawn_seed() -> int:
    """Return a seed drawn from torch's generator, so that `torch.manual_seed` determines the policy's draws, as in
    Qlib.
    """
    return int(torch.randint(2**31, ()))


class PPO(CallablePolicy, native.PPO):
    """PPO with Qlib's arguments. `network` computes the features for actor and critic."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"seed": _drawn_seed(), **kwargs})


class DQN(CallablePolicy, native.DQN):
    """DQN with Qlib's arguments and, where none are given, Qlib's target network and loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if len(args) <= 7:  # the eighth argument
            kwargs.setdefault("target_update_freq", 0)
        if len(args) <= 10:  # the eleventh argument
            kwargs.setdefault("clip_loss_grad", False)
        super().__init__(*args, **{"seed": _drawn_seed(), **kwargs})


def _plain(obs: Any) -> Any:
    """Convert observations in tianshou's Batch, or a list of observations, to arrays in the structure of the
    observation space.
    """
    if isinstance(obs, list) or getattr(getattr(obs, "dtype", None), "kind", "") == "O":
        rows: list[Any] = [_plain(row) for row in cast("Iterable[Any]", obs)]
        if isinstance(rows[0], dict):
            return {name: np.stack([row[name] for row in rows]) for name in cast("dict[str, Any]", rows[0])}
        return np.stack(rows)
    if hasattr(obs, "items"):
        return {name: _plain(part) for name, part in obs.items()}
    return np.asarray(obs)


def auto_device(module: torch.nn.Module) -> torch.device:
    """Return the device of a module's parameters."""
    return next((part.device for part in module.parameters()), torch.device("cpu"))


def set_weight(policy: Any, loaded_weight: Mapping[str, Any]) -> None:
    """Load weights into a tianshou policy. If it refuses them, load them a second time under names with
    `_actor_critic.`, which newer versions of tianshou have too.
    """
    try:
        policy.load_state_dict(loaded_weight)
    except RuntimeError:
        policy.load_state_dict({**loaded_weight, **{f"_actor_critic.{k}": v for k, v in loaded_weight.items()}})


def chain_dedup(*iterables: Iterable[Any]) -> Generator[Any]:
    """Yield each item of the iterables once."""
    seen: set[Any] = set()
    for iterable in iterables:
        for item in iterable:
            if item not in seen:
                seen.add(item)
                yield item


# ---- tianshou's ----------------------------------------------------------------------------------


class TianshouBuffer:
    """The transitions of one collection in tianshou's `VectorReplayBuffer`, from which the policy learns."""

    def __init__(self, size: int | None, num_envs: int) -> None:
        self.num_envs = num_envs
        self._size = size or DEFAULT_BUFFER_SIZE
        self._data = sys.modules["tianshou.data"]
        self.begin_collect()

    def begin_collect(self) -> None:
        """Replace the buffer by an empty one."""
        self.buffer: Any = self._data.VectorReplayBuffer(self._size, self.num_envs)

    def add_actions(self, obs: Any, actions: Any, extras: Mapping[str, Any], ids: Any) -> None:
        """Keep the observations and actions of the step under way."""
        self._ids = np.arange(self.num_envs) if ids is None else np.asarray(ids)
        self._obs = copied(select(obs, self._ids))
        self._act = np.array(extras["act"])

    def add_outcomes(self, rewards: Any, terminated: Any, truncated: Any, obs: Any, lost: Any = ()) -> None:
        """Add the transitions of the step, except those of lost episodes."""
        kept = ~np.isin(self._ids, np.asarray(lost, np.int64))
        ids = self._ids[kept]
        if not len(ids):
            return
        batch = self._data.Batch(
            obs=select(self._obs, kept),
            act=self._act[kept],
            rew=np.array(rewards[ids]),
            terminated=np.array(terminated[ids]),
            truncated=np.array(truncated[ids]),
            done=terminated[ids] | truncated[ids],
            obs_next=copied(select(obs, ids)),
            info=self._data.Batch(),
            policy=self._data.Batch(),
        )
        self.buffer.add(batch, buffer_ids=ids)


class TianshouPolicy(Policy):
    """Wraps a policy of tianshou 0.4 or 0.5, which acts and learns by its own code.

    Other attributes are those of the wrapped policy. `act` raises ConfigError if the policy returns a hidden state,
    because none is kept between steps.
    """

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.observation_space = as_gymnasium(getattr(policy, "observation_space", None))
        self.action_space = as_gymnasium(getattr(policy, "action_space", None))
        self._data = sys.modules["tianshou.data"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["policy"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped policy."""
        return self.policy(*args, **kwargs)

    def act(self, obs: Any, *, explore: bool) -> PolicyOutput:
        """Return the policy's actions for observations, mapped to the action space, and under "act" as the policy
        returned them.

        explore: add the policy's exploration noise.
        """
        batch = self._data.Batch(obs=copied(obs), info=self._data.Batch())
        with torch.no_grad():
            result = self.policy(batch, None)
        if getattr(result, "state", None) is not None:
            raise ConfigError(
                f"{type(self.policy).__name__} returns a hidden state, which is not kept between steps; "
                "return None, and let the observation hold what the policy must remember"
            )
        act: Any = self._data.to_numpy(result.act)
        if explore:
            act = self.policy.exploration_noise(act, batch)
        return PolicyOutput(np.asarray(self.policy.map_action(act)), {"act": np.asarray(act)})

    def update(self, buffer: Any, **kwargs: Any) -> dict[str, float]:
        """Let the policy learn from the whole buffer. Return the mean of each of its metrics."""
        result: Mapping[str, Any] = self.policy.update(sample_size=0, buffer=buffer.buffer, **kwargs)
        arrays = {name: np.asarray(value, np.float64) for name, value in result.items()}
        return {name: float(array.mean()) for name, array in arrays.items() if array.size}

    def make_buffer(self, size: int | None, num_envs: int) -> Any:
        """Return a buffer for one collection."""
        return TianshouBuffer(size, num_envs)

    def train(self, mode: bool = True) -> None:
        """Set the policy and its modules to training (True) or evaluation (False)."""
        self.policy.train(mode)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the weights; `learning_state` returns the rest of the policy's state."""
        return {name: value.detach().clone() for name, value in self.policy.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the weights."""
        self.policy.load_state_dict(dict(state))

    def learning_state(self) -> dict[str, Any]:
        """Return the optimizer's state and the running moments of the returns, as plain values."""
        moments = getattr(self.policy, "ret_rms", None)
        optimizer = getattr(self.policy, "optim", None)
        return {
            "optim": None if optimizer is None else _numbered(optimizer.state_dict()),
            "ret_rms": None if moments is None else {name: float(getattr(moments, name)) for name in _MOMENTS},
        }

    def load_learning_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `learning_state` returned."""
        if state.get("optim") is not None:
            saved = dict(state["optim"])
            saved["state"] = {int(number): dict(values) for number, values in saved["state"].items()}
            self.policy.optim.load_state_dict(saved)
        moments: Mapping[str, float] = state.get("ret_rms") or {}
        for name, value in moments.items():
            setattr(self.policy.ret_rms, name, value)


_MOMENTS = ("mean", "var", "count")
"""The attributes of tianshou's running moments."""


def _numbered(state: Mapping[str, Any]) -> dict[str, Any]:
    groups: list[dict[str, Any]] = [
        {
            name: list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value
            for name, value in group.items()
        }
        for group in state["param_groups"]
    ]
    return {"state": {str(number): dict(values) for number, values in state["state"].items()}, "param_groups": groups}


def as_policy(policy: Any) -> Policy:
    """Return a policy of Leyden as it is, and one of tianshou wrapped in a `TianshouPolicy`.

    Raise ConfigError for any other object.
    """
    if isinstance(policy, Policy):
        return policy
    if "tianshou.data" in sys.modules and isinstance(policy, torch.nn.Module) and hasattr(policy, "process_fn"):
        return TianshouPolicy(policy)
    raise ConfigError(f"policy is a {type(policy).__name__}; give PPO, DQN or AllOne, or a policy of tianshou 0.4")
