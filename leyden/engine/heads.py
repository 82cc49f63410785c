"""Compute the inputs of a loss from hidden states: log-probabilities, entropies and values.

A large vocabulary is processed in chunks of tokens, so that memory does not grow with tokens times
vocabulary: only the logits of one chunk exist at a time, and they are computed again for the gradient. A small
vocabulary takes the direct path, whose operations and their order are fixed. The module knows no losses.

Shapes: N tokens, E width of a hidden state, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from leyden.engine import untyped
from leyden.engine.batches import TrainedPart
from leyden.engine.forward.model_forward import ModelForward
from leyden.engine.forward.products import drop_packed, linear
from leyden.engine.forward.recompute import recomputed
from leyden.errors import ConfigError

logger = logging.getLogger("leyden.engine")

SMALLEST_CHUNKED_VOCABULARY: Final = 4096
"""The smallest vocabulary that is processed in chunks. Below it the logits of a micro-batch are small, and the direct
path is as fast."""
_CHUNK_ELEMENTS: Final = 2**24
"""The number of logits of a chunk on a CPU, 64 MiB in float32: enough for fast matrix products. Two such tensors exist
at a time."""
_CHUNK_ELEMENTS_OF_GPU: Final = 2**27
"""The number of logits of a chunk on an accelerator, 512 MiB in float32. Each chunk reads the head's weights and adds
to their gradient, which takes longer than the products of a small chunk."""

Head = Callable[[Tensor], Tensor]
"""A model's output head, from hidden states to logits."""


class TokenOutputs(NamedTuple):
    """The numbers of N tokens under the current weights. Gradients flow through all of them."""

    logprobs_N: Tensor
    entropies_N: Tensor
    values_N: Tensor | None = None
    """Value estimates; None without a value head."""


class TokenReader:
    """Computes `TokenOutputs` of chosen tokens through a model's forward."""

    def __init__(
        self,
        forward: ModelForward,
        *,
        n_vocabulary: int,
        value_head: torch.nn.Linear | None = None,
        embeddings: EmbeddingGradient | None = None,
    ) -> None:
        """embeddings: of the model that `forward` runs, if they are trained."""
        self._forward = forward
        self._embeddings = embeddings
        self._value_head = value_head
        large = n_vocabulary >= SMALLEST_CHUNKED_VOCABULARY
        self.in_chunks = forward.head is not None and large
        """Whether logits are computed in chunks of tokens."""
        if large and not self.in_chunks:
            logger.warning(
                "the logits of a micro-batch are computed whole, %s for each token, because %s; if memory is short, lower "
                "max_tokens_per_microbatch",
                f"{n_vocabulary:,}",
                forward.headless,
            )

    def read(
        self,
        batch: Sequence[TrainedPart],
        next_ids_N: Tensor,
        temperature: float,
        *,
        entropy_gradient: bool = False,
        values: bool = False,
    ) -> TokenOutputs:
        """Return the outputs at the N positions of the sequences. Causal models see only earlier tokens.

        next_ids_N: the token after each position, whose log-probability is returned.
        temperature: divides the logits.
        entropy_gradient: whether gradients flow through the entropies as well.
        values: apply the value head too.
        """
        head = self._forward.head
        sequences, positions = [part.inputs for part in batch], [part.positions for part in batch]
        if head is None or not (values or self.in_chunks):
            logits_NV = self._forward.logits_at(sequences, positions)
            return TokenOutputs(*_direct(logits_NV, next_ids_N, temperature, entropy_gradient))
        with contextlib.nullcontext() if self._embeddings is None else self._embeddings.sparse():
            hidden_NE = self._forward.hidden_at(sequences, positions)
        weight_VE = None if self._embeddings is None else self._embeddings.head_weight
        size = _CHUNK_ELEMENTS if hidden_NE.device.type == "cpu" else _CHUNK_ELEMENTS_OF_GPU
        outputs = (
            chunked_logprobs(hidden_NE, head, next_ids_N, temperature, entropy_gradient, weight_VE, chunk_elements=size)
            if self.in_chunks
            else _direct(head(hidden_NE), next_ids_N, temperature, entropy_gradient)
        )
        if not values or self._value_head is None:
            return TokenOutputs(*outputs)
        return TokenOutputs(*outputs, self._value_head(hidden_NE.float())[:, 0])


class EmbeddingGradient:
    """Keeps one copy of the gradient of a large vocabulary's embeddings, where autograd would make up to three: of the
    rows that were looked up, of a tied head, and their sum.

    The lookup's gradient is sparse, and the tied head's is that of another leaf, to which `merge` adds the rows.
    """

    def __init__(self, embeddings: Any, head: Head | None) -> None:
        """embeddings, head: the modules of the model."""
        self._module = embeddings
        weight_VE: Tensor = embeddings.weight
        self._is_sparse = (
            weight_VE.requires_grad
            and weight_VE.is_leaf  # and no sum of other weights, as below an adapter
            and weight_VE.dtype == torch.float32  # narrower numbers would be rounded with each row
            and weight_VE.device.type == "cpu"  # CUDA adds rows in no fixed order
            and len(weight_VE) >= SMALLEST_CHUNKED_VOCABULARY
            and isinstance(embeddings, torch.nn.Embedding)
            and not (embeddings.sparse or embeddings.scale_grad_by_freq)
        )
        is_tied = self._is_sparse and type(head) is torch.nn.Linear and cast(torch.nn.Linear, head).weight is weight_VE
        self.head_weight = weight_VE.detach().requires_grad_() if is_tied else None
        """The tied head's leaf, which has the memory of the embeddings; None without one."""

    @contextlib.contextmanager
    def sparse(self) -> Generator[None]:
        """During the block, look tokens up so that their gradient is sparse."""
        if not self._is_sparse:
            yield
            return
        self._module.sparse = True
        try:
            yield
        finally:
            self._module.sparse = False

    def merge(self) -> None:
        """Make the embeddings' gradient whole, after one or several backward passes."""
        if not self._is_sparse:
            return
        weight_VE, leaf_VE = self._module.weight, self.head_weight
        by_rows_VE, by_head_VE = weight_VE.grad, None if leaf_VE is None else leaf_VE.grad
        if by_rows_VE is None or by_head_VE is None:
            by_rows_VE = by_head_VE if by_rows_VE is None else by_rows_VE
            weight_VE.grad = by_rows_VE.to_dense() if by_rows_VE is not None and by_rows_VE.is_sparse else by_rows_VE
        elif by_rows_VE is not by_head_VE:
            weight_VE.grad = by_head_VE.add_(by_rows_VE)
        if leaf_VE is not None:
            leaf_VE.grad = weight_VE.grad  # later passes add to it, too

    def clear(self) -> None:
        """Clear the gradient of the tied head's leaf."""
        if self.head_weight is not None:
            self.head_weight.grad = None


def make_value_head(forward: ModelForward, device: torch.device) -> torch.nn.Linear:
    """Return a linear head, in float32, that estimates the return from a token's hidden state.

    Its weights are 0 at first, so that its first estimates are 0 and it draws no random numbers. Raise ConfigError for
    a model whose hidden states cannot be read apart from its logits.
    """
    if forward.head is None:
        raise ConfigError(
            f"value_head=True needs a model whose logits are its output head's, and {forward.headless}. "
            "Leave value_head out, or take another model as the critic"
        )
    with torch.no_grad():
        width = forward.hidden_at([[0, 0]], [[1]]).shape[-1]
    head = torch.nn.Linear(width, 1, device=device)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    return head


def chunked_logprobs(
    hidden_NE: Tensor,
    head: Head,
    ids_N: Tensor,
    temperature: float,
    entropy_gradient: bool = True,
    weight_VE: Tensor | None = None,
    *,
    chunk_elements: int,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each token of `ids_N` and the entropy of its distribution, both (N,) in float32.

    They equal those of `log_softmax(head(hidden_NE).float() / temperature)` up to rounding, without a tensor of shape
    (N, V): only `chunk_elements` logits are in memory, forwards and backwards.

    entropy_gradient: whether gradients flow through the entropies as well.
    weight_VE: takes the place of a linear head's weight; None: that itself.
    """
    if type(head) is torch.nn.Linear:
        linear = cast(torch.nn.Linear, head)
        weight_VE = linear.weight if weight_VE is None else weight_VE
        if weight_VE.requires_grad and torch.is_grad_enabled():
            drop_packed(linear)  # the optimizer's step changes the weights
        n_tokens = max(1, chunk_elements // weight_VE.shape[0])
        arguments = hidden_NE, weight_VE, linear.bias, ids_N, temperature, entropy_gradient, n_tokens
        return untyped.apply(_ChunkedLinear, *arguments)
    # Adapters or quantised weights inside the head: autograd computes each chunk again.
    with torch.no_grad():
        n_vocabulary = head(hidden_NE[:1]).shape[-1]
    parts = [
        recomputed(_of_chunk, hidden_NE[at], head, ids_N[at], temperature, entropy_gradient)
        for at in _chunks(len(ids_N), max(1, chunk_elements // n_vocabulary))
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _of_chunk(
    hidden_CE: Tensor, head: Head, ids_C: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    return _direct(head(hidden_CE), ids_C, temperature, entropy_gradient)


def _direct(logits_NV: Tensor, ids_N: Tensor, temperature: float, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    logits_NV = logits_NV.float() / temperature
    if logits_NV.shape[-1] < SMALLEST_CHUNKED_VOCABULARY:
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    else:  # log_softmax sums one after the other, and is off by 1e-4 over 262,144 tokens
        logprobs_NV = logits_NV - logits_NV.logsumexp(-1, keepdim=True)
    logprobs_N = logprobs_NV.gather(-1, ids_N[:, None])[:, 0]
    if not entropy_gradient:
        logprobs_NV = logprobs_NV.detach()
    return logprobs_N, -(logprobs_NV.exp() * logprobs_NV).nan_to_num().sum(-1)


def _chunks(n: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


class _ChunkedLinear(torch.autograd.Function):
    """Log-probabilities and entropies after a linear head.

    With z the logits over the temperature, p = softmax(z) and H the entropy:

        d log p_i / d z_j = [i = j] - p_j        d H / d z_j = - p_j (log p_j + H)

    A gradient of the weights, or of entropies, computes the logits again. That of the hidden states alone is the loss's
    gradient by log p_i times a vector that does not depend on the loss, so it is computed while the logits exist.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        weight_VE: Tensor,
        bias_V: Tensor | None,
        ids_N: Tensor,
        temperature: float,
        entropy_gradient: bool,
        size: int,
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of `ids_N` and the entropies, each (N,) in float32.

        entropy_gradient: whether gradients flow through the entropies.
        size: the number of tokens in a chunk. For `backward`, the softmax's log-normaliser and the entropy of each
            token are kept, or d log p / d hidden.
        """
        logprobs_N, normaliser_N, entropies_N = (hidden_NE.new_empty(len(ids_N), dtype=torch.float32) for _ in range(3))
        wants_hidden, *wants_others = ctx.needs_input_grad[:3]
        is_frozen = wants_hidden and not entropy_gradient and not any(wants_others)
        slopes_NE = torch.empty_like(hidden_NE) if is_frozen else None
        for at in _chunks(len(ids_N), size):
            logits_CV = _tempered(hidden_NE[at], weight_VE, bias_V, temperature)
            largest_C1 = logits_CV.amax(-1, keepdim=True)
            logits_CV.sub_(largest_C1)
            terms_CV = logits_CV.exp()
            total_C = terms_CV.sum(-1)
            log_total_C = total_C.log()
            logprobs_N[at] = logits_CV.gather(-1, ids_N[at, None])[:, 0] - log_total_C
            entropies_N[at] = log_total_C - logits_CV.mul_(terms_CV).nan_to_num_().sum(-1) / total_C
            normaliser_N[at] = largest_C1[:, 0] + log_total_C
            if slopes_NE is not None:
                terms_CV.div_(-total_C[:, None])
                terms_CV.scatter_(-1, ids_N[at, None], terms_CV.gather(-1, ids_N[at, None]) + 1)
                slopes_NE[at] = linear(terms_CV.div_(temperature).to(weight_VE.dtype), weight_VE.T)
        if slopes_NE is not None:
            ctx.save_for_backward(slopes_NE)
        else:
            ctx.save_for_backward(hidden_NE, weight_VE, bias_V, ids_N, normaliser_N, entropies_N)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies_N)
        ctx.temperature, ctx.size = temperature, size
        ctx.set_materialize_grads(False)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias, and None for the other inputs of `forward`. If the
        weights have one, logits are computed again, chunk by chunk.
        """
        by_logprob_N, by_entropy_N = gradients
        if len(ctx.saved_tensors) == 1:
            (slopes_NE,) = ctx.saved_tensors
            return (slopes_NE * by_logprob_N[:, None].to(slopes_NE.dtype), *[None] * 6)
        hidden_NE, weight_VE, bias_V, ids_N, normaliser_N, entropies_N = ctx.saved_tensors
        if by_logprob_N is None:
            by_logprob_N = torch.zeros_like(normaliser_N)
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        by_hidden_NE = torch.empty_like(hidden_NE) if wants_hidden else None
        # In float32, whatever the weights' type, because they are sums of many chunks.
        by_weight_VE = torch.zeros_like(weight_VE, dtype=torch.float32) if wants_weight else None
        by_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if wants_bias else None
        for at in _chunks(len(ids_N), ctx.size):
            hidden_CE, scale_C1 = hidden_NE[at], by_logprob_N[at, None]
            logprobs_CV = _tempered(hidden_CE, weight_VE, bias_V, ctx.temperature).sub_(normaliser_N[at, None])
            by_logits_CV = logprobs_CV.exp()
            if by_entropy_N is None:
                by_logits_CV.mul_(-scale_C1)
            else:
                logprobs_CV.add_(entropies_N[at, None]).mul_(by_entropy_N[at, None]).add_(scale_C1)
                by_logits_CV.mul_(logprobs_CV.neg_())
            del logprobs_CV
            by_logits_CV.scatter_(-1, ids_N[at, None], by_logits_CV.gather(-1, ids_N[at, None]) + scale_C1)
            narrow_CV = by_logits_CV.div_(ctx.temperature).to(weight_VE.dtype)
            if by_hidden_NE is not None:
                by_hidden_NE[at] = linear(narrow_CV, weight_VE.T)
            if by_weight_VE is not None:  # added in parts, each at most as large as a chunk's logits
                for part in _chunks(len(weight_VE), max(1, ctx.size * len(weight_VE) // weight_VE.shape[1])):
                    by_weight_VE[part].add_(linear(narrow_CV[:, part].T, hidden_CE.T))
            if by_bias_V is not None:
                by_bias_V.add_(by_logits_CV.sum(0))
        return (
            by_hidden_NE,
            None if by_weight_VE is None else by_weight_VE.to(weight_VE.dtype),
            None if by_bias_V is None else by_bias_V.to(bias_V.dtype),
            *[None] * 4,
        )


def _tempered(hidden_CE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    logits_CV = linear(hidden_CE, weight_VE, bias_V).float()
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)
