# pyright: reportIncompatibleMethodOverride=false, reportUnknownVariableType=false, reportUnknownMemberType=false
"""Agents, runners and hooks with Agent Lightning's constructors and getters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

from opentelemetry.sdk.trace import ReadableSpan

from leyden import agent as native
from leyden.errors import ConfigError
from leyden.execution import runner as native_runner
from leyden.execution.runner import AttemptRecorder, Hook
from leyden.types import AttemptedRollout, NamedResources
from leyden_compat.agentlightning.interfaces import Runner, as_latch, users_store
from leyden_compat.agentlightning.own_store import as_native
from leyden_compat.agentlightning.resources import old_resources
from leyden_compat.agentlightning.types import Span, SpanCoreFields

T = TypeVar("T")


class _OldAgent(native.LitAgent[Any]):
    """Attributes and methods of Agent Lightning's agents that Leyden's agents lack."""

    trained_agents: str | None = None

    @property
    def trainer(self) -> Any:
        return self.get_trainer()

    @property
    def runner(self) -> Any:
        return self.get_runner()

    def get_tracer(self) -> Any:
        return self.tracer

    def on_rollout_start(self, task: Any, runner: Any, tracer: Any) -> None:
        """Never called, as in Agent Lightning, where it is deprecated. Use a Hook."""

    def on_rollout_end(self, task: Any, rollout: Any, runner: Any, tracer: Any) -> None:
        """Never called, as in Agent Lightning, where it is deprecated. Use a Hook."""

    def run(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        return _as_result(super().run(task, old_resources(resources), rollout), rollout)

    async def run_async(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        return _as_result(await super().run_async(task, old_resources(resources), rollout), rollout)


def _as_result(result: Any, rollout: AttemptedRollout) -> Any:
    """Return an agent's result with each `SpanCoreFields` in a list made into a span of this attempt."""
    if not isinstance(result, list):
        return result
    rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
    return [
        Span.from_core_fields(step, rollout_id=rollout_id, attempt_id=attempt_id)
        if isinstance(step, SpanCoreFields)
        else step
        for step in cast(list[Any], result)
    ]


class LitAgent(_OldAgent, Generic[T]):
    """The base class of an agent, with Agent Lightning's constructor.

    trained_agents: of no effect here; give the adapter `agent_match`.
    """

    def __init__(self, *, trained_agents: str | None = None) -> None:
        self.trained_agents = trained_agents


class FunctionalLitAgent(native.FunctionalLitAgent, LitAgent[Any]):
    """A function as an agent."""

    def __init__(self, rollout_func: Callable[..., Any], *, strip_proxy: bool = True, needs: str | None = None) -> None:
        native.FunctionalLitAgent.__init__(self, rollout_func, needs=needs, strip_proxy=strip_proxy)


def rollout(func: Callable[..., Any]) -> FunctionalLitAgent:
    """Make an agent of a function. The names of its parameters say what it is given: the task, the rollout, a
    resource.
    """
    return FunctionalLitAgent(func)


def llm_rollout(func: Callable[..., Any] | None = None, *, strip_proxy: bool = True) -> Any:
    """Make an agent of a function with the parameters `task` and `llm`.

    strip_proxy: give the function an `LLM` with the address of the attempt instead of a `ProxyLLM`.
    """
    if func is None:
        return functools.partial(llm_rollout, strip_proxy=strip_proxy)
    return FunctionalLitAgent(func, strip_proxy=strip_proxy, needs="llm")


def prompt_rollout(func: Callable[..., Any] | None = None) -> Any:
    """Make an agent of a function with the parameters `task` and `prompt_template`."""
    if func is None:
        return prompt_rollout
    return FunctionalLitAgent(func, needs="prompt_template")


def is_v0_1_rollout_api(func: Callable[..., Any]) -> bool:
    """Return whether a method has the parameters of version 0.1, with `rollout_id` instead of `rollout`."""
    return "rollout_id" in inspect.signature(func).parameters


class LitAgentRunner(native_runner.LitAgentRunner[T], Runner[T]):
    """Runs an agent on the rollouts of the queue, one at a time.

    poll_interval, interval_jitter: of no effect, because a claim returns as soon as there is work.
    heartbeat_launch_mode, heartbeat_include_gpu: of no effect; the monitor reads the GPU.
    """

    def __init__(
        self,
        tracer: Any = None,
        max_rollouts: int | None = None,
        poll_interval: float = 5.0,
        heartbeat_interval: float = 10.0,
        interval_jitter: float = 0.5,
        heartbeat_launch_mode: str = "thread",
        heartbeat_include_gpu: bool = False,
        *,
        concurrency: int = 1,
    ) -> None:
        super().__init__(
            tracer, concurrency=concurrency, max_rollouts=max_rollouts, heartbeat_interval=heartbeat_interval
        )

    run = Runner.run
    run_context = Runner.run_context

    def init(
        self,
        agent: native.LitAgent[T],
        *,
        hooks: Sequence[Hook] | None = None,
        recorders: Sequence[AttemptRecorder] = (),
        **_: Any,
    ) -> None:
        """Bind the agent and the hooks."""
        super().init(agent, hooks=hooks or (), recorders=recorders)

    def init_worker(self, worker_id: int, store: Any, *, worker_name: str | None = None, **_: Any) -> None:
        """Bind the store, which may be one of the program's own."""
        super().init_worker(worker_id, as_native(store), worker_name=worker_name)

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Drop the reference to the store."""
        super().teardown_worker(worker_id)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Tear down the tracer, and drop the reference to the agent."""
        super().teardown()

    async def iter(self, event: Any = None) -> None:
        """Run the rollouts of the queue until `event` is set, or `max_rollouts` have run."""
        async with as_latch(event) as latch:
            await super().iter(latch)

    def get_agent(self) -> native.LitAgent[T]:
        """Return the agent. Raise ValueError before `init`."""
        if self._agent is None:
            raise ConfigError("the runner has no agent; call init(agent) first")
        return self._agent

    def get_store(self) -> Any:
        """Return the store. Raise ValueError before `init_worker`."""
        return users_store(self._bound_store())

    def get_worker_id(self) -> str:
        """Return the worker's name for the log: `Worker-` and its number."""
        return f"Worker-{self.worker_id}" if self.worker_id is not None else "Worker-Unknown"


RolloutRawResultLegacy = float | list[Any] | list[dict[str, Any]] | list[ReadableSpan] | None
