"""Resources, which an algorithm gives an agent: named, versioned, immutable once written."""

from __future__ import annotations

import hashlib
import json
import string
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field

from leyden._lib.attempt_key import attempt_key
from leyden.errors import ConfigError
from leyden.types.named_fields import NamedFields
from leyden.types.openai_clients import async_client, sync_client

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


_SHOWN_CHARACTERS = 60
"""The most characters of a template that an error quotes."""


class Resource(NamedFields):
    """The base of every kind of resource. Its `resource_type` says how a stored resource is read."""

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


GATEWAY_SCHEME = "gateway://"
"""The scheme of `ProxyLLM.endpoint` for a model whose address the store knows by a name; see
`LightningStore.set_endpoint`."""


class LLM(Resource):
    """A model that speaks OpenAI's protocol at a base URL."""

    model_config = ConfigDict(hide_input_in_errors=True)  # an input that is refused may hold the key

    resource_type: Literal["llm"] = "llm"
    endpoint: str
    """The base URL, as an OpenAI client takes it (it ends in `/v1`), or `gateway://NAME`, which a store replaces by the
    base URL that `set_endpoint(NAME, ...)` gave, each time it is read."""
    model: str
    api_key: str | None = Field(default=None, repr=False)
    sampling_parameters: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Suggested arguments of a call (`temperature`, `max_tokens`); the agent's code may use them."""

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """Return the base URL for one attempt.

        A plain LLM has one for all; a ProxyLLM needs both ids.
        """
        return self.endpoint

    def get_api_key(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str | None:
        """Return the key for one attempt.

        A plain LLM has one for all; a ProxyLLM needs both ids.
        """
        return self.api_key

    def openai(self, rollout_id: str | None = None, attempt_id: str | None = None) -> AsyncOpenAI:
        """Return an `openai.AsyncOpenAI` client for this model, for code on an event loop.

        The clients of one loop share their connections, so call this in every rollout: it takes 0.05 ms of CPU, where a
        client with its own connections takes about 20 ms. The client needs no `async with` and no `close`; the end of
        the loop closes the connections. The key is this resource's, or else OPENAI_API_KEY. A plain LLM needs no ids; a
        ProxyLLM needs both.

        Raise ConfigError without the package `openai`, and without a running event loop (use `openai_sync`).
        """
        return async_client(self.get_base_url(rollout_id, attempt_id), self.get_api_key(rollout_id, attempt_id))

    def openai_sync(self, rollout_id: str | None = None, attempt_id: str | None = None) -> OpenAI:
        """Return an `openai.OpenAI` client for this model, for synchronous code in any thread.

        All clients of one process share their connections.

        Raise ConfigError without the package `openai`.
        """
        return sync_client(self.get_base_url(rollout_id, attempt_id), self.get_api_key(rollout_id, attempt_id))


class ProxyLLM(LLM):
    """A model behind the gateway. Its base URL carries the attempt's ids, so that calls are recorded there."""

    resource_type: Literal["proxy_llm"] = "proxy_llm"  # pyright: ignore[reportIncompatibleVariableOverride] -- the tag of the union

    @property
    def root(self) -> str:
        """The gateway's address, without the `/v1`."""
        return self.endpoint.rstrip("/").removesuffix("/v1")

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """Return the base URL of one attempt: `.../rollout/{id}/attempt/{id}/v1`.

        Raise ConfigError if an id is missing: without it the call could not be recorded.
        """
        rollout_id, attempt_id = _both_ids("get_base_url", rollout_id, attempt_id)
        return f"{self.root}/rollout/{quote(rollout_id, safe='')}/attempt/{quote(attempt_id, safe='')}/v1"

    def get_api_key(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """Return the key of one attempt, `sk-leyden-...`. Raise ConfigError if an id is missing.

        The key places a call even if the URL does not, and is refused for any other attempt.
        """
        return attempt_key(self.api_key, *_both_ids("get_api_key", rollout_id, attempt_id))

    def with_attempted_rollout(self, rollout_id: str, attempt_id: str) -> LLM:
        """Return the plain LLM that one attempt should call."""
        return LLM(
            endpoint=self.get_base_url(rollout_id, attempt_id),
            model=self.model,
            api_key=self.get_api_key(rollout_id, attempt_id),
            sampling_parameters=dict(self.sampling_parameters),
        )


def _both_ids(method: str, rollout_id: str | None, attempt_id: str | None) -> tuple[str, str]:
    """Return both ids. Raise ConfigError, which names the method, unless both are non-empty text."""
    for given in (rollout_id, attempt_id):
        if not isinstance(given, str) or not given:
            raise ConfigError(
                f"ProxyLLM.{method} needs rollout_id and attempt_id as text, got {rollout_id!r} and {attempt_id!r}; "
                f"use the `llm` that @llm_rollout passes, or {method}(rollout.rollout_id, rollout.attempt.attempt_id)"
            )
    return cast(tuple[str, str], (rollout_id, attempt_id))


class PromptTemplate(Resource):
    """A prompt with placeholders.

    A placeholder of an `f-string` template is a plain name in braces, `{task}`; `{{` and `}}` stand for single braces
    (see `escape`). Attributes, indexes, conversions and widths are refused, because an optimiser or a model may have
    written the template, and `{task.__init__.__globals__}` would read the runner's memory.
    """

    resource_type: Literal["prompt_template"] = "prompt_template"
    template: str
    engine: Literal["f-string", "jinja", "poml"] = "f-string"

    @staticmethod
    def escape(text: str) -> str:
        """Return `text` with doubled braces, which an `f-string` template renders as `text` itself.

        Use it for text that is part of a template and that another program wrote: JSON, code, an example of an answer.
        """
        return text.replace("{", "{{").replace("}", "}}")

    @property
    def placeholders(self) -> tuple[str, ...]:
        """The placeholders' names, each once, in order of appearance.

        Raise ConfigError for a placeholder that is no plain name, for a brace without its partner, and for an engine
        other than `f-string`.
        """
        return tuple(dict.fromkeys(name for _, name in self._parts() if name is not None))

    def format(self, **values: Any) -> str:
        """Return the template with `str(value)` for each placeholder.

        Raise ConfigError for a placeholder without a value, and for a template that `placeholders` refuses.
        """
        parts = self._parts()
        if missing := next((name for _, name in parts if name is not None and name not in values), None):
            given = ", ".join(map(repr, sorted(values))) or "none"
            raise ConfigError(f"{self._shown()} needs a value for {missing!r}; given: {given}")
        return "".join(literal if name is None else f"{literal}{values[name]!s}" for literal, name in parts)

    def _parts(self) -> list[tuple[str, str | None]]:
        """Return the template as pairs of literal text and the name of the placeholder after it (None: no placeholder
        follows). Raise ConfigError for a template that is not plain.
        """
        if self.engine != "f-string":
            raise ConfigError(
                f"{self._shown()} has the engine {self.engine!r}, whose own library renders it; 'f-string' is built in"
            )
        try:
            parsed = list(string.Formatter().parse(self.template))
        except ValueError as error:
            raise ConfigError(
                f"{self._shown()} cannot be read: {error}; write {{{{ and }}}} for braces that are text, "
                "or PromptTemplate.escape(text)"
            ) from error
        for _, name, width, conversion in parsed:
            if name is not None and (not name.isidentifier() or width or conversion):
                written = name + (f"!{conversion}" if conversion else "") + (f":{width}" if width else "")
                raise ConfigError(
                    f"{self._shown()} has the placeholder {{{written:.100}}}, which is no plain name such as {{task}}. "
                    "Format values before you pass them; write {{ and }} for braces that are text, "
                    "or PromptTemplate.escape(text)"
                )
        return [(literal, name) for literal, name, _, _ in parsed]

    def _shown(self) -> str:
        beginning = (
            self.template if len(self.template) <= _SHOWN_CHARACTERS else f"{self.template[:_SHOWN_CHARACTERS]}..."
        )
        return f"the template {beginning!r}"


ResourceUnion = Annotated[LLM | ProxyLLM | PromptTemplate, Field(discriminator="resource_type")]
NamedResources = dict[str, ResourceUnion]
"""The resources that an agent receives, by name."""
Resources = NamedResources
"""Another name of `NamedResources`."""


class ResourcesUpdate(BaseModel):
    """One version of the resources under one id."""

    resources_id: str
    """`rs-` and 12 hexadecimal digits, or any id of the caller's choice."""
    create_time: float
    update_time: float
    version: int = Field(ge=1)
    resources: NamedResources
    parent: tuple[str, int] | None = None
    """The id and the version that this one was made from."""
    author: str | None = None
    """The author: a run's id, an algorithm, a person."""
    frozen: bool = False
    """Whether labels refuse this version; see `LightningStore.freeze_resources`."""

    @property
    def digest(self) -> str:
        """The SHA-256 of the content that an agent sees, 64 hexadecimal digits, equal for equal content anywhere."""
        return digest_of(self.resources)


class Label(BaseModel):
    """A name, such as `production`, that is on one version of resources."""

    label: str
    resources_id: str
    version: int


def digest_of(resources: NamedResources) -> str:
    """Return the SHA-256 of the resources' content as 64 hexadecimal digits. Addresses and keys of models are left out,
    because they differ between processes.
    """
    seen = {
        name: resource.model_dump(mode="json", exclude={"endpoint", "api_key"} if isinstance(resource, LLM) else None)
        for name, resource in resources.items()
    }
    return hashlib.sha256(json.dumps(seen, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
