"""One attempt, from its first hook to its report: call the agent, record its steps, decide how it ended.

Every end of the agent becomes an `Outcome`. This module raises only if the store cannot be reached or the run ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from leyden._lib.exhaustion import warn_if_exhausted
from leyden._lib.frames import users_part
from leyden._lib.host.listening import at_host_of
from leyden._lib.logs import Preview
from leyden._lib.text import describe_error, error_line, inner_errors
from leyden.agent import LitAgent, record_result
from leyden.agent.emitter import emit_exception
from leyden.errors import (
    IllegalTransition,
    InvalidReturn,
    MissingResource,
    UnknownResources,
    UnknownRollout,
)
from leyden.execution.runner.calls import (
    AgentCancelled,
    AgentTimeout,
    QuitDebugging,
    call_async,
    call_sync,
    call_to_debug,
)
from leyden.execution.runner.cancellation import CancelWatch
from leyden.execution.runner.runner import AttemptRecorder, Hook, Runner
from leyden.store.base import LightningStore
from leyden.tracing import Tracer, current_trace
from leyden.types import (
    GATEWAY_SCHEME,
    LLM,
    AttemptedRollout,
    AttemptStatus,
    NamedResources,
    ProxyLLM,
    Span,
    find_final_reward,
    semconv,
)

logger = logging.getLogger(__name__)

ReasonKind = Literal[
    "exception", "timeout", "cancelled", "invalid_return", "no_reward", "no_model_call", "missing_resource", "recording"
]
"""Why an attempt did not succeed. `recording`: its spans could not be stored."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an attempt, with the reason if it did not succeed."""

    status: AttemptStatus
    reason_kind: ReasonKind | None = None
    reason: str = ""
    error: Exception | None = None
    """The exception that the agent raised."""

    @property
    def completed(self) -> bool:
        """Whether the agent returned or raised in time, and its spans were recorded."""
        return self.reason_kind not in ("timeout", "cancelled", "recording")


SUCCEEDED = Outcome("succeeded")
CANCELLED = Outcome("cancelled", "cancelled", "its rollout was cancelled")


@dataclass(frozen=True, slots=True)
class AttemptRunner:
    """Runs attempts of one agent for one worker."""

    agent: LitAgent[Any]
    runner: Runner[Any]
    store: LightningStore
    tracer: Tracer
    hooks: Sequence[Hook]
    recorders: Sequence[AttemptRecorder]
    watch: CancelWatch

    @property
    def agent_name(self) -> str:
        """The agent's name, for messages."""
        return getattr(self.agent, "__qualname__", type(self.agent).__name__)

    async def run(self, rollout: AttemptedRollout, resources: Awaitable[NamedResources | None]) -> Outcome:
        """Run one claimed rollout, report its end to the store, and return the end. Cancelling this call cancels the
        agent and reports nothing.

        resources: awaited here and not before, so that a failure to read them is reported as the end of this attempt.
        """
        claimed = time.monotonic()
        rollout_id, attempt_id = rollout.rollout_id, rollout.attempt.attempt_id
        logger.debug("rollout %s: attempt %s begins, %s", rollout_id, attempt_id, rollout.attempt.worker_id)
        await self._call_hooks("on_rollout_start", rollout=rollout)
        spans: Sequence[Span] = ()
        outcome: Outcome | None = None
        try:
            async with self.tracer.trace_context(
                name=rollout_id, store=self.store, rollout_id=rollout_id, attempt_id=attempt_id
            ):
                await self._call_hooks("on_trace_start", tracer=self.tracer, rollout=rollout)
                try:
                    outcome = await self._call_agent(rollout, resources, claimed)
                    await self._call_hooks("on_trace_end", tracer=self.tracer, rollout=rollout)
                finally:
                    for recorder in self.recorders:
                        recorder.end_attempt(rollout_id, attempt_id)
            spans = self.tracer.get_last_trace()
            for recorder in self.recorders:
                await recorder.flush(rollout_id, attempt_id)
            outcome = await self._check_requirements(rollout, spans, outcome)
        except QuitDebugging:
            raise
        except Exception as error:  # noqa: BLE001 -- a tracer of the user's own may raise anything
            outcome = _unrecorded(outcome, error)
        await self._call_hooks("on_rollout_end", rollout=rollout, spans=spans)
        await self._report(rollout, outcome)
        if logger.isEnabledFor(logging.DEBUG):
            reason, milliseconds = Preview(outcome.reason or "no reason"), 1000 * (time.monotonic() - claimed)
            line = "rollout %s: attempt %s %s, %s, %.0f ms, %d spans, reward %s"
            reward = find_final_reward(spans)
            logger.debug(line, rollout_id, attempt_id, outcome.status, reason, milliseconds, len(spans), reward)
        return outcome

    async def _call_agent(
        self, rollout: AttemptedRollout, reading: Awaitable[NamedResources | None], claimed: float
    ) -> Outcome:
        """Call the agent and return how the attempt ended. Only the debugger's `quit` is raised.

        reading: the resources, which are read while the attempt is prepared.
        claimed: the time of the claim, from which `timeout_seconds` counts.
        """
        agent, limit = self.agent, rollout.config.timeout_seconds
        # by this machine's monotonic clock, because the store's may differ
        timeout = None if limit is None else max(0.0, claimed + limit - time.monotonic())
        try:
            resources = _own_copy(await reading or {}, store_url=self.store.url)
            for recorder in self.recorders:
                recorder.begin_attempt(rollout.rollout_id, rollout.attempt.attempt_id, resources)
            _route_model_calls(resources, rollout)
            with self.watch.over(rollout.rollout_id) as cancelled:
                run = partial(agent.run, rollout.input, resources, rollout)
                run_async = partial(agent.run_async, rollout.input, resources, rollout)
                if (debugger := self.runner.debugger) is not None:
                    result = await call_to_debug(run_async if agent.is_async() else partial(debugger, run))
                elif agent.is_async():
                    result = await call_async(run_async, timeout, cancelled=cancelled)
                else:
                    name = f"agent-{rollout.rollout_id}"
                    result = await call_sync(run, timeout, name=name, cancelled=cancelled)
            await record_result(result, rollout=rollout, store=self.store)
        except AgentTimeout:
            limit = rollout.config.timeout_seconds
            return Outcome("timeout", "timeout", f"the agent did not return within timeout_seconds={limit:g}")
        except AgentCancelled:
            return CANCELLED
        except QuitDebugging:
            raise
        except InvalidReturn as error:
            return _failed("invalid_return", error)
        except (MissingResource, UnknownResources) as error:
            return _failed("missing_resource", error)
        except Exception as error:
            if await self.watch.is_cancelled(rollout.rollout_id):
                # The error is a refusal of the gateway, which noticed the cancellation first.
                return CANCELLED
            if self.runner.debugger is not None:
                shown = (type(error), error, users_part(error.__traceback__) or error.__traceback__)
                logger.error("agent %r raised on rollout %s", self.agent_name, rollout.rollout_id, exc_info=shown)
            warn_if_exhausted(logger, f"rollout {rollout.rollout_id}", error)
            _record_error(error)
            lacks = all(isinstance(inner, MissingResource | UnknownResources) for inner in inner_errors(error))
            return _failed("missing_resource" if lacks else "exception", error)
        return SUCCEEDED

    async def _check_requirements(self, rollout: AttemptedRollout, spans: Sequence[Span], outcome: Outcome) -> Outcome:
        """Return a failure if a successful attempt lacks the model call or reward that its rollout requires.

        spans: the spans recorded in this process. Model calls are looked up in the store, because the gateway may
            record them in another process.
        """
        if outcome is not SUCCEEDED:
            return outcome
        if rollout.config.require_model_call:
            calls = await self.store.query_spans(
                rollout.rollout_id,
                rollout.attempt.attempt_id,
                name=semconv.MODEL_CALL,
                sort_by="status_code",
                sort_order="desc",  # UNSET and OK sort before ERROR
                limit=1,
            )
            if not calls.total:
                reason = (
                    "the agent never called the model through the gateway: give its client the address and key of the "
                    f"`llm`, in each rollout anew{_end_of_program(spans)}"
                )
                return Outcome("failed", "no_model_call", reason)
            if calls[0].status.status_code == "ERROR":
                reason = f"none of the agent's {calls.total} model calls was answered; {calls[0].status.description}"
                return Outcome("failed", "no_model_call", reason)
        if rollout.config.require_reward and find_final_reward(spans) is None:
            return Outcome(
                "failed", "no_reward", "the agent ended without a reward; return a number or call emit_reward(...)"
            )
        return outcome

    async def _report(self, rollout: AttemptedRollout, outcome: Outcome) -> None:
        """Report the end of the attempt to the store. An attempt that has ended there already stays as it is. If the
        report fails, its error names the end that it was to report.
        """
        metadata = {} if outcome.reason_kind is None else {"reason_kind": outcome.reason_kind, "reason": outcome.reason}
        try:
            await self.store.update_attempt(
                rollout.rollout_id, rollout.attempt.attempt_id, status=outcome.status, metadata=metadata
            )
        except (IllegalTransition, UnknownRollout) as error:  # the attempt has ended, and may be pruned already
            logger.info(
                "attempt %s ended as %s too late to count: %s", rollout.attempt.attempt_id, outcome.status, error
            )
        except Exception as error:
            if outcome.reason:
                error.add_note(
                    f"the attempt {rollout.attempt.attempt_id!r} had ended as {outcome.status}: {outcome.reason}"
                )
            raise error from outcome.error

    async def _call_hooks(self, point: str, **arguments: Any) -> None:
        """Call one method of every hook. An error is logged, because it must not fail the attempt."""
        for hook in self.hooks:
            try:
                call: Callable[..., Awaitable[None]] = getattr(hook, point)
                await call(agent=self.agent, runner=self.runner, **arguments)
            except Exception:
                logger.exception("hook %s.%s failed; the attempt goes on", type(hook).__name__, point)


def _route_model_calls(resources: NamedResources, rollout: AttemptedRollout) -> None:
    """Write the address and key of the attempt's gateway, if it has one, into the current trace. Instrumented SDKs read
    them there, so that the agent's code need not know Leyden.
    """
    llm = next((resource for resource in resources.values() if isinstance(resource, ProxyLLM)), None)
    trace = current_trace()
    if llm is not None and trace is not None:
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        trace.route.base_url, trace.route.api_key = llm.get_base_url(*ids), llm.get_api_key(*ids)


def _own_copy(resources: NamedResources, *, store_url: str) -> NamedResources:
    """Return a copy for one agent, because an agent may change its resources (`llm.sampling_parameters.pop(...)`),
    which other attempts must not notice.

    A gateway that listens on all addresses (0.0.0.0) runs on the store's machine; its host becomes the one under which
    this process reaches the store. Raise MissingResource for a model whose gateway has no address yet.
    """
    copies = {name: resource.model_copy(deep=True) for name, resource in resources.items()}
    for name, resource in copies.items():
        if isinstance(resource, LLM) and resource.endpoint.startswith(GATEWAY_SCHEME):
            raise MissingResource(
                f"resource {name!r} is a model at {resource.endpoint}, and its address has not been set; the "
                f"algorithm that serves it calls set_endpoint({resource.endpoint.removeprefix(GATEWAY_SCHEME)!r}, ...)"
            )
        if isinstance(resource, ProxyLLM):
            resource.endpoint = at_host_of(store_url, resource.endpoint)
    return copies


def _record_error(error: Exception) -> None:
    """Record what the agent raised, if a trace is open: a tracer of the user's own may open none. An error of the
    recording is logged, because it must not hide the agent's.
    """
    if current_trace() is None:
        return
    try:
        emit_exception(error)
    except Exception:
        logger.exception("the error that the agent raised could not be recorded in its trace")


def _unrecorded(outcome: Outcome | None, error: Exception) -> Outcome:
    """Return how an attempt ended whose record `error` left incomplete. A failure of the agent stays the reason."""
    reason = f"the record of the attempt is incomplete: {describe_error(error) or type(error).__name__}"
    if outcome is None or outcome.status == "succeeded":
        return Outcome("failed", "recording", reason, error)
    logger.warning("after the end of an attempt as %s (%s): %s", outcome.status, outcome.reason, reason)
    return replace(outcome, reason=f"{outcome.reason}; {reason}")


def _failed(kind: ReasonKind, error: Exception) -> Outcome:
    return Outcome("failed", kind, error_line(error), error)


def _end_of_program(spans: Sequence[Span]) -> str:
    """Return how an agent that is a program ended, if not well, as the end of a message."""
    ends = [each.attributes for each in spans if each.name == semconv.PROCESS]
    if not ends or not (code := ends[-1].get(semconv.PROCESS_EXIT_CODE)):
        return ""
    words = " | ".join(str(ends[-1].get(semconv.PROCESS_STDERR, "")).strip().splitlines()[-3:])[-500:]
    return f"; the program exited with code {code}: {words}"
