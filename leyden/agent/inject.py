"""Bind the parameters of an agent function to a task, its rollout and its resources.

Parameters are bound by name: `task`, `resources`, `rollout`, `llm`, `prompt_template`. A parameter of another name is
refused when the function is decorated, a missing resource before the run starts. The module knows signatures and
resources, and no runner. To offer one more parameter, add it to `_KINDS` if it is a kind of resource, otherwise to
`PARAMETERS` and to `Binder.arguments`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from leyden.errors import ConfigError, MissingResource
from leyden.types import LLM, AttemptedRollout, NamedResources, PromptTemplate, ProxyLLM, Resource, Rollout

logger = logging.getLogger(__name__)

_KINDS: Final[Mapping[str, type[Resource]]] = {"llm": LLM, "prompt_template": PromptTemplate}
"""The parameters that are given the first resource of a kind."""

PARAMETERS: Final = ("task", "resources", "rollout", *_KINDS)
"""Every parameter that an agent function can have."""

_Parameter = inspect.Parameter


class Binder:
    """Makes the keyword arguments of one agent function.

    needs: a parameter that the function must have beside `task` (`llm` for @llm_rollout).
    strip_proxy: give `llm` as a plain LLM whose base URL carries the attempt's ids; otherwise as it is in the
        resources.
    Raise ConfigError, with the parameter and what is possible, for a signature that cannot be bound.
    """

    def __init__(self, function: Callable[..., Any], *, needs: str | None = None, strip_proxy: bool = True) -> None:
        self.name = getattr(function, "__qualname__", repr(function))
        self._strip_proxy = strip_proxy
        parameters = list(inspect.signature(function).parameters.values())
        signature = f"agent {self.name}({', '.join(str(parameter) for parameter in parameters)})"
        possible = f"possible: {', '.join(PARAMETERS)}, and any other with a default value"
        if not parameters or parameters[0].name != "task":
            raise ConfigError(f"the first parameter of {signature} must be `task`; {possible}")
        for parameter in parameters:
            if parameter.kind in (_Parameter.VAR_POSITIONAL, _Parameter.VAR_KEYWORD, _Parameter.POSITIONAL_ONLY):
                raise ConfigError(
                    f"{signature} has {str(parameter)!r}, but arguments are passed by name, each to a parameter of its own; {possible}"
                )
            if parameter.name not in PARAMETERS and parameter.default is _Parameter.empty:
                raise ConfigError(
                    f"{signature} has a parameter {parameter.name!r} that nothing can be given to; {possible}"
                )
        if needs is not None and needs not in (parameter.name for parameter in parameters):
            raise ConfigError(f"{signature} has no parameter {needs!r}; add it, or decorate with @rollout")
        self._given = tuple(parameter.name for parameter in parameters if parameter.name in PARAMETERS)
        self._optional = frozenset(p.name for p in parameters if p.default is not _Parameter.empty)
        self._ambiguity_reported = False

    def check(self, resources: NamedResources) -> None:
        """Raise MissingResource if the function needs a kind of resource that is not among `resources`."""
        for parameter, kind in _KINDS.items():
            if parameter in self._given and parameter not in self._optional and not _of_kind(resources, kind):
                there = ", ".join(f"{name!r} ({type(resource).__name__})" for name, resource in resources.items())
                raise MissingResource(
                    f"agent {self.name!r} has a parameter {parameter!r} and needs a resource of kind {kind.__name__}; there are: "
                    f"{there or 'none'}. Give one with Trainer(initial_resources={{...: {kind.__name__}(...)}}), use an algorithm that "
                    "makes one, or give the parameter a default value"
                )

    def arguments(self, task: Any, resources: NamedResources, rollout: Rollout) -> dict[str, Any]:
        """Return the keyword arguments of one call. Of several resources that fit a parameter it gets the first; a
        warning says so once.

        Raise MissingResource if `resources` lacks a kind that the function needs, and ConfigError for a model behind
        the gateway in a rollout without an attempt.
        """
        self.check(resources)
        arguments: dict[str, Any] = {"task": task, "resources": resources, "rollout": rollout}
        for parameter, kind in _KINDS.items():
            found = _of_kind(resources, kind)
            if parameter not in self._given or not found:
                continue
            name, resource = next(iter(found.items()))
            if len(found) > 1 and not self._ambiguity_reported:
                self._ambiguity_reported = True
                logger.warning(
                    "agent %r is given the resource %r as %r, the first of %s; name the parameter `resources` to choose another",
                    *(self.name, name, parameter, ", ".join(map(repr, found))),
                )
            if self._strip_proxy and isinstance(resource, ProxyLLM):
                if not isinstance(rollout, AttemptedRollout):
                    raise ConfigError(
                        f"agent {self.name!r} is given a model behind the gateway, whose URL needs an attempt, but rollout "
                        f"{rollout.rollout_id!r} has none; pass an AttemptedRollout"
                    )
                resource = resource.with_attempted_rollout(rollout.rollout_id, rollout.attempt.attempt_id)
            arguments[parameter] = resource
        return {name: arguments[name] for name in self._given if name in arguments}


def _of_kind(resources: NamedResources, kind: type[Resource]) -> dict[str, Resource]:
    return {name: resource for name, resource in resources.items() if isinstance(resource, kind)}
