"""`check_simulator`: find the errors of a simulator and its interpreters by running one trajectory.

To check something else, add it to `check_simulator` as a problem (it must be corrected) or a note (it is allowed).
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from gymnasium import spaces

from leyden._lib.pickling import pack_by_value
from leyden.rl.env.wrapper import EnvWrapper
from leyden.rl.parts import ActionInterpreter, Reward, Simulator, StateInterpreter
from leyden.rl.seed import NO_ITEM


@dataclass(frozen=True, slots=True)
class SimulatorReport:
    """The findings of `check_simulator`."""

    steps: int
    """The number of steps of the trajectory."""
    reward: float
    """The sum of the rewards of these steps."""
    problems: list[str] = field(default_factory=list[str])
    """Errors to correct. Without any, a policy can be trained with the simulator."""
    notes: list[str] = field(default_factory=list[str])
    """Findings that are allowed but often not intended."""


def check_simulator(
    simulator_fn: Callable[..., Simulator[Any, Any, Any]],
    state_interpreter: StateInterpreter[Any, Any],
    action_interpreter: ActionInterpreter[Any, Any, Any],
    initial_state: Any = NO_ITEM,
    reward_fn: Reward[Any] | None = None,
    *,
    max_steps: int = 1000,
    seed: int = 0,
) -> SimulatorReport:
    """Run one trajectory with random actions, and return a report of its problems.

    Errors of the simulator and the interpreters are in the report, and are not raised.
    initial_state: an item of the data set; leave it out if simulators take no argument.
    max_steps: stop after this many steps, which the report then notes.
    seed: the seed of the actions and of `self.env.np_random`.
    """
    problems: list[str] = []
    notes: list[str] = []
    for what, thing in (("the simulator factory", simulator_fn), ("the initial state", initial_state)):
        try:
            pack_by_value(thing) if thing is simulator_fn else pickle.dumps(thing)
        except Exception as error:  # noqa: BLE001 -- any object may raise anything
            notes.append(f"{what} cannot be sent to a worker process ({error}): use env_type 'dummy' or 'thread'")
    env: EnvWrapper[Any, Any, Any, Any, Any] = EnvWrapper(
        simulator_fn, state_interpreter, action_interpreter, reward_fn=reward_fn
    )
    doing, total = "a first reset", 0.0
    try:
        first = _copy(env.begin(initial_state, (seed, 0)))
        simulator = env.simulator
        assert simulator is not None
        one = _copy(env.state_interpreter(simulator.get_state()))
        if not _equal(one, env.state_interpreter(simulator.get_state())):
            problems.append(
                "get_state() returns another state when it is called twice; only step() may change a simulator"
            )
        if simulator.done():
            problems.append("done() is True before the first step; leave such initial states out of the data set")
        doing = "a second reset"
        again = env.begin(initial_state, (seed, 0))
        if not _equal(first, again):
            notes.append(
                "two trajectories from one initial state begin with different observations: a run cannot be repeated exactly"
            )
        space = env.action_space
        space.seed(seed)
        before, shown = again, _copy(again)
        while not env.status["done"] and env.status["cur_step"] < max_steps:
            doing = f"step {env.status['cur_step'] + 1}"
            obs, reward, terminated, truncated = env.advance(space.sample())
            total += reward
            if not _equal(before, shown):
                problems.append(
                    f"{doing} changed the observation before it: the same array was returned again; return a copy"
                )
                break
            before, shown = obs, _copy(obs)
            simulator = env.simulator
            assert simulator is not None
            flags: dict[str, Any] = {"done()": simulator.done(), "truncated()": simulator.truncated()}
            for name, flag in flags.items():
                if not isinstance(flag, bool | np.bool_):
                    problems.append(f"{name} is {flag!r} after {doing}; it must be True or False")
            if not np.isfinite(reward):
                problems.append(f"the reward of {doing} is {reward}")
            if bool(simulator.done() or simulator.truncated()) != (terminated or truncated):
                problems.append(f"done() changed between two calls after {doing}; only step() may change it")
            if problems:
                break
        if not env.status["done"] and not problems:
            notes.append(f"the trajectory has not ended after {max_steps} steps")
    except Exception as error:  # noqa: BLE001 -- user code: whatever it raises is a finding
        raised = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{traceback.format_exception_only(error)[-1].strip()} (at {raised.filename}:{raised.lineno})"
        problems.append(f"{doing}: {line if str(error) else traceback.format_exc().strip()}")
    observation_space: Any = env.observation_space
    if isinstance(observation_space, spaces.Box) and cast(Any, observation_space).low.dtype == np.float64:
        notes.append("observations are float64; policies compute in float32, which takes half the memory")
    return SimulatorReport(env.status["cur_step"], total, problems, notes)


def _copy(sample: Any) -> Any:
    return pickle.loads(pickle.dumps(sample))


def _equal(one: Any, other: Any) -> bool:
    return pickle.dumps(one) == pickle.dumps(other)
