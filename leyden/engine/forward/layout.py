"""`LayoutForward`: a fast forward pass for the Llama layout (Llama, Mistral, Qwen2, Qwen3, SmolLM), for Phi-3 and
Phi-4-mini, whose projections are fused, and for Gemma 3, whose attention slides over a window in most layers, and which
has norms after attention and MLP. It calls the model's own sub-modules.

It is fast because

- the tokens of all rows lie side by side without padding;
- prefixes that rows share are computed once for a gradient (`prefix_tree`);
- single tokens and new prompts run in one pass;
- the last layer's MLP runs only for the wanted tokens;
- norms are fused, and keys and values are written to the cache without another copy.

Projections are called as modules, so that adapters (LoRA) and quantised layers inside them work. `__init__` refuses
models of another layout; the probe (`choose`) finds wrong results.

Shapes: N tokens of a batch, B rows, S new tokens of a row, T tokens that a row attends to, H heads, K key-value heads,
G = H / K, D head size, U tokens of a prefix tree, E width of a hidden state.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from leyden.engine.context import context_of
from leyden.engine.forward.model_forward import KeyValueStore, hiding_mask, unseen
from leyden.engine.forward.prefix_tree import PrefixTree
from leyden.engine.forward.recompute import gated_mlp, recomputed
from leyden.errors import ConfigError

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "smollm3"})
"""Types of text models, in transformers' configurations. The table in docs/how-to/choose-a-model.md lists them."""
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""The kinds of RoPE whose angles depend on the position alone, not on the sequence's length. The angles of others do
not, either, within the context that `context_of` gives.
"""


class LayoutForward:
    """A `ModelForward` for models with the layout of Llama and Qwen: one flat batch of tokens, without padding."""

    name = "the fast path for the Llama layout"
    caches = True
    shares_prefixes = True

    def __init__(self, model: Any, *, max_rows: int, max_length: int) -> None:
        """Raise ConfigError for a model without this layout."""
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        config = inner.config
        _check_layout(config, max_length)
        self.max_length = max_length
        self._embed, self._final_norm, self._head = inner.model.embed_tokens, inner.model.norm, inner.lm_head
        self.head: Callable[[Tensor], Tensor] | None = inner.lm_head
        self.headless = ""
        self._layers = [_Layer(layer) for layer in inner.model.layers]
        self._run: Callable[..., Tensor] = cast(Any, operator.call)
        """Runs one layer of a forward pass for a gradient, and keeps its activations; `recomputed` does not."""
        self._store = KeyValueStore(max_rows, max_length)
        self.device: torch.device = self._embed.weight.device
        self._windows = {layer.window for layer in self._layers}
        self._tables = {
            layer.kind: _rotary_table(inner.model.rotary_emb, layer.kind, max_length, self._embed.weight)
            for layer in self._layers
        }
        """The cosines and sines of the rotary embedding, by the kind of layer."""

    def decode(self, rows: Sequence[int], sequences: Sequence[Sequence[int]], cached: Sequence[int]) -> Tensor:
        """Return each row's next-token logits, (B, V), from one pass over the uncached tokens of all rows."""
        self._store.reserve(max(rows), max(map(len, sequences)))
        return self._decode(_StepTokens.of(rows, sequences, cached, self._embed.weight, self._windows))

    def decode_fixed(self, ids_B: Tensor, positions_B: Tensor, rows_B: Tensor, length: int) -> Tensor:
        """Return the logits (B, V) after one more token of each row, without a copy from or to the host.

        length: how many positions attention reads, above every position, and reserved.
        """
        masks = _masks(length, positions_B, self._embed.weight, self._windows)
        every = _Single(rows_B, length, {window: mask_BT[:, None, None] for window, mask_BT in masks.items()})
        return self._decode(_StepTokens(ids_B, positions_B, rows_B, len(ids_B), every, None, every, None))

    def reserve(self, rows: Sequence[int], length: int) -> tuple[int, ...]:
        """Make room for `length` tokens in rows of the cache. Return the addresses of its memory, for which a captured
        graph is valid.
        """
        self._store.reserve(max(rows), length)
        return self._store.addresses()

    def _decode(self, batch: _StepTokens) -> Tensor:
        rotary = self._rotary(batch.positions_N)
        x = self._embed(batch.ids_N)
        for index, layer in enumerate(self._layers[:-1]):
            q, k, v = layer.project(x, *rotary[layer.kind])
            self._store.write(index, batch.rows_N, batch.positions_N, k, v)
            x = layer.finish(x, self._attend(index, q, batch))
        index, layer = len(self._layers) - 1, self._layers[-1]
        q, k, v = layer.project(x, *rotary[layer.kind])
        self._store.write(index, batch.rows_N, batch.positions_N, k, v)
        if batch.last_B is not None:
            x, q = x[batch.last_B], q[batch.last_B]
        x = layer.finish(x, self._attend_single(index, q, batch.every))
        return self._head(_norm(self._final_norm, x))

    def logits_at(self, sequences: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> Tensor:
        return self._head(self.hidden_at(sequences, positions))

    def hidden_at(self, sequences: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> Tensor:
        tree = PrefixTree.of(sequences, positions, self._embed.weight)
        rotary = self._rotary(tree.positions_U)
        x = self._embed(tree.ids_U)
        for layer in self._layers[:-1]:
            x = self._run(layer.of_tree, x, *rotary[layer.kind], tree, None)
        last = self._layers[-1]
        return _norm(self._final_norm, self._run(last.of_tree, x, *rotary[last.kind], tree, tree.chosen_N))

    def recompute_layers(self) -> None:
        self._run = recomputed
        for layer in self._layers:
            layer.is_recomputed = True

    def copy_row(self, source: int, target: int, length: int) -> None:
        self._store.copy(source, target, length)

    def release(self) -> None:
        self._store.clear()

    def _rotary(self, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return {kind: (cos[positions], sin[positions]) for kind, (cos, sin) in self._tables.items()}

    def _attend(self, index: int, q_NHD: Tensor, batch: _StepTokens) -> Tensor:
        """Return the attention's output (N, H * D) for a batch: for its single tokens, then for its prompts.

        index: the layer's.
        """
        parts: list[Tensor] = []
        if batch.single is not None:
            parts.append(self._attend_single(index, q_NHD[: batch.n_single], batch.single))
        if batch.prompts is not None:
            parts.append(self._attend_prompts(index, q_NHD[batch.n_single :], batch.prompts))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_single(self, index: int, q_BHD: Tensor, rows: _Single) -> Tensor:
        """Return the attention's output (B, H * D) for one new token of each row."""
        keys, values = self._store.read(index, rows.rows_B, rows.length)
        n, n_heads, size = q_BHD.shape
        # The heads of one group share keys, so they are passed as the queries of one head.
        q_BKGD = q_BHD.view(n, keys.shape[1], -1, size)
        layer = self._layers[index]
        attended = functional.scaled_dot_product_attention(
            q_BKGD, keys, values, attn_mask=rows.masks_B11T[layer.window], scale=layer.scale
        )
        return attended.reshape(n, n_heads * size)

    def _attend_prompts(self, index: int, q_NHD: Tensor, rows: _Prompts) -> Tensor:
        """Return the attention's output (N, H * D) for the N tokens of several prompts.

        Queries are padded to (B, K, G, S, D): K key heads, each shared by G query heads.
        """
        keys, values = self._store.read(index, rows.rows_B, rows.length)
        n_heads, size = q_NHD.shape[1:]
        n_kv = keys.shape[1]
        padded = q_NHD.new_zeros(len(rows.rows_B) * rows.width, n_heads, size)
        padded[rows.places_N] = q_NHD
        q_BKGSD = padded.view(-1, rows.width, n_kv, n_heads // n_kv, size).permute(0, 2, 3, 1, 4)
        layer = self._layers[index]
        mask_B1GST = rows.masks_B1ST[layer.window][:, :, None].expand(-1, -1, n_heads // n_kv, -1, -1)
        attended = functional.scaled_dot_product_attention(
            q_BKGSD.flatten(2, 3), keys, values, attn_mask=mask_B1GST.flatten(2, 3), scale=layer.scale
        )
        attended_BKGSD = attended.reshape(-1, n_kv, n_heads // n_kv, rows.width, size)
        return attended_BKGSD.permute(0, 3, 1, 2, 4).reshape(-1, n_heads * size)[rows.places_N]


class _Layer:
    """One layer of the model: its sub-modules, looked up once, and the parts of its forward pass."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._input_norm, self._mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self._attention_out_norm = self._mlp_out_norm = None
        if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma
            self._attention_out_norm, self._mlp_norm = layer.post_attention_layernorm, layer.pre_feedforward_layernorm
            self._mlp_out_norm = layer.post_feedforward_layernorm
        self.kind: str = getattr(attention, "layer_type", None) or "full_attention"
        self.window: int | None = getattr(attention, "sliding_window", None)
        """The number of tokens, its own included, that a token attends to; None: all before it."""
        self.scale: float = attention.scaling
        """The factor on the products of queries and keys."""
        self._qkv = getattr(attention, "qkv_proj", None)  # Phi: one product instead of three
        if self._qkv is None:
            self._q, self._k, self._v = attention.q_proj, attention.k_proj, attention.v_proj
        self._n_kv: int = attention.config.num_key_value_heads
        self._o = attention.o_proj
        self._is_rotated: bool = getattr(attention, "use_rope", True)
        """SmolLM3 leaves the positions out in every fourth layer."""
        self._q_norm, self._k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self._size: int = attention.head_dim
        self.is_recomputed = False
        """Whether the whole layer is computed again for the gradient."""
        self._gate_up = getattr(mlp, "gate_up_proj", None)  # Phi
        if self._gate_up is None:
            self._gate, self._up, self._act = mlp.gate_proj, mlp.up_proj, mlp.act_fn
        else:
            self._act = mlp.activation_fn
        self._down = mlp.down_proj

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries (..., H, D), rotated keys (..., K, D) and values (..., K, D)."""
        h = _norm(self._input_norm, x)
        if self._qkv is not None:
            qkv = self._qkv(h).unflatten(-1, (-1, self._size))
            qk, v = qkv[..., : -self._n_kv, :], qkv[..., -self._n_kv :, :]
        else:
            q = self._q(h).unflatten(-1, (-1, self._size))
            k = self._k(h).unflatten(-1, (-1, self._size))
            v = self._v(h).unflatten(-1, (-1, self._size))
            if self._q_norm is not None:
                q, k = _norm(self._q_norm, q), _norm(self._k_norm, k)
            if not self._is_rotated:
                return q, k, v
            qk = torch.cat([q, k], dim=-2)
        qk = _rotate(qk, cos, sin)
        return qk[..., : -self._n_kv, :], qk[..., -self._n_kv :, :], v

    def of_tree(self, x_UE: Tensor, cos: Tensor, sin: Tensor, tree: PrefixTree, chosen_N: Tensor | None) -> Tensor:
        """Return the layer's output for all tokens of a tree, (U, E), or for the chosen ones, (N, E)."""
        q, k, v = self.project(x_UE, cos, sin)
        n_keys = k.shape[-2]

        def attend(q: Tensor, kv: Tensor, mask_BQS: Tensor | None) -> Tensor:
            return _attend_rows(q, kv[..., :n_keys, :], kv[..., n_keys:, :], mask_BQS, self.scale)

        attended = tree.in_rows(attend, q, torch.cat([k, v], dim=-2), self.window)
        if chosen_N is not None:
            x_UE, attended = x_UE[chosen_N], attended[chosen_N]
        return self.finish(x_UE, attended)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return x with the projected attention added, then the output of the MLP."""
        attended = self._o(attended)
        x = x + (attended if self._attention_out_norm is None else _norm(self._attention_out_norm, attended))
        h = _norm(self._mlp_norm, x)
        gate, up = (self._gate(h), self._up(h)) if self._gate_up is None else self._gate_up(h).chunk(2, dim=-1)
        if self.is_recomputed:
            out = self._down(self._act(gate) * up)
        else:
            out = gated_mlp(self._act, gate, up, self._down)
        return x + (out if self._mlp_out_norm is None else _norm(self._mlp_out_norm, out))


@dataclass(slots=True)
class _Single:
    """The inputs of attention for B rows with one query each."""

    rows_B: Tensor
    """The rows in the key-value store."""
    length: int
    """The longest row's length, T."""
    masks_B11T: dict[int | None, Tensor]
    """Minus infinity at positions that the query does not see, else 0, by the window of a layer."""


@dataclass(slots=True)
class _Prompts:
    """The inputs of attention for B rows with several queries, which are padded only for attention."""

    rows_B: Tensor
    """The rows in the key-value store."""
    length: int
    """The longest row's length, T."""
    width: int
    """The largest number of queries of a row, S."""
    places_N: Tensor
    """The index of each token in the padded queries, (B * S)."""
    masks_B1ST: dict[int | None, Tensor]
    """Minus infinity at positions that a query does not see, else 0, by the window of a layer."""


@dataclass(slots=True)
class _StepTokens:
    """The tokens of one step: first those of rows with a single token, then those of prompts."""

    ids_N: Tensor
    positions_N: Tensor
    """The position of each token in its sequence."""
    rows_N: Tensor
    """The row of each token in the key-value store."""
    n_single: int
    """The number of rows with a single token."""
    single: _Single | None
    """These rows; None if there are none."""
    prompts: _Prompts | None
    """The other rows; None if there are none."""
    every: _Single
    """The last token of every row, in the order in which the rows were given."""
    last_B: Tensor | None
    """The index of each row's last token among the N; None if these are all N tokens, in order."""

    @classmethod
    def of(
        cls,
        rows: Sequence[int],
        sequences: Sequence[Sequence[int]],
        cached: Sequence[int],
        like: Tensor,
        windows: Collection[int | None],
    ) -> _StepTokens:
        """Return the uncached tokens of all sequences as one flat batch. Sequences with one such token come first, then
        those with several, because each kind has its own call of attention.

        rows: each sequence's row in the key-value store.
        cached: how many of its tokens the store holds.
        like: a tensor with the device, and the dtype of attention masks.
        windows: the windows of the model's layers.
        """
        lengths = [len(sequence) for sequence in sequences]
        singles = [b for b, length in enumerate(lengths) if length - cached[b] == 1]
        prompts = [b for b, length in enumerate(lengths) if length - cached[b] > 1]
        ids = [sequences[b][-1] for b in singles]
        positions = [lengths[b] - 1 for b in singles]
        row_of = [rows[b] for b in singles]
        last = [0] * len(rows)
        for at, b in enumerate(singles):
            last[b] = at
        for b in prompts:
            ids += sequences[b][cached[b] :]
            positions += range(cached[b], lengths[b])
            row_of += [rows[b]] * (lengths[b] - cached[b])
            last[b] = len(ids) - 1
        device = like.device
        single = every = _single(list(rows), lengths, like, windows)
        if prompts:
            single = (
                _single([rows[b] for b in singles], [lengths[b] for b in singles], like, windows) if singles else None
            )
        return cls(
            ids_N=torch.tensor(ids, device=device),
            positions_N=torch.tensor(positions, device=device),
            rows_N=torch.tensor(row_of, device=device),
            n_single=len(singles),
            single=single,
            prompts=_prompts(prompts, rows, lengths, cached, like, windows) if prompts else None,
            every=every,
            last_B=torch.tensor(last, device=device) if prompts else None,
        )


def _single(rows: list[int], lengths: list[int], like: Tensor, windows: Collection[int | None]) -> _Single:
    length = max(lengths)
    masks = _masks(length, torch.tensor(lengths) - 1, like, windows)
    return _Single(
        torch.tensor(rows, device=like.device),
        length,
        {window: mask_BT[:, None, None] for window, mask_BT in masks.items()},
    )


def _masks(length: int, positions: Tensor, like: Tensor, windows: Collection[int | None]) -> dict[int | None, Tensor]:
    """Return for each window the mask (..., T) of queries at the given positions (...) over T = `length` keys."""
    seen = unseen(length, positions, None)
    whole = hiding_mask(seen, like)
    return {
        window: whole if window is None or length <= window else hiding_mask(unseen(length, positions, window), like)
        for window in windows
    }


def _prompts(
    chosen: list[int],
    rows: Sequence[int],
    lengths: list[int],
    cached: Sequence[int],
    like: Tensor,
    windows: Collection[int | None],
) -> _Prompts:
    """Return the inputs of attention for the prompts at the indices `chosen`.

    rows, lengths, cached: for all sequences, the row in the store, the number of tokens, and how many of them have
        their keys and values in the store already.
    """
    new = [lengths[b] - cached[b] for b in chosen]
    width, length = max(new), max(lengths[b] for b in chosen)
    queries = [at * width + column for at, n in enumerate(new) for column in range(n)]
    queries_BS = torch.tensor([cached[b] for b in chosen])[:, None] + torch.arange(width)
    return _Prompts(
        torch.tensor([rows[b] for b in chosen], device=like.device),
        length,
        width,
        torch.tensor(queries, device=like.device),
        {window: mask[:, None] for window, mask in _masks(length, queries_BS, like, windows).items()},
    )


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, mask_BQS: Tensor | None, scale: float) -> Tensor:
    """Return the attention's output (B, Q, H * D) for queries (B, Q, H, D), keys and values (B, S, K, D).

    mask_BQS: minus infinity at positions that a query may not see, else 0; None: queries and keys are the same tokens,
        and each sees itself and those before it.
    Rows are padded on the right, so that no token attends to padding.
    """
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    mask = None if mask_BQS is None else mask_BQS[:, None]
    attended = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return attended.transpose(1, 2).flatten(2)


def _norm(module: Any, x: Tensor) -> Tensor:
    """Return the norm of x, by one kernel if it is a root-mean-square norm."""
    if type(module).__name__.startswith("Gemma"):  # in float32, and the weight is what is added to 1
        normed = functional.rms_norm(x.float(), (x.shape[-1],), 1 + module.weight.float(), module.eps)
        return normed.to(x.dtype)
    if type(module).__name__.endswith("RMSNorm"):
        return functional.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)
    return module(x)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (..., heads, D) with the rotary position embedding in its first R columns. cos and sin have shape
    (..., R), and the first half of sin is negated (`_rotary_table`).
    """
    if (n_rotated := cos.shape[-1]) < x.shape[-1]:
        return torch.cat([_rotate(x[..., :n_rotated], cos, sin), x[..., n_rotated:]], dim=-1)
    return torch.addcmul(x * cos[..., None, :], x.roll(x.shape[-1] // 2, dims=-1), sin[..., None, :])


def _rotary_table(rotary: Any, kind: str, max_length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines, and the sines with their first half negated, (max_length, D), for one kind of layer."""
    with torch.no_grad():
        positions = torch.arange(max_length, device=like.device)[None]
        by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
        cos, sin = rotary(like.new_zeros(1), positions, *([kind] if by_kind else []))
    half = sin.shape[-1] // 2
    return cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)


def _check_layout(config: Any, max_length: int) -> None:
    """Raise ConfigError for a model of another layout, and for one that treats long sequences in another way, which a
    short probe cannot find.
    """
    if config.model_type not in MODEL_TYPES:
        raise ConfigError(f"{config.model_type!r} is none of {', '.join(sorted(MODEL_TYPES))}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, name, None):
            raise ConfigError(f"{name} is {getattr(config, name)!r}")
    window = getattr(config, "sliding_window", None)
    if config.model_type == "gemma3_text":
        if "rope_parameters" not in config.to_dict():
            raise ConfigError("this release of transformers keeps the two rotary embeddings of Gemma 3 in another way")
    elif window is not None and window < max_length:
        raise ConfigError(f"attention slides over {window} tokens, max_length is {max_length}")
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for each in [cast(dict[str, Any], value) for value in rope.values() if isinstance(value, dict)] or [rope]:
        rope_type = each.get("rope_type", "default")
        if rope_type not in _ROPE_TYPES and max_length > context_of(config.to_dict())[0]:
            raise ConfigError(f"rotary embedding of type {rope_type!r} depends on the length of the sequence")
