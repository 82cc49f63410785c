"""A class is an agent: the mode chooses the method, any async method makes it an async agent."""

import gc
import pickle
from typing import Any

import pytest

from leyden._lib.components import arguments_of
from leyden.agent import LitAgent, check_resources
from leyden.errors import ConfigError, MissingResource
from leyden.execution.runner import LitAgentRunner
from leyden.types import Attempt, AttemptedRollout, NamedResources, RolloutMode


def rollout_in(mode: RolloutMode | None) -> AttemptedRollout:
    attempt = Attempt(rollout_id="ro-1", attempt_id="at-1", sequence_id=1, start_time=0.0)
    return AttemptedRollout(rollout_id="ro-1", input=None, start_time=0.0, mode=mode, attempt=attempt)


class Plain(LitAgent[str]):
    def rollout(self, task: str, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        return f"rollout {task}"


class Validating(Plain):
    def validation_rollout(self, task: str, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        return f"validation {task}"


class Async(LitAgent[str]):
    async def rollout_async(self, task: str, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        return f"rollout {task}"

    async def training_rollout_async(self, task: str, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        return f"training {task}"


MODES: list[RolloutMode | None] = ["train", "val", "test", "live", None]


@pytest.mark.parametrize("mode", MODES)
async def test_the_mode_chooses_the_method(mode: RolloutMode | None):
    rollout = rollout_in(mode)
    assert Plain().run("x", {}, rollout) == "rollout x"
    assert Validating().run("x", {}, rollout) == ("rollout x" if mode == "train" else "validation x")
    assert await Async().run_async("x", {}, rollout) == ("training x" if mode == "train" else "rollout x")


def test_any_async_method_makes_an_async_agent():
    class OnlyValidation(Plain):
        async def validation_rollout_async(
            self, task: str, resources: NamedResources, rollout: AttemptedRollout
        ) -> Any:
            return task

    assert [agent.is_async() for agent in (Plain(), Validating(), Async(), OnlyValidation())] == [
        False,
        False,
        True,
        True,
    ]


async def test_a_method_that_is_missing_is_named():
    with pytest.raises(ConfigError, match=r"LitAgent was asked for rollout\(\), which it does not have"):
        LitAgent[str]().run("x", {}, rollout_in("train"))

    class OnlyTraining(LitAgent[str]):
        async def training_rollout_async(self, task: str, resources: NamedResources, rollout: AttemptedRollout) -> Any:
            return task

    with pytest.raises(
        ConfigError, match=r"OnlyTraining was asked for rollout_async\(\).*or the variant for this mode"
    ):
        await OnlyTraining().run_async("x", {}, rollout_in("val"))


def test_a_class_may_say_what_it_needs():
    class Needy(Plain):
        def check_resources(self, resources: NamedResources) -> None:
            if "judge" not in resources:
                raise MissingResource("Needy needs 'judge'")

    check_resources(Plain(), {})
    with pytest.raises(MissingResource, match="judge"):
        check_resources(Needy(), {})


class Owner:
    """Stands for a trainer or a runner, of which an agent knows nothing but that it is there."""


def test_trainer_and_runner_are_remembered_weakly():
    agent, trainer, runner = Plain(), Owner(), Owner()
    agent.set_trainer(trainer)
    agent.set_runner(runner)
    assert agent.get_trainer() is trainer
    assert agent.get_runner() is runner
    with_tracer = LitAgentRunner()
    agent.set_runner(with_tracer)
    assert agent.tracer is with_tracer.tracer
    agent.set_runner(runner)
    del trainer
    gc.collect()
    with pytest.raises(ConfigError, match="Plain has no trainer: it is set while a run is under way"):
        agent.get_trainer()
    again = pickle.loads(pickle.dumps(agent))
    assert isinstance(again, Plain)
    with pytest.raises(ConfigError, match="no runner"):
        again.get_runner()


class KeepsNoClient(LitAgent[int]):
    """Leaves out what cannot be pickled, and knows nothing of what its base class remembers."""

    def __init__(self, client: object, limit: int) -> None:
        self.client, self.limit = client, limit

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "client": None}


def test_what_an_agent_was_made_with_is_remembered_and_not_pickled():
    agent = KeepsNoClient(lambda: None, limit=3)
    assert arguments_of(agent)["limit"] == 3
    again = pickle.loads(pickle.dumps(agent))
    assert (again.client, again.limit) == (None, 3)
