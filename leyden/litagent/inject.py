"""One binder: what an agent function is given, by the names of its parameters."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

from leyden.errors import ConfigError, MissingResource
from leyden.litagent.agent import LitAgent
from leyden.types import LLM, AttemptedRollout, NamedResources, PromptTemplate, ProxyLLM, Resource

__all__ = ["AgentParameters", "check_resources"]

logger = logging.getLogger(__name__)

_KINDS: dict[str, type[Resource]] = {"llm": LLM, "prompt_template": PromptTemplate}
_POSSIBLE = ("task", "resources", "rollout", *_KINDS)
_HOW_TO_GIVE = "pass Trainer(initial_resources={...}), or use an algorithm that provides it"


class AgentParameters:
    """The parameters of one agent function, checked once.

    strip_proxy: pass a ProxyLLM as the plain LLM of the attempt.
    Raises ConfigError for a first parameter that is not `task`, and for any that nothing can be passed to.
    """

    def __init__(self, function: Callable[..., Any], *, strip_proxy: bool = True) -> None:
        self._name, self._strip_proxy = function.__qualname__, strip_proxy
        self._named: list[str] = []
        parameters = list(inspect.signature(function).parameters.values())
        if not parameters or parameters[0].name != "task":
            raise ConfigError(
                f"the first parameter of agent {self._name!r} must be called 'task'; {_signature(function)}"
            )
        for parameter in parameters:
            if parameter.name in _POSSIBLE and parameter.kind in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            ):
                self._named.append(parameter.name)
            elif parameter.default is parameter.empty:
                raise ConfigError(
                    f"agent {self._name!r} has a parameter {str(parameter)!r} that nothing can be passed to; "
                    f"possible: {', '.join(_POSSIBLE)}, or any with a default value; {_signature(function)}"
                )

    def require(self, *names: str) -> None:
        """Raises ConfigError for a parameter that this kind of agent must have and this one has not."""
        for name in names:
            if name not in self._named:
                raise ConfigError(f"agent {self._name!r} needs a parameter called {name!r}; it has {self._named}")

    def check(self, resources: NamedResources) -> None:
        """Raises MissingResource when a resource that the function names is not there."""
        for name, kind in _KINDS.items():
            if name in self._named:
                self._first(kind, resources)

    def bind(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> dict[str, Any]:
        """The keyword arguments of one call."""
        values: dict[str, Any] = {"task": task, "resources": resources, "rollout": rollout}
        for name, kind in _KINDS.items():
            if name in self._named:
                values[name] = self._for_attempt(self._first(kind, resources), rollout)
        return {name: values[name] for name in self._named}

    def _first(self, kind: type[Resource], resources: NamedResources) -> Resource:
        found = {name: resource for name, resource in resources.items() if isinstance(resource, kind)}
        if not found:
            there = ", ".join(f"{name} ({type(resource).__name__})" for name, resource in resources.items()) or "none"
            raise MissingResource(
                f"agent {self._name!r} needs a resource of kind {kind.__name__}; there are: {there}. {_HOW_TO_GIVE}"
            )
        name, resource = next(iter(found.items()))
        if len(found) > 1:
            logger.warning(
                "agent %r takes the %s %r, the first of %s; name a parameter 'resources' to choose",
                self._name,
                kind.__name__,
                name,
                list(found),
            )
        return resource

    def _for_attempt(self, resource: Resource, rollout: AttemptedRollout) -> Resource:
        if self._strip_proxy and isinstance(resource, ProxyLLM):
            return resource.with_attempted_rollout(rollout.rollout_id, rollout.attempt.attempt_id)
        return resource


def check_resources(agent: LitAgent[Any], resources: NamedResources) -> None:
    """Raises MissingResource, before anything runs, if the agent is known to need what `resources` does not hold."""
    agent.check(resources)


def _signature(function: Callable[..., Any]) -> str:
    return f"it is {function.__name__}{inspect.signature(function)}"
