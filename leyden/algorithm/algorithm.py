"""`Algorithm`, the base class: the method that a subclass must have, and the collaborators that the trainer sets."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from leyden._lib import ids
from leyden._lib.aio import Latch
from leyden._lib.components import KeepsArguments
from leyden._lib.options import NamedOptions
from leyden._lib.text import error_line
from leyden.adapter import TraceAdapter
from leyden.algorithm.collector import RolloutCollector
from leyden.algorithm.evaluator import Evaluator, with_models
from leyden.errors import ConfigError, LeydenError
from leyden.store.base import LightningStore
from leyden.training.runs import Run
from leyden.types import GATEWAY_SCHEME, LLM, AttemptStatus, NamedResources
from leyden.types.run_record import algorithm_group

if TYPE_CHECKING:
    from leyden.engine.policy_backend import PolicyBackend
    from leyden.gateway import LLMProxy, UpstreamModel

logger = logging.getLogger(__name__)

T = TypeVar("T")
Model = TypeVar("Model", bound=LLM)

_CANCEL_SECONDS = 5.0
"""The time limit for cancelling the rollouts of an algorithm that has ended. The store may be the part that failed."""

Dataset = Sequence[T]
"""Tasks: any object with a length and items by index (a list, a Hugging Face data set)."""


class Algorithm(NamedOptions, KeepsArguments, ABC):
    """Base class of algorithms. A subclass overrides `run`, synchronous or asynchronous.

    The trainer calls the setters before `run`. A getter raises ConfigError if its value was not set.
    """

    uses_gateway: bool = False
    """Whether the trainer must make an `LLMProxy` if the user gave none."""

    run_kind: str = "fit"
    """The kind of run that this algorithm makes (`RunRecord.kind`)."""

    result_is_shown: bool = False
    """Whether the program that calls `fit` shows the result, so that `fit` shows no summary."""

    holds_runners: bool = False
    """Whether runners must wait for `announce_ready` before their first claim. In a resumed run the queue is full
    before the policy is restored."""

    enqueues_datasets: bool = False
    """Whether the items of both data sets are tasks, which the algorithm enqueues as they are. The trainer then checks
    before the run that each is a JSON value."""

    resumable: bool = False
    """Whether `run` can be called again after it has failed, and then continues from its newest checkpoint
    (`get_run().resume`)."""

    steps_option: ClassVar[str | None] = None
    """The option with the number of steps, which `leyden extend` raises. An algorithm that has one calls `step_ended`
    after each step, unless it has a `TrainLoop`. None: its runs can be stopped, and neither paused nor changed."""

    changeable: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The options that may change between two steps (`leyden set`), `steps_option` among them, each with the attributes
    that hold it: `{"temperature": ("temperature",), "optim.learning_rate": ("optim",)}`. To check a new value, another
    algorithm is made with it; then its attributes are taken over. Classes add to those of their bases, and take one
    away with `()`."""

    fixed_options: ClassVar[Mapping[str, str]] = {}
    """Why other options may not change, where it is not plain."""

    _ready: Latch | None = None
    _interrupt: Callable[[], Awaitable[None]] | None = None
    _trainer: weakref.ref[Any] | None = None
    _store: LightningStore | None = None
    _adapter: TraceAdapter[Any] | None = None
    hosts_gateway: bool = False
    """Whether the algorithm can run the gateway in its engine's process (`LLMProxy.reserve`)."""
    _llm_proxy: LLMProxy | None = None
    _initial_resources: NamedResources | None = None
    _run: Run | None = None
    _concurrency: int | None = None
    _collector: RolloutCollector | None = None
    _evaluator: Evaluator | None = None
    _agent_version: str | None = None

    @abstractmethod
    def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> Awaitable[Any] | Any:
        """Do all of the work, and return any result, which `RunSummary.result` keeps.

        Both data sets are optional. Raise ConfigError for one that is needed and missing.
        """

    def is_async(self) -> bool:
        """Return whether `run` is a coroutine function."""
        return inspect.iscoroutinefunction(self.run)

    def planned_resources(self) -> NamedResources | None:
        """Return the resources that rollouts will get, or None if unknown before the run.

        The trainer uses them to refuse, before the run, an agent that needs another resource.
        """
        return None

    def trained_model(self) -> Any:
        """Return the model that is trained, for the run's record: a folder, hub name or object; None if none is."""
        return None

    def credit_assignment(self) -> dict[str, Any] | None:
        """Return how rollouts are credited with their rewards, as JSON for the run's record, so that a reader can
        compute the advantages of a recorded group again; None for an algorithm without advantages.
        """
        return None

    def planned_rollouts(self, n_train: int, n_val: int) -> int | None:
        """Return how many rollouts a run on data sets of these lengths has at most; None if that is not known before
        the run.
        """
        return None

    def changeable_options(self) -> dict[str, tuple[str, ...]]:
        """Return the options that may change in this run, with the attributes that hold them (`changeable`)."""
        bases = reversed(type(self).__mro__)
        found = {name: each for base in bases for name, each in vars(base).get("changeable", {}).items()}
        return {name: each for name, each in found.items() if each and hasattr(self, each[0])}

    def check_change(self, changed: Any) -> None:
        """Raise ConfigError if this run cannot go on with the options of `changed`, which its constructor accepts."""

    def options_changed(self, n_finished: int) -> Awaitable[None] | None:
        """Do what a change of options needs beyond its attributes. The next step is number `n_finished`, from 0."""

    async def step_ended(self, n_finished: int, goes_on: Callable[[], bool]) -> None:
        """Do what people have asked of the run meanwhile; return when it may go on. For algorithms without a TrainLoop.

        n_finished: the number of finished steps.
        goes_on: returns whether another step follows.
        """
        if (recorder := self.get_run().recorder) is not None:
            await recorder.step_ended(n_finished, goes_on)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def set_ready(self, ready: Latch) -> None:
        """Set the latch that runners wait for before their first claim."""
        self._ready = ready

    def announce_ready(self) -> None:
        """Allow the runners to claim rollouts."""
        if self._ready is not None:
            self._ready.set()

    def set_interrupt(self, interrupt: Callable[[], Awaitable[None]]) -> None:
        """Set the function with which `interrupt_runners` stops the runners of this run."""
        self._interrupt = interrupt

    async def interrupt_runners(self) -> None:
        """Stop the runners of a failed algorithm, before it tears down what their agents need.

        Runners finish as when a run is stopped from outside. Rollouts that they did not finish return to the queue, and
        the interrupted attempts do not count.
        """
        if self._interrupt is not None:
            await self._interrupt()

    def set_trainer(self, trainer: Any) -> None:
        """Keep a weak reference to the trainer, for users' code. Leyden does not read it."""
        self._trainer = weakref.ref(trainer)

    def get_trainer(self) -> Any:
        """Return the trainer. Raise ConfigError if it was not set or does not exist any more."""
        trainer = self._trainer() if self._trainer else None
        if trainer is None:
            raise self._not_set("trainer")
        return trainer

    def set_store(self, store: LightningStore) -> None:
        """Set the store that `get_store` returns."""
        self._store, self._collector = store, None

    def get_store(self) -> LightningStore:
        """Return the store in which rollouts are enqueued."""
        if self._store is None:
            raise self._not_set("store")
        return self._store

    def set_adapter(self, adapter: TraceAdapter[Any]) -> None:
        """Set the adapter that `get_adapter` returns."""
        self._adapter = adapter

    def get_adapter(self) -> TraceAdapter[Any]:
        """Return the adapter, which converts spans to this algorithm's data."""
        if self._adapter is None:
            raise self._not_set("adapter")
        return self._adapter

    def set_llm_proxy(self, llm_proxy: LLMProxy | None) -> None:
        """Set the gateway that `get_llm_proxy` returns, or None."""
        self._llm_proxy, self._evaluator = llm_proxy, None

    def get_llm_proxy(self) -> LLMProxy | None:
        """Return the gateway; None if there is none."""
        return self._llm_proxy

    def require_llm_proxy(self) -> LLMProxy:
        """Return the gateway. Raise ConfigError if there is none."""
        if self._llm_proxy is None:
            name = type(self).__name__
            raise ConfigError(f"{name} needs a gateway; Trainer makes one, or call set_llm_proxy(LLMProxy(...))")
        return self._llm_proxy

    @contextlib.asynccontextmanager
    async def serving(
        self, backend: PolicyBackend | None, models: Sequence[UpstreamModel] = ()
    ) -> AsyncGenerator[LLMProxy]:
        """Start a backend, if there is one, and route the gateway to it and to `models`. Yield the gateway, and stop
        the backend at the end of the block.

        Raise ConfigError without a gateway.
        """
        proxy = self.require_llm_proxy()
        async with contextlib.AsyncExitStack() as stack:
            if backend is not None:
                await backend.start()
                stack.push_async_callback(backend.stop)
            proxy.update_model_list(models)
            if backend is not None:
                proxy.serve_engine(backend.endpoint())
            yield proxy

    async def publish_resources(self, name: str, resources: NamedResources) -> str:
        """Write resources to the store under an id of the run and `name`, and return the id. Safe to repeat."""
        run_id = self.get_run().run_id
        resources_id = ids.derived_id("rs", run_id, name)
        await self.get_store().update_resources(resources_id, resources, author=run_id)
        return resources_id

    async def publish_endpoint(self, llm: Model) -> Model:
        """Write the address and key of a model to the store, under the run's id. Return the model with a name
        (`gateway://RUN_ID`) in place of both. Start the gateway if it is only reserved.

        An attempt gets the address that the store has when the attempt starts. So rollouts that were enqueued before a
        restart find the gateway of the new process, and the resources keep their version.
        """
        proxy = self.get_llm_proxy()
        if proxy is not None and proxy.is_reserved and not proxy.is_running():
            await proxy.start()  # no engine's process hosts it
        name = self.get_run().run_id
        await self.get_store().set_endpoint(name, llm.endpoint, api_key=llm.api_key)
        return llm.model_copy(update={"endpoint": f"{GATEWAY_SCHEME}{name}", "api_key": None})

    async def with_model(self, resources: NamedResources, *, model: str | None = None) -> NamedResources:
        """Return the resources, with a model of the gateway as `main_llm` if they have no model and there is a gateway.

        model: its name. None: the only one; nothing is added if the gateway serves several, so that an agent which
            needs one of them is refused by name.
        Raise ConfigError for a name that is not served.
        """
        proxy = self.get_llm_proxy()
        if proxy is None or any(isinstance(each, LLM) for each in resources.values()):
            return resources
        try:
            llm = proxy.as_resource(model=model)
        except ConfigError:
            if model is not None:
                raise
            return resources
        return {**resources, "main_llm": await self.publish_endpoint(llm)}

    @contextlib.asynccontextmanager
    async def recorded_calls(
        self, purpose: str, *, model: str | None = None, metadata: dict[str, Any] | None = None
    ) -> AsyncGenerator[LLM]:
        """Yield a model for calls that the algorithm itself makes, for example to improve a prompt.

        The gateway records each call, with tokens and cost, in an attempt that belongs to the algorithm and to no task:
        its rollout has the group `RUN_ID/algorithm` and the purpose as its input, and no run, so that it is not counted
        among the run's rollouts. It succeeds when the block ends, and fails with the error that leaves the block.

        purpose: what the calls are for, such as "reflection".
        model: a model that the gateway serves; None if it serves one only.
        Raise ConfigError without a gateway, and BudgetExceeded if a budget of tokens or cost has no room for the
        attempt.
        """
        proxy, store, run_id = self.get_llm_proxy(), self.get_store(), self.get_run().run_id
        if proxy is None:
            raise ConfigError(
                f"{type(self).__name__}.recorded_calls needs a gateway; call set_llm_proxy(LLMProxy(...))"
            )
        async with self.collector.reserve_attempt() as settle:
            rollout = await store.start_rollout(
                {"algorithm": type(self).__name__, "purpose": purpose},
                metadata={"run_id": run_id, **(metadata or {})},
                run_id=None,
                group_id=algorithm_group(run_id),
            )
            attempt = rollout.rollout_id, rollout.attempt.attempt_id
            status: AttemptStatus = "failed"
            outcome: dict[str, Any] = {"reason": "the algorithm was interrupted", "reason_kind": "algorithm"}
            try:
                yield proxy.as_resource(*attempt, model=model)
                status, outcome = "succeeded", {}
            except Exception as error:
                outcome["reason"] = error_line(error)
                raise
            finally:
                proxy.end_attempt(*attempt)
                await proxy.flush(*attempt)
                settle(await store.update_attempt(*attempt, status=status, metadata=outcome))

    def set_initial_resources(self, resources: NamedResources | None) -> None:
        """Set the resources that the user starts with, or None."""
        self._initial_resources = resources

    def get_initial_resources(self) -> NamedResources | None:
        """Return the resources that the user starts with; None if none were given."""
        return self._initial_resources

    def set_concurrency(self, concurrency: int) -> None:
        """Set the number of rollouts that all runners together work on at once."""
        self._concurrency, self._collector = concurrency, None

    def set_agent_version(self, version: str | None) -> None:
        """Set the version of the agent that runs the rollouts: a text that changes with its code; None: unknown."""
        self._agent_version, self._evaluator = version, None

    def get_agent_version(self) -> str | None:
        """Return the version of the agent that runs the rollouts, with the gateway's models if any; None if unknown."""
        if self._agent_version is None or self.models_version is None:
            return self._agent_version
        return with_models(self._agent_version, self.models_version)

    @property
    def models_version(self) -> str | None:
        """A digest of the gateway's models; None without a gateway."""
        return None if self._llm_proxy is None else self._llm_proxy.models_digest()

    def set_run(self, run: Run) -> None:
        """Set the run that `get_run` returns."""
        self._run, self._collector = run, None

    def get_run(self) -> Run:
        """Return the run: its id, its folder and what to resume.

        Raise ConfigError outside a run.
        """
        if self._run is None:
            raise self._not_set("run")
        return self._run

    @property
    def collector(self) -> RolloutCollector:
        """The collector that runs this algorithm's rollouts. Each run has a new one, made at its first use.

        When the algorithm ends, the trainer cancels the rollouts that have not finished, because no caller would read
        their results. If `leaves_rollouts`, they stay for the resumed run. Raise ConfigError without a store.
        """
        if self._collector is None:
            pin = None if self._run is None else self.pin
            self._collector = RolloutCollector(
                self.get_store(),
                pin=pin,
                concurrency=self._concurrency,
                on_unfinished=self.announce_ready,
                tally=None if self._run is None else self._run.tally,
            )
        return self._collector

    @property
    def evaluator(self) -> Evaluator:
        """An evaluator on this algorithm's collector, which knows the agent's version.

        Raise ConfigError without a store.
        """
        collector = self.collector
        if self._evaluator is None or self._evaluator.collector is not collector:
            self._evaluator = Evaluator(collector, agent_version=self.get_agent_version(), models=self.models_version)
        return self._evaluator

    def leaves_rollouts(self, error: BaseException | None) -> bool:
        """Return whether unfinished rollouts stay in the queue when `run` has ended.

        error: what `run` raised; None if it returned.
        """
        return self.resumable and error is not None

    @contextlib.asynccontextmanager
    async def collecting(self) -> AsyncGenerator[None]:
        """Run the algorithm within this block, as the Trainer does. At the end of the block, its unfinished rollouts
        are cancelled unless it `leaves_rollouts`.
        """
        try:
            yield
        except BaseException as error:
            await self._end_collecting(error)
            raise
        await self._end_collecting(None)

    async def _end_collecting(self, error: BaseException | None) -> None:
        """Cancel the unfinished rollouts of this run, in a resumed run also those that an earlier process had enqueued.
        Errors of the store are only logged.

        error: what `run` raised; None if it returned.
        """
        resumed = self._run is not None and self._run.resume
        if self.leaves_rollouts(error) or (self._collector is None and not resumed):
            return
        try:
            async with asyncio.timeout(_CANCEL_SECONDS):
                if resumed:
                    await self.collector.cancel_earlier(self.get_run().run_id)
                # `cancel` leaves the pins on finished rollouts, which a resumed run reads again.
                await (self.collector.cancel() if self.resumable else self.collector.close())
        except (LeydenError, TimeoutError) as failure:
            logger.warning("unfinished rollouts could not be cancelled: %s", failure or "the store did not answer")

    @property
    def pin(self) -> str:
        """The name under which `collector` pins rollouts, so that the store keeps those that this run will read."""
        return f"run {self.get_run().run_id}"

    def _not_set(self, what: str) -> ConfigError:
        name = type(self).__name__
        return ConfigError(f"{name} has no {what}; Trainer sets it, or call {name}.set_{what}(...) before run()")
