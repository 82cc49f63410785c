"""The models behind the gateway, by the name that agents ask for.

It knows where a model is and what its server understands; it opens no connection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from leyden.dialects import DIALECTS, Dialect, DialectName
from leyden.errors import ConfigError
from leyden.types import LLM, ProxyLLM

__all__ = ["UpstreamModel", "upstream_models"]


@dataclass(frozen=True, slots=True)
class UpstreamModel:
    """One model that agents may ask for, and the server that answers."""

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
    dialects: tuple[DialectName, ...] = ("chat", "completions", "embeddings")
    """What the server speaks, best first. Calls in another dialect are translated. With `record_tokens`, so are those in
    any but chat and completions where the server speaks chat: no other dialect gives token ids."""

    price_per_million: tuple[float, float] | None = None
    """What a million tokens of prompts and of answers cost, in any unit; for `AttemptLimits.cost`."""

    def __post_init__(self) -> None:
        if not self.model_name:
            raise ConfigError("model_list: model_name is empty; give the name that agents ask for")
        if not self.endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"model_list: endpoint of {self.model_name!r} is {self.endpoint!r}; "
                "it must be an http(s) base URL such as http://127.0.0.1:8000/v1"
            )

        if unknown := [name for name in self.dialects if name not in DIALECTS]:
            raise ConfigError(
                f"model_list: dialects of {self.model_name!r} has {unknown[0]!r}; possible: {', '.join(DIALECTS)}"
            )

    def dialect_for(self, client: Dialect) -> Dialect | None:
        """The dialect in which the server is asked for what came in `client`; None if it cannot be."""
        spoken = [DIALECTS[name] for name in self.dialects]
        if client.translates and self.record_tokens and DIALECTS["chat"] in spoken:
            return DIALECTS["chat"]
        if client in spoken:
            return client
        return next((dialect for dialect in spoken if dialect.translates), None) if client.translates else None

    @property
    def address(self) -> str:
        """Where it is, for people."""
        return self.endpoint

    def url(self, path: str) -> str:
        """The URL of `path` (`chat/completions`) at the server."""
        return f"{self.endpoint.rstrip('/')}/{path}"


def upstream_models(
    model_list: Sequence[UpstreamModel | LLM | Mapping[str, Any]],
) -> dict[str, tuple[UpstreamModel, ...]]:
    """The servers of each model of `model_list`, by the model's name.

    Raises ConfigError for an entry that is no model, an unknown key, and a name given twice with one endpoint.
    """
    models: dict[str, tuple[UpstreamModel, ...]] = {}
    for entry in model_list:
        model = _upstream_model(entry)
        others = models.get(model.model_name, ())
        if any(other.endpoint == model.endpoint for other in others):
            raise ConfigError(
                f"model_list names {model.model_name!r} twice at {model.endpoint}; several servers of a model have an endpoint each"
            )
        models[model.model_name] = (*others, model)
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
