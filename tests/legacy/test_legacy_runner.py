"""`LegacyAgentRunner`: agents with the signatures and results of 0.1, on a list of tasks."""

import pytest

from leyden import emit_reward
from leyden.agent import LitAgent, llm_rollout, rollout
from leyden.legacy import DevTaskLoader, LegacyAgentRunner, RolloutLegacy, TripletLegacy
from leyden.types import LLM

pytestmark = pytest.mark.filterwarnings("ignore:.*belongs to the task protocol:DeprecationWarning")

MODEL = {"main_llm": LLM(endpoint="http://127.0.0.1:9/v1", model="tiny")}


def worker(agent, tasks, **options):
    loader = DevTaskLoader(tasks, MODEL)
    return LegacyAgentRunner(agent, loader, max_tasks=len(tasks), **options), loader


class AgentOf01(LitAgent):
    """The signature of 0.1: the rollout's id in the second place, and no rollout."""

    def training_rollout(self, task, rollout_id, resources):
        return [
            TripletLegacy(
                prompt={"token_ids": [task]}, response={"token_ids": [7]}, reward=0.75, metadata={"id": rollout_id}
            )
        ]

    def validation_rollout(self, task, rollout_id, resources):
        assert resources["main_llm"].model == "tiny"
        return RolloutLegacy(rollout_id=rollout_id, final_reward=float(task), metadata={"note": "whole report"})


def test_an_agent_of_01_runs_with_its_signature_and_its_results():
    running, loader = worker(AgentOf01(), [1, 2])
    assert running.iter() == 2
    assert [report.final_reward for report in loader.rollouts] == [1.0, 2.0]
    assert loader.rollouts[0].metadata == {"note": "whole report"}
    assert loader.rollouts[0].rollout_id == "local_task_001"


def test_triplets_that_an_agent_returns_are_reported_with_their_last_reward():
    from leyden.legacy import Task

    loader = DevTaskLoader([Task(rollout_id="r", input=5, mode="train")], MODEL)
    assert LegacyAgentRunner(AgentOf01(), loader, max_tasks=1).iter() == 1
    [report] = loader.rollouts
    assert report.final_reward == 0.75 and report.triplets[0].prompt == {"token_ids": [5]}
    assert report.triplets[0].metadata == {"id": "r"}


def test_an_agent_of_01_without_a_method_for_validation_has_that_for_training():
    class Agent(LitAgent):
        def training_rollout(self, task, rollout_id, resources):
            return float(task)

    running, loader = worker(Agent(), [3])
    assert running.iter() == 1
    assert [report.final_reward for report in loader.rollouts] == [3.0]


async def test_an_agent_of_today_is_reported_with_its_trace():
    @rollout
    async def agent(task):
        emit_reward(task / 10)

    running, loader = worker(agent, [5])
    assert await running.iter_async() == 1
    [report] = loader.rollouts
    assert report.final_reward == 0.5 and report.triplets is None
    [span] = report.trace
    assert span["context"]["trace_id"].startswith("0x") and span["start_time"].endswith("Z")


def test_an_agents_error_is_an_empty_report_and_the_worker_goes_on(caplog):
    @rollout
    def agent(task):
        return 1.0 / task

    running, loader = worker(agent, [0, 2])
    assert running.iter() == 2
    failed, succeeded = loader.rollouts
    assert failed.is_empty and failed.task.input == 0 and "ZeroDivisionError" in failed.metadata["error"]
    assert succeeded.final_reward == 0.5
    assert "ZeroDivisionError" in caplog.text


def test_a_model_of_the_resources_is_given_by_its_kind():
    @llm_rollout
    def agent(task, llm):
        return 1.0 if llm.model == "tiny" else 0.0

    running, loader = worker(agent, [1])
    running.iter()
    assert loader.rollouts[0].final_reward == 1.0
