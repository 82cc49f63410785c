"""`FixedSteps`: decode steps of a few fixed shapes, which a GPU replays as captured graphs.

The ordinary decoder starts hundreds of kernels from Python for each token, and waits for the token before it starts the
next ones. Here all numbers that change from step to step lie in one buffer, batch and length are rounded up, and
sampled tokens stay on the device, where the next step finds them. A shape runs as it is the first time, is captured the
second time, and is replayed from then on. A step can be started before the tokens of the step before have arrived.

A CPU runs the same steps without capture, for tests. The module knows rows of a cache and the numbers of a request, no
text and no stops.

Shapes: B rows of the batch, I numbers that each is given.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from leyden.engine.forward.layout import LayoutForward
from leyden.engine.forward.model_forward import ModelForward, rounding
from leyden.engine.memory import free_cached_memory
from leyden.engine.sampling import draw_tensors
from leyden.engine.untyped import listed
from leyden.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from leyden.engine.decoder import DecodingRow

logger = logging.getLogger("leyden.engine")
_cuda: Any = torch.cuda
Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Returns a function that does again what the given one does, in the same memory."""
_SMALLEST_LENGTH: Final = 64
_MAX_GRAPHS: Final = 64
_NUMBERS: Final = 7
"""I: id, source, position and cache row of a token, then random number, temperature and top_p. They are float64, which
holds every id exactly, so that one copy takes them to the device."""


class _Shape(NamedTuple):
    """The sizes and the kinds of sampling that one graph is captured for."""

    n_rows: int
    length: int
    """How many positions attention reads."""
    divides: bool
    """Whether a temperature is neither 0 nor 1."""
    is_greedy: bool
    """Whether a temperature is 0."""
    truncates: bool
    """Whether a top_p is below 1."""


@dataclass(slots=True)
class _Flight:
    """A step that was started."""

    places: dict[DecodingRow, tuple[int, int]]
    """The index of each row in the batch, and its number of tokens before the step."""
    results_2B: Tensor
    """The tokens and their log-probabilities, in the host's memory, once `done`."""
    done: Any
    """An event of CUDA; None on a CPU."""

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()


class FixedSteps:
    """Decodes one token for each row, in the cache of `forward`. Only the decoder's thread calls it."""

    def __init__(self, forward: LayoutForward, *, max_rows: int, capture: Capture | None = None) -> None:
        """max_rows: the most rows of a batch.
        capture: None: by graphs of CUDA on a GPU, and no capture on a CPU.
        """
        self._forward = forward
        self._on_gpu = forward.device.type == "cuda"
        self._capture = capture or (self._capture_on_gpu if self._on_gpu else None)
        largest = _rounded_rows(max_rows)
        self._inputs_IB = torch.zeros(_NUMBERS, largest, dtype=torch.float64, device=forward.device)
        self._results_2B = torch.zeros(2, largest, dtype=torch.float64, device=forward.device)
        # Memory of the host for two steps, because at most two are under way.
        self._host = [
            [
                torch.zeros_like(each, device="cpu", pin_memory=self._on_gpu)
                for each in (self._inputs_IB, self._results_2B)
            ]
            for _ in range(2)
        ]
        self._n_started = 0
        self._flight: _Flight | None = None
        """The step that was started ahead."""
        self._addresses: tuple[int, ...] = ()
        """The addresses of the cache's tensors that the captured graphs read and write."""
        self._seen: set[_Shape] = set()
        """Shapes that ran with these addresses, so that a capture allocates and loads nothing that stays."""
        self._graphs: OrderedDict[_Shape, Callable[[], None]] = OrderedDict()
        self._pool: Any = None
        self._failed = False
        self.n_replays = 0
        """How many steps were replays of a graph."""

    def step(self, rows: Sequence[DecodingRow], *, ahead: bool) -> tuple[list[int], list[float]] | None:
        """Return a token for each row, and its log-probability; None if the ordinary decoder has to take the step.

        ahead: start the next step, of the rows that do not end with this one, before this one is waited for.
        """
        if self._failed or any(row.n_new != 1 for row in rows):
            return None
        flight = self._flight
        if flight is not None and any(flight.places.get(row, (0, 0))[1] != len(row.tokens) for row in rows):
            self.discard()
        flight, self._flight = self._flight or self._try_start(rows, None), None
        if flight is None:
            return None
        for row in rows:
            row.uniform()
        if ahead and (staying := [row for row in rows if not self._ends(row)]):
            self._flight = self._try_start(staying, flight)
        flight.wait()
        tokens, logprobs = listed(flight.results_2B[:, [flight.places[row][0] for row in rows]])
        return [int(token) for token in tokens], logprobs

    def discard(self) -> None:
        """Drop a step that was started ahead, because rows, weights or the cache have changed."""
        if self._flight is not None:
            self._flight.wait()
            self._flight = None

    def check(self, n_vocabulary: int) -> None:
        """Raise EngineError unless probabilities are those of the ordinary decoder. The cache is empty afterwards."""
        forward, n = self._forward, min(4, self._forward.max_length - 1)
        rows = [1, 0][-self._inputs_IB.shape[1] :]
        prompts = [[(5 * row + at) % n_vocabulary for at in range(n)] for row in rows]
        shape = _Shape(len(rows), min(_SMALLEST_LENGTH, forward.max_length), False, False, False)
        with torch.inference_mode(), self._on_device():
            forward.decode(rows, prompts, [0] * len(rows))
            for token in range(4):  # as it is, captured, replayed
                token %= n_vocabulary
                self._fill([(token, -1, n, row, 0.3 + 0.1 * token, 1, 1) for row in rows])
                self._run(shape, rows)
                tokens_B, found_B = self._results_2B[:, : len(rows)]
                logits_BV = forward.decode(rows, [[*prompt, token] for prompt in prompts], [n] * len(rows))
                wanted_B = logits_BV.float().log_softmax(-1).gather(-1, tokens_B[:, None].long())[:, 0]
                apart = float((found_B - wanted_B).abs().max())
                if not apart <= 2 * rounding(logits_BV):
                    raise EngineError(
                        f"cuda_graphs=True: log-probabilities differ by {apart:.2g} from those without it; leave it out"
                    )
            self._drop_graphs()
            forward.release()

    def _ends(self, row: DecodingRow) -> bool:
        """Return whether the token under way is certainly the row's last."""
        request = row.generation
        return len(request.token_ids) + 1 >= request.max_tokens or len(row.tokens) + 1 >= self._forward.max_length

    def _on_device(self) -> Any:
        return _cuda.device(self._forward.device) if self._on_gpu else nullcontext()

    def _try_start(self, rows: Sequence[DecodingRow], after: _Flight | None) -> _Flight | None:
        """Start a step; None if that failed, and the ordinary decoder takes over for good.

        after: the step under way whose tokens come before this one's; None: the rows have them.
        """
        try:
            with self._on_device():
                return self._start(rows, after)
        except (RuntimeError, MemoryError) as error:
            logger.warning("decoding goes on without cuda_graphs, because a step failed: %s", error)
            self._failed = True
            self._drop_graphs()
            free_cached_memory()
            return None

    def _start(self, rows: Sequence[DecodingRow], after: _Flight | None) -> _Flight:
        lengths = [len(row.tokens) + (after is not None) for row in rows]
        temperatures, top_ps = [row.generation.temperature for row in rows], [row.generation.top_p for row in rows]
        shape = _Shape(
            _rounded_rows(len(rows)),
            min(_rounded_length(max(lengths)), self._forward.max_length),
            any(temperature not in (0.0, 1.0) for temperature in temperatures),
            0.0 in temperatures,
            any(top_p < 1.0 for top_p in top_ps),
        )
        begun = [(row.tokens[-1], -1) if after is None else (0, after.places[row][0]) for row in rows]
        places = zip(begun, lengths, rows, temperatures, top_ps, strict=True)
        numbers = [(*ids, length - 1, row.slot, row.peek(), *more) for ids, length, row, *more in places]
        numbers += numbers[:1] * (shape.n_rows - len(rows))  # the first row again, which writes the same once more
        results_2B = self._fill(numbers)
        self._run(shape, [row.slot for row in rows])
        results_2B.copy_(self._results_2B, non_blocking=True)
        done: Any = _cuda.Event() if self._on_gpu else None
        if done is not None:
            done.record()
        return _Flight({row: (index, lengths[index]) for index, row in enumerate(rows)}, results_2B, done)

    def _fill(self, numbers: Sequence[Sequence[float]]) -> Tensor:
        """Copy the numbers of a step to the device. Return the memory of the host for its results."""
        inputs_IB, results_2B = self._host[self._n_started % 2]
        self._n_started += 1
        inputs_IB[:, : len(numbers)] = torch.tensor(numbers, dtype=torch.float64).T
        self._inputs_IB.copy_(inputs_IB, non_blocking=True)
        return results_2B

    def _run(self, shape: _Shape, slots: Sequence[int]) -> None:
        """Compute a step, by its graph if it has one."""
        if self._forward.reserve(slots, shape.length) != self._addresses:
            self._drop_graphs()
        if self._capture is None or shape not in self._seen:
            self._compute(shape)
            if (addresses := self._forward.reserve(slots, shape.length)) != self._addresses:
                self._drop_graphs()  # the step has allocated memory that graphs share
            self._addresses = addresses
            self._seen.add(shape)
            return
        if (replay := self._graphs.get(shape)) is None:
            replay = self._graphs[shape] = self._capture(partial(self._compute, shape))
            if len(self._graphs) > _MAX_GRAPHS:
                self._synchronize()
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(shape)
        replay()
        self.n_replays += 1

    def _compute(self, shape: _Shape) -> None:
        """Compute a step from the buffer of inputs to that of results, whose tokens it may begin with."""
        inputs_IB, results_2B = self._inputs_IB[:, : shape.n_rows], self._results_2B[:, : shape.n_rows]
        ids_B, places_B, positions_B, rows_B = inputs_IB[:4].long().unbind()
        uniforms_B, temperatures_B, top_ps_B = inputs_IB[4:].unbind()
        ids_B = torch.where(places_B < 0, ids_B, self._results_2B[0, places_B.clamp_min(0)].long())
        greedy_B = temperatures_B == 0.0
        results_2B[0], results_2B[1] = draw_tensors(
            self._forward.decode_fixed(ids_B, positions_B, rows_B, shape.length),
            temperatures_B.masked_fill(greedy_B, 1.0).float() if shape.divides else None,
            greedy_B if shape.is_greedy else None,
            top_ps_B.float() if shape.truncates else None,
            uniforms_B,
        )

    def _capture_on_gpu(self, work: Callable[[], None]) -> Callable[[], None]:
        graph, self._pool = _cuda.CUDAGraph(), self._pool or _cuda.graph_pool_handle()
        with _cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # the trainer's thread goes on
            work()
        return graph.replay

    def _drop_graphs(self) -> None:
        self._synchronize()
        self._graphs.clear()
        self._seen.clear()

    def _synchronize(self) -> None:
        """Wait until no graph is running, so that one can be dropped."""
        if self._on_gpu and self._graphs:
            _cuda.synchronize(self._forward.device)


def fixed_steps(
    forward: ModelForward, *, max_rows: int, n_vocabulary: int, capture: Capture | None = None
) -> FixedSteps:
    """Return fixed steps, checked (`FixedSteps.check`). Raise ConfigError for a model of another layout."""
    if not isinstance(forward, LayoutForward):
        raise ConfigError(f"cuda_graphs=True needs a model of the Llama layout, and this one runs by {forward.name}")
    fixed = FixedSteps(forward, max_rows=max_rows, capture=capture)
    fixed.check(n_vocabulary)
    return fixed


def _rounded_rows(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _rounded_length(n: int) -> int:
    """Return a length of at least `n`: a multiple of 64, and one of four for each power of two."""
    step = max(_SMALLEST_LENGTH, 1 << max(0, n.bit_length() - 3))
    return -(-n // step) * step
