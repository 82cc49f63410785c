"""Teach a pretrained language model to find the one statement that answers a question, with a task of `reasoning-gym`.

    pip install -e '.[reasoning-gym]'
    python examples/real_model/reasoning.py gemma3 --sft-steps 0

The questions, the answers and the verifier are the package's `needle_haystack`. The algorithm and its options are those
of `train.py`. No held-out question is among those that are trained on.
"""

from __future__ import annotations

from typing import Any

import reasoning_gym
from train import main

from leyden import LLM, llm_rollout

KIND = "needle_haystack"
SIZES = {"min_num_statements": 3, "max_num_statements": 6}

_verify = reasoning_gym.get_score_answer_fn(KIND)


def question_of(task: dict[str, Any]) -> str:
    """Return the question in one line, because a base model ends its answer with the line."""
    return f"Question: {' '.join(task['question'].split())}\nAnswer:"


def questions(seed: int, count: int) -> list[dict[str, Any]]:
    return list(reasoning_gym.create_dataset(KIND, seed=seed, size=count, **SIZES))


SHOTS = "".join(f"{question_of(task)} {task['answer']}\n" for task in questions(seed=77, count=2))


@llm_rollout
async def find(task: dict[str, Any], llm: LLM) -> float:
    """Answer `task["question"]` after two answered ones; the reward is 1 if the verifier accepts the answer, else 0."""
    answer = await llm.openai().completions.create(
        model=llm.model, prompt=SHOTS + question_of(task), stop=["\n"], **llm.sampling_parameters
    )
    return float(_verify(answer=answer.choices[0].text.strip(), entry=task) == 1)


def train_tasks() -> list[dict[str, Any]]:
    """Return 1,000 questions to train on."""
    return questions(seed=0, count=1000)


def held_out_tasks() -> list[dict[str, Any]]:
    """Return 100 other questions."""
    seen = {task["question"] for task in train_tasks()}
    return [task for task in questions(seed=1_000_000, count=150) if task["question"] not in seen][:100]


if __name__ == "__main__":
    main(__doc__, find, train_tasks(), held_out_tasks())
