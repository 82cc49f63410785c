"""Make the demo's starting policy: a tokenizer and a tiny Qwen2 that imitates a sloppy player.

    python -m benchmarks.make_weights --out FOLDER --seed 0

The player's games are recorded in a store, with the tokens of each reply, and `SFT` learns from the
store. To start from another task, give `conversation` and `record_games` another game and teacher.

The result is an ordinary Hugging Face folder for `AutoModelForCausalLM` and `AutoTokenizer`. The
policy knows the form of the game (one digit, end of turn), and uses the game's replies as seldom as
its teacher. It wins 43 % of its games; reinforcement learning teaches it the rest.

The same seed gives the same bytes only on one machine with one version of torch and transformers.
A folder that is made elsewhere plays as well as the one in `weights/`, but its bytes differ.
"""

# torch and transformers leave some parameters of their public functions without a type:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AddedToken, GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from leyden._lib import ids
from leyden.algorithm import SFT
from leyden.cli.demo.demo_agent import play
from leyden.cli.demo.game import NUMBERS, Game, sloppy_probability, sloppy_reply
from leyden.engine import EmbeddedBackend, OptimParams
from leyden.store import LightningStore, open_store
from leyden.trainer import Trainer
from leyden.training import LogWriter, MetricsRow, Row
from leyden.types import AttemptedRollout, Attributes, Span, TokenRecord, reward_attributes, semconv

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
PAD_ID, END_ID = 0, 2  # the tokenizer's trainer numbers its special tokens first, in order

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML, in which the model itself ends its turn with END.

The next turn's prompt therefore begins with exactly the tokens of the last prompt and reply, and a
whole game is one sequence.
"""

ATTENTION = 0.25
"""The share of turns in which the teacher uses the game's reply. It wins 45 % of its games."""
MAX_TOKENS = 4
"""The longest reply of a player, in tokens: a digit, the end of the turn, and room for mistakes."""

MAX_LENGTH = 512
"""The longest sequence, in tokens. A game of four turns has about 70."""

Message = dict[str, str]


def conversation(secret: int, rng: random.Random) -> list[Message]:
    """Return one game of the sloppy player as chat messages, up to the player's last reply."""
    game = Game(secret)
    messages: list[Message] = []
    text = game.prompt()
    while not game.done:
        reply = sloppy_reply(game, rng, attention=ATTENTION)
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
        text = game.guess(reply).text
    return messages


def build_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int = 320,
    max_length: int = MAX_LENGTH,
    chat_template: str = CHAT_TEMPLATE,
    tags: Sequence[str] = (),
) -> Qwen2Tokenizer:
    """Return Qwen2's byte-level BPE with merges learnt from `texts`, and a chat template.

    Every digit is one token, and every byte has a token, so that any text can be written. The class is Qwen2's own,
    because `AutoTokenizer` uses it for every folder of a Qwen2 model.
    vocab_size: the most tokens; the demo's texts have fewer merges.
    tags: texts, such as `<tool_call>`, that are one token each and are not special.
    """
    empty = Qwen2Tokenizer(unk_token=PAD, pad_token=PAD, eos_token=END)  # for its normalizer and splitting
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = empty.backend_tokenizer.normalizer
    bpe.pre_tokenizer = empty.backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[PAD, START, END],
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    learnt = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=cast(Any, [tuple(pair) for pair in learnt["merges"]]),  # transformers annotates them as text
        unk_token=PAD,  # never used: bytes cover all text
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        model_max_length=max_length,
        chat_template=chat_template,
    )
    # Not as `extra_special_tokens`, which transformers 4 and 5 write to the folder in two shapes.
    tokenizer.add_tokens([AddedToken(START, special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return tokenizer


def prompt_ids(tokenizer: Qwen2Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Return the token ids of the prompt for the model's reply to `messages`."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(cast(str, text), add_special_tokens=False)


def build_model(
    tokenizer: Qwen2Tokenizer,
    *,
    seed: int,
    max_tokens: int = MAX_TOKENS,
    layers: int = 2,
    heads: int = 2,
    key_value_heads: int = 1,
) -> Qwen2ForCausalLM:
    """Return a small float32 Qwen2 with random weights drawn from `seed`. The demo's has about 100,000 parameters.

    max_tokens: the longest reply that it samples.
    """
    hidden_size = 64
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        intermediate_size=3 * hidden_size,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        # The usual 0.02 suits wide models. At this width, attention would ignore the game's
        # replies for hundreds of steps.
        initializer_range=0.8 * hidden_size**-0.5,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    # Sample from the whole distribution, because that is what reinforcement learning trains.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_tokens,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    return model


async def record_games(
    store: LightningStore, tokenizer: Qwen2Tokenizer, games: Iterable[tuple[int, Sequence[Message]]]
) -> None:
    """Record games of the teacher as rollouts, with the tokens of each reply and a reward.

    games: the secret and the conversation of each game. A game that was won has the reward 1.0.
    """
    for secret, messages in games:
        game = Game(secret)
        calls: list[TokenRecord] = []
        for turn in range(0, len(messages), 2):
            reply = messages[turn + 1]["content"]
            response = tokenizer.encode(reply + END, add_special_tokens=False)
            logprob = math.log(sloppy_probability(game, reply, attention=ATTENTION))
            calls.append(
                TokenRecord(
                    prompt_ids=prompt_ids(tokenizer, messages[: turn + 1]),
                    response_ids=response,
                    logprobs=[logprob] + [0.0] * (len(response) - 1),  # the teacher always ends its turn
                )
            )
            game.guess(reply)
        await record_rollout(store, {"secret": secret}, calls, reward=float(game.won))


async def record_rollout(store: LightningStore, task: Any, calls: Sequence[TokenRecord], *, reward: float) -> None:
    """Record a finished rollout: its task, its reward, and the tokens of each model call."""
    rollout = await store.start_rollout(task, mode="train")
    spans = [_span(rollout, semconv.MODEL_CALL, tokens=tokens) for tokens in calls]
    spans.append(_span(rollout, semconv.REWARD, reward_attributes({semconv.PRIMARY_REWARD: reward})))
    await store.add_many_spans(spans)
    await store.update_attempt(rollout.rollout_id, rollout.attempt.attempt_id, status="succeeded")


async def imitate(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, store: LightningStore, *, steps: int, seed: int
) -> float:
    """Train the model on all replies that the store has, of games won and lost.

    Return the last step's loss, in nats per token.
    """
    losses = _Losses()
    backend = EmbeddedBackend(
        model, tokenizer=tokenizer, device="cpu", threads=1, max_length=MAX_LENGTH, max_tokens_per_microbatch=4096
    )
    algorithm = SFT(
        backend,
        source=store,
        select="all",
        items_per_step=48,
        weighting="token",
        n_steps=steps,
        warmup_steps=min(20, steps - 1),
        schedule="linear",
        final_fraction=0.1,
        optim=OptimParams(learning_rate=3e-3, betas=(0.9, 0.95)),
        seed=seed,
        writers=[losses],
    )
    await Trainer(algorithm=algorithm, store="memory", progress=False).afit(play, None)
    return losses.newest


def _span(
    rollout: AttemptedRollout, name: str, attributes: Attributes | None = None, tokens: TokenRecord | None = None
) -> Span:
    """Return a span of a rollout's attempt. The store numbers it."""
    return Span(
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt.attempt_id,
        sequence_id=0,
        trace_id=ids.trace_id(),
        span_id=ids.span_id(),
        name=name,
        attributes=attributes or {},
        tokens=tokens,
    )


class _Losses(LogWriter):
    """Keeps the loss of the newest step."""

    newest = math.nan

    def write(self, row: Row) -> None:
        if isinstance(row, MetricsRow):
            self.newest = float(row.metrics.get("loss", self.newest))


def success_rate(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, *, games: int, seed: int) -> float:
    """Return the share of games that the model wins, sampled at temperature 1.

    The secrets are all numbers in turn. The seed is set as torch's global one.
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
    """Return one sampled reply for each prompt, without its end token."""
    batch = tokenizer.pad({"input_ids": list(prompts)}, padding_side="left", return_tensors="pt")
    output_BT = cast(Any, model).generate(**batch)
    return tokenizer.batch_decode(output_BT[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Make the folder that the command line names. argv: the arguments; None: those
    of this process.
    """
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
    games: list[tuple[int, list[Message]]] = []
    for _ in range(options.games):
        secret = rng.randrange(NUMBERS)
        games.append((secret, conversation(secret, rng)))
    tokenizer = build_tokenizer(_texts(messages for _, messages in games))
    model = build_model(tokenizer, seed=options.seed)
    loss = asyncio.run(_train(model, tokenizer, games, steps=options.steps, seed=options.seed))
    seeds = range(options.rounds)
    rate = sum(success_rate(model, tokenizer, games=1000, seed=seed) for seed in seeds) / len(seeds)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(
        f"{options.out}: {model.num_parameters():,} parameters, vocabulary {len(tokenizer)}, loss {loss:.3f}, "
        f"wins {rate:.3f} of {options.rounds},000 games; {time.process_time() - started:.0f} s CPU"
    )


async def _train(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    games: Iterable[tuple[int, Sequence[Message]]],
    *,
    steps: int,
    seed: int,
) -> float:
    async with open_store("memory://") as store:
        await record_games(store, tokenizer, games)
        return await imitate(model, tokenizer, store, steps=steps, seed=seed)


def _texts(conversations: Iterable[Sequence[Message]]) -> Iterable[str]:
    for messages in conversations:
        for message in messages:
            yield f"{message['role']}\n{message['content']}"


if __name__ == "__main__":
    main()
