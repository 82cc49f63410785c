"""An agent with the Trainer of Agent Lightning 0.1, as its examples have it: `original_trainer.py URL N`."""

import sys

from agentlightning import LitAgent, Trainer
from agentlightning.tracer.base import BaseTracer


class Agent(LitAgent):
    def training_rollout(self, task, rollout_id, resources):
        if task["n"] == 0:
            raise ValueError("no")
        return float(task["n"])


class NoTracer(BaseTracer):
    """AgentOps would call its own servers."""

    def init(self):
        pass

    def teardown(self):
        pass

    def init_worker(self, worker_id):
        pass

    def teardown_worker(self, worker_id):
        pass

    def trace_context(self, name=None):
        import contextlib

        return contextlib.nullcontext()

    def get_last_trace(self):
        return []


if __name__ == "__main__":
    Trainer(n_workers=1, max_tasks=int(sys.argv[2]), tracer=NoTracer()).fit(Agent(), sys.argv[1])
