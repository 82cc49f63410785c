"""Gradients of the clipped policy-gradient loss and AdamW steps on a model's own parameters.

It knows sequences of token ids with behaviour log-probabilities, advantages and weights; not where
they came from, and nothing of sampling beyond the chore that swaps the weights. Dropout is off: the
trained distribution is the sampled one.

Shapes: N trained tokens of a micro-batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from leyden.engine.base import ForwardBackwardResult, OptimParams, PolicyLoss
from leyden.engine.forward.base import ModelForward
from leyden.errors import ConfigError, EngineError
from leyden.maths.losses import LOSSES
from leyden.types import TrainingSequence


class Learner:
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

    def forward_backward(self, sequences: Sequence[TrainingSequence], loss: PolicyLoss) -> ForwardBackwardResult:
        """See `PolicyBackend.forward_backward`."""
        check_sequences(sequences, self._n_vocabulary, self._forward.max_length)
        total = _Totals()
        for batch in micro_batches([_Trained.of(s) for s in sequences if any(s.weights)], self._max_tokens):
            logits_NV = self._forward.logits_at([s.inputs for s in batch], [s.positions for s in batch])
            targets = _Targets.of(batch, logits_NV.device)
            summed, seen = policy_loss(logits_NV, targets, loss)
            if not math.isfinite(seen["loss"]):
                self.clear_gradient()
                raise EngineError(
                    f"the loss of {len(batch)} sequences is {seen['loss']}; the gradient has been cleared. Look for "
                    "log-probabilities, advantages or weights that are not finite, or a policy that moved too far"
                )
            summed.backward()  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped
            total.add(
                seen, n_sequences=len(batch), n_tokens=sum(len(s.inputs) for s in batch), n_trained=len(targets.ids_N)
            )
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


def check_sequences(sequences: Sequence[TrainingSequence], n_vocabulary: int, max_length: int) -> None:
    """Raise ConfigError, which names the sequence, if no gradient can be computed from a
    sequence.
    """
    for index, sequence in enumerate(sequences):
        n = len(sequence.token_ids)
        lengths = (n, len(sequence.logprobs), len(sequence.advantages), len(sequence.weights))
        if len(set(lengths)) > 1:
            raise ConfigError(
                f"sequence {index} has {lengths[0]} token_ids, {lengths[1]} logprobs, {lengths[2]} advantages and "
                f"{lengths[3]} weights; the four lists must have one length"
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
    logprobs: list[float]
    advantages: list[float]
    weights: list[float]

    @classmethod
    def of(cls, sequence: TrainingSequence) -> _Trained:
        at = [index for index, weight in enumerate(sequence.weights) if weight]
        return cls(
            inputs=list(sequence.token_ids[: at[-1]]),
            positions=[index - 1 for index in at],
            targets=[sequence.token_ids[index] for index in at],
            logprobs=[sequence.logprobs[index] for index in at],
            advantages=[sequence.advantages[index] for index in at],
            weights=[sequence.weights[index] for index in at],
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
    ids_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor

    @classmethod
    def of(cls, batch: Sequence[_Trained], device: torch.device) -> _Targets:
        def floats(read: Callable[[_Trained], list[float]]) -> Tensor:
            return torch.tensor([value for s in batch for value in read(s)], dtype=torch.float32, device=device)

        return cls(
            ids_N=torch.tensor([token for s in batch for token in s.targets], device=device),
            behaviour_N=floats(lambda s: s.logprobs),
            advantages_N=floats(lambda s: s.advantages),
            weights_N=floats(lambda s: s.weights),
        )


def policy_loss(logits_NV: Tensor, targets: _Targets, loss: PolicyLoss) -> tuple[Tensor, dict[str, float]]:
    """Return the summed, weighted loss, and metrics summed over the N tokens.

    `PolicyLoss` has the formula.
    """
    logprobs_NV = torch.log_softmax(logits_NV.float() / loss.temperature, dim=-1)
    logprobs_N = logprobs_NV.gather(-1, targets.ids_N[:, None])[:, 0]
    terms = LOSSES[loss.name](logprobs_N, targets.behaviour_N, targets.advantages_N, loss)
    summed = -(targets.weights_N * terms.objective_N).sum()
    with torch.no_grad():
        figures = torch.stack(
            [
                summed,
                terms.n_clipped(),
                terms.kl_sum(),
                -(logprobs_NV.exp() * logprobs_NV).nan_to_num().sum(),
                terms.log_ratio_N.abs().max(),
            ]
        )
    names = ("loss", "n_clipped", "kl", "entropy", "max_difference")
    values = cast(list[float], figures.tolist())  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped
    return summed, dict(zip(names, values, strict=True))


class _Totals:
    """Figures of several micro-batches."""

    def __init__(self) -> None:
        self._sums = {"loss": 0.0, "n_clipped": 0.0, "kl": 0.0, "entropy": 0.0}
        self._max_difference = 0.0
        self._n_tokens = 0
        self._n_trained = 0

    def add(self, seen: dict[str, float], *, n_sequences: int, n_tokens: int, n_trained: int) -> None:
        for name in self._sums:
            self._sums[name] += seen[name]
        self._max_difference = max(self._max_difference, seen["max_difference"])
        self._n_tokens += n_tokens
        self._n_trained += n_trained

    def result(self, n_sequences: int) -> ForwardBackwardResult:
        return ForwardBackwardResult(
            loss=self._sums["loss"],
            n_sequences=n_sequences,
            n_tokens=self._n_tokens,
            n_trained=self._n_trained,
            clip_fraction=self._sums["n_clipped"] / self._n_trained,
            kl=self._sums["kl"] / self._n_trained,
            entropy=self._sums["entropy"] / self._n_trained,
            max_logprob_difference=self._max_difference,
        )
