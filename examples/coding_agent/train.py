"""Teach a small model to correct lines of code: imitate a teacher first, then compare rollouts (GRPO).

    python examples/coding_agent/line_agent.py tasks 'boltons-line-*' 'parse-line-*' > train.jsonl
    python examples/coding_agent/line_agent.py tasks 'semver-line-*' 'toolz-line-*' > held_out.jsonl
    python examples/coding_agent/train.py smollm2 train.jsonl held_out.jsonl --run-dir runs/lines

The teacher is a server that knows the correct lines. The agent runs behind a gateway that passes its calls on to the
teacher and records them with the token ids of the model that will imitate them. The held-out tasks are run before, after
the imitation and at the end. They are of other packages than the tasks to train on, so no line is in both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web
from line_agent import Task, correct, questions_of

import leyden as ly
from leyden.training.runs import open_run

OPTIONS = {"max_tokens": 48, "warmup_steps": 1, "schedule": "linear", "final_fraction": 0.1}


def correct_lines(tasks: Sequence[Task]) -> dict[str, str]:
    """Return the correct line for each prompt of the tasks."""
    answers: dict[str, str] = {}
    for task in tasks:
        folder = Path(task["path"])
        for file, place, prompt in questions_of(task, folder / "environment"):
            solution = folder / "solution" / file.relative_to(folder / "environment")
            answers[prompt] = solution.read_text().splitlines()[place].strip()
    return answers


async def record(model: Path, tasks: Sequence[Task], run_dir: Path) -> None:
    """Run the agent with the teacher as its model, and keep the run."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    answers = correct_lines(tasks)

    async def complete(request: web.Request) -> web.Response:
        prompt = (await request.json())["prompt"]
        text = f" {answers[prompt]}"
        ids = tokenizer.encode(text + "\n", add_special_tokens=False)  # the newline ends the answer
        prompt_ids = tokenizer.encode(prompt)
        choice = {
            "index": 0,
            "text": text,
            "finish_reason": "stop",
            "prompt_token_ids": prompt_ids,
            "token_ids": ids,
            "logprobs": {"tokens": tokenizer.convert_ids_to_tokens(ids), "token_logprobs": [0.0] * len(ids)},
        }
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids)}
        answer = {"id": "teacher", "object": "text_completion", "model": "teacher", "choices": [choice], "usage": usage}
        return web.json_response(answer)

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        gateway = ly.LLMProxy(model_list=[ly.LLM(endpoint=f"http://{host}:{port}/v1", model="teacher")])
        trainer = ly.Trainer(algorithm=ly.Baseline(), llm_proxy=gateway, run_dir=run_dir, concurrency=4)
        await trainer.afit(correct, tasks)
    finally:
        await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", type=Path, help="folder of a causal language model")
    parser.add_argument("tasks", type=Path, help="tasks to train on, as line_agent.py prints them")
    parser.add_argument("held_out", type=Path, help="tasks to measure the model on")
    parser.add_argument(
        "--sft-steps", type=int, default=8, help="optimizer steps that imitate the teacher (default: 8)"
    )
    parser.add_argument("--steps", type=int, default=6, help="steps that compare rollouts (default: 6)")
    parser.add_argument("--seed", type=int, default=0, help="seed of tasks and sampling (default: 0)")
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="the folder of the three runs; what is there goes on"
    )
    given = parser.parse_args()
    tasks, held_out = ([json.loads(line) for line in file.open()] for file in (given.tasks, given.held_out))
    if both := {task["path"] for task in tasks} & {task["path"] for task in held_out}:
        parser.error(f"{len(both)} tasks are to be trained on and held out, such as {min(both)}")
    taught, imitated, compared = (given.run_dir / name for name in ("teacher", "sft", "grpo"))

    def backend(model: Path) -> ly.IsolatedBackend:
        lora = {"rank": 16, "alpha": 32}
        return ly.IsolatedBackend(model, device="cpu", max_length=1024, seed=given.seed, lora=lora)

    if not taught.exists():
        asyncio.run(record(given.model, tasks, taught))
    sft = ly.SFT(
        backend(given.model),
        source=taught,
        min_reward=1.0,
        n_steps=given.sft_steps,
        items_per_step=24,
        optim=ly.OptimParams(learning_rate=1e-3),
        validate_first=True,
        seed=given.seed,
        **OPTIONS,
    )
    ly.Trainer(algorithm=sft, run_dir=imitated).fit(correct, None, held_out, resume=imitated.exists())
    grpo = ly.GRPO(
        backend(imitated / "model"),
        n_steps=given.steps,
        tasks_per_step=8,
        rollouts_per_task=8,
        minibatch_size=32,
        optim=ly.OptimParams(learning_rate=3e-4),
        seed=given.seed,
        **OPTIONS,
    )
    ly.Trainer(algorithm=grpo, run_dir=compared).fit(correct, tasks, held_out, resume=compared.exists())
    before, *_, after_sft = open_run(imitated).metrics("val")
    *_, after = open_run(compared).metrics("val")
    shares = (f"{row.metrics['reward']:.0%}" for row in (before, after_sft, after))
    print("of {} held-out tasks solved: {} before, {} after imitation, {} at the end".format(len(held_out), *shares))


if __name__ == "__main__":
    main()
