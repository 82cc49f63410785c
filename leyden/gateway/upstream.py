"""`UpstreamModel`: a model behind the gateway, its server's address and the server's dialects.

The module opens no connection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any, cast
from urllib.parse import unquote, urlsplit, urlunsplit

from leyden._lib.extras import require_packages
from leyden._lib.options import named_options
from leyden.dialects import CHAT, DIALECTS, Dialect
from leyden.errors import HIDDEN, ConfigError
from leyden.gateway.prices import Price, Prices
from leyden.types import LLM, ProxyLLM

_OF_LITELLM: tuple[str, ...] = ("chat", "completions", "embeddings")
"""The dialects in which LiteLLM can be called."""
_OPENAI_COMPATIBLE = ("openai", "hosted_vllm")
"""LiteLLM's names for servers that speak OpenAI's API."""
_SECRETS = ("key", "token", "secret", "password", "credentials")
"""Endings of the names of LiteLLM's arguments that hold a secret."""


@named_options
@dataclass(frozen=True, slots=True)
class UpstreamModel:
    """One model that agents may name, and one server of it."""

    model_name: str
    """The name that agents use."""
    endpoint: str = ""
    """The server's base URL, as an OpenAI client takes it (it ends in `/v1`).

    A user and a password in it (`http://user:password@host/v1`) move to `login`.
    """
    api_key: str | None = field(default=None, repr=False)
    """The key for the server; None: it needs none."""
    upstream_model: str | None = None
    """The server's own name for the model; None if it is `model_name`."""
    sampling_parameters: dict[str, Any] = field(default_factory=dict[str, Any])
    """Parameters that `LLMProxy.as_resource` suggests to agents. The gateway does not add them to requests."""
    record_tokens: bool | None = None
    """Whether to request token ids and log-probabilities from the server (vLLM's `return_token_ids`).

    Switch it off for a server that refuses unknown fields, such as api.openai.com; its calls are then recorded as text
    only. None: True, but False with `litellm_params`.
    """
    dialects: tuple[str, ...] = ("chat", "completions", "embeddings")
    """The dialects that the server speaks, best first. Calls in another dialect are translated.

    With `record_tokens`, calls in any dialect but chat and completions are translated to chat if the server speaks it,
    because other dialects return no token ids.
    """

    part_of_run: bool = False
    """Whether this is the run's own engine, whose death ends the run.

    Calls that lose the engine then wait for that end instead of failing. Their attempts are interrupted, and a resumed
    run makes them again.
    """
    price_per_million: Price | Sequence[float] | Mapping[str, float] | None = None
    """The price of a million tokens, in any unit: a `Price`, its fields, or the numbers (of prompts, of answers, of
    cached prompts). It takes precedence over the prices of the gateway."""
    litellm_params: Mapping[str, Any] | None = field(default=None, repr=False)
    """Arguments of `litellm.acompletion`, "model" among them, to call the server through LiteLLM.

    Give them instead of `endpoint`, for providers whose API is neither OpenAI's nor Anthropic's.
    """
    login: tuple[str, str] | None = field(default=None, init=False, repr=False)
    """User and password for HTTP basic authentication at the server, from `endpoint`."""

    def __post_init__(self) -> None:
        if not self.model_name:
            raise ConfigError("model_list: model_name is empty; give the name that agents ask for")
        if self.litellm_params is not None:
            self._check_litellm()
        elif not self.endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"model_list: endpoint of {self.model_name!r} is {self.endpoint!r}; "
                "it must be an http(s) base URL such as http://127.0.0.1:8000/v1"
            )
        else:
            self._take_login()
        if self.price_per_million is not None:
            price = Price.of(self.price_per_million, f"model_list: price_per_million of {self.model_name!r}")
            object.__setattr__(self, "price_per_million", price)
        if self.record_tokens is None:
            object.__setattr__(self, "record_tokens", self.litellm_params is None)
        if unknown := [name for name in self.dialects if name not in DIALECTS]:
            raise ConfigError(
                f"model_list: dialects of {self.model_name!r} has {unknown[0]!r}; possible: {', '.join(DIALECTS)}"
            )

    def _take_login(self) -> None:
        """Move user and password out of the endpoint, so that no message shows them."""
        try:
            parts = urlsplit(self.endpoint)
        except ValueError as error:
            raise ConfigError(f"model_list: endpoint of {self.model_name!r} is {self.endpoint!r}: {error}") from error
        if parts.username is None and parts.password is None:
            return
        if self.api_key is not None:
            raise ConfigError(
                f"model_list: {self.model_name!r} has a user and a password in its endpoint and an api_key; give one of them"
            )
        object.__setattr__(self, "login", (unquote(parts.username or ""), unquote(parts.password or "")))
        host = parts.netloc.rpartition("@")[2]
        object.__setattr__(self, "endpoint", urlunsplit(parts._replace(netloc=host)))

    def _check_litellm(self) -> None:
        """Raise ConfigError if LiteLLM's parameters are incomplete, are combined with an endpoint, or need a package
        that is missing.
        """
        params = self.litellm_params or {}
        if self.endpoint:
            raise ConfigError(f"model_list: {self.model_name!r} has an endpoint and litellm_params; give one of them")
        if not isinstance(params.get("model"), str) or not params["model"]:
            raise ConfigError(
                f"model_list: litellm_params of {self.model_name!r} has no model; give LiteLLM's name for it, such as "
                "'bedrock/anthropic.claude-sonnet-4'"
            )
        if unspoken := [name for name in self.dialects if name not in _OF_LITELLM]:
            raise ConfigError(
                f"model_list: dialects of {self.model_name!r} has {unspoken[0]!r}; LiteLLM is asked in {', '.join(_OF_LITELLM)}"
            )
        require_packages("litellm", extra="litellm", needed_by=f"model_list: {self.model_name!r} with litellm_params")

    @property
    def price(self) -> Price | None:
        return cast("Price | None", self.price_per_million)

    def priced(self, prices: Prices) -> UpstreamModel:
        """Return the model with its price among `prices`, unless it has one."""
        if self.price_per_million is not None or (price := prices.of_model(self.model_name, self.name_there)) is None:
            return self
        priced = copy(self)  # `replace` would lose the login
        object.__setattr__(priced, "price_per_million", price)
        return priced

    @property
    def address(self) -> str:
        """The server's address: its endpoint, or LiteLLM and its name there."""
        if self.litellm_params is None:
            return self.endpoint
        base = self.litellm_params.get("api_base")
        return f"litellm:{self.litellm_params['model']}" + (f" at {base}" if base else "")

    @property
    def name_there(self) -> str:
        """The server's name for the model."""
        return self.upstream_model or (self.litellm_params or {}).get("model") or self.model_name

    @property
    def content(self) -> list[Any]:
        """The fields that the model's responses depend on: names, address and parameters, without keys."""
        params = {name: each for name, each in (self.litellm_params or {}).items() if not name.endswith(_SECRETS)}
        return [self.model_name, self.address, self.name_there, self.sampling_parameters, params]

    def dialect_for(self, client: Dialect) -> Dialect | None:
        """Return the dialect in which to call the server; None if no translation exists."""
        spoken = [DIALECTS[name] for name in self.dialects]
        if client.translates and self.record_tokens and CHAT in spoken:
            return CHAT
        if client in spoken:
            return client
        return next((dialect for dialect in spoken if dialect.translates), None) if client.translates else None

    def without_key(self, body: bytes) -> bytes:
        """Return `body` with each occurrence of the server's key or password replaced by `***`."""
        for secret in (self.api_key, *(self.login or ())[1:]):
            if secret:
                body = body.replace(secret.encode(), HIDDEN.encode())
        return body

    def url(self, path: str) -> str:
        """Return the URL of a route below the endpoint; one that begins with / is beside `/v1`."""
        base = self.endpoint.rstrip("/")
        return f"{base.removesuffix('/v1')}{path}" if path.startswith("/") else f"{base}/{path}"


def upstream_models(
    model_list: Sequence[UpstreamModel | LLM | Mapping[str, Any]],
) -> dict[str, tuple[UpstreamModel, ...]]:
    """Return the servers of each model of `model_list`, by the model's name.

    Raise ConfigError for an invalid entry, for an unknown key, and for a model that is named twice with one endpoint.
    """
    models: dict[str, tuple[UpstreamModel, ...]] = {}
    for entry in model_list:
        model = _upstream_model(entry)
        others = models.get(model.model_name, ())
        if any(other.address == model.address for other in others):
            raise ConfigError(
                f"model_list names {model.model_name!r} twice at {model.address}; several servers of a model have an endpoint each"
            )
        models[model.model_name] = (*others, model)
    return models


def _upstream_model(entry: UpstreamModel | LLM | Mapping[str, Any]) -> UpstreamModel:
    """Return an entry of `model_list` as an UpstreamModel. Raise ConfigError, naming the key, for an invalid entry."""
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
    known = {option.name for option in fields(UpstreamModel) if option.init}
    if unknown := sorted(set(entry) - known):
        raise ConfigError(f"model_list: unknown key {unknown[0]!r}; possible: {', '.join(sorted(known))}")
    if "model_name" not in entry:
        raise ConfigError(f"model_list: an entry has no 'model_name'; it has {', '.join(sorted(entry)) or 'nothing'}")
    if "endpoint" not in entry and "litellm_params" not in entry:
        raise ConfigError(f"model_list: {entry['model_name']!r} has no 'endpoint'; it has {', '.join(sorted(entry))}")
    return UpstreamModel(**(_without_litellm(entry) or entry))


def _without_litellm(entry: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the fields of an entry whose `litellm_params` name an OpenAI-compatible server, with an endpoint instead;
    None for any other entry.

    Agent Lightning's model_list has such entries: "openai/NAME" or "hosted_vllm/NAME" at an `api_base`. Their servers
    are called without LiteLLM, so that tokens are recorded.
    """
    params: Any = entry.get("litellm_params")
    if not isinstance(params, Mapping):
        return None
    given = dict(cast(Mapping[str, Any], params))
    provider, _, name = str(given.pop("model", "")).partition("/")
    base, key = given.pop("api_base", None), given.pop("api_key", None)
    if provider not in _OPENAI_COMPATIBLE or not name or not base or given or "endpoint" in entry:
        return None
    rest = {field: value for field, value in entry.items() if field != "litellm_params"}
    return {"upstream_model": name, "api_key": key, **rest, "endpoint": base}
