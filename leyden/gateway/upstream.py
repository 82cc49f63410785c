"""The models behind the gateway, by the name that agents ask for.

It knows where a model is and what its server understands; it opens no connection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from leyden.errors import ConfigError
from leyden.types import LLM, ProxyLLM

__all__ = ["UpstreamModel", "upstream_models"]


@dataclass(frozen=True, slots=True)
class UpstreamModel:
    """One model that agents may ask for, and the OpenAI-compatible server that answers."""

    model_name: str
    """The name that agents use."""
    endpoint: str
    """The server's base URL, as an OpenAI client takes it (it ends in `/v1`)."""
    api_key: str | None = None
    upstream_model: str | None = None
    """The server's name for the model, where it is another one."""
    sampling_parameters: dict[str, Any] = field(default_factory=dict[str, Any])
    """Suggested to agents by `LLMProxy.as_resource`; requests pass as agents send them."""
    record_tokens: bool = True
    """Ask the server for token ids and log-probabilities (vLLM's `return_token_ids`). Switch it off for a server that
    refuses fields it does not know, such as api.openai.com: its calls are recorded as text only."""

    def __post_init__(self) -> None:
        if not self.model_name:
            raise ConfigError("model_list: model_name is empty; give the name that agents ask for")
        if not self.endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"model_list: endpoint of {self.model_name!r} is {self.endpoint!r}; "
                "it must be an http(s) base URL such as http://127.0.0.1:8000/v1"
            )

    def url(self, path: str) -> str:
        """The URL of `path` (`chat/completions`) at the server."""
        return f"{self.endpoint.rstrip('/')}/{path}"


def upstream_models(model_list: Sequence[UpstreamModel | LLM | Mapping[str, Any]]) -> dict[str, UpstreamModel]:
    """The models of `model_list` by name.

    Raises ConfigError for an entry that is no model, an unknown key, and a name given twice.
    """
    models: dict[str, UpstreamModel] = {}
    for entry in model_list:
        model = _upstream_model(entry)
        if model.model_name in models:
            raise ConfigError(f"model_list names {model.model_name!r} twice; one model name has one endpoint")
        models[model.model_name] = model
    return models


def _upstream_model(entry: UpstreamModel | LLM | Mapping[str, Any]) -> UpstreamModel:
    if isinstance(entry, UpstreamModel):
        return entry
    if isinstance(entry, ProxyLLM):
        raise ConfigError(
            f"model_list: {entry.model!r} is a ProxyLLM, which is a gateway itself; give the model behind it"
        )
    if isinstance(entry, LLM):
        return UpstreamModel(
            model_name=entry.model,
            endpoint=entry.endpoint,
            api_key=entry.api_key,
            sampling_parameters=dict(entry.sampling_parameters),
        )
    known = {option.name for option in fields(UpstreamModel)}
    if unknown := sorted(set(entry) - known):
        raise ConfigError(f"model_list: unknown key {unknown[0]!r}; possible: {', '.join(sorted(known))}")
    if missing := sorted({"model_name", "endpoint"} - set(entry)):
        raise ConfigError(f"model_list: an entry has no {missing[0]!r}; it has {', '.join(sorted(entry)) or 'nothing'}")
    return UpstreamModel(**entry)
