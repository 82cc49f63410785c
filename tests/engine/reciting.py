"""A model that says what it was told to say: its next token depends on the position alone.

It is a real GPT-2 whose token embeddings are zero and whose position embeddings spell out a script, so a response can be
chosen for each length of prompt, to the token.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

CONTEXT = 4096
_WIDTH = 64
_CERTAINTY = 4.0
"""Logits of the scripted token are above all others by more than 100."""


class Script:
    """The model, and what it says."""

    def __init__(self, n_vocabulary: int, eos_id: int) -> None:
        config = GPT2Config(
            vocab_size=n_vocabulary,
            n_positions=CONTEXT,
            n_embd=_WIDTH,
            n_layer=1,
            n_head=1,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=eos_id,
            pad_token_id=0,
        )
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            self.model: Any = GPT2LMHeadModel(config).eval()
            self._codes_VW = torch.randint(0, 2, (n_vocabulary, _WIDTH)).mul(2).sub(1).float()
            for parameter in self.model.transformer.h.parameters():
                parameter.zero_()
            self.model.transformer.wte.weight.zero_()
            self.model.transformer.wpe.weight.copy_(self._codes_VW[eos_id].expand(CONTEXT, -1))
            self.model.lm_head.weight.copy_(_CERTAINTY * self._codes_VW)

    def say(self, n_prompt: int, ids: list[int]) -> None:
        """Answer any prompt of `n_prompt` tokens with `ids`."""
        with torch.no_grad():
            places = slice(n_prompt - 1, n_prompt - 1 + len(ids))
            self.model.transformer.wpe.weight[places] = self._codes_VW[ids]
