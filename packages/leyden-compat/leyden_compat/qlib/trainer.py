"""Qlib's `Trainer`, vessels, `train` and `backtest`.

They are subclasses of Leyden's. A vessel takes policies of tianshou too. A vessel that overrides `train`, `validate` or
`test` is given environments that tianshou's collectors accept.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from leyden.rl import trainer as native
from leyden.rl.env import FiniteVectorEnv as NativeVectorEnv
from leyden.training.pth import with_arrays
from leyden_compat.qlib.policy import DEFAULT_BUFFER_SIZE, TianshouPolicy, as_policy
from leyden_compat.qlib.vector import FiniteVectorEnv, worker_options


class TrainingVesselBase(native.TrainingVesselBase[Any]):
    """The base class of vessels: a policy with everything that it needs to act and to learn."""

    # for subclasses that do not call `super().__init__()`, as Qlib allows
    reward: Any = None
    aux_info_collector: Any = None

    def __init__(self, **parts: Any) -> None:
        """Accept the parts by keyword. A subclass may leave some out and set them itself."""
        names = ("simulator_fn", "state_interpreter", "action_interpreter", "policy")
        missing: dict[str, Any] = {name: None for name in names if name not in parts}
        super().__init__(**{**missing, **parts})

    def __class_getitem__(cls, types: Any) -> type[TrainingVesselBase]:
        return cls

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _give_old_environments(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, as_policy(value) if name == "policy" and value is not None else value)

    def state_dict(self) -> dict[str, Any]:
        """Return the policy's weights, and its state of learning if it is a policy of tianshou."""
        return {**super().state_dict(), **_learning_state(self.policy)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. A state with weights alone is accepted."""
        super().load_state_dict(state)
        _load_learning_state(self.policy, state)


class TrainingVessel(native.TrainingVessel[Any]):
    """A policy with its simulator, interpreters and reward, trained on initial states."""

    def __init__(self, *, policy: Any, buffer_size: int | None = None, **options: Any) -> None:
        policy = as_policy(policy)
        if buffer_size is None and isinstance(policy, TianshouPolicy):
            buffer_size = DEFAULT_BUFFER_SIZE
        super().__init__(policy=policy, buffer_size=buffer_size, **options)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _give_old_environments(cls)

    def train(self, vector_env: Any) -> Mapping[str, Any]:
        """Collect, then update. Return the metrics of both."""
        return super().train(_native(vector_env))

    def validate(self, vector_env: Any) -> Mapping[str, Any]:
        """Run each initial state of the validation once."""
        return super().validate(_native(vector_env))

    def test(self, vector_env: Any) -> Mapping[str, Any]:
        """Run each initial state of the test once."""
        return super().test(_native(vector_env))

    def state_dict(self) -> dict[str, Any]:
        """Return the policy's weights, and its state of learning if it is a policy of tianshou."""
        return {**super().state_dict(), **_learning_state(self.policy)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. A state with weights alone is accepted."""
        super().load_state_dict(state)
        _load_learning_state(self.policy, state)


class Trainer(native.Trainer):
    """Train a vessel by iterations of "collect, update, sometimes validate"."""

    uses_val_initial_states = False

    def __init__(self, *, finite_env_type: str = "subproc", **options: Any) -> None:
        given: Mapping[str, Any] = options.pop("env_options", None) or {}
        env_options = {**worker_options(finite_env_type), **given}
        options.setdefault("progress", False)  # Qlib's prints nothing itself
        super().__init__(finite_env_type=finite_env_type, env_options=env_options, **options)

    def named_callbacks(self) -> dict[str, Any]:
        """Return the callbacks by their types' names in lower case; later ones of a type are numbered from 1."""
        return _by_type(self.callbacks)

    def named_loggers(self) -> dict[str, Any]:
        """Return the writers by their types' names in lower case; later ones of a type are numbered from 1."""
        return _by_type(self.loggers)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, or what `torch.load` read from a file of `Checkpoint`."""
        super().load_state_dict(with_arrays(dict(state)))


def _by_type(parts: Sequence[Any]) -> dict[str, Any]:
    """Return the parts by their types' names in lower case; later ones of a type are numbered."""
    named: dict[str, Any] = {}
    seen: Counter[str] = Counter()
    for part in parts:
        kind = type(part).__name__.lower()
        named[f"{kind}{seen[kind] or ''}"] = part
        seen[kind] += 1
    return named


def train(
    simulator_fn: Callable[..., Any],
    state_interpreter: Any,
    action_interpreter: Any,
    initial_states: Sequence[Any],
    policy: Any,
    reward: Any,
    vessel_kwargs: Mapping[str, Any] | None = None,
    trainer_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Train a policy on these initial states."""
    vessel = TrainingVessel(
        simulator_fn=simulator_fn,
        state_interpreter=state_interpreter,
        action_interpreter=action_interpreter,
        policy=policy,
        train_initial_states=initial_states,
        reward=reward,
        **(vessel_kwargs or {}),
    )
    Trainer(**(trainer_kwargs or {})).fit(vessel)


def backtest(
    simulator_fn: Callable[..., Any],
    state_interpreter: Any,
    action_interpreter: Any,
    initial_states: Sequence[Any],
    policy: Any,
    logger: Any,
    reward: Any = None,
    finite_env_type: str = "subproc",
    concurrency: int = 2,
) -> None:
    """Run each initial state once with an unchanged policy, and write its rows to `logger`."""
    vessel = TrainingVessel(
        simulator_fn=simulator_fn,
        state_interpreter=state_interpreter,
        action_interpreter=action_interpreter,
        policy=policy,
        test_initial_states=initial_states,
        reward=reward,
    )
    Trainer(max_iters=0, loggers=logger, finite_env_type=finite_env_type, concurrency=concurrency).test(vessel)


def _give_old_environments(cls: type) -> None:
    """Wrap the methods `train`, `validate` and `test` that a class defines, so that they are given environments which
    tianshou accepts.
    """
    for name in ("train", "validate", "test"):
        if (own := cls.__dict__.get(name)) is not None:
            setattr(cls, name, _with_old_environment(own))


def _with_old_environment(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_stage(self: Any, vector_env: Any) -> Any:
        return run(self, FiniteVectorEnv.over(vector_env) if isinstance(vector_env, NativeVectorEnv) else vector_env)

    return run_stage


def _native(vector_env: Any) -> NativeVectorEnv:
    return vector_env.native if isinstance(vector_env, FiniteVectorEnv) else vector_env


def _learning_state(policy: Any) -> dict[str, Any]:
    return {"learning": policy.learning_state()} if isinstance(policy, TianshouPolicy) else {}


def _load_learning_state(policy: Any, state: Mapping[str, Any]) -> None:
    if isinstance(policy, TianshouPolicy) and "learning" in state:
        policy.load_learning_state(state["learning"])
