"""Tiny random models with a byte-level tokenizer and a ChatML template, made in well under a second.

`make(path)` writes a Hugging Face folder; `model(...)` and `tokenizer()` give the objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATE_WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Without tools it writes what TEMPLATE does."""
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")


def tokenizer(template: str = TEMPLATE, *, end: str = SPECIAL[2], more: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token for each byte, and the special tokens before them: three, of which `end` ends a turn, and `more`."""
    special = (*SPECIAL[:2], end, *more)
    vocabulary = {token: index for index, token in enumerate((*special, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=SPECIAL[0],
        eos_token=end,
        additional_special_tokens=[SPECIAL[1], *more],
    )
    fast.chat_template = template
    return fast


def model(
    kind: str = "qwen2",
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int = 1,
    seed: int = 0,
    **options: Any,
) -> Any:
    """A random causal LM of any architecture that takes these sizes, its next-token distribution far from uniform."""
    options = {
        "vocab_size": 260,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 3 * hidden,
        "max_position_embeddings": 512,
        "initializer_range": 0.8 * hidden**-0.5,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **options,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options))
    made.generation_config.eos_token_id = 2
    made.generation_config.pad_token_id = 0
    return made.eval()


def make(path: Path, *, template: str = TEMPLATE, **options: Any) -> Path:
    """Write a model (see `model`) and its tokenizer to the folder `path`."""
    model(**options).save_pretrained(path)
    tokenizer(template).save_pretrained(path)
    return path
