"""`Replay`: run a recorded rollout again, with its first model calls answered from the record.

`leyden replay` is its command. It copies the record into the run's own store, because the gateway reads it there, and
enqueues one fork. `leyden.algorithm.forks` makes many forks while training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from leyden._lib.attempt_key import NO_TOKEN
from leyden.adapter import ReplayedCall, replayed_calls
from leyden.algorithm.algorithm import Algorithm, Dataset
from leyden.algorithm.collector import CollectedRollout
from leyden.algorithm.forks import fork_requests
from leyden.engine.policy_backend import PolicyBackend
from leyden.errors import ConfigError
from leyden.gateway import LLMProxy, UpstreamModel
from leyden.types import LLM, AttemptedRollout, NamedResources, ProxyLLM, Span, find_final_reward, semconv


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of running a recorded rollout again."""

    rollout: CollectedRollout
    calls: list[ReplayedCall]
    """Each model call: replayed, diverged, live or failed."""
    reward_before: float | None
    """The final reward of the record; None if it has none."""


def count_recorded_calls(spans: Sequence[Span]) -> int:
    """Return how many model calls of an attempt a replay can answer at most: those up to the last answered one."""
    answered = [call.call_index for call in replayed_calls(spans) if call.state != "failed"]
    return max(answered, default=-1) + 1


class Replay(Algorithm):
    """Runs one recorded rollout again, and returns a `ReplayResult`.

    rollout: the recorded rollout, with the attempt to repeat.
    spans: the spans of the attempt.
    resources: the resources that the agent was given. Models are replaced by the gateway, under their names.
    n_calls: how many calls are answered from the record; None: all recorded ones.
    backend: a model that is loaded here and answers later calls.
    models: models of other servers, which answer later calls. A later call to another model, or without a backend and
        models, is refused.
    Raise ConfigError for a rollout without a recorded model call, and for more calls than it has.
    """

    run_kind = "replay"
    uses_gateway = True

    def __init__(
        self,
        rollout: AttemptedRollout,
        spans: Sequence[Span],
        *,
        resources: NamedResources | None = None,
        n_calls: int | None = None,
        backend: PolicyBackend | None = None,
        models: Sequence[UpstreamModel] = (),
    ) -> None:
        recorded = count_recorded_calls(spans)
        if not recorded:
            raise ConfigError(
                f"rollout {rollout.rollout_id!r} has no answered model call that a gateway recorded, so there is nothing to replay"
            )
        if n_calls is not None and not 0 <= n_calls <= recorded:
            raise ConfigError(
                f"a replay cannot be live from call {n_calls} on: rollout {rollout.rollout_id!r} has {recorded} recorded calls, so "
                f"give 0 to {recorded}"
            )
        self._rollout, self._spans = rollout, list(spans)
        self._resources = dict(resources or {})
        self.n_calls = recorded if n_calls is None else n_calls
        self._backend, self._models = backend, list(models)

    @property
    def has_model(self) -> bool:
        """Whether calls after the record can be answered."""
        return self._backend is not None or bool(self._models)

    def planned_resources(self) -> NamedResources:
        return dict(self._resources)

    async def run(
        self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None
    ) -> ReplayResult:
        """Run the rollout again. The data sets are not read: the task is the recorded one."""
        async with self.serving(self._backend, self._models) as proxy:
            original = await self._copy_record()
            (request,) = fork_requests(original, at_call=self.n_calls, n=1, resources_id=await self._publish(proxy))
            limits = original.config.model_copy(update={"max_attempts": 1, "retry_condition": []})
            request = request.model_copy(update={"config": limits})
            (result,) = [result async for result in self.collector.collect([request])]
        return ReplayResult(result, replayed_calls(result.spans), find_final_reward(self._spans))

    async def _copy_record(self) -> AttemptedRollout:
        """Write the recorded attempt into this run's store. Safe to repeat."""
        store, rollout, attempt = self.get_store(), self._rollout, self._rollout.attempt
        await store.start_rollout(
            rollout.input,
            mode=rollout.mode,
            config=rollout.config.model_copy(update={"retry_condition": []}),
            metadata={name: value for name, value in rollout.metadata.items() if name != semconv.REPLAY_FROM},
            rollout_id=rollout.rollout_id,
            attempt_id=attempt.attempt_id,
            run_id=None,
        )
        await store.add_many_spans(self._spans)
        # An attempt that was interrupted, or has not ended, would be run again.
        status = "succeeded" if attempt.status == "succeeded" else "failed"
        metadata = {name: value for name, value in attempt.metadata.items() if name != "reason_kind"}
        await store.update_attempt(rollout.rollout_id, attempt.attempt_id, status=status, metadata=metadata)
        found = await store.get_rollout_by_id(rollout.rollout_id)
        assert isinstance(found, AttemptedRollout)
        return found

    async def _publish(self, proxy: LLMProxy) -> str:
        """Write the agent's resources to the store, with the gateway in place of each model. Return their id."""
        resources: NamedResources = {}
        for name, resource in self._resources.items():
            if isinstance(resource, LLM):
                served = ProxyLLM(
                    endpoint=proxy.endpoint,
                    model=resource.model,
                    api_key=NO_TOKEN,
                    sampling_parameters=resource.sampling_parameters,
                )
                resource = await self.publish_endpoint(served)
            resources[name] = resource
        return await self.publish_resources("replay", resources)
