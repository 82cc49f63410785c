"""`TorchLearner`: gradients of a registered loss, and AdamW steps on a model's own parameters.

The module knows sequences of token ids with weights and columns (such as behaviour log-probabilities and advantages),
and not where they came from. It knows nothing of sampling. Dropout is off, so that the trained distribution is the
sampled one.

Shapes: N trained tokens of a micro-batch, V vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import Tensor

from leyden.engine import untyped
from leyden.engine.batches import Targets, TrainedPart, check_sequences, held_tokens, micro_batches
from leyden.engine.forward.model_forward import ModelForward
from leyden.engine.heads import EmbeddingGradient, TokenOutputs, TokenReader, make_value_head
from leyden.engine.memory import free_cached_memory, is_out_of_memory, move_optimizer
from leyden.engine.policy_backend import ForwardBackwardResult, ForwardResult, OptimParams
from leyden.engine.untyped import listed
from leyden.errors import ConfigError, EngineError, PolicyDiverged
from leyden.objectives.losses import Loss, LossTerms, RegisteredLoss, TokenBatch, find_loss
from leyden.types import TrainingSequence

logger = logging.getLogger("leyden.engine")

_VALUE_HEAD: Final = "value_head"
_TIED_HEAD: Final = "tied head"
Owed = frozenset[str] | None
"""The names of the leaves that a micro-batch has not yet added its gradient to; None: all."""


class TorchLearner:
    """Owns the gradient and the optimizer. Not thread-safe: make one training call at a time."""

    def __init__(
        self,
        model: Any,
        forward: ModelForward,
        *,
        max_tokens_per_microbatch: int,
        value_head: bool = False,
        offload: bool = False,
    ) -> None:
        """forward: runs `model`, for sampling and for training.
        max_tokens_per_microbatch: the most tokens that a gradient may hold in memory at once.
        value_head: whether to train a critic, too.
        offload: whether optimizer state waits in the CPU's memory between two steps.
        Raise ConfigError for a model without a parameter to train.
        """
        self._forward = forward
        self.max_tokens = max_tokens_per_microbatch
        """The largest size of a micro-batch in tokens (`held_tokens`). It is lowered when memory runs out."""
        embeddings = model.get_input_embeddings()
        self._n_vocabulary = int(embeddings.weight.shape[0])
        self._device: torch.device = embeddings.weight.device
        self.parameters: dict[str, Tensor] = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        """The trained parameters by name; tied weights appear once."""
        if not self.parameters:
            raise ConfigError(f"{type(model).__name__} has no parameter with requires_grad; there is nothing to train")
        self._value_head = make_value_head(forward, self._device) if value_head else None
        values = {} if self._value_head is None else dict(self._value_head.named_parameters(prefix=_VALUE_HEAD))
        self.parameters |= values
        self.masters: dict[str, Tensor] = {
            name: parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_()
            for name, parameter in self.parameters.items()
        }
        """The tensors that the optimizer updates: the parameters, or float32 copies of narrower ones."""
        policy = [master for name, master in self.masters.items() if name not in values]
        self._groups = [policy, [self.masters[name] for name in values]] if values else [policy]
        """The parameters of the policy, and those of the value head if there is one. Each group has its own learning
        rate and gradient norm."""
        first = OptimParams()
        self.optimizer = torch.optim.AdamW(
            [{"params": group} for group in self._groups],
            lr=first.learning_rate,
            betas=first.betas,
            weight_decay=first.weight_decay,
            fused=True,  # one pass over each parameter instead of ten
        )
        self._embeddings = EmbeddingGradient(embeddings, forward.head)
        self._reader = TokenReader(
            forward, n_vocabulary=self._n_vocabulary, value_head=self._value_head, embeddings=self._embeddings
        )
        self._offload = offload
        self._pinned: dict[tuple[Tensor, str], Tensor] = {}
        """The CPU's memory for offloaded tensors (`move_optimizer`)."""
        self._n_gradients = 0
        """How many calls have added to the gradient since it was cleared."""
        self._lowered = False
        """Whether the warning of too large micro-batches has been logged."""
        self._accumulated: set[str] = set()
        """The names of the leaves that the micro-batch under way has added its gradient to."""
        self._leaves = dict(self.parameters)
        """The leaves of a backward pass by name: the parameters, and a tied head's own."""
        if self._embeddings.head_weight is not None:
            self._leaves[_TIED_HEAD] = self._embeddings.head_weight
        accumulated = self._accumulated  # not self: torch keeps the hooks where no collector finds a cycle through them
        for name, leaf in self._leaves.items():
            untyped.after_gradient(leaf, lambda _, name=name: accumulated.add(name))
        self.offload()

    def forward(
        self, sequences: Sequence[TrainingSequence], temperature: float, *, values: bool = False
    ) -> ForwardResult:
        """Return log-probabilities, entropies and, on request, values of the tokens with a weight, without a gradient.

        temperature: divides the logits.
        values: whether to return the value head's estimates.
        Raise ConfigError, which names the sequence, for invalid sequences.
        """
        check_sequences(sequences, self._n_vocabulary, self._forward.max_length)
        results = [[[0.0] * len(s.token_ids) for s in sequences] for _ in range(3 if values else 2)]
        trained = [TrainedPart.of(s, (), index) for index, s in enumerate(sequences) if any(s.weights)]

        def run(batch: Sequence[TrainedPart], owed: Owed) -> None:
            """Fill `results` at the trained tokens of a micro-batch."""
            targets = Targets.of(batch, (), self._device)
            outputs = self._reader.read(batch, targets.ids_N, temperature, values=values)
            tensors = (outputs.logprobs_N, outputs.entropies_N, outputs.values_N)
            for lists, found_N in zip(results, (each for each in tensors if each is not None), strict=True):
                found = iter(listed(found_N))  # goes on over all sequences of the batch, so zip is not strict
                for s in batch:
                    for position, value in zip(s.positions, found, strict=False):
                        lists[s.index][position + 1] = value  # the logits at a position predict the next token

        with torch.no_grad():
            self._in_micro_batches(trained, run)
        return ForwardResult(*results)

    def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Loss, temperature: float
    ) -> ForwardBackwardResult:
        """Add the gradient of `loss` over the sequences to the parameters, and return the metrics.

        temperature: divides the logits.
        Raise ConfigError, which names the sequence, for invalid sequences, and EngineError for a loss that is not
        finite, or a sequence that does not fit into memory; the gradient is then cleared.
        """
        kind = find_loss(loss)
        columns = kind.columns_of(loss)
        check_sequences(sequences, self._n_vocabulary, self._forward.max_length, kind.name, columns)
        total = _Metrics()
        trained = [TrainedPart.of(s, columns, index) for index, s in enumerate(sequences) if any(s.weights)]

        def run(batch: Sequence[TrainedPart], owed: Owed) -> None:
            """Add the gradient and the metrics of one micro-batch. Raise EngineError, with the gradient cleared, if its
            loss is not finite.

            owed: names of the leaves whose gradient this pass adds; None for all.
            """
            targets = Targets.of(batch, columns, self._device)
            outputs = self._reader.read(
                batch, targets.ids_N, temperature, entropy_gradient=loss.uses_entropies, values=loss.uses_values
            )
            summed, seen = token_loss(outputs, targets, kind, loss)
            seen.n_tokens, seen.n_trained = sum(len(s.inputs) for s in batch), len(targets.ids_N)
            if not math.isfinite(seen.loss):
                self.clear_gradient()
                raise PolicyDiverged(
                    f"the loss of {len(batch)} sequences is {seen.loss}; the gradient has been cleared. Look for "
                    f"weights or columns ({', '.join(columns)}) that are not finite, or a policy that moved too far: "
                    "then lower the learning_rate or max_grad_norm of OptimParams"
                )
            inputs = None if owed is None else [self._leaves[name] for name in owed]
            if inputs is None or inputs:  # [] would mean all parameters to torch
                untyped.backward(summed, inputs)
            total.add(seen)

        self._in_micro_batches(trained, run)
        self._embeddings.merge()
        self._n_gradients += 1
        return ForwardBackwardResult(
            loss=total.loss,
            n_sequences=len(sequences),
            n_tokens=total.n_tokens,
            n_trained=total.n_trained,
            metrics={name: value / total.n_trained for name, value in total.sums.items()} | total.maxima,
        )

    def _in_micro_batches(
        self, trained: Sequence[TrainedPart], run: Callable[[Sequence[TrainedPart], Owed], None]
    ) -> None:
        """Call `run` with each micro-batch. If one does not fit into memory, call it with halves.

        A backward pass that ran out of memory has added its gradient to some parameters already. Its halves are run
        only for the others, so that the sum equals that of the whole up to rounding. Raise EngineError, and clear the
        gradient, if one sequence alone does not fit.
        """
        waiting: deque[tuple[list[TrainedPart], Owed]] = deque((batch, None) for batch in self._micro_batches(trained))
        while waiting:
            batch, owed = waiting.popleft()
            if len(batch) > 1 and self._held_tokens(batch) > self.max_tokens:
                waiting.extendleft((part, owed) for part in reversed(self._micro_batches(batch)))
                continue
            self._accumulated.clear()
            failure = _memory_failure(run, batch, owed)
            if failure is not None:
                free_cached_memory()
                self._lower_max_tokens(batch, failure)
                names = frozenset(self._leaves) if owed is None else owed
                waiting.appendleft((batch, names - self._accumulated))

    def _lower_max_tokens(self, batch: Sequence[TrainedPart], failure: str) -> None:
        """Halve the largest size of a micro-batch, for this one and later ones, with one warning.

        failure: the message of the failed allocation. Raise EngineError, and clear the gradient, if the micro-batch is
        a single sequence.
        """
        longest = max(len(part.inputs) for part in batch)
        if len(batch) == 1:
            self.clear_gradient()
            raise EngineError(
                f"a gradient of one sequence of {longest} tokens does not fit into memory ({failure}), and "
                "max_tokens_per_microbatch cannot divide a sequence; the gradient has been cleared. Use "
                "gradient_checkpointing=True, lora=LoRA(), dtype='bfloat16', or shorter sequences (max_length)"
            )
        held = self._held_tokens(batch)
        before, self.max_tokens = self.max_tokens, max(longest, held // 2)  # a sequence cannot be divided
        if not self._lowered:
            self._lowered = True
            logger.warning(
                "a micro-batch of %d tokens does not fit into memory (%s): it is halved, now and later, with the same "
                "gradient; max_tokens_per_microbatch=%d (it is %d) avoids the attempt",
                held,
                failure,
                self.max_tokens,
                before,
            )

    def _micro_batches(self, trained: Sequence[TrainedPart]) -> list[list[TrainedPart]]:
        return micro_batches(trained, self.max_tokens, shares_prefixes=self._forward.shares_prefixes)

    def _held_tokens(self, batch: Sequence[TrainedPart]) -> int:
        return held_tokens(batch, shares_prefixes=self._forward.shares_prefixes)

    def offload(self) -> None:
        """Move optimizer state to the CPU's memory if the learner has the option `offload`."""
        if self._offload:
            self._move_optimizer(torch.device("cpu"))
            if self._device.type != "cpu":
                free_cached_memory()

    def _move_optimizer(self, device: torch.device) -> None:
        own = [master for name, master in self.masters.items() if master is not self.parameters[name]]
        move_optimizer(self.optimizer, own, device, self._pinned)

    def clip(self, params: OptimParams) -> float:
        """Clip the gradient to `max_grad_norm`, and return the policy's gradient norm before that.

        Raise EngineError if there is no gradient, or if its norm is not finite; it is then cleared.
        """
        if not self._n_gradients:
            raise EngineError("optim_step was called with no gradient; call forward_backward first")
        if self._offload:
            self._move_optimizer(self._device)
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float()
        if all(master.grad is None for master in self.masters.values()):  # no loss depended on a parameter
            return 0.0
        norms = [float(torch.nn.utils.clip_grad_norm_(group, params.max_grad_norm)) for group in self._groups]
        if not all(map(math.isfinite, norms)):
            self.clear_gradient()
            self.offload()
            raise PolicyDiverged(
                f"the gradient's norm is {norms[0]}; it has been cleared and the weights are unchanged. Lower the learning_rate, "
                "or look for extreme advantages or weights"
            )
        return norms[0]

    def apply(self, params: OptimParams) -> None:
        """Take one AdamW step with the clipped gradient, then clear the gradient.

        Call it between two decode steps, because the decoder reads the same weights.
        """
        of_values = params.learning_rate if params.value_learning_rate is None else params.value_learning_rate
        # Without a value head there is one group, so zip is not strict.
        for group, rate in zip(self.optimizer.param_groups, (params.learning_rate, of_values), strict=False):
            group.update(lr=rate, betas=params.betas, weight_decay=params.weight_decay)
        with torch.inference_mode(False):
            untyped.step(self.optimizer)
            self.publish()
        self.clear_gradient()
        self.offload()

    def publish(self) -> None:
        """Copy the float32 master weights into the parameters of a narrower type, which are sampled."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if self.masters[name] is not parameter:
                    parameter.copy_(self.masters[name])

    def clear_gradient(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = None
            self.masters[name].grad = None
        self._embeddings.clear()
        self._n_gradients = 0


@dataclass(slots=True)
class _Metrics:
    """The loss and the metrics of one micro-batch, or of several."""

    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict[str, float])
    """Sums over the trained tokens by name, of which the call reports means."""
    maxima: dict[str, float] = field(default_factory=dict[str, float])
    """Maxima over the trained tokens by name."""
    n_tokens: int = 0
    n_trained: int = 0

    def add(self, other: _Metrics) -> None:
        self.loss += other.loss
        self.sums |= {name: self.sums.get(name, 0.0) + value for name, value in other.sums.items()}
        self.maxima |= {name: max(self.maxima.get(name, value), value) for name, value in other.maxima.items()}
        self.n_tokens += other.n_tokens
        self.n_trained += other.n_trained


def token_loss(outputs: TokenOutputs, targets: Targets, kind: RegisteredLoss, loss: Loss) -> tuple[Tensor, _Metrics]:
    """Return the summed, weighted loss of N tokens, and its metrics."""
    batch = TokenBatch(
        outputs.logprobs_N,
        targets.columns,
        targets.weights_N,
        targets.sequence_N,
        entropies_N=outputs.entropies_N if loss.uses_entropies else None,
        values_N=outputs.values_N,
    )
    terms = kind.function(batch, loss)
    _check_terms(terms, kind.name, len(targets.weights_N), needs_gradient=batch.logprobs_N.requires_grad)
    summed = -(targets.weights_N * terms.objective_N).sum()
    with torch.no_grad():
        sums = {"entropy": outputs.entropies_N.sum(), **terms.sums}
        values = listed(torch.stack([summed, *sums.values(), *terms.maxima.values()]))  # one copy from the device
    n_sums = len(sums)
    return summed, _Metrics(
        values[0],
        dict(zip(sums, values[1 : 1 + n_sums], strict=True)),
        dict(zip(terms.maxima, values[1 + n_sums :], strict=True)),
    )


def _check_terms(terms: LossTerms, loss: str, n: int, *, needs_gradient: bool) -> None:
    """Raise ConfigError, which names the loss and the tensor, for a tensor of the wrong shape. A number in place of N
    objectives would be broadcast, and counted N times.
    """
    if not isinstance(cast(object, terms), LossTerms):
        raise ConfigError(
            f"the loss {loss!r} returned a {type(terms).__name__}; return LossTerms, as policy_terms(...) does"
        )
    if isinstance(cast(object, terms.objective_N), Tensor) and needs_gradient and not terms.objective_N.requires_grad:
        raise ConfigError(
            f"the loss {loss!r} returned objective_N without a gradient; compute it from batch.logprobs_N"
        )
    wanted = {"objective_N": (terms.objective_N, (n,))}
    for kind, metrics in (("sums", terms.sums), ("maxima", terms.maxima)):
        wanted |= {f"{kind}[{name!r}]": (value, ()) for name, value in metrics.items()}
    for name, (value, shape) in wanted.items():
        found: Any = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if found != shape:
            what = (
                "a tensor without a dimension, summed or maximised over the tokens"
                if not shape
                else "one number a token"
            )
            raise ConfigError(
                f"the loss {loss!r} returned {name} of shape {found}; it must have the shape {shape}: {what}"
            )


def _memory_failure(
    run: Callable[[Sequence[TrainedPart], Owed], None], batch: Sequence[TrainedPart], owed: Owed
) -> str | None:
    """Call `run`. Return the message of an allocation that failed; None if none failed.

    The error itself is not returned, because its traceback would keep the failed pass's tensors alive.
    """
    try:
        run(batch, owed)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return None
