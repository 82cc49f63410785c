"""The configuration: verl's own with Leyden's defaults over it, and every mistake named with its remedy."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import leyden
from leyden.agent import llm_rollout
from leyden.algorithm.verl import VERL, make_config
from leyden.algorithm.verl.daemon import DaemonOptions
from leyden.algorithm.verl.verl_config import check_config, check_model, check_resources
from leyden.algorithm.verl.verl_run import with_cluster
from leyden.errors import ConfigError
from leyden.store import InMemoryLightningStore
from leyden.trainer import Trainer
from leyden.types import LLM

pytestmark = [pytest.mark.verl, pytest.mark.merge]
MODEL = str(Path(leyden.__file__).parent / "cli" / "demo" / "weights")


def test_the_keys_of_the_guide_from_verl_are_verls_own() -> None:
    page = (Path(__file__).parents[2] / "docs/migrating/verl.md").read_text()
    named: dict[str, Any] = {"ly": leyden}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[2], named)
    config = named["algorithm"].config
    assert config.actor_rollout_ref.rollout.n == 8 and config.data.max_response_length == 256


def test_leydens_defaults_lie_over_those_of_verl_and_the_users_over_both() -> None:
    config = make_config({"data": {"train_batch_size": 64}, "actor_rollout_ref.rollout.temperature": 0.7})
    assert config.algorithm.adv_estimator == "grpo" and config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.data.train_batch_size == 64 and config.actor_rollout_ref.rollout.temperature == 0.7
    assert (
        config.actor_rollout_ref.rollout.prompt_length == config.data.max_prompt_length == 4096
    )  # verl's interpolation
    assert DaemonOptions.of(config).rollouts_per_task == 4
    check_config(config)


def test_a_new_key_is_written_with_a_plus_sign() -> None:
    keys: dict[str, Any] = {
        "+trainer.note": "a",
        "actor_rollout_ref": {"rollout": {"engine_kwargs": {"vllm": {"+x": 4}}}},
    }
    config = make_config(keys, ["+leyden.mine=3", "data.train_batch_size=16"])
    assert config.trainer.note == "a" and config.actor_rollout_ref.rollout.engine_kwargs.vllm.x == 4
    assert config.leyden.mine == 3 and config.data.train_batch_size == 16


def test_parallel_and_offload_keys_reach_verl() -> None:
    keys = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}
    actor = {"fsdp_config": {"param_offload": True, "optimizer_offload": True}}
    config = make_config({"actor_rollout_ref": {"rollout": keys, "actor": actor}})
    assert config.actor_rollout_ref.rollout.pipeline_model_parallel_size == 2
    assert config.actor_rollout_ref.actor.fsdp_config.param_offload


@pytest.mark.filterwarnings("ignore:.*Agent Lightning 0.1.*:DeprecationWarning")
def test_a_client_is_that_of_the_task_server_of_mode_v0() -> None:
    algorithm = VERL({"leyden": {"mode": "v0", "port": 4321}}, None, None)
    assert algorithm.get_client().endpoint == "http://127.0.0.1:4321"
    with pytest.raises(ConfigError, match="which has no task server"):
        VERL().get_client()
    with pytest.raises(ConfigError, match=r"leyden\.port is 0"):
        VERL({"leyden": {"mode": "v0", "port": 0}}).get_client()


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        ({"data": {"train_batchsize": 8}}, [], r"no key 'data.train_batchsize'; did you mean data.train_batch_size\?"),
        ({"actor_rollout_ref.optim.lr": 1}, [], r"did you mean actor_rollout_ref.actor.optim.lr\?.*\+actor_rollout"),
        ({"agentlightning": {"port": 1}}, [], r"no key 'agentlightning.port'; did you mean leyden.port\?"),
        ({"zzz": 1}, [], r"no key 'zzz'; A new key is written with a plus sign: \+zzz"),
        (None, ["data.train_batch_size=["], "the override 'data.train_batch_size=.' cannot be read"),
        (None, ["~data"], "the override '~data' deletes or sweeps a key"),
        ({"leyden.overlong": "trim"}, [], "leyden.overlong is 'trim'; possible: drop, cut"),
        ({"leyden.mode": "v2"}, [], "leyden.mode is 'v2'; possible: v1, v0"),
        ({"leyden.timeout_seconds": 0}, [], "leyden.timeout_seconds is 0"),
        ({"actor_rollout_ref.actor.loss_agg_mode": "token-mean"}, [], "set leyden.rollout_loss=false"),
        ({"algorithm.adv_estimator": "remax"}, [], "samples no greedy baselines.*leyden.ReMax"),
        ({"data.filter_overlong_prompts": True}, [], "data.filter_overlong_prompts has no effect"),
    ],
)
def test_a_wrong_key_is_refused_with_the_nearest(config: Any, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VERL(config, overrides=overrides)


@pytest.mark.parametrize(
    ("keys", "val", "expected"),
    [
        ({}, [3], True),
        ({"trainer.val_before_train": False}, [3], True),
        ({"trainer.test_freq": 0}, [3], True),
        ({"trainer.test_freq": 7}, [3], 7),
        ({}, None, -1),
    ],
)
def test_a_validation_set_without_an_interval_is_run_after_the_last_step(
    keys: dict[str, Any], val: list[int] | None, expected: Any, tmp_path: Path
) -> None:
    algorithm = VERL({"data.train_batch_size": 1, **keys})
    found = algorithm._prepared(tmp_path, None, [1, 2], val).trainer.test_freq
    assert found == (2**31 - 1 if expected is True else expected), (
        "verl validates after its last step if it is positive"
    )
    assert algorithm.config.trainer.test_freq == keys.get("trainer.test_freq", -1)
    alias = importlib.import_module("leyden.compat.agentlightning.algorithm").VERL({"data.train_batch_size": 1, **keys})
    assert alias._prepared(tmp_path, None, [1, 2], val).trainer.test_freq == keys.get("trainer.test_freq", -1)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("data: [\n")
    with pytest.raises(ConfigError, match=r"broken\.yaml is no valid YAML: .*line"):
        make_config(tmp_path / "broken.yaml")
    with pytest.raises(ConfigError, match=r"absent\.yaml cannot be read: No such file"):
        make_config(tmp_path / "absent.yaml")
    (tmp_path / "good.yaml").write_text("data:\n  train_batch_size: 4\n")
    assert make_config(tmp_path / "good.yaml").data.train_batch_size == 4


def test_verls_refusal_of_a_value_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"verl refuses the configuration: .*train_batch_size"):
        check_config(make_config({"data.train_batch_size": 2, "actor_rollout_ref.actor.ppo_mini_batch_size": 8}))


@pytest.mark.parametrize(
    ("key", "value", "nearest"),
    [("algorithm.adv_estimator", "grppo", "'grpo'"), ("actor_rollout_ref.rollout.name", "vlm", "'vllm'")],
)
def test_an_unknown_estimator_or_engine_is_refused_before_a_step(key: str, value: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is '{value}'; .*{nearest}"):
        check_config(make_config({key: value}))


def test_an_estimator_that_the_program_has_registered_is_known() -> None:
    core_algos = importlib.import_module("verl.trainer.ppo.core_algos")
    core_algos.register_adv_est("mine")(lambda **_: None)
    try:
        check_config(make_config({"algorithm.adv_estimator": "mine"}))
    finally:
        del core_algos.ADV_ESTIMATOR_REGISTRY["mine"]


def test_a_refusal_of_verl_without_a_message_is_shown_by_its_line() -> None:
    config = make_config({"actor_rollout_ref.actor.optim.lr_scheduler_type": "linear"})
    with pytest.raises(ConfigError, match=r"verl refuses the configuration: .*lr_scheduler_type"):
        check_config(config)


def test_a_critic_is_that_of_the_policys_model_and_its_refusal_has_the_reason() -> None:
    keys = {"algorithm.adv_estimator": "gae", "actor_rollout_ref.model.path": MODEL}
    config = make_config(keys)
    assert config.critic.model.path == MODEL
    check_config(config)
    with pytest.raises(ConfigError, match=r"verl refuses the configuration: .*no/critic.* full_key: critic\.model"):
        check_config(make_config({**keys, "critic.model.path": "no/critic/there"}))


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path is '/no/model', and that folder does not exist"):
        check_model("/no/model")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        check_model(str(tmp_path))
    with pytest.raises(ConfigError, match="not in the cache of the hub, and HF_HUB_OFFLINE=1"):
        check_model("nobody/nothing")


def test_too_few_accelerators_are_named_with_the_setting() -> None:
    config = OmegaConf.create({"trainer": {"n_gpus_per_node": 8, "nnodes": 2}})
    with pytest.raises(
        ConfigError, match=r"trainer\.n_gpus_per_node=8 and trainer\.nnodes=2 need 16 x GPU, and Ray has 1"
    ):
        check_resources(config, {"GPU": 1.0, "CPU": 64.0})
    check_resources(config, {"GPU": 16.0})


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "127.0.0.1:1",
            r"ray_kwargs\.ray_init\.address is '127\.0\.0\.1:1', and no Ray answers there.*ray start --head",
        ),
        (
            "auto",
            r"Ray cannot be started with ray_kwargs\.ray_init=\{'address': 'auto'\}: Could not find any running Ray",
        ),
    ],
)
def test_a_ray_that_is_not_started_is_named_with_the_setting(address: str, message: str) -> None:
    config = make_config({"trainer.device": "cpu", "+ray_kwargs.ray_init.address": address})
    with pytest.raises(ConfigError, match=message), with_cluster(config):
        pass


CPU = {"leyden.platform": "examples.verl_cpu.cpu"}


@llm_rollout
async def won(task: int, llm: LLM) -> float:
    """Win."""
    return 1.0


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        ({"actor_rollout_ref.model.path": "/no/model"}, "ConfigError: actor_rollout_ref.model.path is '/no/model'"),
        ({"actor_rollout_ref.actor.ppo_mini_batch_size": 8}, "ConfigError: verl refuses the configuration: "),
        ({"trainer.v1.trainer_mode": "separate_async"}, "ConfigError: trainer.v1.trainer_mode is 'separate_async'"),
        (
            {"leyden.platform": None},
            "ConfigError: trainer.device is 'cpu', which verl has no platform for; set leyden.p",
        ),
    ],
)
async def test_a_configuration_that_cannot_work_is_the_cause_in_the_runs_record(
    keys: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    given = {"actor_rollout_ref.model.path": MODEL, "data.train_batch_size": 4, "trainer.device": "cpu", **CPU, **keys}
    async with InMemoryLightningStore() as store:
        trainer = Trainer(algorithm=VERL(given), store=store, run_dir=tmp_path / "run", progress=False)
        with pytest.raises(ConfigError) as caught:
            await trainer.afit(won, [1, 2, 3, 4])
        (run,) = await store.query_runs()
    assert run.status == "failed" and run.cause == f"ConfigError: {caught.value}"
    assert run.cause.startswith(cause)
    assert not (tmp_path / "run").exists()  # nothing was started


@pytest.mark.timeout(240)
def test_the_program_records_why_its_run_failed_and_begins_anew_after_it(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("1\n")
    files = [f"data.{name}_files={tmp_path / 'tasks.jsonl'}" for name in ("train", "val")]
    for model in ("/no/model", "/no/other"):
        command = [sys.executable, "-m", "leyden.algorithm.verl", "--run-dir", tmp_path / "run", "--port", "0", *files]
        done = subprocess.run(
            [*command, f"actor_rollout_ref.model.path={model}"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(Path(leyden.__file__).parents[1])},
        )
        assert done.returncode == 1 and f"model.path is '{model}', and that folder does not exist" in done.stderr
        record = json.loads((tmp_path / "run" / "run.json").read_text())
        assert record["status"] == "failed"
        assert record["cause"].startswith(f"ConfigError: actor_rollout_ref.model.path is '{model}'")
