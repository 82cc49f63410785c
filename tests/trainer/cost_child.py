"""A run for a test to kill: `python cost_child.py ENDPOINT RUN_DIR`. Its calls have prices, and its gateway is durable."""

from __future__ import annotations

import sys

import leyden as ly
from leyden.gateway import LLMProxy, UpstreamModel
from tests.trainer.test_cost import PRICES, agent

if __name__ == "__main__":
    endpoint, directory = sys.argv[1:]
    proxy = LLMProxy(model_list=[UpstreamModel("fake", endpoint)], durable=True)
    ly.Trainer(
        algorithm="baseline", llm_proxy=proxy, prices=PRICES, run_dir=directory, concurrency=1, progress=False
    ).fit(agent, range(60))
