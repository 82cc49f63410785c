"""`python -m leyden.algorithm.verl`: train with verl, for runners that connect to the store that it serves."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from leyden.adapter import TraceToTriplet
from leyden.algorithm.verl.algorithm import VERL
from leyden.errors import LeydenError
from leyden.gateway import LLMProxy
from leyden.runs import Run
from leyden.store import LightningStoreServer, SqliteLightningStore

_EXAMPLES = """examples:
  python -m leyden.algorithm.verl data.train_files=train.jsonl data.val_files=val.jsonl
  python -m leyden.algorithm.verl --config grpo.yaml --port 4747 actor_rollout_ref.actor.optim.lr=2e-6
  python -m leyden.algorithm.verl --config grpo.yaml trainer.n_gpus_per_node=8 +trainer.note=second

Start runners in other processes: LitAgentRunner on LightningStoreClient("http://127.0.0.1:4747").
"""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m leyden.algorithm.verl",
        description="Train with verl, and serve the store and the gateway that runners connect to.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="keys of the configuration, as Hydra takes them"
    )
    parser.add_argument("--config", type=Path, help="a YAML file with changes of the configuration")
    parser.add_argument(
        "--run-dir", type=Path, default=Path(".leyden/verl"), help="store and checkpoints (default: %(default)s)"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="where store and gateway listen; another host needs LEYDEN_STORE_TOKEN"
    )
    parser.add_argument("--port", type=int, default=4747, help="of the store (default: %(default)s)")
    parser.add_argument("--gateway-port", type=int, default=0, help="of the gateway (default: a free one)")
    return parser.parse_args()


async def _train(arguments: argparse.Namespace) -> None:
    algorithm = VERL(arguments.config, overrides=arguments.overrides)
    token = os.environ.get("LEYDEN_STORE_TOKEN")
    folder: Path = arguments.run_dir
    folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 -- nothing else runs yet
    async with SqliteLightningStore(folder / "store.sqlite") as store:
        server = LightningStoreServer(store, arguments.host, arguments.port, token=token)
        await server.start()
        try:
            async with LLMProxy(store=store, host=arguments.host, port=arguments.gateway_port, token=token) as proxy:
                logging.getLogger("leyden").info(
                    "the store is at %s, the gateway at %s", server.endpoint, proxy.endpoint
                )
                algorithm.set_store(store)
                algorithm.set_adapter(TraceToTriplet())
                algorithm.set_llm_proxy(proxy)
                algorithm.set_run(Run(run_id=folder.name, directory=folder))
                async with algorithm.collecting():
                    await algorithm.run()
        finally:
            await server.stop()


def main() -> int:
    """Run the program, and return its exit status."""
    arguments = _arguments()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(_train(arguments))
    except LeydenError as error:
        print(error, file=sys.stderr)  # noqa: T201 -- a program
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
