"""Make the starting policy: a tokenizer and a tiny Qwen2 that imitates a pupil who seldom minds the minus sign.

    python examples/reasoning_gym/make_weights.py

The pupil reads each minus as a plus in 6 of 10 cases and computes well otherwise. So the policy's likeliest answer to most questions is
wrong: taking fewer chances would not make it better, it has to learn. Takes about five minutes on one core.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tasks import Task, held_out_tasks, score, train_tasks
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from leyden.demo.make_weights import TokenizedGame, build_tokenizer, fit, prompt_ids, sample_replies, tokenize
from leyden.demo.make_weights import build_model as demo_model

WEIGHTS = Path(__file__).parent / "weights"
INATTENTION = 0.6
"""How often the pupil reads a minus as a plus."""
MAX_TOKENS = 5
"""The longest answer: a sign, two digits, the end, and room for mistakes."""

Conversation = list[dict[str, str]]


def sloppy_answer(task: Task, rng: random.Random) -> str:
    """The pupil's answer to a chain sum."""
    first, *rest = task["metadata"]["expression"].split()
    result = int(first)
    for operator, number in zip(rest[::2], rest[1::2], strict=True):
        minus = operator == "-" and rng.random() >= INATTENTION
        result += -int(number) if minus else int(number)
    return str(result)


def conversation(task: Task, rng: random.Random) -> Conversation:
    """A question of the package, and the pupil's answer."""
    return [{"role": "user", "content": task["question"]}, {"role": "assistant", "content": sloppy_answer(task, rng)}]


def build_model(tokenizer: Qwen2Tokenizer, *, seed: int) -> Qwen2ForCausalLM:
    """A Qwen2 of about 170,000 parameters in float32: the demo's, one layer deeper, since three numbers are to be added."""
    settings = demo_model(tokenizer, seed=seed)
    config = Qwen2Config.from_dict(
        {
            **settings.config.to_dict(),
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_types": None,
        }
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    model.generation_config = settings.generation_config
    model.generation_config.max_new_tokens = MAX_TOKENS
    return model


def mean_score(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, tasks: Sequence[Task], *, greedy: bool) -> float:
    """What the verifier says of one answer to each task. Uses torch's global generator unless `greedy`."""
    model.generation_config.top_k = 1 if greedy else 0  # of so many; 0: of all
    replies = sample_replies(
        model, tokenizer, [prompt_ids(tokenizer, [{"role": "user", "content": task["question"]}]) for task in tasks]
    )
    model.generation_config.top_k = 0
    return sum(score(task, reply) for task, reply in zip(tasks, replies, strict=True)) / len(tasks)


def main(argv: Sequence[str] | None = None) -> None:
    """Make the folder; see `--help`."""
    parser = argparse.ArgumentParser(description="Make the starting policy of the reasoning-gym example.")
    parser.add_argument("--out", type=Path, default=WEIGHTS, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps of imitation")
    parser.add_argument("--answers", type=int, default=64, help="answers of the pupil to each training task")
    options = parser.parse_args(argv)

    torch.set_num_threads(1)  # two threads add in another order, and are slower at this size
    rng = random.Random(options.seed)
    started = time.process_time()
    conversations = [conversation(task, rng) for task in train_tasks() for _ in range(options.answers)]
    tokenizer = build_tokenizer(
        f"{message['role']}\n{message['content']}" for pair in conversations[:: options.answers] for message in pair
    )
    model = build_model(tokenizer, seed=options.seed)
    examples = _tokenized(tokenizer, conversations)
    loss = fit(model, examples, steps=options.steps, rng=rng, batch_games=64)
    tasks = held_out_tasks(500)
    sampled, likeliest = (mean_score(model, tokenizer, tasks, greedy=greedy) for greedy in (False, True))
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(
        f"{options.out}: {model.num_parameters():,} parameters, vocabulary {len(tokenizer)}, loss {loss:.3f}; scores {sampled:.3f} on "
        f"held-out tasks ({likeliest:.3f} for the likeliest answer); {time.process_time() - started:.0f} s CPU"
    )


def _tokenized(tokenizer: Qwen2Tokenizer, conversations: Sequence[Conversation]) -> list[TokenizedGame]:
    known: dict[str, TokenizedGame] = {}  # most of them occur many times
    for pair in conversations:
        if str(pair) not in known:
            known[str(pair)] = tokenize(tokenizer, pair)
    return [known[str(pair)] for pair in conversations]


if __name__ == "__main__":
    main()
