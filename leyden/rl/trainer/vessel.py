"""Vessels: a policy with its simulator, interpreters and reward, and how it is trained.

`TrainingVesselBase` says which methods a trainer calls. `TrainingVessel` serves most needs: it collects episodes, then
updates the policy. A vessel knows neither processes nor checkpoints: the trainer gives it an `Iteration` and a
`FiniteVectorEnv` over its seeds, and saves its state. To train in another way, subclass `TrainingVesselBase` and write
the seed iterators and `train`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, cast

import numpy as np

from leyden._lib.components import KeepsArguments
from leyden._lib.options import NamedOptions, check_number
from leyden.errors import CheckpointError, ConfigError
from leyden.rl.buffer import Buffer, ReplayBuffer
from leyden.rl.collector import Collector, CollectResult
from leyden.rl.env import FiniteVectorEnv
from leyden.rl.parts import (
    ActionInterpreter,
    AuxiliaryInfoCollector,
    InitialStateType,
    Reward,
    Simulator,
    StateInterpreter,
)
from leyden.rl.policy import Policy
from leyden.rl.seed import Items, SeedPlan, SeedsLike
from leyden.rl.spaces import difference
from leyden.training import Stage

if TYPE_CHECKING:
    from leyden.rl.trainer.rl_trainer import Trainer

logger = logging.getLogger(__name__)

_STAGES: Final[Mapping[Stage, tuple[str, str, str]]] = {
    "train": ("train_seed_iterator", "train", "train_initial_states"),
    "val": ("val_seed_iterator", "validate", "val_initial_states"),
    "test": ("test_seed_iterator", "test", "test_initial_states"),
}
"""For each stage, the method that returns its seeds, the method that runs it, and the argument of `TrainingVessel` with
its initial states.
"""

Seeds: TypeAlias = "SeedsLike | AbstractContextManager[SeedsLike]"
"""The initial states of a stage: a `SeedPlan`, a `DataQueue` (entered while it is used), or any iterable."""


class SeedIteratorNotAvailable(ConfigError):
    """A vessel has no initial states for a stage."""


def _report_nothing(done: int, total: int, **counts: float) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Iteration:
    """The facts about the current iteration that a vessel needs. The defaults are for a vessel without a trainer."""

    number: int = 0
    """The number of finished iterations."""
    fast_dev_run: int | None = None
    """The number of initial states that each stage uses; None: all."""
    progress: Callable[..., None] = _report_nothing
    """Called with `(done, total, **counts)` to report the progress of the stage."""


class TrainingVesselBase(NamedOptions, KeepsArguments, Generic[InitialStateType]):
    """A policy with everything that it needs to act and to learn.

    simulator_fn: makes a simulator from an initial state.
    reward: None: every reward is 0.
    aux_info_collector: reads further values of the simulator's state; None: none.
    """

    iteration: Iteration = Iteration()
    """The current iteration, which the trainer sets before each stage."""

    def __init__(
        self,
        *,
        simulator_fn: Callable[..., Simulator[InitialStateType, Any, Any]],
        state_interpreter: StateInterpreter[Any, Any],
        action_interpreter: ActionInterpreter[Any, Any, Any],
        policy: Policy,
        reward: Reward[Any] | None = None,
        aux_info_collector: AuxiliaryInfoCollector[Any, Any] | None = None,
    ) -> None:
        self.simulator_fn = simulator_fn
        self.state_interpreter = state_interpreter
        self.action_interpreter = action_interpreter
        self.policy = policy
        self.reward = reward
        self.aux_info_collector = aux_info_collector
        self._trainer: Callable[[], Trainer | None] = lambda: None

    @property
    def trainer(self) -> Trainer:
        """The trainer of this vessel, for subclasses of users. Leyden itself reads `iteration`.

        Raises ConfigError before `assign_trainer`, and after the trainer is gone.
        """
        trainer = self._trainer()
        if trainer is None:
            raise ConfigError(
                f"{type(self).__name__} has no trainer yet; Trainer.fit and Trainer.test assign it, so read it after they began"
            )
        return trainer

    def assign_trainer(self, trainer: Trainer) -> None:
        """Keep a reference to the trainer. It is weak, because the trainer refers to the vessel."""
        self._trainer = weakref.ref(trainer)

    def require_stage(self, stage: Stage) -> None:
        """Raise ConfigError unless the vessel can run this stage. Called before anything has begun. Raise
        SeedIteratorNotAvailable, which is a ConfigError, if the vessel has no initial states for the stage.
        """
        seeds, run, _ = _STAGES[stage]
        if _is_method_of(TrainingVesselBase, self, seeds):
            raise SeedIteratorNotAvailable(f"{type(self).__name__} has no initial states to {run} on; write `{seeds}`")
        if _is_method_of(TrainingVesselBase, self, run):
            raise ConfigError(f"{type(self).__name__} does not say how to {run}; write `{run}`")

    def require_policy_of_these_spaces(self) -> None:
        """Raise ConfigError unless the policy fits the interpreters' observations and actions."""
        for what, part, name in (
            ("observations", self.state_interpreter, "observation_space"),
            ("actions", self.action_interpreter, "action_space"),
        ):
            made_for, given = getattr(self.policy, name, None), getattr(part, name, None)
            if made_for is None or given is None:  # a policy or vessel of another kind
                continue
            if differs := difference(made_for, given):
                raise ConfigError(
                    f"{type(self.policy).__name__} is made for {what} of {made_for}, {type(part).__name__} has {given}: {differs}; "
                    f"make the policy with the {name} of the interpreter"
                )

    def train_seed_iterator(self) -> Seeds:
        """Return the initial states of one training stage. The base class raises SeedIteratorNotAvailable."""
        raise SeedIteratorNotAvailable(f"{type(self).__name__} has no initial states to train on")

    def val_seed_iterator(self) -> Seeds:
        """Return the initial states of one validation. The base class raises SeedIteratorNotAvailable."""
        raise SeedIteratorNotAvailable(f"{type(self).__name__} has no initial states to validate on")

    def test_seed_iterator(self) -> Seeds:
        """Return the initial states of a test. The base class raises SeedIteratorNotAvailable."""
        raise SeedIteratorNotAvailable(f"{type(self).__name__} has no initial states to test on")

    def train(self, vector_env: FiniteVectorEnv) -> Mapping[str, Any] | None:
        """Run one training stage, in which the policy learns. Return its metrics.

        vector_env: environments over the seeds of the stage.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how it is trained; write `train`")

    def validate(self, vector_env: FiniteVectorEnv) -> Mapping[str, Any] | None:
        """Run one validation, without a change to the policy. Return its metrics."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it is validated; write `validate`")

    def test(self, vector_env: FiniteVectorEnv) -> Mapping[str, Any] | None:
        """Run one test, without a change to the policy. Return its metrics."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it is tested; write `test`")

    def log(self, name: str, value: Any) -> None:
        """Log a value of this iteration, or the mean of an array, at level INFO."""
        if isinstance(value, np.ndarray | Sequence) and not isinstance(value, str):
            value = float(np.mean(cast("Sequence[float]", value)))
        logger.info("[Iter %d] %s = %s", self.iteration.number, name, value)

    def log_dict(self, data: Mapping[str, Any]) -> None:
        """Call `log` for each value."""
        for name, value in data.items():
            self.log(name, value)

    def state_dict(self) -> dict[str, Any]:
        """Return all state that the next stage depends on: containers, numbers, texts, arrays and tensors.

        A subclass with more state extends this method and `load_state_dict`.
        """
        return {"policy": self.policy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`."""
        self.policy.load_state_dict(state["policy"])


def _is_method_of(cls: type, vessel: TrainingVesselBase[Any], name: str) -> bool:
    return getattr(getattr(vessel, name), "__func__", None) is getattr(cls, name)


class TrainingVessel(TrainingVesselBase[InitialStateType]):
    """A policy with its simulator, interpreters and reward, trained on initial states.

    Each training stage collects `episode_per_iter` episodes and updates the policy once. Validation and test run each
    of their initial states once.

    train_initial_states, val_initial_states, test_initial_states: data sets with a length and items by index; None: the
        stage is not available. Training states are shuffled again in each pass, and each training stage continues where
        the last one ended. The others are taken in order.
    buffer_size: the transitions that the policy's buffer holds; None: PPO's grows with the collect, DQN's holds 20,000.
    episode_per_iter: the episodes of each training stage.
    update_kwargs: arguments of `policy.update`.
    seed: the seed of the shuffling.
    """

    def __init__(
        self,
        *,
        simulator_fn: Callable[..., Simulator[InitialStateType, Any, Any]],
        state_interpreter: StateInterpreter[Any, Any],
        action_interpreter: ActionInterpreter[Any, Any, Any],
        policy: Policy,
        reward: Reward[Any] | None = None,
        aux_info_collector: AuxiliaryInfoCollector[Any, Any] | None = None,
        train_initial_states: Items[InitialStateType] | None = None,
        val_initial_states: Items[InitialStateType] | None = None,
        test_initial_states: Items[InitialStateType] | None = None,
        buffer_size: int | None = None,
        episode_per_iter: int = 1000,
        update_kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            simulator_fn=simulator_fn,
            state_interpreter=state_interpreter,
            action_interpreter=action_interpreter,
            policy=policy,
            reward=reward,
            aux_info_collector=aux_info_collector,
        )
        check_number("buffer_size", buffer_size, at_least=1, whole=True, or_none="the policy's default")
        check_number("episode_per_iter", episode_per_iter, at_least=1, whole=True)
        check_number("seed", seed, whole=True)
        for name, states in (
            ("train_initial_states", train_initial_states),
            ("val_initial_states", val_initial_states),
            ("test_initial_states", test_initial_states),
        ):
            if states is not None and not (hasattr(states, "__len__") and hasattr(states, "__getitem__")):
                raise ConfigError(
                    f"{name} is a {type(states).__name__}, which has no length and items by index; give the data set itself, "
                    "or a list of it"
                )
            if states is not None and len(states) == 0:
                raise ConfigError(
                    f"{name} is empty; give at least one initial state, or None where there is no such stage"
                )
        self.train_initial_states = train_initial_states
        self.val_initial_states = val_initial_states
        self.test_initial_states = test_initial_states
        self.buffer_size = buffer_size
        self.episode_per_iter = episode_per_iter
        self.update_kwargs = dict(update_kwargs or {})
        self.seed = seed
        self._plan: SeedPlan[InitialStateType] | None = None
        """The order of the training states."""
        self._plan_of: int | None = None
        """The `fast_dev_run` for which the plan was made."""
        self._buffer: Buffer | None = None
        self._to_load: Mapping[str, Any] | None = None
        """The saved position of a plan that is not made yet."""

    def require_stage(self, stage: Stage) -> None:
        seeds, run, argument = _STAGES[stage]
        if _is_method_of(TrainingVessel, self, seeds) and getattr(self, argument) is None:
            raise SeedIteratorNotAvailable(f"{type(self).__name__} has no initial states to {run} on; give {argument}")
        super().require_stage(stage)

    def train_seed_iterator(self) -> Seeds:
        """Return the plan of the training states, in which each stage continues after the last."""
        if self.train_initial_states is None:
            return super().train_seed_iterator()
        if self._plan is None or self._plan_of != self.iteration.fast_dev_run:
            states = self._limited("train_initial_states", self.train_initial_states)
            self._plan_of = self.iteration.fast_dev_run
            self._plan = SeedPlan(states, repeat=-1, shuffle=True, seed=self.seed)
            if self._to_load is not None:
                to_load, self._to_load = self._to_load, None
                self._plan.load_state_dict(to_load)
        return self._plan

    def val_seed_iterator(self) -> Seeds:
        if self.val_initial_states is None:
            return super().val_seed_iterator()
        return SeedPlan(self._limited("val_initial_states", self.val_initial_states))

    def test_seed_iterator(self) -> Seeds:
        if self.test_initial_states is None:
            return super().test_seed_iterator()
        return SeedPlan(self._limited("test_initial_states", self.test_initial_states))

    def train(self, vector_env: FiniteVectorEnv) -> Mapping[str, Any]:
        """Collect `episode_per_iter` episodes, then update the policy. Return the metrics of both. Raise ConfigError if
        both have a metric of one name.
        """
        self.policy.train()
        if isinstance(self._buffer, ReplayBuffer):
            self._buffer.set_num_envs(vector_env.num_envs)
        elif self._buffer is None or self._buffer.num_envs != vector_env.num_envs:
            self._buffer = self.policy.make_buffer(self.buffer_size, vector_env.num_envs)
        n_episode = self.iteration.fast_dev_run or self.episode_per_iter
        collected = self._collect(vector_env, n_episode, n_episode, explore=True, buffer=self._buffer)
        updated = self.policy.update(self._buffer, **self.update_kwargs)
        if both := sorted(collected.metrics.keys() & updated.keys()):
            raise ConfigError(
                f"the metric {both[0]!r} is logged in episodes and returned by {type(self.policy).__name__}.update; log it under "
                "another name, because a row has one value for each name"
            )
        metrics = {**collected.metrics, **updated}
        self.log_dict(metrics)
        return metrics

    def validate(self, vector_env: FiniteVectorEnv) -> Mapping[str, Any]:
        return self._evaluate(vector_env, self.val_initial_states)

    def test(self, vector_env: FiniteVectorEnv) -> Mapping[str, Any]:
        return self._evaluate(vector_env, self.test_initial_states)

    def _evaluate(self, vector_env: FiniteVectorEnv, states: Items[Any] | None) -> Mapping[str, Any]:
        """Run each seed of the environments once, without exploring. Return the metrics."""
        self.policy.eval()
        total = 0 if states is None else len(states)
        metrics = self._collect(
            vector_env, None, min(self.iteration.fast_dev_run or total, total), explore=False
        ).metrics
        self.log_dict(metrics)
        return metrics

    def _collect(
        self, vector_env: FiniteVectorEnv, n_episode: int | None, total: int, *, explore: bool, buffer: Any = None
    ) -> CollectResult:
        """Collect episodes with the policy, report the progress, and return the result.

        n_episode: episodes to collect; None: until the seeds end.
        total: the number of episodes in all, for the progress bar.
        """
        report = self.iteration.progress

        def progress(episodes: int, steps: int) -> None:
            report(episodes, total, steps=steps)

        with vector_env.collector_guard():
            collector = Collector(self.policy, vector_env, buffer)
            return collector.collect(n_episode=n_episode, explore=explore, on_progress=progress)

    def _limited(self, name: str, states: Items[InitialStateType]) -> Items[InitialStateType]:
        """Return all states, or `fast_dev_run` of them, chosen at random by `seed`."""
        n = self.iteration.fast_dev_run
        if n is None or n >= len(states):
            return states
        chosen = np.random.default_rng(self.seed).permutation(len(states))[:n]
        logger.info("fast_dev_run: %d of %d %s", n, len(states), name)
        return [states[int(index)] for index in chosen]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the policy, the training seeds and a replay buffer, if there is one.

        A rollout buffer is left out, because it is not used after its stage.
        """
        kept = self._buffer if isinstance(self._buffer, ReplayBuffer) else None
        return {
            "policy": self.policy.state_dict(),
            "seeds": self._to_load if self._plan is None else self._plan.state_dict(),
            "buffer": None if kept is None else {"num_envs": kept.num_envs, **kept.state_dict()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `state_dict`. A state may hold the policy alone. Raise CheckpointError if it does not fit
        the policy, the initial states or the buffer.
        """
        self.policy.load_state_dict(state["policy"])
        self._to_load = state.get("seeds")
        self._plan = self._buffer = None
        if self._to_load is not None and "iteration" in vars(self) and self.train_initial_states is not None:
            self.train_seed_iterator()  # a trainer is about to begin: refuse other initial states now
        if (kept := state.get("buffer")) is not None:
            self._buffer = self.policy.make_buffer(self.buffer_size, kept["num_envs"])
            if not isinstance(self._buffer, ReplayBuffer):
                raise CheckpointError(
                    f"the checkpoint has a replay buffer, and {type(self.policy).__name__} learns from none"
                )
            self._buffer.load_state_dict(kept)
