"""The four recommended configurations, each with the same agent.

python examples/anywhere/configurations.py development   # try the agent; nothing is kept
python examples/anywhere/configurations.py small         # train, four runners in this process
python examples/anywhere/configurations.py large         # train, eight runner processes
python examples/anywhere/configurations.py machines      # train, sixteen on each machine
"""

from __future__ import annotations

import asyncio
from typing import Any

from agent import TASKS, play
from train import options, train

import leyden as ly
from leyden.cli.demo import WEIGHTS

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "development": {"n_runners": 1, "dev": True},
    "small": {"n_runners": 4, "strategy": "shm"},
    "large": {"n_runners": 8, "strategy": "cs"},
    "machines": {"n_runners": 16, "port": 9999},
}


async def try_out() -> None:
    """Play each game once with the untrained model, through a gateway, and log what happened."""
    ly.setup_logging("INFO")
    async with (
        ly.IsolatedBackend(WEIGHTS, device="cpu", max_length=128) as model,
        ly.InMemoryLightningStore() as store,
        ly.LLMProxy(model_list=[model.endpoint()], store=store) as gateway,
    ):
        llm = gateway.as_resource(sampling_parameters={"temperature": 1.0, "max_tokens": 4})
        trainer = ly.Trainer(
            algorithm=ly.Baseline(span_verbosity="none"),
            store=store,
            llm_proxy=gateway,
            initial_resources={"llm": llm},
            **CONFIGURATIONS["development"],
        )
        trainer.dev(play, TASKS)


def main() -> None:
    """See `--help`."""
    parser = options(__doc__)
    parser.add_argument("configuration", choices=CONFIGURATIONS)
    given = parser.parse_args()
    if given.configuration == "development":
        asyncio.run(try_out())
    else:
        train(given, **CONFIGURATIONS[given.configuration])


if __name__ == "__main__":
    main()
