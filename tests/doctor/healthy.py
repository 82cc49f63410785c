"""Healthy runs of all kinds, in which the doctor finds nothing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

import leyden as ly
from leyden.rl import DQN, PPO, ActionInterpreter, Reward, Simulator, StateInterpreter, TrainingVessel
from leyden.rl import Trainer as SimulatorTrainer
from leyden.testing import FakeUpstream
from tests.algorithm.asking import ask, backend
from tests.doctor.faults import Case
from tests.doctor.policy import says_four, train

# ---- policies ------------------------------------------------------------------------------------


def policy(**options: Any) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        given = {name: value() if callable(value) and name == "backend" else value for name, value in options.items()}
        train(directory, ly.llm_rollout(says_four), **{"n_steps": 10, "tasks_per_step": 4, **given})

    return make


def in_processes(directory: Path) -> None:
    train(directory, ly.llm_rollout(says_four), n_steps=3, tasks_per_step=4, strategy="ipc", n_runners=2)


def resumed(directory: Path) -> None:
    def fit(n_steps: int, *, resume: bool) -> None:
        algorithm = ly.GRPO(backend(), n_steps=n_steps, tasks_per_step=4, rollouts_per_task=4, max_tokens=4)
        ly.Trainer(algorithm=algorithm, run_dir=directory, progress=False).fit(
            ly.llm_rollout(says_four), list(range(8)), resume=resume
        )

    fit(3, resume=False)
    fit(6, resume=True)


@contextmanager
def running(directory: Path) -> Generator[None]:
    """The run waits in its third step while it is looked at."""
    go_on, is_waiting = asyncio.Event(), asyncio.Event()

    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        if len(steps) >= 2:
            is_waiting.set()
            await go_on.wait()
        return await says_four(task, llm)

    steps: list[int] = []

    class Steps(ly.Callback):
        def on_iter_end(self, loop: Any, vessel: Any) -> None:
            steps.append(1)

    async def start() -> asyncio.Task[Any]:
        algorithm = ly.GRPO(backend(), n_steps=3, tasks_per_step=4, rollouts_per_task=4, max_tokens=4)
        trainer = ly.Trainer(algorithm=algorithm, run_dir=directory, progress=False, callbacks=[Steps()])
        task = asyncio.create_task(trainer.afit(agent, list(range(8))))
        await asyncio.wait({task, asyncio.create_task(is_waiting.wait())}, return_when=asyncio.FIRST_COMPLETED)
        return task

    with asyncio.Runner() as runner:
        task = runner.run(start())

        async def end() -> None:
            go_on.set()
            await task

        try:
            yield
        finally:
            runner.run(end())


def recorded(kind: Any) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        source = directory.with_name("source")
        options: dict[str, Any] = {"n_steps": 2, "tasks_per_step": 8, "rollouts_per_task": 8}
        train(source, ly.llm_rollout(says_four), list(range(16)), **options, optim=ly.OptimParams(learning_rate=1e-5))
        algorithm = kind(
            backend(), source=source, query={"mode_in": ["train"]}, items_per_step=16, n_steps=6, max_tokens=4
        )
        ly.Trainer(algorithm=algorithm, run_dir=directory, progress=False).fit(
            ly.llm_rollout(says_four), None, val_dataset=[{"held out": n} for n in range(16)]
        )

    return make


# ---- prompts, and agents that are only measured --------------------------------------------------

RULES = {
    "refund": "Refunds take five days.",
    "delivery": "Ask for the order number.",
    "invoice": "Invoices are in the account.",
}
TICKETS = [{"topic": topic, "number": number} for number in range(8) for topic in RULES]


def play(body: dict[str, Any]) -> str:
    """Return what the agent's model, APO's critic, its editor or GEPA's reflection model would say."""
    text = "\n".join(message["content"] for message in body["messages"])
    if "new instruction" in text:
        prompt = re.findall(r"```\n(.*?)\n```", text, re.DOTALL)[0]
        topics = re.findall(r"cannot help with your (\w+)", text)
        return f"```\n{prompt}\n{RULES[topics[0]] if topics else 'Be kind.'}\n```"
    if "<new_prompt>" in text:
        prompt = re.findall(r"<prompt>\n(.*?)\n</prompt>", text, re.DOTALL)[0]
        topics = re.findall(r"The prompt says nothing about (\w+)", text)
        return f"<new_prompt>{prompt}\n{RULES[topics[0]]}</new_prompt>" if topics else prompt
    if "<prompt>" in text:
        topics = re.findall(r"cannot help with your (\w+)", text)
        return f"The prompt says nothing about {topics[0]}." if topics else "Nothing is missing."
    topic = re.findall(r"my (\w+)\?", text)[-1]
    return "Gladly." if RULES[topic] in text else f"I cannot help with your {topic}."


@ly.rollout
async def support(task: Any, llm: ly.LLM, prompt_template: ly.PromptTemplate) -> float:
    prompt = prompt_template.format(ticket=f"Number {task['number']}: what about my {task['topic']}?")
    return float(await ask(llm, prompt) == "Gladly.")


def with_upstream(
    algorithm: Callable[[], Any], template: str = "Answer the customer. {ticket}"
) -> Callable[[Path], None]:
    async def fit(directory: Path) -> None:
        async with FakeUpstream(reply=play) as server:
            trainer = ly.Trainer(
                algorithm=algorithm(),
                llm_proxy=ly.LLMProxy(model_list=[{"model_name": "fake", "endpoint": server.endpoint}]),
                initial_resources={"prompt": ly.PromptTemplate(template=template)},
                run_dir=directory,
                progress=False,
            )
            await trainer.afit(support, TICKETS[:12], TICKETS[12:])

    return lambda directory: asyncio.run(fit(directory))


def program(directory: Path) -> None:
    agent = ly.ProcessAgent(["sh", "-c", "task=$(cat); echo $((task * task))"], reward="last_line")
    ly.Trainer(algorithm="baseline", run_dir=directory, progress=False).fit(agent, list(range(20)))


# ---- simulators ----------------------------------------------------------------------------------


class Walk(Simulator[Any, Any, Any]):
    """Ten steps left or right from where it starts."""

    def __init__(self, initial: int) -> None:
        self.position, self.steps = initial, 0

    def step(self, action: int) -> None:
        self.position += action
        self.steps += 1

    def get_state(self) -> int:
        return self.position

    def done(self) -> bool:
        return self.steps == 10


class Position(StateInterpreter[Any, Any]):
    observation_space: Any = spaces.Box(-20, 20, (1,), np.float32)  # pyright: ignore[reportIncompatibleMethodOverride] -- a constant serves

    def interpret(self, simulator_state: int) -> Any:
        return np.array([simulator_state], np.float32)


class Direction(ActionInterpreter[Any, Any, Any]):
    action_space: Any = spaces.Discrete(2)  # pyright: ignore[reportIncompatibleMethodOverride] -- a constant serves

    def interpret(self, simulator_state: int, action: int) -> int:
        return 1 if action else -1


class NearZero(Reward[Any]):
    def reward(self, simulator_state: int) -> float:
        return -abs(simulator_state) / 10


def simulator(kind: Any, **options: Any) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        vessel = TrainingVessel(
            simulator_fn=Walk,
            state_interpreter=Position(),
            action_interpreter=Direction(),
            policy=kind(None, Position.observation_space, Direction.action_space, lr=3e-3),
            reward=NearZero(),
            train_initial_states=list(range(-5, 6)),
            val_initial_states=[-4, 0, 4],
            episode_per_iter=22,
            update_kwargs=options,
        )
        trainer = SimulatorTrainer(
            max_iters=12, val_every_n_iters=4, finite_env_type="dummy", concurrency=2, run_dir=directory, progress=False
        )
        trainer.fit(vessel)

    return make


HEALTHY = (
    Case("GRPO", policy()),
    Case("Dr. GRPO", policy(kind=ly.DrGRPO)),
    Case("RLOO", policy(kind=ly.RLOO)),
    Case("REINFORCE++", policy(kind=ly.REINFORCEpp)),
    Case("ReMax", policy(kind=ly.ReMax, tasks_per_step=16, rollouts_per_task=1)),
    Case("VinePPO", policy(kind=ly.VinePPO)),
    Case("PPO with a value head", policy(kind=ly.PPO, backend=lambda: backend(value_head=True))),
    Case("LoRA", policy(backend=lambda: backend(lora={"rank": 4}))),
    Case("groups that are sampled ahead", policy(max_staleness=1)),
    Case("with validation", policy(val=[{"held out": n} for n in range(16)], val_every_n_steps=2, validate_first=True)),
    Case(
        "a validation that measures each task four times",
        policy(val=[{"task": n % 4} for n in range(16)], val_every_n_steps=5),
    ),
    Case("two processes of runners", in_processes),
    Case("resumed", resumed),
    Case("running", running),
    Case(
        "a game with ten beginnings, as the demo's",
        policy(tasks=[{"secret": n} for n in range(10)], val=[{"secret": n % 10} for n in range(40)], n_steps=4),
    ),
    Case("SFT", recorded(ly.SFT)),
    Case("DPO", recorded(ly.DPO)),
    Case("APO", with_upstream(lambda: ly.APO(beam_rounds=3, beam_width=2, branch_factor=1))),
    Case("GEPA", with_upstream(lambda: ly.GEPA(max_steps=3))),
    Case("Baseline", with_upstream(lambda: "baseline", f"{RULES['refund']} {{ticket}}")),
    Case("a program as the agent", program),
    Case("PPO in a simulator", simulator(PPO, batch_size=64, repeat=4)),
    Case("DQN in a simulator", simulator(DQN)),
)
