"""`VERL`: verl's trainer as an algorithm, with Leyden's store and gateway."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from leyden._lib.extras import import_optional
from leyden.algorithm.algorithm import Algorithm, Dataset
from leyden.algorithm.verl.daemon import AgentModeDaemon, DaemonOptions
from leyden.algorithm.verl.verl_config import Config, make_config
from leyden.errors import ConfigError
from leyden.legacy import AgentLightningClient
from leyden.training import Metrics, Stage
from leyden.types import NamedResources, ProxyLLM

logger = logging.getLogger(__name__)

_AFTER_THE_LAST_STEP: Final = 2**31 - 1
"""A `trainer.test_freq` that no step reaches: verl validates after the last step in any case."""


class VERL(Algorithm):
    """Trains a policy with verl (https://github.com/verl-project/verl): FSDP, vLLM and Ray.

    It trains on one GPU or many. Agents are run and recorded as with `PolicyGradient`, and verl's trainer gets the rows
    of their rollouts. It needs the extra `verl`, in an environment that verl supports.

    config: changes of the configuration: a YAML file or a mapping, nested or with dotted keys. A key that verl does not
        know begins with a plus sign.
    trainer_cls: a subclass of verl's `PPOTrainer` to use in place of `AgentLightningTrainer`. It is called with
        `(config, report=...)`.
    daemon_cls: a class to use in place of `AgentModeDaemon`.
    overrides: changes in Hydra's command-line syntax, applied after `config`.
    Raise ConfigError for a key that verl does not know, and for a value that it refuses.
    """

    enqueues_datasets = True

    uses_gateway = True
    resumable = True

    validates_at_end: bool = True
    """Whether a validation set is run after the last step although no `trainer.test_freq` asks for it."""

    def __init__(
        self,
        config: Config | None = None,
        trainer_cls: Any = None,
        daemon_cls: Any = None,
        *,
        overrides: Sequence[str] = (),
    ) -> None:
        self.config = make_config(config, overrides)
        """The whole configuration, an OmegaConf `DictConfig`."""
        self.trainer_cls, self.daemon_cls = trainer_cls, daemon_cls or AgentModeDaemon

    def planned_resources(self) -> NamedResources:
        llm = ProxyLLM(endpoint="http://gateway/v1", model=str(self.config.actor_rollout_ref.model.path))
        return {**(self.get_initial_resources() or {}), str(self.config.leyden.resource_name): llm}

    def trained_model(self) -> Any:
        return str(self.config.actor_rollout_ref.model.path)

    def get_client(self) -> AgentLightningClient:
        """Return a client of mode v0's task server, as a worker of Agent Lightning 0.1 uses it.

        Raise ConfigError in mode v1, whose runners take tasks from the store, and if `leyden.port` is 0.
        """
        own = self.config.leyden
        if own.mode != "v0":
            raise ConfigError(
                "leyden.mode is 'v1', which has no task server for a client: runners take tasks from the store, and "
                "get_llm_proxy().as_resource() is the policy; set leyden.mode=v0 for workers of Agent Lightning 0.1"
            )
        if not own.port:
            raise ConfigError(
                "leyden.port is 0, so the task server takes a free port, which the log names; set leyden.port"
            )
        return AgentLightningClient(f"http://127.0.0.1:{own.port}")

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Train with verl. Checkpoints are written to the run's directory, and a resumed run continues from the newest
        one.

        Without data sets, verl reads `data.train_files` and `data.val_files`. With a validation set and no
        `trainer.test_freq`, verl also validates once, after the last step. Without one, verl validates on the training
        set, if `trainer.val_before_train` or `trainer.test_freq` asks for a validation.
        """
        from leyden.algorithm.verl.verl_run import run_ppo

        proxy, run = self.require_llm_proxy(), self.get_run()
        with TemporaryDirectory(prefix="leyden-verl-") as folder:
            config = self._prepared(Path(folder), run.directory, train_dataset, val_dataset)
            daemon = self.daemon_cls(
                self.collector,
                proxy,
                self.get_adapter(),
                publish=self.publish_endpoint,
                run_id=run.run_id,
                options=DaemonOptions.of(config),
                initial_resources=self.get_initial_resources(),
            )
            try:
                await asyncio.to_thread(daemon.start)
                self.announce_ready()
                await asyncio.to_thread(run_ppo, config, daemon, trainer_cls=self.trainer_cls, report=self._report)
            finally:
                await daemon.aclose()

    def _prepared(self, scratch: Path, kept: Path | None, train: Dataset[Any] | None, val: Dataset[Any] | None) -> Any:
        """Write the data sets, and return a copy of the configuration with their files and a folder for checkpoints.

        scratch: a folder that lasts as long as the run.
        Raise ConfigError for an empty data set, and for one that is smaller than a batch.
        """
        from leyden.algorithm.verl.dataset import LoadedDataset  # it imports torch

        omegaconf = import_optional("omegaconf", extra="verl", needed_by="VERL")
        config = omegaconf.OmegaConf.create(omegaconf.OmegaConf.to_container(self.config, resolve=False))
        with omegaconf.open_dict(config):
            for name, tasks in (("train", train), ("val", val if val is not None else train)):
                if tasks is None:
                    continue
                if not len(tasks):
                    raise ConfigError(f"VERL needs tasks; the {name} data set is empty")
                config.data[f"{name}_files"] = str(LoadedDataset(tasks).write(scratch / f"{name}.jsonl"))
            if str(config.trainer.default_local_dir).startswith("checkpoints/"):  # verl's default
                config.trainer.default_local_dir = str((kept or scratch) / "checkpoints")
        if val is not None and self.validates_at_end and not (config.trainer.test_freq or 0) > 0:
            logger.info("val_dataset is run after the last step; give trainer.test_freq to see it during training too")
            config.trainer.test_freq = _AFTER_THE_LAST_STEP
        size = config.data.train_batch_size
        if train is not None and len(train) < size:
            raise ConfigError(
                f"data.train_batch_size is {size} and the data set has {len(train)} tasks, so verl would have no step; "
                "lower data.train_batch_size"
            )
        return config

    def _report(self, metrics: Metrics, stage: Stage, step: int) -> None:
        self.get_run().report(metrics, stage=stage, iteration=step)
