"""`python -m leyden.algorithm.verl`: train with verl, and serve the store to which runners connect."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from leyden._lib.atomic import private_directory
from leyden._lib.components import arguments_of
from leyden._lib.text import error_line
from leyden.adapter import TraceToTriplet
from leyden.algorithm.verl.verl_algorithm import VERL
from leyden.errors import LeydenError
from leyden.gateway import LLMProxy
from leyden.store import LightningStoreServer, SqliteLightningStore
from leyden.training.runs import Run
from leyden.training.runs.folder import MANIFEST, METRICS
from leyden.training.runs.opening import begin_run
from leyden.training.runs.recorder import RunRecorder
from leyden.training.runs.recording import FolderRecorder
from leyden.training.runs.run_description import (
    NOT_DEFAULT,
    changed_options,
    describe,
    describe_model,
    describe_program,
    import_path,
)

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
    private_directory(folder)
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
                async with _recorded(algorithm, folder, store) as run:
                    algorithm.set_run(run)
                    async with algorithm.collecting():
                        await algorithm.run()
        finally:
            await server.stop()


@asynccontextmanager
async def _recorded(algorithm: VERL, folder: Path, store: SqliteLightningStore) -> AsyncGenerator[Run]:
    """Begin a run in the folder, or continue the run that is there, and record how it ends. A run that ended before its
    first step is replaced.
    """
    metrics = folder / METRICS
    goes_on = metrics.exists() and metrics.stat().st_size > 0
    if not goes_on:
        (folder / MANIFEST).unlink(missing_ok=True)
    config = {
        "algorithm": {"name": import_path(VERL), "options": describe(arguments_of(algorithm))},
        "model": describe_model(algorithm.trained_model()),
        NOT_DEFAULT: changed_options(algorithm, "algorithm"),
        **describe_program(),
    }
    _, manifest = begin_run(folder, resume=goes_on, config=config)
    recorder = RunRecorder(manifest, store, FolderRecorder(folder, manifest))
    await recorder.open()
    recorder.begin_algorithm(resume=goes_on)
    try:
        yield Run(manifest.record.run_id, folder, resume=goes_on, recorder=recorder)
    except asyncio.CancelledError:
        await recorder.close("stopped", "interrupted")
        raise
    except Exception as error:
        await recorder.close("failed", error_line(error))
        raise
    await recorder.close("succeeded")


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
