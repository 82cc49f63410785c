"""A tiny Qwen2 with random weights, and what it must say: the truth that vLLM's tokens are compared with.

The truth is independent of vLLM and of Leyden: the tokenizer with its chat template for prompts, a forward pass of the same
weights in transformers for log-probabilities. It knows no server. P prompt tokens, R response tokens, V entries in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from benchmarks.make_weights import build_tokenizer

MAX_LENGTH = 8192

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(folder: Path) -> None:
    """Write the model, its tokenizer and a chat template to `folder`: 160,000 parameters in float32, always the same."""
    tokenizer = build_tokenizer(
        ["system\nuser\nassistant\ntool\n", "What is 6 times 7?", "Say it again, in other words."]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.model_max_length = MAX_LENGTH
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=192,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,  # tied, the last token would be the likeliest next one
        initializer_range=0.1,  # the usual 0.02 leaves all tokens nearly equal, and greedy decoding without a clear winner
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Truth:
    """What the model's prompts are, and how likely its answers."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def chat_ids(self, messages: Sequence[Any], tools: Sequence[Any] | None = None) -> list[int]:
        """The prompt of a chat, shape (P,)."""
        text = self.tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=True
        )
        return self.text_ids(text)

    def text_ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def ids_of(self, characters: str) -> list[int]:
        """One token for each character."""
        ids = [self.text_ids(character) for character in characters]
        assert all(len(each) == 1 for each in ids)
        return [each[0] for each in ids]

    @property
    def end_id(self) -> int:
        """What ends a turn."""
        return self.tokenizer.eos_token_id

    @torch.inference_mode()
    def logprobs(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int], *, temperature: float = 1.0
    ) -> list[float]:
        """Of each token of the response, shape (R,)."""
        logits_TV = self.model(input_ids=torch.tensor([[*prompt_ids, *response_ids]])).logits[0]
        logprobs_RV = (logits_TV[len(prompt_ids) - 1 : -1] / temperature).log_softmax(-1)
        return logprobs_RV.gather(1, torch.tensor(response_ids)[:, None])[:, 0].tolist()

    @torch.inference_mode()
    def greedy_ids(self, prompt_ids: Sequence[int], n: int) -> list[int]:
        """The likeliest `n` tokens, one after another; shape (R,), R < n where the turn ends before."""
        ids = list(prompt_ids)
        while len(ids) < len(prompt_ids) + n and (len(ids) == len(prompt_ids) or ids[-1] != self.end_id):
            ids.append(int(self.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt_ids) :]
