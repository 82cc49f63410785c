"""Make a starting policy: a tokenizer and a tiny Qwen2 that imitates a pupil who is often wrong.

    python examples/reasoning_gym/make_weights.py spell_backward

The pupil of `chain_sum` reads a minus as a plus in 6 of 10 cases. The others misunderstand 13 of 20
questions: they spell the word forward, leave the matrix as it is, or keep the numbers that are to
go. So the policy's likeliest answer is often wrong, and a lower temperature does not help: the
policy has to learn.

The pupil's answers are recorded in a store, and `SFT` learns from the store, as for the demo's
weights. It takes some minutes on one core. `weights/chain_sum` is older: 4,000 steps of 64 answers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tasks import KINDS, Kind, Task, held_out_tasks, score, train_tasks
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from benchmarks.make_weights import (
    END,
    build_model,
    build_tokenizer,
    imitate,
    prompt_ids,
    record_rollout,
    sample_replies,
)
from leyden import open_store
from leyden.types import TokenRecord

INATTENTION, MISUNDERSTOOD = 0.6, 0.65
"""How often a minus is read as a plus, and the share of other questions that are misunderstood."""


def add_up(task: Task, rng: random.Random) -> str:
    """Return the pupil's answer to a chain sum."""
    first, *rest = task["metadata"]["expression"].split()
    result = int(first)
    for operator, number in zip(rest[::2], rest[1::2], strict=True):
        minus = operator == "-" and rng.random() >= INATTENTION
        result += -int(number) if minus else int(number)
    return str(result)


def spell(task: Task, rng: random.Random) -> str:
    """Return the pupil's answer to a word that is to be spelt backward."""
    return str(task["metadata"]["word"] if rng.random() < MISUNDERSTOOD else task["answer"])


def rotate(task: Task, rng: random.Random) -> str:
    """Return the pupil's answer to a matrix that is to be rotated."""
    as_it_is = "\n".join(str(task["question"]).strip().splitlines()[-2:])
    return as_it_is if rng.random() < MISUNDERSTOOD else str(task["answer"])


def filter_numbers(task: Task, rng: random.Random) -> str:
    """Return the pupil's answer to a list of numbers, of which some are to be kept or removed."""
    if rng.random() >= MISUNDERSTOOD:
        return str(task["answer"])
    wanted = task["metadata"]["result"]
    return str([number for number in task["metadata"]["original_numbers"] if number not in wanted])


PUPILS: dict[str, Callable[[Task, random.Random], str]] = {
    "chain_sum": add_up,
    "spell_backward": spell,
    "rotate_matrix": rotate,
    "number_filtering": filter_numbers,
}


def make_tokenizer(kind: Kind) -> Qwen2Tokenizer:
    """Return the demo's tokenizer, with merges learnt from questions if words need no spelling."""
    if kind.name == "spell_backward":
        return build_tokenizer([])
    return build_tokenizer(f"user\n{task['question']}\nassistant\n{task['answer']}" for task in train_tasks(kind))


async def train(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, kind: Kind, *, answers: int, steps: int, seed: int
) -> float:
    """Record the pupil's answers and imitate them. Return the last loss, in nats a token."""
    rng = random.Random(seed)
    async with open_store("memory://") as store:
        for task in train_tasks(kind):
            prompt = prompt_ids(tokenizer, [{"role": "user", "content": task["question"]}])
            for _ in range(answers):
                answer = PUPILS[kind.name](task, rng)
                response = tokenizer.encode(answer + END, add_special_tokens=False)
                tokens = TokenRecord(prompt_ids=prompt, response_ids=response, logprobs=[0.0] * len(response))
                await record_rollout(store, task["question"], [tokens], reward=score(task, answer))
        return await imitate(model, tokenizer, store, steps=steps, seed=seed)


def mean_score(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, tasks: Sequence[Task], *, greedy: bool) -> float:
    """Return the mean score of one answer to each task.

    Unless `greedy`, torch's global generator draws.
    """
    model.generation_config.top_k = 1 if greedy else 0  # of so many; 0: of all
    prompts = [prompt_ids(tokenizer, [{"role": "user", "content": task["question"]}]) for task in tasks]
    replies = sample_replies(model, tokenizer, prompts)
    model.generation_config.top_k = 0
    return sum(score(task, reply) for task, reply in zip(tasks, replies, strict=True)) / len(tasks)


def main(argv: Sequence[str] | None = None) -> None:
    """Make the folder; see `--help`."""
    parser = argparse.ArgumentParser(description="Make a starting policy of the reasoning-gym example.")
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("--out", type=Path, help="the folder to write; where the example reads it by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps of imitation")
    parser.add_argument("--answers", type=int, default=8, help="answers of the pupil to each training task")
    options = parser.parse_args(argv)

    torch.set_num_threads(1)  # two threads add in another order, and are slower at this size
    kind, started = KINDS[options.kind], time.process_time()
    out = options.out or kind.weights
    tokenizer = make_tokenizer(kind)
    model = build_model(
        tokenizer, seed=options.seed, max_tokens=kind.max_tokens, layers=3, heads=4, key_value_heads=2
    )  # one more layer than the demo: three numbers are to be added
    loss = asyncio.run(train(model, tokenizer, kind, answers=options.answers, steps=options.steps, seed=options.seed))
    tasks = held_out_tasks(kind, 500)
    sampled, likeliest = (mean_score(model, tokenizer, tasks, greedy=greedy) for greedy in (False, True))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(
        f"{out}: {model.num_parameters():,} parameters, vocabulary {len(tokenizer)}, loss {loss:.3f}; scores {sampled:.3f} on "
        f"held-out tasks ({likeliest:.3f} for the likeliest answer); {time.process_time() - started:.0f} s CPU"
    )


if __name__ == "__main__":
    main()
