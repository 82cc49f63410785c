"""Run any causal model of transformers through its own `forward`: with transformers' cache, or without a cache.

`CachedForward` gives the model a transformers `Cache` whose layers keep keys and values in the rows of a
`KeyValueStore`. Rows of different lengths can therefore share a batch, be kept when they are finished, and be
continued. For the model a batch is left-padded: the last token of every row is in the last column, and positions and
the attention mask tell where each row begins. `UncachedForward` runs whole sequences at every step. It is slow, and
right for any model, also for one with a recurrent state.

Shapes: B rows, S columns of new tokens, T columns of all tokens, N new tokens without padding, V vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from leyden.engine.forward.model_forward import KeyValueStore, rounding
from leyden.engine.forward.recompute import recompute_layers
from leyden.errors import ConfigError


class UncachedForward:
    """The model's own `forward` on whole, right-padded sequences."""

    name = "the model's own forward, without a cache"
    caches = False
    shares_prefixes = False

    def __init__(self, model: Any, *, max_rows: int, max_length: int) -> None:
        self.model = model
        self.max_length = max_length
        self.device = next(model.parameters()).device
        parameters = inspect.signature(_innermost(model).forward).parameters
        self._selects = "logits_to_keep" in parameters and self._selection_works()
        """Whether the model computes logits only for the positions that the caller wants."""
        self.headless = self._why_headless()
        self.head: Callable[[Tensor], Tensor] | None = None if self.headless else self.model.get_output_embeddings()

    def decode(self, rows: Sequence[int], sequences: Sequence[Sequence[int]], cached: Sequence[int]) -> Tensor:
        return self.logits_at(sequences, [[len(sequence) - 1] for sequence in sequences])

    def logits_at(self, sequences: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> Tensor:
        inputs, chosen_BS = self._inputs(sequences, positions)
        if self._selects:
            return self.model(**inputs, logits_to_keep=chosen_BS).logits
        return self.model(**inputs).logits[chosen_BS]

    def hidden_at(self, sequences: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> Tensor:
        inputs, chosen_BS = self._inputs(sequences, positions)
        with _head_input(self.model.get_output_embeddings()) as seen:
            self.model(**inputs)
        return seen[-1][chosen_BS]

    def recompute_layers(self) -> None:
        recompute_layers(self.model)

    def copy_row(self, source: int, target: int, length: int) -> None:
        raise NotImplementedError

    def release(self) -> None:
        pass

    def _inputs(
        self, sequences: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]
    ) -> tuple[dict[str, Any], Tensor]:
        """Return the model's inputs, and the mask (B, S) of the chosen positions."""
        ids_BS, attention_mask = _right_padded(sequences, self.device)
        chosen_BS = torch.zeros(ids_BS.shape, dtype=torch.bool)
        for row, at in enumerate(positions):
            chosen_BS[row, list(at)] = True
        inputs = {"input_ids": ids_BS, "attention_mask": attention_mask, "use_cache": False}
        return inputs, chosen_BS.to(self.device)

    def _why_headless(self) -> str:
        """Return why the output head's output is not the model's logits; empty if it is.

        The head's output is replaced by numbers that a cap or a scale would change by far, and that the model must
        return as they are: no rounding can hide a difference, or look like one.
        """
        head = self.model.get_output_embeddings()
        if not isinstance(head, torch.nn.Module):
            return "this model names no output head"
        given: list[Tensor] = []

        def replace(module: Any, arguments: Any, output: Tensor) -> Tensor:
            """Return large numbers of the shape of the head's output. torch calls it after the head."""
            numbers = torch.arange(output.numel(), device=output.device) % 2003 - 1001
            given.append(numbers.to(output.dtype).view(output.shape))
            return given[-1]

        hook = head.register_forward_hook(replace)
        try:
            logits = self._probe_logits()
        except _REFUSALS as error:
            return f"the output head of this model cannot be read: {type(error).__name__}: {error}"
        finally:
            hook.remove()
        if len(given) != 1 or given[0].shape != logits.shape or not torch.equal(given[0].float(), logits.float()):
            return (
                "the logits of this model are not its output head's: it scales or caps them, or changes them otherwise"
            )
        return ""

    def _selection_works(self) -> bool:
        """Return whether the model's option `logits_to_keep` takes a boolean mask of positions, with which its head
        runs only on the chosen tokens.
        """
        mask = torch.tensor([[True, False, True], [False, True, False]], device=self.device)
        try:
            chosen, wanted = self._probe_logits(logits_to_keep=mask), self._probe_logits()[mask]
        except _REFUSALS:
            return False
        return chosen.shape == wanted.shape and float((chosen - wanted).abs().max()) <= rounding(wanted)

    @torch.no_grad()
    def _probe_logits(self, **options: Any) -> Tensor:
        ids = torch.tensor([[0, 1, 2], [2, 1, 0]], device=self.device)
        return self.model(input_ids=ids, use_cache=False, **options).logits


_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)
"""Errors by which a model refuses a way to call it."""


class CachedForward(UncachedForward):
    """The model's own `forward` with transformers' cache protocol over preallocated rows."""

    name = "the model's own forward"
    caches = True

    def __init__(self, model: Any, *, max_rows: int, max_length: int) -> None:
        inner = _innermost(model)
        config = inner.config.get_text_config()
        if getattr(config, "attn_temperature_tuning", False) and max_length >= (scale := int(config.floor_scale)):
            # it takes columns for positions, but rows are padded on the left; a short probe cannot see that
            raise ConfigError(f"attention is scaled by the column from {scale} tokens on, max_length is {max_length}")
        super().__init__(model, max_rows=max_rows, max_length=max_length)
        self._takes_positions = "position_ids" in inspect.signature(inner.forward).parameters
        """Whether the model takes positions; otherwise it finds them by the attention mask."""
        self._store = KeyValueStore(max_rows, max_length)
        self._plan = _Plan(self._store)
        n_layers: int = config.num_hidden_layers
        self._cache = Cache(layers=[_RowLayer(self._plan, index) for index in range(n_layers)])

    def decode(self, rows: Sequence[int], sequences: Sequence[Sequence[int]], cached: Sequence[int]) -> Tensor:
        """Return each row's next-token logits, (B, V). Long prompts and single tokens run apart."""
        # One padded batch of long prompts and single tokens would consist almost only of padding.
        lengths = [len(sequence) - held for sequence, held in zip(sequences, cached, strict=True)]
        single = [index for index, length in enumerate(lengths) if length == 1]
        longer = [index for index, length in enumerate(lengths) if length > 1]
        logits: Tensor | None = None
        for group in (longer, single):
            if not group:
                continue
            part = self._decode([rows[i] for i in group], [sequences[i] for i in group], [cached[i] for i in group])
            if len(group) == len(rows):
                return part
            if logits is None:
                logits = part.new_empty(len(rows), part.shape[-1])
            logits[group] = part
        assert logits is not None
        return logits

    def _decode(self, rows: list[int], sequences: list[Sequence[int]], cached: list[int]) -> Tensor:
        """Run the model on the uncached tokens, padded on the left to one width. Return each row's next-token logits,
        (B, V).

        rows: each sequence's row in the cache.
        cached: how many of its tokens the cache holds.
        """
        self._plan.prepare(rows, [len(sequence) for sequence in sequences], cached, self.device)
        width = self._plan.width
        ids_BS = torch.tensor(
            [[0] * (width - len(s) + c) + list(s[c:]) for s, c in zip(sequences, cached, strict=True)]
        )
        inputs: dict[str, Any] = {
            "input_ids": ids_BS.to(self.device),
            "attention_mask": self._plan.attention_mask_BT,
            "past_key_values": self._cache,
            "use_cache": True,
        }
        if self._takes_positions:
            inputs["position_ids"] = self._plan.positions_BS
        if self._selects:
            inputs["logits_to_keep"] = 1
        return self.model(**inputs).logits[:, -1]

    def copy_row(self, source: int, target: int, length: int) -> None:
        self._store.copy(source, target, length)

    def release(self) -> None:
        self._store.clear()


@contextlib.contextmanager
def _head_input(head: Any) -> Generator[list[Tensor]]:
    """During the block, collect the inputs (B, S, E) of a model's output head, and give the head no token to work on.
    Calls of the model in other threads are not changed.
    """
    seen: list[Tensor] = []
    thread = threading.get_ident()

    def catch(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if threading.get_ident() != thread:
            return None
        seen.append(arguments[0])
        return (arguments[0][:, :0], *arguments[1:])

    hook = head.register_forward_pre_hook(catch)
    try:
        yield seen
    finally:
        hook.remove()


class _Plan:
    """The rows and columns of each token of one batch. Every layer of the cache reads them."""

    def __init__(self, store: KeyValueStore) -> None:
        self.store = store
        self.width = 0
        """S"""
        self.length = 0
        """T"""

    def prepare(self, rows: list[int], lengths: list[int], cached: list[int], device: torch.device) -> None:
        """Plan a batch, and reserve room for it in the store.

        rows: each sequence's row in the store.
        lengths: the number of its tokens.
        cached: how many of them the store holds.
        """
        new = [length - held for length, held in zip(lengths, cached, strict=True)]
        self.width, self.length = max(new), max(lengths)
        self.store.reserve(max(rows), self.length)
        rows_B = torch.tensor(rows)
        length_B1 = torch.tensor(lengths)[:, None]
        # Column t of T holds token t - (T - length) of its row.
        source_BT = torch.arange(self.length) - self.length + length_B1
        target_BS = source_BT[:, self.length - self.width :]
        batch_N, column_N = (target_BS >= torch.tensor(cached)[:, None]).nonzero(as_tuple=True)
        self.batch_N, self.column_N = batch_N.to(device), column_N.to(device)
        self.rows_N = rows_B[batch_N].to(device)
        self.positions_N = target_BS[batch_N, column_N].to(device)
        self.rows_B1 = rows_B[:, None].to(device)
        self.source_BT = source_BT.clamp_min(0).to(device)
        self.positions_BS = target_BS.clamp_min(0).to(device)
        self.attention_mask_BT = (source_BT >= 0).long().to(device)


class _RowLayer(DynamicLayer):
    """One layer's keys and values, in the rows of the shared store."""

    def __init__(self, plan: _Plan, index: int) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType] -- transformers leaves it untyped
        self._plan = plan
        self._index = index
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new keys and values (B, heads, S, dim).

        Return the keys and values of the whole rows (B, heads, T, dim).
        """
        plan = self._plan
        keys = key_states.transpose(1, 2)[plan.batch_N, plan.column_N]
        values = value_states.transpose(1, 2)[plan.batch_N, plan.column_N]
        plan.store.write(self._index, plan.rows_N, plan.positions_N, keys, values)
        all_keys, all_values = plan.store.read_at(self._index, plan.rows_B1, plan.source_BT)
        return all_keys.transpose(1, 2), all_values.transpose(1, 2)

    def get_seq_length(self) -> int:
        return self._plan.length - self._plan.width

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._plan.length, 0


def _innermost(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _right_padded(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, sequences))
    ids = torch.tensor([[*sequence, *([0] * (width - len(sequence)))] for sequence in sequences])
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    mask = (torch.arange(width) < lengths[:, None]).long()
    return ids.to(device), mask.to(device)
