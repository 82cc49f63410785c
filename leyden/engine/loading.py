"""Load a model and its tokenizer from a folder, a hub name or objects, and write or share them.

The module knows transformers' loading conventions; nothing of decoding or gradients.
"""

from __future__ import annotations

import base64
import contextlib
import difflib
import importlib
import json
import logging
import pickle
import shutil
import threading
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from leyden.engine.chat_templates import chat_template_text
from leyden.engine.context import context_of
from leyden.engine.gguf import METADATA, imported
from leyden.engine.lora import add_adapter, merge, merged, write_adapter
from leyden.engine.policy_backend import LoRA, SharedWeights
from leyden.engine.source import (
    ADAPTER,
    BASE,
    BaseModel,
    model_digest,
    model_files,
    remedy,
    require_source,
    why_not_loadable,
)
from leyden.engine.text import Text
from leyden.errors import ConfigError, EngineError

logger = logging.getLogger("leyden.engine")

_loading = threading.Lock()
"""Held while transformers loads or saves a model."""


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A model on its device, in evaluation mode."""

    model: Any
    text: Text | None
    """The tokenizer; None if a model object was given without one."""
    eos_ids: frozenset[int]
    """The tokens that end a turn."""
    context: int
    """The most tokens of a sequence that the model is made for, and whose log-probabilities do not depend on the tokens
    after them."""
    context_reason: str
    """What limits the context, as a clause for messages."""
    n_vocabulary: int
    """The number of rows of the model's embeddings."""
    gguf_metadata: Path | None = None
    """The metadata of the GGUF file that the model comes from."""
    origin: str | None = None
    """The folder, GGUF file or hub name that the model was loaded from; None for a model object, and for one that an
    adapter was merged into."""
    files: Path = Path()
    """The folder with the files of `origin`."""
    stamps: tuple[tuple[str, int, int], ...] = ()
    """Name, size and time of change of these files when they were loaded."""

    @property
    def device_type(self) -> str:
        return next(self.model.parameters()).device.type


def load_policy(
    model: Any,
    tokenizer: Any,
    *,
    device: str | None,
    dtype: str | None,
    chat_template: str | None = None,
    base: str | None = None,
) -> LoadedPolicy:
    """Load a model and its tokenizer, and return them on the device.

    model: a folder, a GGUF file, a hub name or an object. An adapter that a run has left is merged into its base model.
    tokenizer: a folder, a hub name or an object; None: the model's.
    device, dtype: None: the default of `EmbeddedBackend`.
    chat_template: replaces the tokenizer's.
    base: where the base model of an adapter is now; None: where it was.
    Raise EngineError, with the cause, if the model or the tokenizer cannot be loaded, and if the base model of an
    adapter has changed. Raise ConfigError if the tokenizer has more tokens than the model's embeddings, because it then
    belongs to another model.
    """
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    wanted: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
    origin, files = None, Path()
    if isinstance(model, str | Path):
        if reason := why_not_loadable(base or model):
            raise EngineError(reason)
        recorded = BaseModel.of(model)
        origin = folder = str(model if recorded is None else base or recorded.found())
        if Path(origin).suffix.lower() == ".gguf" and Path(origin).is_file():
            with _one_at_a_time():
                folder = str(imported(origin))
        loaded = _from_pretrained(AutoModelForCausalLM, folder, dtype=wanted or torch.float32)
        files = _files_of(folder)
        if recorded is not None:
            if model_digest(files) != recorded.sha256:
                raise EngineError(
                    f"{model} is an adapter of the model {recorded.model}, and {origin} has other weights or another "
                    f"configuration than that had; {remedy(model)}"
                )
            loaded, origin, folder = (
                merge(add_adapter(loaded, LoRA(adapter=model), seed=0)).requires_grad_(),
                None,
                str(model),
            )
        tokenizer = folder if tokenizer is None else tokenizer
    else:
        loaded = model if wanted is None else model.to(wanted)
    if isinstance(tokenizer, str | Path):
        tokenizer = _from_pretrained(AutoTokenizer, tokenizer)
    if tokenizer is not None and chat_template is not None:
        tokenizer.chat_template = chat_template_text(chat_template)
    loaded = loaded.to(target).eval()
    config = loaded.config.get_text_config()
    n_vocabulary = int(loaded.get_input_embeddings().weight.shape[0])
    if tokenizer is not None and (n_tokens := len(tokenizer)) > n_vocabulary:
        raise ConfigError(
            f"the tokenizer has {n_tokens:,} tokens and the model knows {n_vocabulary:,}, so it belongs to another model; "
            "give the tokenizer that came with the model, or leave tokenizer= out"
        )
    context, context_reason = context_of(config.to_dict())
    return LoadedPolicy(
        model=loaded,
        text=None if tokenizer is None else Text(tokenizer),
        eos_ids=_eos_ids(loaded, tokenizer),
        context=context,
        context_reason=context_reason,
        n_vocabulary=n_vocabulary,
        gguf_metadata=metadata if (metadata := files / METADATA).is_file() else None,
        origin=origin,
        files=files,
        stamps=() if origin is None else _stamps(files),
    )


def write_pretrained(policy: LoadedPolicy, path: Path, *, whole: bool = False) -> None:
    """Write the model and its tokenizer as a Hugging Face folder. Adapters are written alone if the model beneath comes
    from files, which must be as they were; else they are merged into a copy of the weights.

    whole: merge them in any case.
    """
    model = policy.model
    adapted = hasattr(model, "merge_and_unload")
    alone = adapted and not whole and policy.origin is not None and path.absolute() != policy.files.absolute()
    if alone and not (policy.files.is_dir() and _stamps(policy.files) == policy.stamps):
        logger.warning(
            "%s has changed since it was loaded, so %s gets the whole model instead of its adapter", policy.origin, path
        )
        alone = False
    # What an earlier call left in the other form is removed: the folder would be two models.
    for old in path.glob("model*.safetensors*") if alone else (path / name for name in (BASE, *ADAPTER)):
        old.unlink(missing_ok=True)
    if alone:
        _write_alone(policy, path)
    else:
        model = merged(model) if adapted else model
        with _one_at_a_time(), _declared_tied(model) as weights:
            model.save_pretrained(path, state_dict=weights)
    if policy.text is not None:
        policy.text.tokenizer.save_pretrained(path)
    if policy.gguf_metadata is not None:
        shutil.copyfile(policy.gguf_metadata, path / METADATA)


def _write_alone(policy: LoadedPolicy, path: Path) -> None:
    """Write the adapters of a model as peft does, and what the model was loaded from.

    Its configuration is left out: with it, transformers takes the folder for a whole model.
    """
    origin, folder = str(policy.origin), str(policy.files.absolute())
    is_path = Path(origin).exists()
    for config in policy.model.peft_config.values():
        config.base_model_name_or_path = folder if is_path else origin
    with _one_at_a_time():
        write_adapter(policy.model, path)
    (path / "config.json").unlink(missing_ok=True)
    dtype = str(policy.model.get_base_model().dtype).removeprefix("torch.")
    record = BaseModel(str(Path(origin).absolute()) if is_path else origin, folder, model_digest(policy.files), dtype)
    (path / BASE).write_text(json.dumps(asdict(record), indent=2) + "\n")


def _stamps(folder: Path) -> tuple[tuple[str, int, int], ...]:
    found = [(path.name, path.stat()) for path in model_files(folder)]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


def _files_of(model: str) -> Path:
    """Return the folder with the files of a model: of a hub name, the one in the hub's cache."""
    if Path(model).is_dir():
        return Path(model)
    untyped: Any = importlib.import_module("transformers.utils")
    return Path(untyped.cached_file(model, "config.json")).parent


@contextlib.contextmanager
def _declared_tied(model: Any) -> Generator[dict[str, Tensor]]:
    """Return the tensors to write, so that loading them gives the same model. During the block, the configuration says
    that weights are tied only if they are.

    transformers writes one of two tensors that share memory, and fills the other at loading only if the configuration
    ties the two.
    """
    weights: dict[str, Tensor] = model.state_dict()
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    written: dict[int, str] = {}
    for name, weight in list(weights.items()):
        other = written.setdefault(weight.data_ptr(), name)
        if other != name and tied.get(name) != other and tied.get(other) != name:
            weights[name] = weight.clone()
    differ = any(
        weights[name].data_ptr() != weights[other].data_ptr()
        for name, other in tied.items()
        if name in weights and other in weights
    )
    configs = [
        each
        for each in (model.config, model.config.get_text_config())
        if differ and getattr(each, "tie_word_embeddings", False)
    ]
    for config in configs:
        config.tie_word_embeddings = False
    try:
        yield weights
    finally:
        for config in configs:
            config.tie_word_embeddings = True


def share_weights(policy: LoadedPolicy) -> SharedWeights:
    """Return handles of the policy's weights. A tied output head is among them, under its own name."""
    reductions: Any = importlib.import_module("torch.multiprocessing.reductions")  # untyped
    weights: dict[str, Any] = {
        name: weight.detach() for name, weight in policy.model.named_parameters(remove_duplicate=False)
    }
    device_id = "cpu"
    if policy.device_type == "cuda":
        device = next(iter(weights.values())).device
        torch.cuda.synchronize(device)  # the optimizer's step may still be under way
        device_id = str(cast(Any, torch.cuda).get_device_properties(device).uuid)
    handles = [{device_id: reductions.reduce_tensor(weight)[1]} for weight in weights.values()]
    return SharedWeights(
        names=list(weights),
        dtypes=[str(weight.dtype).removeprefix("torch.") for weight in weights.values()],
        shapes=[list(weight.shape) for weight in weights.values()],
        handles=base64.b64encode(pickle.dumps(handles)).decode(),
    )


def _from_pretrained(factory: Any, name: str | Path, **options: Any) -> Any:
    """Return the object that a class of transformers (`factory`) loads from a folder or a hub name.

    Raise EngineError, which names the class and the folder, if loading fails.
    """
    require_source(name)
    exists = Path(name).exists()
    with _one_at_a_time():
        try:
            # Code that comes with a model is never run, and transformers must not ask on a terminal
            # whether it should be.
            return factory.from_pretrained(str(name), trust_remote_code=False, **options)
        except Exception as error:  # each format has its own errors
            absent = "" if exists else f" (there is no folder {Path(name).absolute()}, so it was taken for a hub name)"
            raise EngineError(
                f"{factory.__name__} cannot load {str(name)!r}{absent}: {type(error).__name__}: {str(error).rstrip('.')}"
                f"{'' if exists else _nearest_folder(Path(name))}"
            ) from error


def _nearest_folder(path: Path) -> str:
    """Return the end of a message: which model's folder beside the one that is missing may be meant."""
    beside = [each.name for each in path.absolute().parent.glob("*") if (each / "config.json").is_file()]
    near = difflib.get_close_matches(path.name, beside, n=1)
    return f"; did you mean {str(path.with_name(near[0]))!r}?" if near else "; give the folder of a model"


@contextlib.contextmanager
def _one_at_a_time() -> Generator[None]:
    """Hold a lock during the block, and hide transformers' progress bars, which would garble the caller's output.

    Transformers patches torch while it loads. Two loads at once would leave torch patched.
    """
    with _loading:
        shows_progress = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            if shows_progress:
                transformers_logging.enable_progress_bar()


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a turn, by the model's generation config and by its tokenizer."""
    found: set[int] = set()
    declared = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    for value in (declared, getattr(tokenizer, "eos_token_id", None)):
        if value is not None:
            found.update(cast(list[int], value) if isinstance(value, list) else [int(value)])
    return frozenset(found)
