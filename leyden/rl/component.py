"""The base of simulators, interpreters and rewards: access to the environment, and logging.

`EnvWrapper` sets a weak reference to the environment. A component that is copied or sent to another
process arrives without it. A component belongs to one environment at a time: the last one that took
it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from leyden.rl.env.wrapper import EnvWrapper

from leyden.errors import ConfigError

_STAYS_HERE: Final = ("_env_reference", "_check", "_conformer")
"""Attributes that are of this process: the reference, and the compiled checks of interpreters."""


class EnvComponent:
    """Has an `env`, which is None until an `EnvWrapper` takes it, and after that one is gone."""

    _env_reference: weakref.ref[EnvWrapper[Any, Any, Any, Any, Any]] | None = None

    @property
    def env(self) -> EnvWrapper[Any, Any, Any, Any, Any] | None:
        """The environment that holds this: its `logger` and its `status`."""
        return None if self._env_reference is None else self._env_reference()

    @env.setter
    def env(self, env: EnvWrapper[Any, Any, Any, Any, Any] | None) -> None:
        self._take_env(env)

    def log(self, name: str, value: float) -> None:
        """Log a number of this step for writers and the stage's metrics.

        Raise ConfigError outside an environment.
        """
        if (env := self.env) is None:
            raise ConfigError(
                f"{type(self).__name__}.log({name!r}) outside an environment; log from `step` or `reward`, when an EnvWrapper has it"
            )
        env.logger.add_scalar(name, value)

    def _take_env(self, env: EnvWrapper[Any, Any, Any, Any, Any] | None) -> None:
        object.__setattr__(self, "_env_reference", None if env is None else weakref.ref(env))  # frozen dataclasses too

    def __getstate__(self) -> Any:
        state: Any = super().__getstate__()
        if isinstance(state, dict):
            return {name: value for name, value in state.items() if name not in _STAYS_HERE}  # pyright: ignore[reportUnknownVariableType] -- any attributes
        return state
