"""Agent Lightning's whole program for VERL, as its documentation writes it: trainer, gateway's port, adapter, tracer.

Run by `python -m leyden.compat seed_program.py PORT`; trains one step on CPUs and validates. AgentOps itself is not
there: it wants an older `packaging` than verl's.
"""

import os
import sys

os.environ.update(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0", HF_HUB_OFFLINE="1", VERL_LOGGING_LEVEL="ERROR")

import yaml
from agentlightning import LLM, LLMProxy, TracerTraceToTriplet, llm_rollout
from agentlightning.algorithm import VERL
from agentlightning.tracer import AgentOpsTracer
from agentlightning.trainer import Trainer

from examples.verl_cpu.train import KEYS, WEIGHTS, play


@llm_rollout
async def agent(task: dict[str, int], llm: LLM) -> float:
    return await play(task, llm=llm)


def main(port: int) -> None:
    verl_config = {
        **yaml.safe_load(KEYS.read_text()),
        "actor_rollout_ref.model.path": str(WEIGHTS),
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.rollout.n": 4,
        "data.train_batch_size": 4,
        "trainer.total_training_steps": 1,
        "trainer.test_freq": 1,
    }
    tasks = [{"secret": number} for number in range(8)]
    trainer = Trainer(
        n_runners=4,
        algorithm=VERL(verl_config),
        llm_proxy=LLMProxy(port=port),
        adapter=TracerTraceToTriplet(),
        tracer=AgentOpsTracer(),
    )
    trainer.fit(agent, tasks, tasks[:4])


if __name__ == "__main__":
    main(int(sys.argv[1]))
