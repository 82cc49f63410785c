"""`run_ppo`: a whole run of verl's trainer in the calling thread, with Ray and TransferQueue.

verl's driver runs in this process, because the store, the gateway and the run's record are here under every strategy.
verl's workers and servers are processes of Ray.
"""

# verl is installed in few environments, and it has no types.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from leyden.algorithm.verl.daemon import AgentModeDaemon
from leyden.algorithm.verl.verl_config import check_config, check_model, check_resources
from leyden.errors import ConfigError

logger = logging.getLogger(__name__)

PLUGIN = "leyden.algorithm.verl.plugin"
_SLOW_START = "timed out during startup"
"""Text of Ray's error when its agent took more than 15 seconds to start.

No setting changes that limit (ray-project/ray#65983).
"""
_RAY_STARTS = 3
"""How often Ray is started if it times out."""
_CONNECT_SECONDS = 10.0
DATASET = "pkg://leyden.algorithm.verl.dataset"


def run_ppo(
    config: Any,
    daemon: AgentModeDaemon,
    *,
    trainer_cls: Any = None,
    report: Any = None,
) -> None:
    """Train, and return when the last step is done.

    It blocks: call it in a thread, and not in the thread of the daemon's event loop.

    config: a configuration of `make_config`. `data.train_files` and `data.val_files` name JSONL or Parquet files with
        tasks.
    trainer_cls: the trainer to use in place of `AgentLightningTrainer`.
    report: called with metrics, the stage ("train" or "val"), and the step.
    Raise ConfigError before training for a configuration, a model or a cluster that cannot work. Raise EngineError,
    with the last lines of its log, if a process of Ray fails. Errors of the trainer itself are raised unchanged.
    """
    if trainer_cls is None and (mode := config.trainer.v1.trainer_mode) != "sync":
        raise ConfigError(
            f"trainer.v1.trainer_mode is {mode!r}, and AgentLightningTrainer is verl's synchronous trainer: leave it at "
            "'sync', or give trainer_cls"
        )
    use_platform(config)
    check_model(str(config.actor_rollout_ref.model.path))
    use_plug_points(config)
    check_config(config)
    from leyden.algorithm.verl.failures import explained
    from leyden.algorithm.verl.verl_trainer import AgentLightningTrainer, DaemonLoopManager

    with with_cluster(config) as logs:
        trainer = (trainer_cls or AgentLightningTrainer)(config, report=report)

        def servers() -> Sequence[Any]:  # none before the trainer has made them
            return getattr(getattr(trainer, "llm_server_manager", None), "server_handles", ())

        with explained(logs, servers, lambda: getattr(trainer, "global_steps", None) or None):
            _train(trainer, daemon, DaemonLoopManager(daemon, config))


def _train(trainer: Any, daemon: AgentModeDaemon, loop_manager: Any) -> None:
    trainer.init()
    tokenizer = trainer.tokenizer
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    daemon.options = replace(daemon.options, pad_id=pad_id)
    daemon.set_up_servers(trainer.llm_server_manager.get_addresses())
    succeeded = False
    try:
        trainer.fit(loop_manager)
        succeeded = True
    finally:
        if (tracking := getattr(trainer, "logger", None)) is not None:
            tracking.finish(exit_code=0 if succeeded else 1)


def use_platform(config: Any) -> None:
    """Let verl use the platform that `leyden.platform` registers. Call it before verl is imported.

    Raise ConfigError for CPUs without one, because verl has none.
    """
    if (module := config.leyden.platform) is not None:
        os.environ["VERL_PLATFORM"] = config.trainer.device
        os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", module)
        importlib.import_module(module)
    elif config.trainer.device == "cpu":
        raise ConfigError(
            "trainer.device is 'cpu', which verl has no platform for; set leyden.platform to a module that registers one, "
            "such as examples.verl_cpu.cpu in a clone of Leyden"
        )


def use_plug_points(config: Any) -> None:
    """Name Leyden's data set and engines in the configuration, unless the user named others."""
    from omegaconf import open_dict

    with open_dict(config):
        if config.data.custom_cls.path is None:
            config.data.custom_cls.path, config.data.custom_cls.name = DATASET, "AgentDataset"
        if config.actor_rollout_ref.model.external_lib is None:
            config.actor_rollout_ref.model.external_lib = PLUGIN
        config.transfer_queue.enable = True
    importlib.import_module(PLUGIN)


@contextmanager
def with_cluster(config: Any) -> Generator[Path | None]:
    """Connect to Ray or start it, and open TransferQueue. Close both at the end if they were opened here.

    Yield the folder of Ray's logs, or None if it is unknown. Raise ConfigError if Ray has fewer accelerators than the
    trainer needs.
    """
    with _ray(config) as logs, _queue(config):
        yield logs


@contextmanager
def _ray(config: Any) -> Generator[Path | None]:
    """Use the Ray that is connected, or connect to it or start it with `ray_kwargs.ray_init`, and shut that down.

    Yield the folder with its logs on this machine, or None if it does not say. Raise ConfigError if it has too few
    accelerators.
    """
    import ray
    from omegaconf import OmegaConf
    from verl.plugin.platform import get_platform
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    started = not ray.is_initialized()
    if started:
        runtime_env = get_ppo_ray_runtime_env(config)
        variables = runtime_env.setdefault("env_vars", {})
        variables["TRANSFER_QUEUE_ENABLE"] = "1"
        for name in ("VERL_PLATFORM", "VERL_USE_EXTERNAL_MODULES"):
            if name in os.environ:
                variables[name] = os.environ[name]
        given = OmegaConf.to_container(config.ray_kwargs.get("ray_init", {}), resolve=True)
        if config.trainer.device == "cpu" and "address" not in given:
            given.setdefault("num_gpus", config.trainer.n_gpus_per_node)
        _check_address(str(given.get("address") or ""))
        given["runtime_env"] = OmegaConf.to_container(OmegaConf.merge(runtime_env, given.get("runtime_env") or {}))
        _start_ray(given)
    try:
        os.environ["TRANSFER_QUEUE_ENABLE"] = "1"
        check_resources(config, ray.cluster_resources(), name=get_platform().ray_resource_name())
        session = getattr(ray.init(ignore_reinit_error=True), "address_info", {}).get("session_dir")
        yield None if session is None else Path(session) / "logs"
    finally:
        if started:
            ray.shutdown()


def _check_address(address: str) -> None:
    """Raise ConfigError if nothing listens at HOST:PORT. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdecimal():
        return  # "auto", "local", or a URL of Ray's client
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigError(
            f"ray_kwargs.ray_init.address is {address!r}, and no Ray answers there: {error}. Start it with "
            "`ray start --head`, or leave the address out to start Ray here"
        ) from error


def _start_ray(options: dict[str, Any]) -> None:
    """Call `ray.init`, again if Ray's own processes time out. Raise ConfigError if that fails."""
    import ray

    for left in reversed(range(_RAY_STARTS)):
        try:
            with _bytecode():
                ray.init(**options)
            return
        except Exception as error:  # Ray raises bare exceptions too
            ray.shutdown()
            if left and _SLOW_START in str(error):
                logger.warning("Ray's node did not start in the time that Ray gives it; trying once more")
                continue
            given = {name: value for name, value in options.items() if value is not None and name != "runtime_env"}
            raise ConfigError(
                f"Ray cannot be started with ray_kwargs.ray_init={given}: {error}. Give the address of a cluster "
                "as +ray_kwargs.ray_init.address, or leave it out to start one here"
            ) from error


@contextmanager
def _bytecode() -> Generator[None]:
    """Let processes that start within the block write bytecode, by removing PYTHONDONTWRITEBYTECODE. Otherwise each of
    Ray's processes would compile verl and torch again.
    """
    value = os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        yield
    finally:
        if value is not None:
            os.environ["PYTHONDONTWRITEBYTECODE"] = value


@contextmanager
def _queue(config: Any) -> Generator[None]:
    import transfer_queue

    transfer_queue.init(config.transfer_queue)
    try:
        yield
    finally:
        transfer_queue.close()
