"""The parts of a started `EmbeddedBackend`, and the operations that need several of them at once.

An optimizer step and a restored state change weights that the decoder reads, so both are applied between two decode
steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from leyden._lib.host.asgi import AsgiThread
from leyden._lib.host.limits import memory_limit
from leyden.engine.decoder import Decoder, Generation, PendingGenerations
from leyden.engine.forward.products import packed_bytes, use_own_products
from leyden.engine.learner import TorchLearner
from leyden.engine.loading import LoadedPolicy
from leyden.engine.policy_backend import EngineStatistics, OptimParams, OptimStepResult, SampledResponse, SamplingParams
from leyden.engine.refusal import check_prompts
from leyden.engine.state import StateFiles, read_state, restore_learner, state_files
from leyden.errors import ConfigError, EngineError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunningPolicy:
    """The parts of a started backend. `train` runs the blocking methods on the training thread."""

    policy: LoadedPolicy
    learner: TorchLearner
    decoder: Decoder
    server: AsgiThread
    executor: ThreadPoolExecutor
    """Has the training thread alone."""
    port: int
    max_length: int
    threads: int
    writing: dict[Path, Future[None]] = field(default_factory=dict[Path, Future[None]])
    """States that have been copied and are being written, by directory."""
    writer: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=1, thread_name_prefix="leyden-state")
    )

    async def sample(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, deterministic: bool
    ) -> list[SampledResponse]:
        """Return one response for each prompt. Cancelling the call takes its responses out of the batch.

        With a seed, prompt i is sampled with `seed + i`.

        deterministic: whether a seed is required. Raise ConfigError for a prompt that cannot be continued, EngineError
        if decoding fails.
        """
        if deterministic and params.seed is None:
            raise ConfigError("this engine runs in deterministic mode; give SamplingParams a seed")
        check_prompts(prompts, self.policy.n_vocabulary, self.max_length)
        pending = PendingGenerations(
            [
                Generation(
                    prompt_ids=list(prompt),
                    max_tokens=params.max_tokens,
                    temperature=params.temperature,
                    top_p=params.top_p,
                    stop_ids=self.policy.eos_ids.union(params.stop_token_ids),
                    seed=None if params.seed is None else params.seed + index,
                )
                for index, prompt in enumerate(prompts)
            ]
        )
        self.decoder.submit(pending.generations)
        try:
            if prompts:
                await pending.finished()
        finally:
            pending.cancel()
        return [
            SampledResponse(each.token_ids, each.logprobs, each.policy_versions, cast(Any, each.finish_reason))
            for each in pending.generations
        ]

    async def train(self, work: Callable[[RunningPolicy], T]) -> T:
        """Call `work` with these parts on the training thread, after earlier work, and return its result.

        Raise the error of `work`, or EngineError if the engine has been stopped.
        """
        try:
            future: Future[T] = self.executor.submit(work, self)
        except RuntimeError as error:
            raise EngineError("the engine has been stopped") from error
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise EngineError("the engine has been stopped") from None  # `stop` has cancelled the waiting work

    def optim_step(self, params: OptimParams) -> OptimStepResult:
        """Take an optimizer step between two decode steps, and drop the cached keys and values of the old weights."""
        norm = self.learner.clip(params)

        def swap() -> int:
            self.learner.apply(params)
            self.decoder.drop_cache()
            self.decoder.policy_version += 1
            return self.decoder.policy_version

        return OptimStepResult(policy_version=self.decoder.between_steps(swap).result(), grad_norm=norm)

    def save_state(self, path: Path) -> None:
        """Write the state into `path`. Sampling continues meanwhile; the weights do not change, because only this
        thread changes them.
        """
        self._state_files().write(path)

    def snapshot(self, path: Path) -> None:
        """Copy the state, and let another thread write it into `path`, because writing even a small state to disk takes
        longer than the pause between two training steps.

        A state whose copy would leave less memory than another one needs is written at once, and training waits.
        """
        files = self._state_files()
        if 2 * files.n_bytes > memory_limit()[1]:
            files.write(path)
        else:
            self.writing[path] = self.writer.submit(files.copied().write, path)

    def _state_files(self) -> StateFiles:
        decoder = self.decoder
        return decoder.between_steps(
            lambda: state_files(self.learner, policy_version=decoder.policy_version, rng=decoder.random)
        ).result()

    def stop(self) -> None:
        """End the threads, and let the model compute by itself again. Work that waits for the training thread is
        cancelled; a state that is being written is finished.
        """
        self.decoder.stop()
        self.server.stop()
        self.executor.shutdown(cancel_futures=True)
        self.writer.shutdown()
        use_own_products(self.policy.model)

    def load_state(self, path: Path, as_version: int | None) -> None:
        """Restore learner, policy version and random state from `path`, between two decode steps; with `as_version`,
        only the learner.

        Raise CheckpointError, and change nothing, if the state does not fit.
        """
        state = read_state(path, self.learner)

        def swap() -> None:
            restore_learner(self.learner, state)
            self.decoder.drop_cache()
            self.decoder.policy_version = state.policy_version if as_version is None else as_version
            if as_version is None:
                self.decoder.random.setstate(state.random_state)

        self.decoder.between_steps(swap).result()

    def statistics(self) -> EngineStatistics:
        """Return the decoder's counters, the threads, the size of a micro-batch and the memory of packed weights."""
        counted = self.decoder.statistics()
        more = {
            "threads": float(self.threads),
            "max_tokens_per_microbatch": float(self.learner.max_tokens),
            "packed_weights_bytes": float(packed_bytes(self.policy.model)),
        }
        return replace(counted, extra=counted.extra | more)
