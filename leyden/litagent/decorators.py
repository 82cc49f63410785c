"""`@rollout`, `@llm_rollout`, `@prompt_rollout`: a function as an agent. Each passes exactly what the function names."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any, overload

from leyden.errors import ConfigError
from leyden.litagent.agent import LitAgent
from leyden.litagent.inject import AgentParameters
from leyden.types import AttemptedRollout, NamedResources

__all__ = ["FunctionalLitAgent", "llm_rollout", "prompt_rollout", "rollout"]

AgentFunction = Callable[..., Any]


class FunctionalLitAgent(LitAgent[Any]):
    """An agent made of a function; calling it calls the function."""

    def __init__(self, function: AgentFunction, *, strip_proxy: bool = True, needs: tuple[str, ...] = ()) -> None:
        self._function = function
        self._parameters = AgentParameters(function, strip_proxy=strip_proxy)
        self._parameters.require(*needs)
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        """Travels to other processes as `module:qualname`."""
        module, name = self._function.__module__, self._function.__qualname__
        if _lookup(sys.modules.get(module), name) is not self:
            raise ConfigError(
                f"agent {module}:{name} cannot be found by its name, so it cannot travel to another process"
            )
        return _load, (module, name)

    def is_async(self) -> bool:
        """Whether the function is a coroutine function."""
        return inspect.iscoroutinefunction(self._function)

    def check(self, resources: NamedResources) -> None:
        """See LitAgent.check."""
        self._parameters.check(resources)

    def rollout(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """Call the function."""
        return self._function(**self._parameters.bind(task, resources, rollout))

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """Call the function."""
        return await self._function(**self._parameters.bind(task, resources, rollout))


def rollout(function: AgentFunction) -> FunctionalLitAgent:
    """Make an agent of a sync or async function whose first parameter is `task`.

    It may name `resources`, `rollout`, `llm` (the first LLM there is) and `prompt_template` (the first PromptTemplate) besides.
    Raises ConfigError for any other parameter without a default.
    """
    return FunctionalLitAgent(function)


@overload
def llm_rollout(function: AgentFunction) -> FunctionalLitAgent: ...
@overload
def llm_rollout(*, strip_proxy: bool) -> Callable[[AgentFunction], FunctionalLitAgent]: ...
def llm_rollout(function: AgentFunction | None = None, *, strip_proxy: bool = True) -> Any:
    """Make an agent of a function of `task` and `llm` (and `rollout`).

    strip_proxy: pass the gateway as a plain LLM whose base URL belongs to the attempt; False: pass the ProxyLLM itself.
    """
    if function is None:
        return functools.partial(FunctionalLitAgent, strip_proxy=strip_proxy, needs=("llm",))
    return FunctionalLitAgent(function, strip_proxy=strip_proxy, needs=("llm",))


def prompt_rollout(function: AgentFunction) -> FunctionalLitAgent:
    """Make an agent of a function of `task` and `prompt_template` (and `rollout`)."""
    return FunctionalLitAgent(function, needs=("prompt_template",))


def _load(module: str, name: str) -> Any:
    return _lookup(importlib.import_module(module), name)


def _lookup(module: Any, name: str) -> Any:
    value = module
    for part in name.split("."):
        value = getattr(value, part, None)
    return value
