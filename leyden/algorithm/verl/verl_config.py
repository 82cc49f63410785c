"""The configuration of a verl run. Leyden's defaults replace those of verl's `ppo_trainer`, and the user's values
replace both.

`make_config` composes it with Hydra and checks the keys. `check_config` lets verl check the values. `check_model` and
`check_resources` check the model folder and Ray's accelerators. verl documents its own keys; `defaults.yaml` documents
the keys of the section `leyden`.
"""

from __future__ import annotations

import difflib
import os
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from leyden._lib.extras import import_optional, require_packages
from leyden._lib.options import check_choice, check_number
from leyden.errors import ConfigError

_DEFAULTS = Path(__file__).with_name("defaults.yaml")
_MAKES_PROMPTS = (
    "prompt_key",
    "image_key",
    "video_key",
    "audio_key",
    "filter_overlong_prompts",
    "truncation",
    "return_raw_input_ids",
    "return_full_prompt",
    "apply_chat_template_kwargs",
)
"""Keys of `data` that tell verl's own data sets how to make prompts. They have no effect on `AgentDataset`, which makes
none."""
Config = Mapping[str, Any] | str | Path
"""Keys of a configuration, nested or dotted, or the path of a YAML file with them."""


def make_config(config: Config | None = None, overrides: Sequence[str] = ()) -> Any:
    """Return the whole configuration, an OmegaConf `DictConfig`.

    config: changes of the defaults. A key that verl does not know must be written with Hydra's plus sign, as in
        `{"+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space": 4}`.
    overrides: Hydra's command-line syntax, applied last: `["data.train_batch_size=8", "+trainer.note=test"]`.
    Raise ConfigError for an unknown key, with the nearest known one, for a key that would have no effect, and for a
    file or an override that cannot be read.
    """
    omegaconf, hydra = _import("omegaconf"), _import("hydra")
    defaults = omegaconf.OmegaConf.load(_DEFAULTS)
    try:
        with hydra.initialize_config_dir(str(_folder_of_verl()), version_base=None):
            composed = hydra.compose("ppo_trainer")
    except Exception as error:
        raise ConfigError(f"verl's own configuration ppo_trainer cannot be composed: {_first_line(error)}") from error
    omegaconf.OmegaConf.set_struct(composed, False)
    composed = omegaconf.OmegaConf.merge(composed, defaults)
    untouched = {key: composed.data[key] for key in _MAKES_PROMPTS}
    for key, value in _flat(_read(config)):
        _set(composed, key, value)
    for override in overrides:
        key, value = _parsed(override)
        _set(composed, key, value)
    omegaconf.OmegaConf.set_struct(composed, True)
    _check_own(composed)
    if composed.data.custom_cls.path is None:
        _check_unused(composed, untouched)
    return composed


def check_config(config: Any) -> None:
    """Let verl check the values of a configuration. Raise ConfigError with verl's message, and for an estimator or an
    engine that verl does not know, which it would notice in the first step.

    Estimators and engines of your own count if they were registered with verl in this process.
    """
    algorithms, engines = _import("verl.trainer.ppo.core_algos"), _import("verl.workers.rollout.replica")
    check_choice("algorithm.adv_estimator", config.algorithm.adv_estimator, algorithms.ADV_ESTIMATOR_REGISTRY)
    check_choice(
        "actor_rollout_ref.rollout.name",
        config.actor_rollout_ref.rollout.name,
        engines.RolloutReplicaRegistry._registry,
    )
    utils, values = _import("verl.trainer.ppo.utils"), _import("verl.utils.config")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no critic, which is the default here
            values.validate_config(
                config=config,
                use_reference_policy=utils.need_reference_policy(config),
                use_critic=utils.need_critic(config),
            )
    except Exception as error:
        raise ConfigError(f"verl refuses the configuration: {_one_line(error)}") from error


def check_model(path: str) -> None:
    """Raise ConfigError if a model's folder does not exist or holds no model, or if a model of the hub would have to be
    downloaded while HF_HUB_OFFLINE=1.

    path: `actor_rollout_ref.model.path`.
    """
    folder = Path(path).expanduser()
    is_local = path.startswith(("/", ".", "~")) or folder.exists() or path.count("/") != 1
    if is_local and not (folder / "config.json").is_file():
        state = "has no config.json" if folder.is_dir() else "does not exist"
        raise ConfigError(
            f"actor_rollout_ref.model.path is {path!r}, and that folder {state}; give a Hugging Face model folder, or a "
            "model of the hub as ORGANISATION/NAME"
        )
    if not is_local and os.environ.get("HF_HUB_OFFLINE") == "1":
        cached = _import("huggingface_hub").try_to_load_from_cache(path, "config.json")
        if not isinstance(cached, str):
            raise ConfigError(
                f"actor_rollout_ref.model.path is {path!r}, which is not in the cache of the hub, and HF_HUB_OFFLINE=1 "
                "forbids its download; unset HF_HUB_OFFLINE, or give a folder"
            )


def check_resources(config: Any, resources: Mapping[str, float], *, name: str = "GPU") -> None:
    """Raise ConfigError if Ray has fewer accelerators than the trainer needs.

    resources: the result of `ray.cluster_resources()`.
    name: Ray's name of the accelerator.
    """
    wanted = config.trainer.n_gpus_per_node * config.trainer.nnodes
    if (found := resources.get(name, 0.0)) < wanted:
        raise ConfigError(
            f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node} and trainer.nnodes={config.trainer.nnodes} need "
            f"{wanted} x {name}, and Ray has {found:g}; lower them, or start Ray with more "
            "(`ray start --num-gpus`, or +ray_kwargs.ray_init.num_gpus)"
        )


# ---- reading -------------------------------------------------------------------------------------


def _import(module: str) -> Any:
    return import_optional(module, extra="verl", needed_by="VERL")


def _folder_of_verl() -> Path:
    """Return the folder of verl's configurations, without importing verl, which takes seconds."""
    require_packages("verl", extra="verl", needed_by="VERL")
    found = find_spec("verl")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / "trainer" / "config"


def _read(config: Config | None) -> Mapping[str, Any]:
    omegaconf = _import("omegaconf")
    if config is None:
        return {}
    if isinstance(config, str | Path):
        try:
            config = omegaconf.OmegaConf.load(config)
        except OSError as error:
            raise ConfigError(f"the configuration {config} cannot be read: {error.strerror or error}") from error
        except Exception as error:
            raise ConfigError(f"the configuration {config} is no valid YAML: {_one_line(error)}") from error
    if isinstance(config, omegaconf.DictConfig):
        config = omegaconf.OmegaConf.to_container(config, resolve=False)
    if not isinstance(config, Mapping):
        raise ConfigError(f"the configuration is a {type(config).__name__}; give a mapping, or the path of a YAML file")
    return config


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a nested mapping with their values. A plus sign before any part of a key comes first."""
    for name, value in config.items():
        part, is_new = str(name).removeprefix("+"), str(name).startswith("+") or prefix.startswith("+")
        key = ".".join(filter(None, (prefix.removeprefix("+"), part)))
        key = f"+{key}" if is_new else key
        if isinstance(value, Mapping) and value:
            yield from _flat(cast(Mapping[str, Any], value), key)
        else:
            yield key, value


def _parsed(override: str) -> tuple[str, Any]:
    """Return key ("+" first if it is new) and value of a Hydra override. Raise ConfigError for a deletion or sweep."""
    parser = _import("hydra.core.override_parser.overrides_parser").OverridesParser.create()
    try:
        parsed = parser.parse_override(override)
    except Exception as error:
        raise ConfigError(f"the override {override!r} cannot be read: {_first_line(error)}") from error
    if parsed.is_delete() or parsed.is_sweep_override():
        raise ConfigError(
            f"the override {override!r} deletes or sweeps a key; give key=value, or +key=value for a new key"
        )
    return ("+" if parsed.is_add() else "") + parsed.key_or_group, parsed.value()


def _set(config: Any, key: str, value: Any) -> None:
    omegaconf = _import("omegaconf")
    is_new, name = key.startswith("+"), key.removeprefix("+")
    if not is_new and not _has(config, name):
        raise ConfigError(_unknown(config, name))
    try:
        omegaconf.OmegaConf.update(config, name, value, merge=True, force_add=is_new)
    except Exception as error:
        raise ConfigError(f"{name}={value!r} cannot be set: {_first_line(error)}") from error


def _has(config: Any, name: str) -> bool:
    omegaconf = _import("omegaconf")
    parent, _, last = name.rpartition(".")
    try:
        node = omegaconf.OmegaConf.select(config, parent) if parent else config
    except Exception:  # noqa: BLE001 -- a part of the path is a value, or an interpolation of a missing key
        return False
    return isinstance(node, omegaconf.DictConfig) and last in node.keys()  # noqa: SIM118 -- `in` is False for a missing value


def _unknown(config: Any, name: str) -> str:
    omegaconf = _import("omegaconf")
    known = [key for key, _ in _flat(omegaconf.OmegaConf.to_container(config, resolve=False))]
    sections = {key.rpartition(".")[0] for key in known}
    nearest = difflib.get_close_matches(name, [*known, *sections], n=1, cutoff=0.6)
    if not nearest:  # the last part in another section
        nearest = [key for key in known if key.rpartition(".")[2] == name.rpartition(".")[2]][:1]
    if name.startswith("agentlightning."):  # its name in Agent Lightning
        nearest = ["leyden.port" if name.endswith(".port") else "leyden.aggregation"]
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    return f"verl's configuration has no key {name!r}; {hint}A new key is written with a plus sign: +{name}"


def _check_own(config: Any) -> None:
    own = config.leyden
    check_choice("leyden.mode", own.mode, ("v1", "v0"))
    check_number("leyden.port", own.port, at_least=0, at_most=65_535, whole=True)
    check_choice("leyden.aggregation", own.aggregation, ("trajectory", "transition"))
    check_choice("leyden.overlong", own.overlong, ("drop", "cut"))
    check_number("leyden.timeout_seconds", own.timeout_seconds, above=0, or_none="no limit")
    check_number("leyden.failed_reward", own.failed_reward, or_none="failed rollouts left out")
    check_number("leyden.runner_timeout_seconds", own.runner_timeout_seconds, above=0, or_none="waiting for ever")
    mode = config.actor_rollout_ref.actor.loss_agg_mode
    if own.rollout_loss and mode != "seq-mean-token-sum":
        raise ConfigError(
            f"actor_rollout_ref.actor.loss_agg_mode is {mode!r}, and leyden.rollout_loss=true needs 'seq-mean-token-sum'; "
            "set leyden.rollout_loss=false to have verl aggregate rows"
        )

    if config.algorithm.adv_estimator == "remax":
        raise ConfigError(
            "algorithm.adv_estimator is 'remax', and verl's trainer samples no greedy baselines for it; take 'grpo' or "
            "'rloo', or train with leyden.ReMax"
        )


def _check_unused(config: Any, untouched: Mapping[str, Any]) -> None:
    """Raise ConfigError if the user has changed a key that has no effect on `AgentDataset`."""
    for key, default in untouched.items():
        if config.data[key] != default:
            raise ConfigError(
                f"data.{key} has no effect: a task goes to the agent as it is, and the agent makes its prompts. Leave it "
                "out; rows that are longer than data.max_prompt_length are dropped and counted"
            )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _one_line(error: BaseException) -> str:
    """Return an error's message in one line. If its first cause has no message, such as a bare `assert`, the line of
    the program that raised it follows.
    """
    text = " ".join(str(error).split())
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    frames = traceback.extract_tb(first.__traceback__)
    return text if str(first) or not frames else f"{text} at `{frames[-1].line}`".lstrip()
