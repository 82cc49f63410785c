# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false
"""Resources with Agent Lightning's methods."""

from __future__ import annotations

import importlib
import re
import string
import time
from _string import formatter_field_name_split  # pyright: ignore[reportMissingModuleSource,reportMissingImports,reportUnknownVariableType,reportAttributeAccessIssue]
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field

from leyden import types
from leyden.errors import ConfigError
from leyden.types import AttemptedRollout

MOST_CHARACTERS: Final = 1000
"""The largest width, precision or count that a template may ask for."""


class ProxyLLM(types.ProxyLLM):
    """A model behind the gateway, whose base URL carries an attempt's ids."""

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """Return the base URL for an attempt; without ids, the gateway's own.

        Raise ValueError for one id alone.
        """
        if rollout_id is None and attempt_id is None:
            return self.endpoint
        return super().get_base_url(rollout_id, attempt_id)

    def with_attempted_rollout(self, rollout: AttemptedRollout | str, attempt_id: str | None = None) -> types.LLM:
        """Return the plain LLM that one attempt should call."""
        if isinstance(rollout, AttemptedRollout):
            return super().with_attempted_rollout(rollout.rollout_id, rollout.attempt.attempt_id)
        return super().with_attempted_rollout(rollout, attempt_id or "")


class PromptTemplate(types.PromptTemplate):
    """A prompt with placeholders. `jinja` templates are rendered in Jinja's sandbox, `poml` ones by the package
    `poml`.
    """

    engine: Literal["jinja", "f-string", "poml"]  # pyright: ignore[reportGeneralTypeIssues] -- required there

    def format(self, **kwargs: Any) -> str:
        """Return the template with values for its placeholders.

        An `f-string` template takes names, keys and formats (`{task[question]}`, `{price:.2f}`) and no attributes,
        because an optimiser or a model may have written it, and attributes reach everything that the program has. Raise
        ConfigError for one that is refused.
        """
        if self.engine == "jinja":
            jinja: Any = importlib.import_module("leyden_compat.agentlightning.sandbox")
            return jinja.render(self.template, kwargs)
        if self.engine == "poml":
            poml: Any = importlib.import_module("poml")
            return str(poml.poml(self.template, context=kwargs, format="raw"))
        return _PlainFormatter().format(self.template, **kwargs)


class _PlainFormatter(string.Formatter):
    """Python's `str.format`, without attributes, without keys of other objects than containers, and without widths that
    make a text of any length.
    """

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        """Return the value of a placeholder, with its first name. Raise ConfigError for an attribute."""
        first, rest = formatter_field_name_split(field_name)
        value = self.get_value(first, args, kwargs)
        for is_attribute, key in rest:
            if is_attribute or not isinstance(value, dict | list | tuple | str):
                raise ConfigError(
                    f"the placeholder {{{field_name:.100}}} of a template reads "
                    f"{'an attribute' if is_attribute else f'a key of a {type(value).__name__}'}; give the value itself"
                )
            value = value[key]
        return value, first

    def format_field(self, value: Any, format_spec: str) -> Any:
        """Return a value in the format. Raise ConfigError for a width above MOST_CHARACTERS."""
        if any(len(number) > 9 or int(number) > MOST_CHARACTERS for number in re.findall(r"\d+", format_spec)):
            raise ConfigError(
                f"a placeholder of a template has the format {format_spec[:100]!r}; the largest width is {MOST_CHARACTERS}"
            )
        return super().format_field(value, format_spec)


OLD_RESOURCES: Final[Mapping[type, type[Any]]] = {
    types.ProxyLLM: ProxyLLM,
    types.PromptTemplate: PromptTemplate,
}
"""The classes of this package for Leyden's, which stores and runners make."""


def old_resources(resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return resources by name, as instances of the classes that a program finds in `agentlightning`."""
    return {name: old_resource(resource) for name, resource in resources.items()}


def old_resource(resource: Any) -> Any:
    """Return a resource of Leyden's as one of the class that a program finds in `agentlightning`; any other object as
    it is.
    """
    old = OLD_RESOURCES.get(type(resource))
    if old is None:
        return resource
    return old.model_construct(**{name: getattr(resource, name) for name in type(resource).model_fields})


class ResourcesUpdate(types.ResourcesUpdate):
    """One version of resources. Version 0.2 gave neither times nor a version number."""

    create_time: float = Field(default_factory=time.time)
    update_time: float = Field(default_factory=time.time)
    version: int = Field(default=1, ge=1)


def old_update(update: types.ResourcesUpdate) -> ResourcesUpdate:
    """Return a version of resources as one of this package's class, with resources of its classes."""
    fields: Any = {name: getattr(update, name) for name in types.ResourcesUpdate.model_fields}
    return ResourcesUpdate.model_construct(**fields | {"resources": old_resources(update.resources)})
