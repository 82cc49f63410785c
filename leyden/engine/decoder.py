"""`Decoder`: continuous batching. One thread decodes all requests together, one token at a time.

Requests join between two steps and leave when they are done. The thread owns the cache, and only it reads the weights
for sampling. Work that must not happen during a step, such as a change of the weights, is passed to the thread with
`between_steps`. The module knows token ids only: no text, no HTTP, no gradients.

Shapes: B rows of the batch, V vocabulary.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from leyden.engine.forward.graph import FixedSteps
from leyden.engine.forward.model_forward import ModelForward
from leyden.engine.memory import free_cached_memory, is_out_of_memory
from leyden.engine.policy_backend import LOGITS_NOT_FINITE, EngineStatistics
from leyden.engine.sampling import draw
from leyden.engine.slots import SlotTable
from leyden.errors import EngineError

logger = logging.getLogger("leyden.engine")
T = TypeVar("T")


class Constraint(Protocol):
    """Decides which tokens may come next in one response. Only the decoder's thread calls it."""

    def allowed(self) -> bytes:
        """Return one byte for each token of the vocabulary, 0 where the token may not come next."""
        ...

    def accept(self, token: int) -> None:
        """Advance past a token that was sampled."""
        ...


@dataclass(slots=True, eq=False)
class Generation:
    """One request for a response, and its result. Only the decoder's thread writes the result; any thread may read it.

    Of the three lists of results `logprobs` grows last, so its length is the number of complete tokens.
    """

    prompt_ids: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    stop_ids: frozenset[int]
    """Tokens that end the response."""
    seed: int | None
    """The seed of the response; None: the decoder's own generator."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    """The event loop on which `notify` is called."""
    notify: Callable[[], object] = lambda: None
    """Called when the response has finished or failed, and after each token if `streams` is set."""
    streams: bool = False
    ends_text: Callable[[Sequence[int]], bool] | None = None
    """Returns whether the text of the sampled ids ends the response, as a stop string does."""
    constraint: Constraint | None = None
    """Limits the tokens that may be sampled; `logprobs` are those of the limited distribution."""

    token_ids: list[int] = field(default_factory=list[int])
    """The sampled tokens."""
    policy_versions: list[int] = field(default_factory=list[int])
    """The version of the weights with which each token was sampled."""
    logprobs: list[float] = field(default_factory=list[float])
    """The log-probability with which each token was drawn (`sampling.draw`)."""
    finish_reason: Literal["stop", "length"] | None = None
    """Why the response ended; None while it has not."""
    error: Exception | None = None
    """Why the response failed; None if it has not."""
    cancelled: bool = False
    """Any thread may set this to remove the request before the next step, without a notification."""

    @property
    def done(self) -> bool:
        """Whether the response has ended or failed."""
        return self.finish_reason is not None or self.error is not None


class PendingGenerations:
    """Generations of one request, and the coroutine that waits for their tokens."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        """generations: made in this event loop, and not submitted yet."""
        self.generations = generations
        self._news = asyncio.Event()
        self._cancelled = False
        for generation in generations:
            generation.notify = self._news.set

    def cancel(self) -> None:
        """Let the decoder take unfinished generations out of the batch, and wake the waiter."""
        self._cancelled = True
        for generation in self.generations:
            generation.cancelled = True
        self._news.set()

    async def news(self) -> bool:
        """Wait until a generation has a new token or has ended.

        Return False after `cancel`. Raise the error that ended a generation.
        """
        await self._news.wait()
        self._news.clear()
        for generation in self.generations:
            if generation.error is not None:
                raise generation.error
        return not self._cancelled

    async def finished(self) -> bool:
        """Wait until all generations are done. Return False after `cancel`."""
        while await self.news():
            if all(generation.done for generation in self.generations):
                return True
        return False


@dataclass(slots=True, eq=False)
class DecodingRow:
    """A request in the batch."""

    generation: Generation
    slot: int
    """Its row in the cache."""
    tokens: list[int]
    """The token ids of the prompt and of the response so far."""
    cached: int
    """How many of them the cache holds."""
    random: Callable[[], float]
    """Returns the next random number of its generator, in [0, 1)."""
    peeked: float | None = None
    """A number that was taken from the generator, and not used yet."""

    @property
    def n_new(self) -> int:
        return len(self.tokens) - self.cached

    def peek(self) -> float:
        """Return the random number of the next token, and keep it."""
        if self.peeked is None:
            self.peeked = self.random()
        return self.peeked

    def uniform(self) -> float:
        """Return the random number of the next token, and go on to that of the token after it."""
        number, self.peeked = self.peek(), None
        return number


class Decoder:
    """Decodes requests with `forward` on its own thread, from `start` to `stop`.

    max_batch_rows: the most requests in a batch; 1 if `deterministic` is set.
    max_prefill_tokens: the most tokens of new prompts that are computed at once, padding included. A longer prompt is
        computed alone.
    deterministic: decode one request at a time, without caches of earlier ones.
    seed: the seed for requests without a seed.
    threads: torch's threads for decoding; None: torch's default.
    min_copied: the number of first tokens that two prompts must have in common so that they are computed once and
        copied; None: never.
    fixed: takes the steps in which every row has one new token and no constraint; None: none.
    """

    def __init__(
        self,
        forward: ModelForward,
        *,
        max_batch_rows: int,
        max_prefill_tokens: int,
        deterministic: bool,
        seed: int,
        threads: int | None,
        min_copied: int | None = None,
        fixed: FixedSteps | None = None,
    ) -> None:
        self._forward = forward
        self._fixed = fixed
        self._max_batch_rows = 1 if deterministic else max_batch_rows
        self._max_prefill_tokens = max_prefill_tokens
        self._lowered = False
        """Whether the warning of too large steps has been logged."""
        self._slots = SlotTable(
            self.n_slots(max_batch_rows, deterministic),
            reuse=not deterministic and forward.caches,
            min_copied=min_copied,
        )
        self._threads = threads
        self.random = random.Random(seed)
        """The generator for requests without a seed. Use it between steps only."""
        self.policy_version = 0
        """The version of the weights. Set it only in a chore of `between_steps`."""
        self._wake = threading.Condition()
        """Guards the three fields below, which other threads write."""
        self._arrived: deque[Generation] = deque()
        self._chores: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._stopping = False
        self._waiting: deque[Generation] = deque()
        """Requests that wait for a place in the batch."""
        self._rows: list[DecodingRow] = []
        """The requests in the batch."""
        self._counts: defaultdict[str, Any] = defaultdict(int)
        """The counters of `EngineStatistics`, by name."""
        self._thread = threading.Thread(target=self._run, name="leyden-decoder", daemon=True)

    @staticmethod
    def n_slots(max_batch_rows: int, deterministic: bool) -> int:
        """Return the number of cache rows: one if deterministic, else twice the batch, for conversations that wait for
        their next turn.
        """
        return 1 if deterministic else 2 * max_batch_rows

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; requests under way fail with EngineError."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def submit(self, generations: Sequence[Generation]) -> None:
        """Queue requests; they join the batch before the next step.

        Raise EngineError after `stop`.
        """
        with self._wake:
            if self._stopping:
                raise EngineError("the engine has been stopped")
            self._arrived.extend(generations)
            self._wake.notify()

    def between_steps(self, chore: Callable[[], T]) -> Future[T]:
        """Run `chore` on the decoder's thread between two steps, and return a future of its result.

        The future raises EngineError if the decoder has been stopped.
        """
        future: Future[T] = Future()
        with self._wake:
            if self._stopping:
                future.set_exception(EngineError("the engine has been stopped"))
            else:
                self._chores.append((chore, future))
                self._wake.notify()
        return future

    def drop_cache(self) -> None:
        """Drop all cached keys and values. Those of rows under way are computed again in the next step.

        Call it in a chore of `between_steps`.
        """
        self._slots.drop()
        if self._fixed is not None:
            self._fixed.discard()
        for row in self._rows:
            row.cached = 0

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            **self._counts,
            extra={
                "reused_prompt_tokens": float(self._slots.reused_tokens),
                "rows": float(len(self._rows)),
                "waiting": float(len(self._waiting) + len(self._arrived)),
            },
        )

    def _run(self) -> None:
        """Decode until the decoder is stopped, then fail the unfinished generations. Runs in the decoder's thread."""
        if self._threads is not None:
            torch.set_num_threads(self._threads)  # OpenMP's count belongs to the calling thread
        with torch.inference_mode():
            while self._collect():
                started = time.perf_counter()
                self._admit()
                if self._rows:
                    self._step()
                self._counts["decode_seconds"] += time.perf_counter() - started
        self._fail(
            [*(row.generation for row in self._rows), *self._waiting], EngineError("the engine has been stopped")
        )
        self._rows.clear()
        self._forward.release()

    def _collect(self) -> bool:
        """Wait for work, add the new requests, and run the chores. Return False to stop."""
        with self._wake:
            while not (self._arrived or self._chores or self._rows or self._waiting or self._stopping):
                self._wake.wait()
            self._waiting.extend(self._arrived)
            self._arrived.clear()
            chores = list(self._chores)
            self._chores.clear()
            stopping = self._stopping
        for chore, future in chores:
            _do(chore, future)
        return not stopping

    def _admit(self) -> None:
        """Remove cancelled rows, and move waiting requests into the batch while it has room and the step keeps its
        budget of prompt tokens.
        """
        if any(row.generation.cancelled for row in self._rows):
            for row in [row for row in self._rows if row.generation.cancelled]:
                self._leave(row)
        budget = self._max_prefill_tokens
        postponed: list[Generation] = []
        """Requests whose prompts begin like one of this step, from which they can be copied in the next."""
        while self._waiting and len(self._rows) + len(postponed) < self._max_batch_rows and budget > 0:
            generation = self._waiting[0]
            if generation.cancelled:
                self._waiting.popleft()
                continue
            if self._slots.should_wait(generation.prompt_ids):
                postponed.append(self._waiting.popleft())
                continue
            place = self._slots.acquire(generation.prompt_ids)
            if place is None:
                break
            self._waiting.popleft()
            if place.copy_from is not None:
                self._forward.copy_row(place.copy_from, place.row, place.n_cached)
            uniform = self.random.random if generation.seed is None else random.Random(generation.seed).random
            self._rows.append(DecodingRow(generation, place.row, list(generation.prompt_ids), place.n_cached, uniform))
            self._counts["requests"] += 1
            self._counts["prompt_tokens"] += len(generation.prompt_ids)
            budget -= len(generation.prompt_ids) - place.n_cached
        self._waiting.extendleft(reversed(postponed))

    def _step(self) -> None:
        """Sample one token for each row. If that fails, all rows fail, and the cache is dropped."""
        forbidden = self._forbidden()
        rows = self._rows
        if not rows:
            return
        try:
            drawn = None
            if self._fixed is not None and not forbidden:
                drawn = self._fixed.step(rows, ahead=not (self._waiting or self._arrived or self._chores))
            if drawn is None:
                logits_BV = self._logits()
                if not rows:
                    return
                for index, row in enumerate(rows):
                    if row in forbidden:
                        forbidden_V = forbidden[row].to(logits_BV.device)
                        # The tokenizer may have more tokens than the model's logits.
                        logits_BV[index].masked_fill_(forbidden_V[: logits_BV.shape[1]], -math.inf)
                drawn = self._drawn(logits_BV)
            tokens, logprobs = drawn
            # A sum is not finite if one of its terms is not.
            if not math.isfinite(sum(logprobs)):
                raise EngineError(
                    f"{LOGITS_NOT_FINITE} (version {self.policy_version}). If training has diverged, "
                    "lower the learning rate and resume from an earlier checkpoint"
                )
        except Exception as error:
            logger.exception("a decode step of %d rows failed", len(rows))
            self._fail([row.generation for row in rows], EngineError(str(error)))
            for row in list(rows):
                self._leave(row)
            self._slots.drop()
            return
        if not rows:
            return
        self._counts["decode_steps"] += 1
        self._counts["response_tokens"] += len(rows)
        self._hand_out(tokens, logprobs)

    def _logits(self) -> Tensor:
        """Return the next-token logits of each row, (B, V).

        Rows whose padded prompts exceed the budget run one after the other, and so do the halves of rows that do not
        fit into memory. A row that does not fit alone is removed, and its request fails.
        """
        rows, failed, logits_BV = list(self._rows), list[int](), torch.empty(0)
        waiting = deque(self._groups())
        while waiting:
            group = waiting.popleft()
            part_BV, failure = self._attempt([rows[index] for index in group])
            if part_BV is not None:
                if len(group) == len(rows):
                    return part_BV
                if not len(logits_BV):
                    logits_BV = part_BV.new_empty(len(rows), part_BV.shape[1])
                logits_BV[group] = part_BV
                continue
            free_cached_memory()
            if len(group) == 1:
                failed += group
                continue
            ordered = sorted(group, key=lambda index: rows[index].n_new)
            if (longest := rows[ordered[-1]].n_new) > 1:
                self._lower_budget(len(group) * longest, failure)
            half = len(ordered) // 2
            waiting.extendleft([ordered[half:], ordered[:half]])
        for row in [rows[index] for index in failed]:
            self._fail(
                [row.generation],
                EngineError(
                    f"a sequence of {len(row.tokens)} tokens does not fit into memory; lower max_length or max_batch_rows, or "
                    "give the model a narrower dtype"
                ),
            )
            self._leave(row)
        return logits_BV[[index for index in range(len(rows)) if index not in failed]] if failed else logits_BV

    def _drawn(self, logits_BV: Tensor) -> tuple[list[int], list[float]]:
        """Return a token for each row, and its log-probability.

        Halves of rows that do not fit into memory are drawn one after the other. A row that does not fit alone is
        removed, and its request fails.
        """
        rows, uniforms = list(self._rows), [row.uniform() for row in self._rows]
        drawn: dict[int, tuple[int, float]] = {}
        waiting = [range(len(rows))]
        while waiting:
            part = waiting.pop()
            requests = [rows[index].generation for index in part]
            try:
                tokens, logprobs = draw(
                    logits_BV[part.start : part.stop],
                    [request.temperature for request in requests],
                    [request.top_p for request in requests],
                    uniforms[part.start : part.stop],
                )
                drawn.update(zip(part, zip(tokens, logprobs, strict=True), strict=True))
                continue
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            free_cached_memory()
            if half := len(part) // 2:
                waiting += [part[:half], part[half:]]
                continue
            why = f"sampling from {logits_BV.shape[1]} tokens does not fit into memory beside the model; lower max_batch_rows"
            self._fail(requests, EngineError(why))
            self._leave(rows[part.start])
        found = [drawn[index] for index in range(len(rows)) if index in drawn]
        return [token for token, _ in found], [logprob for _, logprob in found]

    def _groups(self) -> list[list[int]]:
        """Return the indices of the rows that are computed together: single tokens with as many prompts, the shortest
        first, as the budget holds with their padding, then further prompts.
        """
        groups = [[index for index, row in enumerate(self._rows) if row.n_new == 1]]
        n_prompts = 0
        prompts = [index for index, row in enumerate(self._rows) if row.n_new > 1]
        for index in sorted(prompts, key=lambda index: self._rows[index].n_new):
            if n_prompts and (n_prompts + 1) * self._rows[index].n_new > self._max_prefill_tokens:
                groups.append([])
                n_prompts = 0
            groups[-1].append(index)
            n_prompts += 1
        return [sorted(group) for group in groups]

    def _attempt(self, rows: Sequence[DecodingRow]) -> tuple[Tensor | None, str]:
        """Return the logits of rows, and an empty text; None and the message of the allocation that failed if they do
        not fit into memory.
        """
        try:
            sequences, cached = [row.tokens for row in rows], [row.cached for row in rows]
            return self._forward.decode([row.slot for row in rows], sequences, cached), ""
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None, str(error).strip().partition("\n")[0] or type(error).__name__

    def _lower_budget(self, n_tokens: int, failure: str) -> None:
        """Halve the budget of prompt tokens, with one warning, after tokens that did not fit.

        n_tokens: how many, padding included.
        failure: the message of the failed allocation.
        """
        before, self._max_prefill_tokens = (
            self._max_prefill_tokens,
            max(1, min(self._max_prefill_tokens, n_tokens // 2)),
        )
        if not self._lowered:
            self._lowered = True
            logger.warning(
                "a decode step of %d tokens does not fit into memory (%s): it is halved, now and later; "
                "max_tokens_per_microbatch=%d (it is %d) avoids the attempt",
                n_tokens,
                failure,
                self._max_prefill_tokens,
                before,
            )

    def _forbidden(self) -> dict[DecodingRow, Tensor]:
        """Return for each row with a constraint a mask (V,) of the tokens that may not come next.

        A row whose constraint fails is removed, and its request fails.
        """
        found: dict[DecodingRow, Tensor] = {}
        for row in list(self._rows):
            if (constraint := row.generation.constraint) is None:
                continue
            try:
                found[row] = torch.frombuffer(bytearray(constraint.allowed()), dtype=torch.uint8) == 0
            except Exception as error:  # noqa: BLE001 -- the request's constraint fails, and no other
                self._fail([row.generation], error)
                self._leave(row)
        return found

    def _hand_out(self, tokens: list[int], logprobs: list[float]) -> None:
        """Append one sampled token to each row, remove the finished rows, and notify the callers that wait for them.

        tokens, logprobs: one for each row, in the order of `_rows`.
        """
        to_notify: list[Generation] = []
        staying: list[DecodingRow] = []
        if self._forward.caches:
            self._slots.computed()
        for row, token, logprob in zip(self._rows, tokens, logprobs, strict=True):
            generation = row.generation
            # The new token's keys and values are computed in the next step.
            row.cached = len(row.tokens) if self._forward.caches else 0
            row.tokens.append(token)
            generation.token_ids.append(token)
            generation.policy_versions.append(self.policy_version)
            generation.logprobs.append(logprob)
            if generation.constraint is not None:
                generation.constraint.accept(token)
            if token in generation.stop_ids or (generation.ends_text and generation.ends_text(generation.token_ids)):
                generation.finish_reason = "stop"
            elif len(generation.token_ids) >= generation.max_tokens or len(row.tokens) >= self._forward.max_length:
                generation.finish_reason = "length"
            if generation.finish_reason is None:
                staying.append(row)
            else:
                self._slots.release(row.slot, row.tokens[: row.cached])
            if generation.streams or generation.finish_reason is not None:
                to_notify.append(generation)
        self._rows = staying
        _notify_waiting(to_notify)

    def _leave(self, row: DecodingRow) -> None:
        self._rows.remove(row)
        self._slots.release(row.slot)

    def _fail(self, generations: Sequence[Generation], error: Exception) -> None:
        """End requests with an error, and notify their callers."""
        for generation in generations:
            generation.error = error
        _notify_waiting(generations)


def _do(chore: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(chore())
    except BaseException as error:  # noqa: BLE001 -- the future raises it in the caller
        future.set_exception(error)


def _notify_waiting(to_notify: Sequence[Generation]) -> None:
    """Call `notify` of requests, with one wake-up for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Generation]] = {}
    for generation in to_notify:
        by_loop.setdefault(generation.loop, []).append(generation)
    for loop, generations in by_loop.items():
        try:
            loop.call_soon_threadsafe(lambda waiting: [each.notify() for each in waiting], generations)
        except RuntimeError:  # the loop is closed, so no coroutine is waiting any more
            continue
