"""`SimulatorOptions`: the options of a trainer, a vessel and a policy that may change between two iterations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from leyden._lib.annotations import as_option
from leyden._lib.options import check_number
from leyden.rl.policy import Policy
from leyden.rl.trainer.vessel import TrainingVesselBase
from leyden.training import TrainLoop
from leyden.training.callbacks import HookResult
from leyden.training.runs.start import option_path

_EVERY = "trainer.val_every_n_iters"
_POLICY, _UPDATE, _EPISODES = "vessel.policy.", "vessel.update_kwargs.", "vessel.episode_per_iter"


class SimulatorOptions:
    """A `Steerable` of a run in simulators."""

    steps_path = "trainer.max_iters"

    def __init__(self, loop: TrainLoop, vessel: TrainingVesselBase[Any]) -> None:
        self._loop, self._vessel = loop, vessel
        policy = getattr(vessel, "policy", None)
        self._policy = policy if isinstance(policy, Policy) else None
        self._first = self.settings()
        """The values of the program."""
        self._changed = set[str]()

    def settings(self) -> Mapping[str, Any]:
        vessel, policy = self._vessel, self._policy
        found: dict[str, Any] = {self.steps_path: self._loop.max_iters, _EVERY: self._loop.val_every_n_iters}
        if hasattr(vessel, "episode_per_iter"):
            found[_EPISODES] = getattr(vessel, "episode_per_iter", None)
        if policy is not None:
            found |= {f"{_POLICY}{name}": getattr(policy, name) for name in policy.changeable}
            given: Mapping[str, Any] = getattr(vessel, "update_kwargs", {})
            found |= {f"{_UPDATE}{name}": given.get(name) for name in policy.update_options}
        return found

    def full_path(self, path: str) -> str:
        return ".".join(option_path(path, {"vessel": {}}))

    def why_fixed(self, path: str) -> str | None:
        section, *names = path.split(".")
        owners: dict[str, Any] = {"trainer": self._loop, "vessel": self._vessel}
        held = owners.get(section)
        for name in names:
            held = getattr(held, name, None)
        return None if held is None else "it holds from the first iteration to the last"

    def checked(self, path: str, value: Any) -> Any:
        owner, name = path.rpartition(".")[::2]
        policy: Any = self._policy
        takers: dict[str, Any] = {
            "trainer": type(self._loop),
            "vessel": type(self._vessel),
            "vessel.policy": type(policy),
        }
        value = as_option(takers.get(owner) or policy.update, name, value)
        known: dict[str, Any] = (
            {} if policy is None else {"vessel.policy": policy.changeable}.get(owner, policy.update_options)
        )
        check_number(name, value, **known.get(name, {"at_least": 1, "whole": True}))
        if path == _EVERY:
            self._vessel.require_stage("val")
            self._loop.check_validations(value)
        return value

    def change(self, path: str, value: Any, n_finished: int) -> HookResult:
        self._changed.add(path)
        self._put(path, value)
        return None

    def _put(self, path: str, value: Any) -> None:
        owner, _, name = path.rpartition(".")
        if f"{owner}." == _UPDATE:
            given: dict[str, Any] = cast(Any, self._vessel).update_kwargs
            given[name] = value
            if value is None:
                del given[name]
        else:
            setattr({"vessel.policy": self._policy, "trainer": self._loop}.get(owner, self._vessel), name, value)

    def reset(self) -> None:
        for path in self._changed:
            self._put(path, self._first[path])
        self._changed.clear()
