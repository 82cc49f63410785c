"""Load a model and its tokenizer from a folder, a hub name or objects, and write or share them.

The module knows transformers' loading conventions; nothing of decoding or gradients.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import pickle
import re
import shutil
import threading
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from leyden.engine.chat_templates import chat_template_text
from leyden.engine.context import context_of
from leyden.engine.gguf import METADATA, imported
from leyden.engine.lora import merged
from leyden.engine.policy_backend import SharedWeights
from leyden.engine.source import why_not_loadable
from leyden.engine.text import Text
from leyden.errors import ConfigError, EngineError

_loading = threading.Lock()
"""Held while transformers loads or saves a model."""
_HUB_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")


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

    @property
    def device_type(self) -> str:
        return next(self.model.parameters()).device.type


def load_policy(
    model: Any, tokenizer: Any, *, device: str | None, dtype: str | None, chat_template: str | None = None
) -> LoadedPolicy:
    """Load a model and its tokenizer, and return them on the device.

    model: a folder, a GGUF file, a hub name or an object.
    tokenizer: a folder, a hub name or an object; None: the model's.
    device, dtype: None: the default of `EmbeddedBackend`.
    chat_template: replaces the tokenizer's.
    Raise EngineError, with the cause, if the model or the tokenizer cannot be loaded. Raise ConfigError if the
    tokenizer has more tokens than the model's embeddings, because it then belongs to another model.
    """
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    wanted: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
    if isinstance(model, str | Path):
        if reason := why_not_loadable(model):
            raise EngineError(reason)
        if Path(model).suffix.lower() == ".gguf" and Path(model).is_file():
            with _one_at_a_time():
                model = imported(model)
        loaded = _from_pretrained(AutoModelForCausalLM, model, dtype=wanted or torch.float32)
        tokenizer = str(model) if tokenizer is None else tokenizer
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
        gguf_metadata=metadata
        if isinstance(model, str | Path) and (metadata := Path(model) / METADATA).is_file()
        else None,
    )


def write_pretrained(policy: LoadedPolicy, path: Path) -> None:
    """Write the model and its tokenizer as a Hugging Face folder. Adapters are merged into a copy of the weights, so
    that any library loads the folder.
    """
    model = policy.model
    if hasattr(model, "merge_and_unload"):
        model = merged(model)
    with _one_at_a_time(), _declared_tied(model) as weights:
        model.save_pretrained(path, state_dict=weights)
    if policy.text is not None:
        policy.text.tokenizer.save_pretrained(path)
    if policy.gguf_metadata is not None:
        shutil.copyfile(policy.gguf_metadata, path / METADATA)


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
    exists = Path(name).exists()
    if not exists and not (isinstance(name, str) and _HUB_NAME.fullmatch(name)):
        raise EngineError(
            f"there is no folder {str(name)!r} to load a model from (looked for {Path(name).absolute()}); "
            "give an existing folder, or a hub name such as 'Qwen/Qwen3-0.6B'"
        )
    with _one_at_a_time():
        try:
            # Code that comes with a model is never run, and transformers must not ask on a terminal
            # whether it should be.
            return factory.from_pretrained(str(name), trust_remote_code=False, **options)
        except Exception as error:  # each format has its own errors
            absent = "" if exists else f" (there is no folder {Path(name).absolute()}, so it was taken for a hub name)"
            raise EngineError(
                f"{factory.__name__} cannot load {str(name)!r}{absent}: {type(error).__name__}: {error}"
            ) from error


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
