"""Add low-rank adapters (LoRA, arXiv:2106.09685) to a model, with the package peft.

The base weights are frozen and the adapters are float32, so that only the adapters are trained and saved in a state.
The module knows models and adapter folders; nothing of sampling or gradients.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from leyden._lib.extras import import_optional
from leyden.engine.policy_backend import LoRA
from leyden.engine.source import ADAPTER
from leyden.engine.state import first_difference
from leyden.engine.untyped import load_tensors
from leyden.errors import ConfigError

_CONFIG, _WEIGHTS = ADAPTER


def add_adapter(model: Any, lora: LoRA, *, seed: int) -> Any:
    """Return `model` with adapters: new ones, which do not change its outputs at first, or those in the folder
    `lora.adapter`.

    seed: the seed of the random half of new adapters.
    Raise ConfigError if the model has none of the target modules, or the folder belongs to another model; MissingExtra
    if peft is missing.
    """
    peft = import_optional("peft", extra="lora", needed_by="LoRA")
    if hasattr(model, "peft_config"):
        raise ConfigError("the model has adapters already; leave out lora, or pass the model without them")
    config = _new_config(peft, lora) if lora.adapter is None else _config_in(peft, Path(lora.adapter))
    made_for = config.base_model_name_or_path or "unnamed"
    random_state = torch.random.get_rng_state()
    with warnings.catch_warnings():
        # peft warns of a deprecated name in transformers, and of another base model, which
        # `_load_weights` checks.
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(seed)
        try:
            wrapped = peft.get_peft_model(model, config)
        except ValueError as error:
            where = (
                "" if lora.adapter is None else f"; the adapter in {lora.adapter} belongs to another model ({made_for})"
            )
            raise ConfigError(f"lora cannot be applied to {type(model).__name__}: {error}{where}") from error
        finally:
            torch.random.set_rng_state(random_state)
        if lora.adapter is not None:
            _load_weights(peft, wrapped, Path(lora.adapter), made_for)
    return wrapped.eval()


def check_mergeable(model: Any) -> None:
    """Raise ConfigError for a model whose adapters cannot be merged into its weights, because its exported folder would
    be another model. A model without adapters passes.
    """
    for config in getattr(model, "peft_config", {}).values():
        if not hasattr(model, "merge_and_unload"):
            kind = getattr(config.peft_type, "value", config.peft_type)
            raise ConfigError(
                f"adapters of the kind {kind} cannot be merged into the model that a run leaves; use adapters that change "
                "weights, such as LoRA"
            )
        if getattr(config, "ensure_weight_tying", False) and hasattr(model.get_input_embeddings(), "base_layer"):
            raise ConfigError(
                "the adapter has ensure_weight_tying=True and changes the embeddings, which peft cannot merge into a copy "
                "of the model; make it with ensure_weight_tying=False"
            )
    if hasattr(model, "peft_config") and all(each.is_floating_point() for each in model.parameters()):
        # A trial without numbers takes no memory. Not every kernel of quantised weights has one.
        try:
            merged(model, without_numbers=True)
        except NotImplementedError:
            return
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(f"the adapters cannot be merged into the model that a run leaves: {error}") from error


def merged(model: Any, *, without_numbers: bool = False) -> Any:
    """Return a copy of a model with its adapters merged into its weights. Raise ConfigError if part of an adapter
    remains.

    without_numbers: copy the structure alone, with weights on torch's device "meta".
    """
    weights = model.parameters() if without_numbers else ()
    return merge(
        copy.deepcopy(
            model, {id(each): torch.nn.Parameter(each.detach().to("meta"), each.requires_grad) for each in weights}
        )
    )


def merge(model: Any) -> Any:
    """Merge a model's adapters into its weights, in place. Raise ConfigError if part of an adapter remains."""
    _untie_adapted(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # peft warns that the two are no longer tied
        whole = model.merge_and_unload()
    left = next((name for name, module in whole.named_modules() if type(module).__module__.startswith("peft.")), None)
    if left is not None:
        raise ConfigError(
            f"peft cannot merge all adapters of the module {left!r}; give that module one kind of adapter, or none"
        )
    return whole


def write_adapter(model: Any, path: Path) -> None:
    """Write the adapters of `model` as a folder that `peft.PeftModel.from_pretrained` loads."""
    with warnings.catch_warnings():
        # peft warns of a deprecated name in transformers, and that changed embeddings are written.
        warnings.simplefilter("ignore")
        model.save_pretrained(path)


def _new_config(peft: Any, lora: LoRA) -> Any:
    modules = lora.target_modules
    return peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=modules if isinstance(modules, str) else list(modules),
        lora_dropout=0.0,  # the trained distribution is the sampled one
        task_type="CAUSAL_LM",
    )


def _config_in(peft: Any, folder: Path) -> Any:
    """Return peft's configuration of the adapter in `folder`, set for training. Raise ConfigError if there is no
    adapter, or if it cannot be read.
    """
    if not (folder / _CONFIG).is_file() or not (folder / _WEIGHTS).is_file():
        raise ConfigError(
            f"{folder} holds no adapter: {_CONFIG} or {_WEIGHTS} is missing; give a folder that save_adapter wrote"
        )
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ConfigError(f"the adapter in {folder} cannot be read: {type(error).__name__}: {error}") from error
    config.inference_mode = False
    return config


def _load_weights(peft: Any, model: Any, folder: Path, made_for: str) -> None:
    """Load an adapter's weights into the model. Raise ConfigError if a name or a shape differs from the model's.

    made_for: the base model that the adapter names, for the error message.
    """
    try:
        found = load_tensors(folder / _WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"the adapter in {folder} cannot be read: {error}") from error
    if difference := first_difference(found, peft.get_peft_model_state_dict(model)):
        raise ConfigError(f"the adapter in {folder} belongs to another model ({made_for}): {difference}")
    peft.set_peft_model_state_dict(model, found)


def _untie_adapted(model: Any) -> None:
    """Give each layer its own weights where one with an adapter shares them, such as an output head that is tied to the
    embeddings: the adapter of one must not be merged into the other.
    """
    owners: defaultdict[int, list[tuple[Any, str]]] = defaultdict(list)
    adapted: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners[id(parameter)].append((module, name))
            if "base_layer" in path.split("."):
                adapted.add(id(parameter))
    for shared in adapted:
        for module, name in owners[shared][1:]:
            parameter = getattr(module, name)
            setattr(module, name, torch.nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad))
