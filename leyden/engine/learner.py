"""Gradients of the clipped policy-gradient loss and AdamW steps on a model's own parameters.

It knows sequences of token ids with behaviour log-probabilities, advantages and weights; not where
they came from, and nothing of sampling beyond the chore that swaps the weights. Dropout is off: the
trained distribution is the sampled one.

Shapes: N trained tokens of a micro-batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from leyden.engine.base import ForwardBackwardResult, ForwardResult, OptimParams
from leyden.engine.forward.base import ModelForward
from leyden.errors import ConfigError, EngineError
from leyden.maths.losses import Loss, RegisteredLoss, TokenBatch, find_loss
from leyden.types import TrainingSequence


class TorchLearner:
    """Owns the gradient and the optimizer. Not thread-safe: one training call at a time."""

    def __init__(self, model: Any, forward: ModelForward, *, max_tokens_per_microbatch: int) -> None:
        self._forward = forward
        self._max_tokens = max_tokens_per_microbatch
        self._n_vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.parameters: dict[str, Tensor] = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        """The trained parameters by name; tied weights appear once."""
        if not self.parameters:
            raise ConfigError(f"{type(model).__name__} has no parameter with requires_grad; there is nothing to train")
        self.masters: dict[str, Tensor] = {
            name: parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_()
            for name, parameter in self.parameters.items()
        }
        """The tensors that the optimizer updates: the parameters, or float32 copies of narrower
        ones."""
        first = OptimParams()
        self.optimizer = torch.optim.AdamW(
            list(self.masters.values()),
            lr=first.learning_rate,
            betas=first.betas,
            weight_decay=first.weight_decay,
            fused=True,  # one pass over each parameter instead of ten
        )
        self._n_gradients = 0

    def forward(self, sequences: Sequence[TrainingSequence], temperature: float) -> ForwardResult:
        """See `Learner.forward`."""
        check_sequences(sequences, self._n_vocabulary, self._forward.max_length)
        logprobs, entropies = ([[0.0] * len(s.token_ids) for s in sequences] for _ in range(2))
        trained = [_Trained.of(s, (), index) for index, s in enumerate(sequences) if any(s.weights)]
        with torch.no_grad():
            for batch in micro_batches(trained, self._max_tokens):
                logits_NV = self._forward.logits_at([s.inputs for s in batch], [s.positions for s in batch])
                targets = _Targets.of(batch, (), logits_NV.device)
                logprobs_NV = torch.log_softmax(logits_NV.float() / temperature, dim=-1)
                logprobs_N = _chosen(logprobs_NV, targets.ids_N)
                found = zip(_floats(logprobs_N), _floats(_entropies(logprobs_NV)), strict=True)
                for s in batch:
                    for position, (logprob, entropy) in zip(s.positions, found, strict=False):
                        logprobs[s.index][position + 1], entropies[s.index][position + 1] = logprob, entropy
        return ForwardResult(logprobs, entropies)

    def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Loss, temperature: float
    ) -> ForwardBackwardResult:
        """See `Learner.forward_backward`."""
        kind = find_loss(loss)
        check_sequences(sequences, self._n_vocabulary, self._forward.max_length, kind)
        total = _Totals()
        trained = [_Trained.of(s, kind.columns, index) for index, s in enumerate(sequences) if any(s.weights)]
        for batch in micro_batches(trained, self._max_tokens):
            logits_NV = self._forward.logits_at([s.inputs for s in batch], [s.positions for s in batch])
            targets = _Targets.of(batch, kind.columns, logits_NV.device)
            summed, seen = token_loss(logits_NV, targets, kind, loss, temperature)
            if not math.isfinite(seen.loss):
                self.clear_gradient()
                raise EngineError(
                    f"the loss of {len(batch)} sequences is {seen.loss}; the gradient has been cleared. Look for "
                    f"weights or columns ({', '.join(kind.columns)}) that are not finite, or a policy that moved too far"
                )
            summed.backward()  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped
            total.add(seen, n_tokens=sum(len(s.inputs) for s in batch), n_trained=len(targets.ids_N))
        self._n_gradients += 1
        return total.result(n_sequences=len(sequences))

    def clip(self, params: OptimParams) -> float:
        """Clip the gradient to `max_grad_norm` and return its norm before that.

        Raises EngineError when there is none, or its norm is not finite (it is cleared then).
        """
        if not self._n_gradients:
            raise EngineError("optim_step was called with no gradient; call forward_backward first")
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float()
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        if not gradients:
            return 0.0
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.masters.values()), params.max_grad_norm))
        if not math.isfinite(norm):
            self.clear_gradient()
            raise EngineError(f"the gradient's norm is {norm}; it has been cleared and the weights are as they were")
        return norm

    def apply(self, params: OptimParams) -> None:
        """Take one AdamW step with the clipped gradient, then clear the gradient.

        Call it between decode steps.
        """
        for group in self.optimizer.param_groups:
            group.update(lr=params.learning_rate, betas=params.betas, weight_decay=params.weight_decay)
        with torch.inference_mode(False):
            self.optimizer.step()  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped
            self.publish()
        self.clear_gradient()

    def publish(self) -> None:
        """Copy the masters into parameters of a narrower type."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if self.masters[name] is not parameter:
                    parameter.copy_(self.masters[name])

    def clear_gradient(self) -> None:
        """Forget the gradient."""
        for name, parameter in self.parameters.items():
            parameter.grad = None
            self.masters[name].grad = None
        self._n_gradients = 0


def check_sequences(
    sequences: Sequence[TrainingSequence], n_vocabulary: int, max_length: int, loss: RegisteredLoss | None = None
) -> None:
    """Raise ConfigError, naming the sequence, if no gradient of the loss can be computed from a sequence.

    loss: None for a forward pass alone, which needs no column.
    """
    for index, sequence in enumerate(sequences):
        n = len(sequence.token_ids)
        if loss is not None and (missing := [name for name in loss.columns if name not in sequence.columns]):
            raise ConfigError(
                f"sequence {index} has no column {missing[0]!r}, which the loss {loss.name!r} needs; "
                f"it has {', '.join(sequence.columns) or 'none'}"
            )
        for name, values in {"weights": sequence.weights, **sequence.columns}.items():
            if len(values) != n:
                raise ConfigError(
                    f"sequence {index} has {n} token_ids and {len(values)} {name}; they must have one length"
                )
        if n and not 0 <= min(sequence.token_ids) <= max(sequence.token_ids) < n_vocabulary:
            bad = next(token for token in sequence.token_ids if not 0 <= token < n_vocabulary)
            raise ConfigError(f"sequence {index} has the token id {bad}; the vocabulary has {n_vocabulary} tokens")
        if n > max_length:
            raise ConfigError(f"sequence {index} has {n} tokens; the engine's max_length is {max_length}")
        if n and sequence.weights[0]:
            raise ConfigError(
                f"sequence {index} gives its first token the weight {sequence.weights[0]}; "
                "nothing comes before it that could predict it"
            )
    if not any(any(sequence.weights) for sequence in sequences):
        raise ConfigError(
            f"none of the {len(sequences)} sequences has a token with a weight; there is nothing to train on"
        )


@dataclass(slots=True)
class _Trained:
    """The part of a sequence that a gradient needs: up to its last trained token."""

    inputs: list[int]
    """Every token before the last trained one."""
    positions: list[int]
    """The positions of the tokens before each trained token."""
    targets: list[int]
    weights: list[float]
    columns: list[list[float]]
    """The loss's columns at the trained tokens, in its order."""
    index: int
    """The sequence's place in the call."""

    @classmethod
    def of(cls, sequence: TrainingSequence, columns: Sequence[str], index: int) -> _Trained:
        at = [place for place, weight in enumerate(sequence.weights) if weight]
        return cls(
            inputs=list(sequence.token_ids[: at[-1]]),
            positions=[place - 1 for place in at],
            targets=[sequence.token_ids[place] for place in at],
            weights=[sequence.weights[place] for place in at],
            columns=[[sequence.columns[name][place] for place in at] for name in columns],
            index=index,
        )


def micro_batches(sequences: Sequence[_Trained], max_tokens: int) -> list[list[_Trained]]:
    """Return batches of similar length, shortest first, each of at most `max_tokens` when padded.

    A longer sequence gets a batch of its own. Sequences of one length keep their order, so the
    order of summation follows from the order of the input.
    """
    batches: list[list[_Trained]] = []
    for sequence in sorted(sequences, key=lambda s: len(s.inputs)):
        # Sorted: the newest is the longest, so it sets the padded width.
        if batches and (len(batches[-1]) + 1) * len(sequence.inputs) <= max_tokens:
            batches[-1].append(sequence)
        else:
            batches.append([sequence])
    return batches


@dataclass(slots=True)
class _Targets:
    """The trained tokens of a micro-batch as tensors of shape (N,)."""

    ids_N: Tensor
    weights_N: Tensor
    columns: dict[str, Tensor]
    sequence_N: Tensor

    @classmethod
    def of(cls, batch: Sequence[_Trained], columns: Sequence[str], device: torch.device) -> _Targets:
        def floats(lists: Iterable[list[float]]) -> Tensor:
            return torch.tensor([value for values in lists for value in values], dtype=torch.float32, device=device)

        return cls(
            ids_N=torch.tensor([token for s in batch for token in s.targets], device=device),
            weights_N=floats(s.weights for s in batch),
            columns={name: floats(s.columns[place] for s in batch) for place, name in enumerate(columns)},
            sequence_N=torch.tensor([place for place, s in enumerate(batch) for _ in s.targets], device=device),
        )


@dataclass(frozen=True, slots=True)
class _Seen:
    """Figures of one micro-batch."""

    loss: float
    sums: dict[str, float]
    maxima: dict[str, float]


def token_loss(
    logits_NV: Tensor, targets: _Targets, kind: RegisteredLoss, loss: Loss, temperature: float
) -> tuple[Tensor, _Seen]:
    """Return the summed, weighted loss of N tokens, and its figures."""
    logprobs_NV = torch.log_softmax(logits_NV.float() / temperature, dim=-1)
    logprobs_N = _chosen(logprobs_NV, targets.ids_N)
    terms = kind.function(TokenBatch(logprobs_N, targets.columns, targets.weights_N, targets.sequence_N), loss)
    summed = -(targets.weights_N * terms.objective_N).sum()
    with torch.no_grad():
        sums = {"entropy": _entropies(logprobs_NV).sum(), **terms.sums}
        values = _floats(torch.stack([summed, *sums.values(), *terms.maxima.values()]))  # one copy from the device
    n_sums = len(sums)
    return summed, _Seen(
        values[0],
        dict(zip(sums, values[1 : 1 + n_sums], strict=True)),
        dict(zip(terms.maxima, values[1 + n_sums :], strict=True)),
    )


def _chosen(logprobs_NV: Tensor, ids_N: Tensor) -> Tensor:
    return logprobs_NV.gather(-1, ids_N[:, None])[:, 0]


def _entropies(logprobs_NV: Tensor) -> Tensor:
    return -(logprobs_NV.exp() * logprobs_NV).nan_to_num().sum(-1)


def _floats(values_N: Tensor) -> list[float]:
    return cast(list[float], values_N.tolist())  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped


class _Totals:
    """Figures of several micro-batches."""

    def __init__(self) -> None:
        self._loss = 0.0
        self._sums: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._n_tokens = 0
        self._n_trained = 0

    def add(self, seen: _Seen, *, n_tokens: int, n_trained: int) -> None:
        self._loss += seen.loss
        for name, value in seen.sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        for name, value in seen.maxima.items():
            self._maxima[name] = max(self._maxima.get(name, value), value)
        self._n_tokens += n_tokens
        self._n_trained += n_trained

    def result(self, n_sequences: int) -> ForwardBackwardResult:
        return ForwardBackwardResult(
            loss=self._loss,
            n_sequences=n_sequences,
            n_tokens=self._n_tokens,
            n_trained=self._n_trained,
            metrics={name: value / self._n_trained for name, value in self._sums.items()} | self._maxima,
        )
