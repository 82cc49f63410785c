"""`train` and `backtest`: one call each, without writing a vessel.

Their positional arguments are those of Qlib.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from leyden.rl.env import FiniteEnvType
from leyden.rl.parts import ActionInterpreter, InitialStateType, Reward, Simulator, StateInterpreter
from leyden.rl.policy import Policy
from leyden.rl.seed import Items
from leyden.rl.trainer.rl_trainer import Trainer
from leyden.rl.trainer.vessel import TrainingVessel
from leyden.training import LogWriter


def train(
    simulator_fn: Callable[..., Simulator[InitialStateType, Any, Any]],
    state_interpreter: StateInterpreter[Any, Any],
    action_interpreter: ActionInterpreter[Any, Any, Any],
    initial_states: Items[InitialStateType],
    policy: Policy,
    reward: Reward[Any] | None,
    vessel_kwargs: Mapping[str, Any] | None = None,
    trainer_kwargs: Mapping[str, Any] | None = None,
) -> Trainer:
    """Train a policy on initial states. Return the trainer, with the metrics of the last iteration.

    simulator_fn: makes a simulator from an initial state.
    reward: None: every reward is 0.
    vessel_kwargs: further arguments of `TrainingVessel`.
    trainer_kwargs: arguments of `Trainer`, at least `max_iters` or a callback that ends the run.
    """
    vessel = TrainingVessel(
        simulator_fn=simulator_fn,
        state_interpreter=state_interpreter,
        action_interpreter=action_interpreter,
        policy=policy,
        reward=reward,
        train_initial_states=initial_states,
        **(vessel_kwargs or {}),
    )
    trainer = Trainer(**(trainer_kwargs or {}))
    trainer.fit(vessel)
    return trainer


def backtest(
    simulator_fn: Callable[..., Simulator[InitialStateType, Any, Any]],
    state_interpreter: StateInterpreter[Any, Any],
    action_interpreter: ActionInterpreter[Any, Any, Any],
    initial_states: Items[InitialStateType],
    policy: Policy,
    logger: LogWriter | Sequence[LogWriter] | None = None,
    reward: Reward[Any] | None = None,
    finite_env_type: FiniteEnvType = "subproc",
    concurrency: int = 2,
) -> Mapping[str, Any]:
    """Run a policy once on each initial state, without training it. Return the metrics.

    simulator_fn: makes a simulator from an initial state.
    logger: gets the rows of the episodes.
    reward: computes the rewards in the metrics; None: all are 0.
    finite_env_type, concurrency: where the simulators run, and how many at once.
    """
    vessel = TrainingVessel(
        simulator_fn=simulator_fn,
        state_interpreter=state_interpreter,
        action_interpreter=action_interpreter,
        policy=policy,
        reward=reward,
        test_initial_states=initial_states,
    )
    return Trainer(max_iters=0, loggers=logger, finite_env_type=finite_env_type, concurrency=concurrency).test(vessel)
