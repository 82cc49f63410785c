"""Make the demo's starting policy: a tokenizer and a tiny Qwen2 that imitates a sloppy player of the game.

    python -m leyden.demo.make_weights --out leyden/demo/weights --seed 0

The result is an ordinary Hugging Face folder, read by `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer`'s.
The policy knows the form of the game (one digit, end of turn) and listens to the answers as seldom as its teacher does:
it wins 43 % of its games and leaves the rest to reinforcement learning. The same seed, machine and versions of
torch and transformers give the same bytes; other processors round differently, so the files in `weights/` are the
reference.

B games, T tokens, V entries in the vocabulary. This module knows the game, and nothing of Leyden's training. To start
from another task, give `conversation` another game and teacher.
"""

# torch and transformers leave some parameters of their public functions without a type:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import AddedToken, GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from leyden.demo.game import NUMBERS, Game, sloppy_reply

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
PAD_ID, END_ID = 0, 2  # the tokenizer's trainer numbers its special tokens first, in order

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML. The model itself says END, so the next turn's prompt begins with exactly the tokens of the last prompt and
reply, and a whole game is one sequence."""

ATTENTION = 0.25
"""How often the teacher listens; it then wins 45 % of its games."""
MAX_TOKENS = 4
"""The longest reply of a player: a digit, the end of the turn, and room for mistakes."""

MAX_LENGTH = 512
"""Tokens in one sequence; a game of four turns has about 70."""

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class TokenizedGame:
    """A whole game as one sequence of T tokens."""

    ids: list[int]
    """Shape (T,)."""
    by_player: list[bool]
    """Shape (T,): the player said this token; the other tokens are the game's and the template's."""


def conversation(rng: random.Random) -> list[Message]:
    """One game of the sloppy player as chat messages, from the first prompt to the player's last reply."""
    game = Game(rng.randrange(NUMBERS))
    messages: list[Message] = []
    text = game.prompt()
    while not game.done:
        reply = sloppy_reply(game, rng, attention=ATTENTION)
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
        text = game.guess(reply).text
    return messages


def build_tokenizer(texts: Iterable[str]) -> Qwen2Tokenizer:
    """Qwen2's byte-level BPE with merges learnt from `texts`, and a chat template.

    Every digit is a token by itself and every byte has a token, so any text can be said, only at greater length. It has
    to be Qwen2's own class: `AutoTokenizer` makes one of the folder of a Qwen2 model, whatever class the folder names.
    """
    empty = Qwen2Tokenizer(unk_token=PAD, pad_token=PAD, eos_token=END)
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = empty.backend_tokenizer.normalizer
    bpe.pre_tokenizer = empty.backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=320,  # more than the corpus has merges for
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[PAD, START, END],
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    learnt = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=[tuple(pair) for pair in learnt["merges"]],  # pyright: ignore[reportArgumentType]  # annotated as text
        unk_token=PAD,  # never used: bytes cover all text
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        model_max_length=MAX_LENGTH,
        chat_template=CHAT_TEMPLATE,
    )
    # Not as `extra_special_tokens`, which transformers 4 and 5 write to the folder in different shapes.
    tokenizer.add_tokens([AddedToken(START, special=True, normalized=False)])
    return tokenizer


def prompt_ids(tokenizer: Qwen2Tokenizer, messages: Sequence[Message]) -> list[int]:
    """The tokens after which the model replies to `messages`."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(cast(str, text), add_special_tokens=False)


def tokenize(tokenizer: Qwen2Tokenizer, messages: Sequence[Message]) -> TokenizedGame:
    """A finished conversation as one sequence, made turn by turn as an engine would see it.

    Raises ValueError when a turn's prompt does not begin with the tokens of all turns before it.
    """
    ids: list[int] = []
    by_player: list[bool] = []
    for turn in range(0, len(messages), 2):
        prompt = prompt_ids(tokenizer, messages[: turn + 1])
        if prompt[: len(ids)] != ids:
            raise ValueError(f"turn {turn // 2} does not extend the turns before it: {messages[: turn + 1]}")
        reply = tokenizer.encode(messages[turn + 1]["content"] + END, add_special_tokens=False)
        by_player += [False] * (len(prompt) - len(ids)) + [True] * len(reply)
        ids = prompt + reply
    return TokenizedGame(ids, by_player)


def build_model(tokenizer: Qwen2Tokenizer, *, seed: int) -> Qwen2ForCausalLM:
    """A Qwen2 of about 100,000 parameters in float32, with random weights drawn from `seed`."""
    hidden_size = 64
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=3 * hidden_size,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        # The usual 0.02 suits wide models; at this width attention ignores the answers for hundreds of steps.
        initializer_range=0.8 * hidden_size**-0.5,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    # Sample from the whole distribution: what reinforcement learning trains is what is then played.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_TOKENS,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    return model


def fit(
    model: Qwen2ForCausalLM,
    games: Sequence[TokenizedGame],
    *,
    steps: int,
    rng: random.Random,
    batch_games: int = 48,
    learning_rate: float = 3e-3,
) -> float:
    """Teach the model what the player said in `games` (cross-entropy on its tokens alone).

    Returns the last step's loss, in nats.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    # 20 steps of warm-up, then down to a tenth.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * (1.0 - 0.9 * step / steps)
    )
    loss_value = float("nan")
    for _ in range(steps):
        ids_BT, by_player_BT = collate(rng.sample(games, batch_games))
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
        targets_BT, wanted_BT = ids_BT[:, 1:], by_player_BT[:, 1:]
        loss = functional.cross_entropy(logits_BTV[wanted_BT], targets_BT[wanted_BT])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        loss_value = loss.item()
    return loss_value


def collate(games: Sequence[TokenizedGame]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and player's mask, each (B, T), padded on the right, where causal attention never looks."""
    longest = max(len(game.ids) for game in games)
    ids_BT = torch.full((len(games), longest), PAD_ID)
    by_player_BT = torch.zeros(len(games), longest, dtype=torch.bool)
    for row, game in enumerate(games):
        ids_BT[row, : len(game.ids)] = torch.tensor(game.ids)
        by_player_BT[row, : len(game.ids)] = torch.tensor(game.by_player)
    return ids_BT, by_player_BT


def success_rate(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, *, games: int, seed: int) -> float:
    """The share of games that the model wins, sampled at temperature 1; secrets are balanced over all numbers.

    Sets torch's global seed.
    """
    torch.manual_seed(seed)
    played = [Game(index % NUMBERS) for index in range(games)]
    messages: list[list[Message]] = [[{"role": "user", "content": game.prompt()}] for game in played]
    while going := [index for index, game in enumerate(played) if not game.done]:
        prompts = [prompt_ids(tokenizer, messages[index]) for index in going]
        for index, text in zip(going, sample_replies(model, tokenizer, prompts), strict=True):
            feedback = played[index].guess(text)
            messages[index] += [{"role": "assistant", "content": text}, {"role": "user", "content": feedback.text}]
    return sum(game.won for game in played) / games


@torch.inference_mode()
def sample_replies(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, prompts: Sequence[list[int]]) -> list[str]:
    """One sampled reply for each prompt, without its end token."""
    batch = tokenizer.pad({"input_ids": list(prompts)}, padding_side="left", return_tensors="pt")
    output_BT = cast(Any, model).generate(**batch)
    return tokenizer.batch_decode(output_BT[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Make the folder; see `--help`."""
    parser = argparse.ArgumentParser(description="Make the demo's starting policy.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1200, help="optimizer steps of imitation")
    parser.add_argument("--games", type=int, default=4000, help="games of the teacher to imitate")
    # One thousand games would leave a standard error of 0.016.
    parser.add_argument("--rounds", type=int, default=10, help="rounds of 1,000 games in which the result is measured")
    options = parser.parse_args(argv)

    torch.set_num_threads(1)  # two threads add in another order, and are slower at this size
    rng = random.Random(options.seed)
    started = time.process_time()
    conversations = [conversation(rng) for _ in range(options.games)]
    tokenizer = build_tokenizer(_texts(conversations))
    model = build_model(tokenizer, seed=options.seed)
    games = [tokenize(tokenizer, messages) for messages in conversations]
    loss = fit(model, games, steps=options.steps, rng=rng)
    seeds = range(options.rounds)
    rate = sum(success_rate(model, tokenizer, games=1000, seed=seed) for seed in seeds) / len(seeds)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(
        f"{options.out}: {model.num_parameters():,} parameters, vocabulary {len(tokenizer)}, loss {loss:.3f}, "
        f"wins {rate:.3f} of {options.rounds},000 games; {time.process_time() - started:.0f} s CPU"
    )


def _texts(conversations: Iterable[Sequence[Message]]) -> Iterable[str]:
    for messages in conversations:
        for message in messages:
            yield f"{message['role']}\n{message['content']}"


if __name__ == "__main__":
    main()
