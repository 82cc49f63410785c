"""One learning run of `benchmarks/learning.py`, in a process of its own: `learning_side.py TASK SEED FOLDER`.

Each task is a function of a seed and an empty folder, and a line in `TASKS`. It has one setting for every seed. The last line of the
output is a JSON object: `curve` (pairs of rollouts so far and the step's mean reward), `before` and `after` (measured without training),
`rollouts` (all that training used), `facts` (what else the task has to show) and `cpu_s`.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import random
import resource
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", OMP_WAIT_POLICY="passive")

import leyden as ly
from leyden.cli.demo import WEIGHTS
from leyden.cli.demo.game import NUMBERS
from leyden.testing import LuckGame
from leyden.types import AttemptedRollout, read_replay_from

ROOT = Path(__file__).resolve().parents[2]
Found = dict[str, Any]


def of_run(folder: Path, *, scored: str = "reward") -> Found:
    """Read the metrics of a run folder: its curve, and the validations before and after it."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row.get("stage") == "train" and scored in row]
    measured = [row[scored] for row in rows if row.get("stage") == "val" and scored in row]
    counts = list(itertools.accumulate(int(row.get("rollouts", 0)) for row in steps))
    return {
        "curve": [[count, row[scored]] for count, row in zip(counts, steps, strict=True)],
        "before": measured[0],
        "after": measured[-1],
        "rollouts": counts[-1] if counts else 0,
        "facts": {},
    }


# ---- the demo's game --------------------------------------------------------------------------------------------------------


def guess_the_number(seed: int, folder: Path) -> Found:
    """The demo's game and policy, 29 steps of 120 games, with a third pass over them and a bound on large ratios."""
    from leyden.cli.demo.demo_agent import play
    from leyden.objectives.losses import PPOLoss

    secrets = random.Random(f"demo/{seed}")
    games = [{"secret": secrets.randrange(NUMBERS)} for _ in range(500)]
    algorithm = ly.PolicyGradient(
        ly.IsolatedBackend(WEIGHTS, seed=seed, device="cpu", max_length=128),
        n_steps=29,
        tasks_per_step=10,
        rollouts_per_task=12,
        minibatch_size=16,
        epochs=3,
        loss=PPOLoss(dual_clip=3.0),
        optim=ly.OptimParams(learning_rate=1e-3, betas=(0.9, 0.99)),
        max_tokens=4,
        timeout_seconds=120.0,
        val_every_n_steps=29,
        validate_first=True,
        seed=seed,
    )
    trainer = ly.Trainer(
        algorithm=algorithm,
        llm_proxy=ly.LLMProxy(launch_mode="engine"),
        run_dir=folder / "run",
        concurrency=48,
        progress=False,
    )
    trainer.fit(play, [{"secret": secret} for secret in range(NUMBERS)], val_dataset=games)
    return of_run(folder / "run")


def sft(seed: int, folder: Path) -> Found:
    """Record 2,400 games of the untrained policy in groups of four, and imitate the best of each group that won."""
    from leyden.cli.demo.demo_agent import play

    def backend() -> ly.EmbeddedBackend:
        return ly.EmbeddedBackend(WEIGHTS, device="cpu", max_length=128, seed=seed)

    secrets = random.Random(seed)
    tasks = [{"secret": secrets.randrange(NUMBERS)} for _ in range(600)]
    games = [{"secret": secrets.randrange(NUMBERS)} for _ in range(1000)]
    still = ly.GRPO(
        backend(),
        n_steps=5,
        tasks_per_step=120,
        rollouts_per_task=4,
        max_tokens=4,
        optim=ly.OptimParams(learning_rate=1e-12),
        seed=seed,
    )
    ly.Trainer(algorithm=still, run_dir=folder / "recorded", concurrency=96, progress=False).fit(play, tasks)
    algorithm = ly.SFT(
        backend(),
        source=folder / "recorded",
        query={"mode_in": ["train"]},
        min_reward=1.0,
        items_per_step=64,
        n_steps=80,
        max_tokens=4,
        optim=ly.OptimParams(learning_rate=1e-3),
        validate_first=True,
        val_every_n_steps=40,
        seed=seed,
    )
    ly.Trainer(algorithm=algorithm, run_dir=folder / "run", concurrency=96, progress=False).fit(
        play, None, val_dataset=games
    )
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = [row["reward"] for row in rows if row.get("stage") == "val"]
    return {
        "curve": [[40 * place, reward] for place, reward in enumerate(measured)],
        "before": measured[0],
        "after": measured[-1],
        "rollouts": 2400,
        "facts": {},
    }


# ---- reasoning-gym and other frameworks -------------------------------------------------------------------------------------


def reasoning_gym(kind: str, seed: int, folder: Path) -> Found:
    """The example of that name, as it is."""
    sys.path.insert(0, str(ROOT / "examples" / "reasoning_gym"))
    example, tasks = import_module("train"), import_module("tasks")
    chosen = tasks.KINDS[kind]
    example.train(folder / "run", chosen, steps=chosen.steps, seed=seed, held_out=example.HELD_OUT, resume=False)
    return of_run(folder / "run")


def framework(name: str, seed: int, folder: Path) -> Found:
    """The example's agent of a framework, trained as the example trains it."""
    for variable in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        os.environ.setdefault(variable, "unused")
    sys.path.insert(0, str(ROOT / "examples" / "frameworks"))
    example, module = import_module("train"), import_module(f"{name}_agent")
    example.train(module.agent, module.MODEL, folder / "run", steps=example.STEPS, seed=seed, repeats=8)
    return of_run(folder / "run")


# ---- two agents -------------------------------------------------------------------------------------------------------------

TURNS = 8
"""Guesses of both players in one race."""


@ly.llm_rollout
async def race(task: dict[str, int], llm: ly.LLM) -> float:
    """Two players guess one number in turn; 1.0 if the trained one is the first to say it."""
    low, high, text = 0, NUMBERS - 1, f"guess 0..{NUMBERS - 1}"
    models = {"player": llm.model, "rival": "rival"}  # the gateway serves both
    histories: dict[str, list[Any]] = {"player": [], "rival": []}
    for turn in range(TURNS):
        name = ("player", "rival")[turn % 2]
        messages = histories[name]
        messages.append({"role": "user", "content": text})
        with ly.operation(name="guess", attributes={"gen_ai.agent.name": name}):
            said = await llm.openai().chat.completions.create(
                model=models[name], messages=messages, **llm.sampling_parameters
            )
        reply = said.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": reply})
        number = int(reply) if reply.isascii() and reply.isdigit() else -1
        if number == task["secret"]:
            return float(name == "player")
        if number < 0:
            return float(name != "player")  # no number: the other one wins
        if number < task["secret"]:
            low, text = max(low, number + 1), "higher"
        else:
            high, text = min(high, number - 1), "lower"
        text = f"{text} {low}..{high}"
    return 0.0


def two_agents(seed: int, folder: Path) -> Found:
    """The player learns to beat a rival, whose model is served beside its own and is the one that the player began as."""
    return asyncio.run(_two_agents(seed, folder))


async def _two_agents(seed: int, folder: Path) -> Found:
    secrets = random.Random(seed)
    games = [{"secret": secrets.randrange(NUMBERS)} for _ in range(500)]
    policy = ly.EmbeddedBackend(WEIGHTS, device="cpu", max_length=256, seed=seed)
    algorithm = ly.PolicyGradient(
        policy,
        n_steps=12,
        tasks_per_step=10,
        rollouts_per_task=12,
        minibatch_size=32,
        epochs=2,
        optim=ly.OptimParams(learning_rate=1e-3, betas=(0.9, 0.99)),
        agent_match="^player$",
        max_tokens=4,
        val_every_n_steps=12,
        validate_first=True,
        seed=seed,
    )
    rival = ly.EmbeddedBackend(WEIGHTS, model_name="rival", device="cpu", max_length=256, seed=1000 + seed)
    async with rival:
        weights = {"rival before": await digest(rival, folder / "rival-before")}
        trainer = ly.Trainer(
            algorithm=algorithm,
            llm_proxy=ly.LLMProxy(model_list=[rival.endpoint()]),
            run_dir=folder / "run",
            concurrency=96,
            progress=False,
        )
        tasks = [{"secret": secret} for secret in range(NUMBERS)]
        await trainer.afit(race, tasks, val_dataset=games)
        weights["rival after"] = await digest(rival, folder / "rival-after")
    weights["player after"] = digest_of(folder / "run" / "model")
    return {**of_run(folder / "run"), "facts": weights}


async def digest(backend: ly.EmbeddedBackend, folder: Path) -> str:
    """The digest of the weights that a backend has now."""
    await backend.save_pretrained(folder)
    return digest_of(folder)


def digest_of(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


# ---- credit -----------------------------------------------------------------------------------------------------------------

MOVES = 4
"""Answers of one game: the dealer's, which is luck, then the player's."""
LUCK = 20.0
"""What the dealer's answer can be worth; the player's three answers are worth up to 1 each."""
MOST = 1280
"""Rollouts of one run, forks included."""
IN_STEP, GROUP = 32, 8
"""Rollouts of one step of either kind of credit, forks included, and of one group."""
RATES = {"credit by forks": 3e-3, "credit shared": 3e-3}


@ly.llm_rollout
async def deal_and_play(task: int, llm: ly.LLM) -> float:
    """`LuckGame`: another agent's answer decides most of the reward. Each call knows nothing of the others."""

    async def say(agent: str) -> str:
        with ly.operation(name="say", attributes={"gen_ai.agent.name": agent}):
            said = await llm.openai().chat.completions.create(
                model=llm.model, messages=[{"role": "user", "content": "guess 0..9"}], **llm.sampling_parameters
            )
        return said.choices[0].message.content or ""

    answers = [await say("dealer" if move == 0 else "player") for move in range(MOVES)]
    return LuckGame(lucky=task % 2 == 0, n_moves=MOVES, luck=LUCK).reward(answers)


def credit_algorithm(name: str, rate: float, seed: int, **options: Any) -> ly.PolicyGradient:
    from leyden.objectives.advantages import VinePPOAdvantages
    from leyden.objectives.losses import ReinforceLoss

    by_forks = name == "credit by forks"
    options = {
        "tasks_per_step": IN_STEP // GROUP // (MOVES if by_forks else 1),
        "rollouts_per_task": GROUP,
        "minibatch_size": IN_STEP,
        "loss": ReinforceLoss(),
        "optim": ly.OptimParams(learning_rate=rate),
        "warmup_steps": 1,
        "max_tokens": 2,
        "agent_match": "^player$",
        "seed": seed,
        "n_steps": MOST // IN_STEP,
        **options,
    }
    backend = ly.EmbeddedBackend(WEIGHTS, device="cpu", max_length=128, seed=seed)
    if not by_forks:
        return ly.RLOO(backend, **options)
    places = tuple(range(MOVES - 1))
    return ly.VinePPO(backend, **{"advantages": VinePPOAdvantages(n_forks=1, calls=places), **options})


def credit(name: str, seed: int, folder: Path) -> Found:
    """Learn the player's answers, and count every rollout."""
    return asyncio.run(_credit(name, float(os.environ.get("LEYDEN_BENCH_RATE", RATES[name])), seed))


async def _credit(name: str, rate: float, seed: int) -> Found:
    async with ly.open_store("memory://") as store:
        trainer = ly.Trainer(algorithm=credit_algorithm(name, rate, seed), store=store, concurrency=64, progress=False)
        await trainer.afit(deal_and_play, list(range(64)))
        rollouts = [each for each in await store.query_rollouts() if isinstance(each, AttemptedRollout)]
    curve: list[list[float]] = []
    for step in range(max(int(each.metadata["step"]) for each in rollouts) + 1):
        own = [each for each in rollouts if each.metadata["step"] == step and read_replay_from(each.metadata) is None]
        before = sum(int(each.metadata["step"]) <= step for each in rollouts)
        points = [((each.attempt.reward or 0.0) % LUCK) / (MOVES - 1) for each in own]
        curve.append([before, statistics.fmean(points)])
    return {
        "curve": curve,
        "before": curve[0][1],
        "after": statistics.fmean(skill for _, skill in curve[-3:]),
        "rollouts": curve[-1][0],
        "facts": {"learning rate": rate, "to 0.8": needed(curve, 0.8), "to 0.9": needed(curve, 0.9)},
    }


def needed(curve: Sequence[Sequence[float]], skill: float) -> int | None:
    """Return after how many rollouts the mean of three steps reaches a skill; None if it does not."""
    for place in range(2, len(curve)):
        if statistics.fmean(each for _, each in curve[place - 2 : place + 1]) >= skill:
            return int(curve[place][0])
    return None


def credit_truth(seed: int, folder: Path) -> Found:
    """Estimates by forks in the first step of a run, beside the true advantages, which follow from the weights."""
    return asyncio.run(_credit_truth(seed))


async def _credit_truth(seed: int) -> Found:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from leyden.algorithm import call_advantages
    from leyden.objectives.advantages import VinePPOAdvantages
    from leyden.testing.luck import DIGITS

    tokenizer: Any = AutoTokenizer.from_pretrained(WEIGHTS)
    messages = [{"role": "user", "content": "guess 0..9"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    with torch.inference_mode():
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        chances = torch.softmax(AutoModelForCausalLM.from_pretrained(WEIGHTS)(ids).logits[0, -1].float(), 0)
    probabilities = {digit: chances[tokenizer.convert_tokens_to_ids(digit)].item() for digit in DIGITS}
    probabilities["?"] = 1.0 - sum(probabilities.values())

    class Noting(ly.VinePPO):
        """Keeps the rollouts that the step trains on."""

        trained: Any = ()

        async def _update(self, iteration: int, data: Any) -> Any:
            self.trained = data.trained
            return await super()._update(iteration, data)

    places = tuple(range(MOVES - 1))
    backend = ly.EmbeddedBackend(WEIGHTS, device="cpu", max_length=128, seed=seed)
    algorithm = Noting(
        backend,
        n_steps=1,
        tasks_per_step=4,
        rollouts_per_task=4,
        max_tokens=2,
        agent_match="^player$",
        advantages=VinePPOAdvantages(n_forks=12, calls=places, whiten=False),
        seed=seed,
    )
    async with ly.open_store("memory://") as store:
        await ly.Trainer(algorithm=algorithm, store=store, concurrency=64, progress=False).afit(
            deal_and_play, list(range(4))
        )
        rollouts = await store.query_rollouts()
        inputs = {rollout.rollout_id: rollout.input for rollout in rollouts}
        spans_of = await store.query_spans_of([rollout.data.rollout_id for rollout in algorithm.trained])
    held = cases = 0
    errors: list[float] = []
    for rollout in algorithm.trained:
        triplets = ly.TraceToTriplet().adapt(spans_of[rollout.data.rollout_id])
        answers = [str(triplet.response.raw_content[0]["content"]) for triplet in triplets]
        game = LuckGame(lucky=inputs[rollout.data.rollout_id] % 2 == 0, n_moves=MOVES, luck=LUCK)
        estimates = call_advantages(rollout.data.forked_returns, n_calls=MOVES - 1, own_return=rollout.data.reward)
        for truth, estimate in zip(game.advantages(answers, probabilities)[1:], estimates, strict=True):
            assert estimate.low is not None
            assert estimate.high is not None
            held += estimate.low - 1e-6 <= truth <= estimate.high + 1e-6
            errors.append(estimate.advantage - truth)
            cases += 1
    return {
        "curve": [],
        "before": None,
        "after": held / cases,
        "rollouts": len(rollouts),
        "facts": {"held": held, "intervals": cases, "mean error": statistics.fmean(errors)},
    }


TASKS: dict[str, Any] = {
    "guess the number": guess_the_number,
    "SFT on the best of groups": sft,
    "reasoning-gym chain_sum": partial(reasoning_gym, "chain_sum"),
    "reasoning-gym spell_backward": partial(reasoning_gym, "spell_backward"),
    "reasoning-gym rotate_matrix": partial(reasoning_gym, "rotate_matrix"),
    "reasoning-gym number_filtering": partial(reasoning_gym, "number_filtering"),
    "OpenAI Agents SDK": partial(framework, "openai_agents"),
    "LangGraph": partial(framework, "langgraph"),
    "two agents": two_agents,
    "credit by forks": partial(credit, "credit by forks"),
    "credit shared": partial(credit, "credit shared"),
    "credit true advantages": credit_truth,
}


def main() -> None:
    task, seed, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    found = TASKS[task](seed, folder)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    found["cpu_s"] = round(sum(each.ru_utime + each.ru_stime for each in used), 1)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
