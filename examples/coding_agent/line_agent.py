"""A coding agent with a short prompt, for small models: it shows a line with a bug, and the model writes the correct one.

    python examples/coding_agent/line_agent.py tasks 'semver-line-*' > held_out.jsonl
    leyden eval examples/coding_agent/line_agent.py:correct --tasks held_out.jsonl --model policy=gemma3 --max-tokens 48

A base model does not stop by itself, so it is shown examples, and its answer ends with the line. The tests of the task run
in a sandbox on what the agent has changed. It knows the tasks of make_tasks.py whose instruction names the line: the sizes
token, line and lines.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import leyden as ly
from leyden.errors import ProcessFailed

Task = dict[str, str]
"""`path`: the task's folder. `instruction`: what the agent is told."""

BUG = re.compile(r"Line (\d+) of `(.+)`, in `.+`, has a bug(?:, and its wrong part is `(.+)`)?:")
FAILURE = re.compile(r"These tests fail:\n\n```\n(.+:)\n(?:AssertionError: )?(.*)")
CONTEXT = 2
"""How many lines above and below the bug the model is shown."""
SHOTS = (
    (
        "test_area: assert 12 == 7",
        ["def area(width, height):", "    return width + height"],
        1,
        "+",
        "return width * height",
    ),
    (
        "test_first[empty]: assert None == 'x'",
        ["def first(items, default='x'):", "    if not items:", "        return None", "    return items[0]"],
        2,
        "None",
        "return default",
    ),
    (
        "test_is_adult: assert False is True",
        ["def is_adult(age):", "    limit = 18", "    return age > limit"],
        2,
        ">",
        "return age >= limit",
    ),
)
"""Examples: the failure, the code, the index of the wrong line, its wrong part, and the correct line."""


REWARDS: dict[tuple[str, ...], float] = {}
"""The reward of each task and answers that were tested."""


def tasks_of(folder: Path, *names: str) -> list[Task]:
    """Return the tasks of a folder whose names match a pattern, such as `semver-line-*`."""
    paths = sorted({path.resolve() for pattern in names for path in folder.glob(pattern)})
    return [{"path": str(path), "instruction": (path / "instruction.md").read_text()} for path in paths]


@ly.llm_rollout
async def correct(task: Task, llm: ly.LLM) -> float:
    """Replace each line that the instruction names by the model's; the reward is 1 if the tests then pass, else 0."""
    answers: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "app"
        shutil.copytree(Path(task["path"]) / "environment", work)
        for file, place, prompt in questions_of(task, work):
            answer = await llm.openai().completions.create(
                model=llm.model, prompt=prompt, stop=["\n"], **llm.sampling_parameters
            )
            answers.append(answer.choices[0].text.strip())
            lines = file.read_text().splitlines()
            lines[place] = lines[place].replace(lines[place].strip(), answers[-1])
            file.write_text("\n".join(lines) + "\n")
        known = task["path"], *answers
        if known not in REWARDS:  # equal answers are tested once
            REWARDS[known] = await reward_of(Path(task["path"]), work)
    return REWARDS[known]


def questions_of(task: Task, work: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield each wrong line's file, its index there, and the prompt that asks for the correct one."""
    bugs, failure = BUG.findall(task["instruction"]), FAILURE.search(task["instruction"])
    if not bugs or not failure:
        raise ValueError(f"{task['path']}: the instruction names no line; make tasks of the sizes token, line or lines")
    for number, file, part in bugs:
        lines = (work / file).read_text().splitlines()
        yield work / file, int(number) - 1, prompt_of(f"{failure[1]} {failure[2]}", lines, int(number) - 1, part)


def prompt_of(failure: str, lines: list[str], place: int, part: str) -> str:
    """Return the examples and one bug, which ends where the correct line begins. Without `part`, no wrong part is named."""
    examples = [
        question(failure, lines, place, part and shown) + f" {right}\n\n"
        for failure, lines, place, shown, right in SHOTS
    ]
    return "".join(examples) + question(failure, lines, place, part)


def question(failure: str, lines: list[str], place: int, part: str) -> str:
    code = textwrap.dedent("\n".join(lines[max(place - CONTEXT, 0) : place + CONTEXT + 1]))
    named = f"Wrong part: {part}\n" if part else ""
    return f"Test: {failure[:160]}\nCode:\n{code}\nWrong line: {lines[place].strip()}\n{named}Correct line:"


async def reward_of(task: Path, work: Path) -> float:
    """Run a task's tests on an agent's files, in a sandbox that shows them to nothing else."""
    with tempfile.TemporaryDirectory() as logs:
        python = {path: path for path in (sys.base_prefix, sys.prefix) if path != "/usr"}  # every sandbox shows /usr
        box = ly.Sandbox(
            read={**python, "/tests": str(task / "tests")},
            write={"/app": str(work), "/logs/verifier": logs},
        )
        output = await box.run([sys.executable, "-P", "/tests/verify.py"], cwd="/app", timeout_seconds=600)
        reward = Path(logs) / "reward.txt"
        if not reward.exists():
            raise ProcessFailed(
                f"the tests of {task} wrote no reward, the last of their output: {output.stderr[-300:]}"
            )
        return float(reward.read_text())


if __name__ == "__main__":
    for each in tasks_of(Path(sys.argv[1]), *sys.argv[2:]):
        print(json.dumps(each))
