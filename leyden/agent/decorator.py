"""`@rollout`, `@llm_rollout`, `@prompt_rollout`: a function as an agent.

The decorated function can still be called as before. The names of its parameters declare what the agent needs
(`inject.py`).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pickle
from collections.abc import Callable
from typing import Any, overload

from leyden._lib.text import shown
from leyden.agent.inject import Binder
from leyden.agent.lit_agent import LitAgent
from leyden.errors import ConfigError, InvalidArgument
from leyden.types import AttemptedRollout, NamedResources


class FunctionalLitAgent(LitAgent[Any]):
    """A function as an agent. Its parameters: `task` first, then any of resources, rollout, llm and prompt_template.

    needs: a parameter that the function must have.
    strip_proxy: pass `llm` as a plain LLM whose base URL carries the attempt's ids; otherwise as it is in the
        resources.
    Raise ConfigError for a parameter that has no source and no default, and for a generator function. Raise
    InvalidArgument for a value that is no function.
    """

    def __init__(self, function: Callable[..., Any], *, needs: str | None = None, strip_proxy: bool = True) -> None:
        if not callable(function) or inspect.isclass(function):
            raise InvalidArgument(
                f"the agent is {shown(function)}, which is no function; decorate a function whose first "
                "parameter is `task`, or subclass LitAgent"
            )
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(
                f"agent {function.__qualname__!r} is a generator; an agent returns its result, it does not yield"
            )
        self._function = function
        self._options = {"needs": needs, "strip_proxy": strip_proxy}
        self._binder = Binder(function, needs=needs, strip_proxy=strip_proxy)
        self.__qualname__ = self._binder.name
        functools.update_wrapper(self, function)
        self.__dict__.pop("_arguments", None)  # its function's name describes it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def is_async(self) -> bool:
        function = self._function
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    def rollout(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        return self._function(**self._binder.arguments(task, resources, rollout))

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        return await self._function(**self._binder.arguments(task, resources, rollout))

    def check_resources(self, resources: NamedResources) -> None:
        self._binder.check(resources)

    @property
    def function(self) -> Callable[..., Any]:
        """The function as it was before it was decorated."""
        return self._function

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a decorated function by name, and any other agent as its function and options."""
        if _find(self.__module__, self.__qualname__) is self:
            return _load, (self.__module__, self.__qualname__)
        return self.reduce_by_value()

    def reduce_by_value(self) -> tuple[Any, ...]:
        """Pickle the function and its options, for a process where the agent's name is not importable."""
        return functools.partial(FunctionalLitAgent, self._function, **self._options), ()


def _load(module: str, qualname: str) -> Any:
    importlib.import_module(module)
    found = _find(module, qualname)
    if found is None:
        raise pickle.UnpicklingError(
            f"agent {module}:{qualname} is not there in this process; define it at the top of a module"
        )
    return found


def _find(module: str, qualname: str) -> Any:
    """Return the object of this qualified name; None if the module or the name is missing."""
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return None
    return functools.reduce(lambda found, name: getattr(found, name, None), qualname.split("."), found)


def rollout(function: Callable[..., Any]) -> FunctionalLitAgent:
    """Make an agent of a sync or async function, with parameters `task` and any of `resources`, `rollout`, `llm` and
    `prompt_template`. Raise ConfigError for a parameter that has no source and no default.
    """
    return FunctionalLitAgent(function)


@overload
def llm_rollout(function: Callable[..., Any], /) -> FunctionalLitAgent: ...
@overload
def llm_rollout(*, strip_proxy: bool = True) -> Callable[[Callable[..., Any]], FunctionalLitAgent]: ...
def llm_rollout(function: Callable[..., Any] | None = None, /, *, strip_proxy: bool = True) -> Any:
    """Make an agent of a function that calls a model. Its parameters are `task`, `llm`, and any of `resources`,
    `rollout` and `prompt_template`.

    strip_proxy: give `llm` as a plain LLM whose `endpoint` is the base URL for this attempt; otherwise as it is in the
        resources.
    Raise ConfigError for a function without a parameter `llm`, and for a parameter that has no source and no default.
    """
    if function is None:
        return functools.partial(FunctionalLitAgent, needs="llm", strip_proxy=strip_proxy)
    return FunctionalLitAgent(function, needs="llm", strip_proxy=strip_proxy)


def prompt_rollout(function: Callable[..., Any]) -> FunctionalLitAgent:
    """Make an agent of a function that works with a prompt. Its parameters are `task`, `prompt_template`, and any of
    `resources`, `rollout` and `llm`.

    Raise ConfigError for a function without a parameter `prompt_template`, and for a parameter that has no source and
    no default.
    """
    return FunctionalLitAgent(function, needs="prompt_template")
