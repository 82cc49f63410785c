"""Faults of learning and data."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from pathlib import Path
from typing import Any

from opentelemetry import trace

import leyden as ly
from leyden.cli.demo import WEIGHTS
from leyden.errors import ConfigError, NoTrainingData, PolicyDiverged
from leyden.testing import FakeUpstream
from leyden.training import MetricsRow
from tests.algorithm import falling
from tests.algorithm.asking import ask, backend, client
from tests.doctor.faults import Case
from tests.doctor.policy import says_four, train
from tests.doctor.recorded import record, steps
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


def rewarded(reward: Any, **options: Any) -> Any:
    """Train an agent whose reward is a function of the task and the answer."""

    def make(directory: Path) -> None:
        @ly.llm_rollout
        async def agent(task: Any, llm: ly.LLM) -> Any:
            return reward(task, (await ask(llm, f"guess 0..9 {task}"[:40])).strip())

        with contextlib.suppress(NoTrainingData):
            train(directory, agent, **options)

    return make


def is_four(task: Any, answer: str) -> float:
    return float(answer == "4")


def is_praise(task: Any, answer: str) -> Any:
    return "good"


def is_nothing(task: Any) -> float:
    return 0.0


def raises_on_others(task: Any, answer: str) -> float:
    return {"0": 0.0, "4": 1.0}[answer]


def without_tokens(directory: Path) -> None:
    """The agent names another model of the gateway, whose server returns text alone."""

    async def fit() -> None:
        async with FakeUpstream() as upstream:
            model = {"model_name": "fake", "endpoint": upstream.endpoint, "record_tokens": False}

            @ly.llm_rollout
            async def agent(task: int, llm: ly.LLM) -> float:
                return float(len(await ask(llm, f"task {task}", model="fake")) % 2)

            algorithm = ly.GRPO(backend(), n_steps=2, tasks_per_step=2, rollouts_per_task=4, max_tokens=4)
            trainer = ly.Trainer(
                algorithm=algorithm, llm_proxy=ly.LLMProxy(model_list=[model]), run_dir=directory, progress=False
            )
            with contextlib.suppress(NoTrainingData):
                await trainer.afit(agent, list(range(8)))

    asyncio.run(fit())


def changes_its_mind(directory: Path) -> None:
    """The reward wants another answer from the sixth step on, and the run does not go back."""
    seen: list[int] = []

    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        seen.append(task)
        return float(((await ask(llm)).strip() == "4") != (len(seen) <= 5 * 4 * 8))

    train(directory, agent, n_steps=10, tasks_per_step=4, rollouts_per_task=8, on_collapse="warn", hand_back="last")


def recorded_twice(directory: Path) -> None:
    """A second instrumentation records each call, as one of OpenInference beside one of OpenTelemetry does."""

    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        answer = (
            await client()
            .with_options(base_url=llm.endpoint)
            .chat.completions.create(
                model=llm.model, messages=[{"role": "user", "content": "guess 0..9"}], **llm.sampling_parameters
            )
        )
        known = {"gen_ai.response.id": answer.id, "gen_ai.operation.name": "chat"}
        for name, own in (("chat policy", {}), ("ChatCompletion", {"openinference.span.kind": "LLM"})):
            trace.get_tracer("instrumentation").start_span(name, attributes={**known, **own}).end()
        return float((answer.choices[0].message.content or "").strip() == "4")

    train(directory, agent)


def measured(reward: Any) -> Any:
    def make(directory: Path) -> None:
        @ly.rollout
        def agent(task: Any) -> Any:
            return reward(task)

        ly.Trainer(algorithm="baseline", run_dir=directory, progress=False).fit(agent, [{"n": n} for n in range(24)])

    return make


def waits_in_vain(directory: Path) -> None:
    stop = ly.EarlyStopping(monitor="val/rewards")
    with contextlib.suppress(ConfigError):
        train(directory, ly.llm_rollout(says_four), val=list("abcd"), val_every_n_steps=1, callbacks=[stop])


def learns_from_records(directory: Path) -> None:
    """SFT is given tasks to train on, which it does not use."""
    source = directory.with_name("source")
    train(source, ly.llm_rollout(says_four), list(range(16)), n_steps=2, tasks_per_step=8)
    algorithm = ly.SFT(backend(), source=source, n_steps=3, max_tokens=4)
    ly.Trainer(algorithm=algorithm, run_dir=directory, progress=False).fit(
        ly.llm_rollout(says_four), list(range(4)), val_dataset=[{"held out": n} for n in range(4)]
    )


# ---- what takes hundreds of steps: rows as such runs have them -----------------------------------


def falls_on_validation(tasks: int) -> Any:
    """Training rises from 0.2 to 0.9 in 60 steps of 16 groups; validation rises to 0.6 and falls to 0.3."""

    def make(directory: Path) -> None:
        noise = random.Random(1)
        rows = steps(
            reward=[0.2 + 0.7 * min(1.0, n / 40) + noise.gauss(0, 0.03) for n in range(60)],
            reward_std=[0.45] * 60,
            rollouts=[128] * 60,
            groups=[16] * 60,
            optimizer_steps=[1] * 60,
        )
        for n, reward in ((0, 0.2), (15, 0.5), (30, 0.6), (45, 0.42), (60, 0.3)):
            rows.append(MetricsRow(n, "val", n, {"reward": reward, "reward_std": 0.45, "rollouts": 100}))
        record(directory, rows, config={"data": {"train": {"length": tasks}, "val": {"length": 100}}})

    return make


def hacked(**columns: list[float]) -> Any:
    """The training reward rises from 0.3 to 0.9 in 40 steps, and other metrics change with it."""

    def make(directory: Path) -> None:
        noise = random.Random(2)
        rewards = [0.3 + 0.6 * n / 40 + noise.gauss(0, 0.03) for n in range(40)]
        ends = {
            name: [a + (b - a) * n / 40 + noise.gauss(0, 0.02 * a) for n in range(40)]
            for name, (a, b) in columns.items()
        }
        more = {"reward_std": [0.4] * 40, "rollouts": [64] * 40, "model_calls": [64] * 40, "optimizer_steps": [1] * 40}
        record(directory, steps(reward=rewards, **more, **ends))

    return make


def one_answer_for_all(directory: Path) -> None:
    """A judge that is taken in by one text: the policy learns to say it whatever the task is."""
    tasks = [f"{n} of {m}" for n in range(4) for m in range(4)]
    optim = ly.OptimParams(learning_rate=3e-3)
    train(directory, ly.llm_rollout(_taken_in), tasks, n_steps=8, tasks_per_step=8, rollouts_per_task=8, optim=optim)


async def _taken_in(task: str, llm: ly.LLM) -> float:
    return float((await ask(llm, f"guess 0..9 {task}")).strip() == "4")


def falls(plant: str) -> Any:
    """Break the policy in the update of one step, as tests of the return to the best weights do."""

    def make(directory: Path) -> None:
        with contextlib.suppress(PolicyDiverged):
            falling.fit(WEIGHTS, directory, plant, on_collapse="warn")

    return make


def learns_by_heart(directory: Path) -> None:
    """SFT whose loss falls, while the reward of validations falls, too."""
    rows = steps(loss=[2.0 * 0.9**n for n in range(40)], optimizer_steps=[1] * 40)
    for n, reward in ((10, 0.5), (20, 0.62), (30, 0.4), (40, 0.3)):
        rows.append(MetricsRow(n, "val", n, {"reward": reward, "reward_std": 0.48, "rollouts": 200}))
    record(directory, rows)


def breaks(**columns: list[float]) -> Any:
    def make(directory: Path) -> None:
        n = len(next(iter(columns.values())))
        known = {"reward": [0.3, 0.35] * (n // 2), "optimizer_steps": [1] * n, "rollouts": [64] * n}
        record(directory, steps(**known, **columns))

    return make


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
    Case("a server without token ids", without_tokens, "no-token-ids"),
    Case("an agent that raises KeyError on some answers", rewarded(raises_on_others), "agent-raises"),
    Case("an agent that returns a text", rewarded(is_praise), "agent-raises"),
    Case("an agent_match that matches no agent", rewarded(is_four, agent_match="planner"), "wrong-roles"),
    Case("answers cut at max_tokens", with_template(tiny.TEMPLATE), "cut-answers"),
    Case(
        "a learning rate far too large",
        rewarded(is_four, optim=ly.OptimParams(learning_rate=0.5), n_steps=8),
        "learning-rate",
    ),
    Case(
        "a learning rate far too small",
        rewarded(is_four, optim=ly.OptimParams(learning_rate=1e-7), n_steps=8),
        "learning-rate",
    ),
    Case("a reward that turns round", changes_its_mind, "collapse"),
    Case("two instrumentations", recorded_twice, "double-instrumentation"),
    Case("training tasks in the validation", rewarded(is_four, val=list(range(4)), n_steps=8), "leaked-tasks"),
    Case("the same task many times", rewarded(is_four, tasks=[1] * 12 + [2, 3], n_steps=8), "repeated-tasks"),
    Case("tasks without a text", rewarded(is_four, tasks=[{"question": " "}] * 8, n_steps=5), "empty-tasks"),
    Case("a measurement whose reward is constant", measured(is_nothing), "constant-reward"),
    Case("a callback that waits for a misspelt metric", waits_in_vain, "missing-metrics"),
    Case("tasks for an algorithm that uses none", learns_from_records, "ignored-option"),
    Case(
        "a warm-up that is longer than the run",
        rewarded(is_four, warmup_steps=50, n_steps=4, tasks_per_step=4),
        "ignored-option",
    ),
    Case("one answer for all tasks", one_answer_for_all, "reward-hacking"),
    Case("training rises, validation falls, after many passes", falls_on_validation(32), "overfitting", recorded=True),
    Case("training rises, validation falls, on new tasks", falls_on_validation(5000), "reward-hacking", recorded=True),
    Case("answers explode while the reward rises", hacked(response_tokens=[6e3, 6e4]), "reward-hacking", recorded=True),
    Case("a part of the reward falls", hacked(**{"reward/correct": [0.5, 0.1]}), "reward-hacking", recorded=True),
    Case(
        "a loss that is not finite", breaks(loss=[0.1] * 9 + [math.nan], kl=[0.01] * 10), "unstable-loss", recorded=True
    ),
    Case("updates that go too far", breaks(kl=[0.01, 0.02] * 4 + [0.4, 1.7]), "unstable-loss", recorded=True),
    Case(
        "a sampler without the new weights",
        breaks(mean_logprob_difference=[0.02, 0.1, 0.2, 0.3, 0.4, 0.5], staleness=[0] * 6),
        "stale-weights",
        recorded=True,
    ),
    Case(
        "rollouts that end too late",
        breaks(stale_groups=[6] * 6, groups=[10] * 6, staleness=[1] * 6),
        "stale-weights",
        recorded=True,
    ),
    Case(
        "a chat template that refuses the user's turn",
        with_template("{{ raise_exception('conversations must begin with a system turn') }}"),
        "chat-template",
    ),
    Case("a model without a chat template", with_template(""), "chat-template"),
    Case("an advantage that is infinite", falls("loss"), "unstable-loss"),
    Case("one update that is far too large", falls("kl"), "unstable-loss"),
    Case("a policy that learns one wrong answer", falls("entropy"), "collapse"),
    Case(
        "a reward that rises by its form alone",
        hacked(**{"reward/form": [0.2, 0.9], "reward/correct": [0.03, 0.02]}),
        "reward-hacking",
        recorded=True,
    ),
    Case("SFT that learns its rollouts by heart", learns_by_heart, "overfitting", recorded=True),
    Case("a grad_norm that leaps", breaks(grad_norm=[1.0, 1.2] * 6 + [500.0, 900.0]), "unstable-loss", recorded=True),
)
