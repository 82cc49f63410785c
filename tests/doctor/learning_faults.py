"""Faults of learning and data."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import leyden as ly
from leyden.errors import NoTrainingData
from leyden.testing import FakeUpstream
from tests.algorithm.asking import ask, client
from tests.doctor.faults import Case
from tests.doctor.policy import train
from tests.engine import tiny


def ignores_the_answer(directory: Path) -> None:
    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        await ask(llm)
        return 0.0

    train(directory, agent)


def solved_at_once(directory: Path) -> None:
    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        await ask(llm)
        return 1.0

    train(directory, agent)


def returns_nothing(directory: Path) -> None:
    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> None:
        await ask(llm)

    with contextlib.suppress(NoTrainingData):
        train(directory, agent)


def sometimes_no_reward(directory: Path) -> None:
    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float | None:
        return 1.0 if (await ask(llm)).strip() == "4" else None

    with contextlib.suppress(NoTrainingData):
        train(directory, agent)


async def elsewhere(task: int, llm: ly.LLM) -> float:
    """Ask a server past the gateway."""
    async with FakeUpstream() as upstream:
        answer = (
            await client()
            .with_options(base_url=upstream.endpoint)
            .chat.completions.create(model="fake", messages=[{"role": "user", "content": f"task {task}"}])
        )
    return float(len(answer.choices[0].message.content or "") % 2)


def bypasses_the_gateway(directory: Path) -> None:
    with contextlib.suppress(NoTrainingData):
        train(directory, ly.llm_rollout(elsewhere))


def asks_with(**options: Any) -> Any:
    def make(directory: Path) -> None:
        @ly.llm_rollout
        async def agent(task: int, llm: ly.LLM) -> float:
            return float((await ask(llm, **options)).strip() == "4")

        with contextlib.suppress(NoTrainingData):
            train(directory, agent)

    return make


def long_prompts(directory: Path) -> None:
    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        return float((await ask(llm, "guess 0..9 " * (1 if task % 2 else 100))).strip() == "4")

    with contextlib.suppress(NoTrainingData):
        train(directory, agent)


def with_template(template: str) -> Any:
    def make(directory: Path) -> None:
        model = tiny.make(directory.parent / "model", template=template)

        @ly.llm_rollout
        async def agent(task: int, llm: ly.LLM) -> float:
            return float(len(await ask(llm, f"task {task}")) % 2)

        with contextlib.suppress(NoTrainingData):
            train(directory, agent, backend=ly.EmbeddedBackend(model, device="cpu", max_length=128, seed=1))

    return make


def rewrites_history(directory: Path) -> None:
    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        first = await ask(llm)
        said = [
            {"role": "user", "content": "2. guess 0..9"},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "again"},
        ]
        return float((await ask(llm, said)).strip() == "4")

    train(directory, agent)


FAULTS = (
    Case("a reward that ignores the answer", ignores_the_answer, "flat-groups"),
    Case("tasks that are all solved from the start", solved_at_once, "untrained-model"),
    Case("an agent that returns nothing", returns_nothing, "no-reward"),
    Case("an agent that returns a reward only if it wins", sometimes_no_reward, "no-reward"),
    Case("an agent that calls a server past the gateway", bypasses_the_gateway, "no-token-ids"),
    Case("an agent at temperature 0", asks_with(temperature=0), "changed-sampling"),
    Case("an agent with top_p", asks_with(top_p=0.5), "changed-sampling"),
    Case("an agent with a max_tokens of its own", asks_with(max_tokens=2), "ignored-option"),
    Case("prompts longer than the context", long_prompts, "long-prompts"),
    Case("an agent that rewrites its history", rewrites_history, "split-turns"),
    Case(
        "a chat template without the user's words",
        with_template(tiny.TEMPLATE.replace("{{ m['content'] }}", "")),
        "chat-template",
    ),
    Case(
        "a chat template whose end of turn is no eos",
        with_template(tiny.TEMPLATE.replace("<|im_end|>\n", "<|end|>")),
        "chat-template",
    ),
)
