"""Reinforcement learning on a tiny language model: how fast recorded rollouts become new weights, on one CPU thread.

Both sides hold the same weights and are handed the same finished multi-turn rollouts. What is timed is the step from there to changed
weights: advantages, batches, forward, clipped token loss, backward, one AdamW step. Sampling, loading and reports are outside. The settings
are one another's: GRPO advantages, clip 0.2 and 0.28, no KL term, mean over rollouts of each one's token mean, one optimizer step for a
batch, float32. Before anything is timed, both must find the same gradient norm. A run is several steps, its value their median.

Two workloads. `games`: the demo's model (117,440 parameters) playing the demo's game, short and nearly even. `turns`: a Qwen2 of 829,568
parameters and random tokens, 2 to 6 turns long, as agents that finish early or late leave them. The rollouts of a group share their prompt.

In float32, then in bfloat16: there the peer keeps float32 weights and runs under torch's autocast, Leyden's weights are bfloat16 with
float32 copies in the optimizer. A table puts the bare matrix products of a step beside both: the forward and backward products of every
linear layer over each distinct token of the batch, where a token that rollouts share with all that stands before it counts once.

The last two rows compare Leyden with itself: six-turn rollouts merged into one sequence each, and one row for each call. What rows share at
their beginning is computed once on both sides, so the second row is what merging saves beyond that.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import MINIMUM_RUNS, Peer, PeerFailed, Row, Sample, summary
from benchmarks.report import Table
from leyden.adapter import merge_triplets
from leyden.algorithm.policy_gradient.step_data import Group, RolloutData, build_step, estimate_advantages, minibatches
from leyden.cli.demo import WEIGHTS
from leyden.cli.demo.game import NUMBERS, Game
from leyden.engine import EmbeddedBackend, OptimParams, SamplingParams
from leyden.objectives.advantages import GRPOAdvantages
from leyden.objectives.losses import PPOLoss
from leyden.types import TrainingSequence, Triplet, TripletPrompt, TripletResponse

PEER = "bench-trl"
PEER_SCRIPT = Path(__file__).parent / "peers" / "rl_tiny_trl.py"
GROUP_SIZE = 16
LOSS = PPOLoss(clip_low=0.2, clip_high=0.28)
OPTIM = OptimParams(learning_rate=1e-5, betas=(0.9, 0.99), weight_decay=0.0, max_grad_norm=1.0)
WARM_UP_STEPS = 2
STEPS = 5
"""Timed in each run; one run is the median of so many."""
HEADLINES = ("RL step: 2 to 6 turns, 830k model",)
UNIT = "tokens/CPU s"


@dataclass(frozen=True)
class Episode:
    """One finished rollout, as the gateway recorded it."""

    reward: float
    calls: list[Triplet]


@dataclass(frozen=True)
class Workload:
    """Weights and the rollouts that they are trained on; consecutive `GROUP_SIZE` episodes are a group."""

    name: str
    model: Path
    episodes: list[Episode]

    @property
    def n_trained(self) -> int:
        """Tokens that the loss is taken over: what the policy sampled."""
        return sum(len(call.response.token_ids) for episode in self.episodes for call in episode.calls)


@dataclass(frozen=True)
class Measured:
    """One side's run of one workload."""

    step: Sample
    """From finished rollouts to changed weights; trained tokens a CPU second."""
    gradient: Sample
    """Forward, loss, backward and the optimizer alone."""
    grad_norm: float
    """Of the first step, before clipping."""


def main(peer: Peer | None) -> list[Row | Table]:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    rows: list[Row] = []
    floors: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        games = asyncio.run(recorded_games(n_groups=8))
        turns = recorded_turns(Path(folder) / "qwen2", n_groups=4, turns=(2, 6))
        for dtype in ("float32", "bfloat16"):
            for workload, title in ((games, "short games, 117k model"), (turns, "2 to 6 turns, 830k model")):
                title = title if dtype == "float32" else f"{title}, {dtype}"
                step, gradient = against_peer(workload, title, peer, Path(folder), dtype=dtype)
                rows += [step, gradient]
                floors.append(floor_line(workload, title, gradient, dtype=dtype))
                print(step, gradient, floors[-1], sep="\n", flush=True)
        rows += merged_against_calls(turns.model)
    columns = ["gradient of", "tokens, distinct ones", "bare products, CPU ms", "Leyden's share", "the peer's share"]
    return [*rows, Table("Bare matrix products, as a share of the whole gradient", columns, floors)]


# ---- the floor -------------------------------------------------------------------------------------------------------------


def floor_line(workload: Workload, title: str, gradient: Row, *, dtype: str) -> list[str]:
    """A workload's line: its tokens, its bare matrix products, and their share of both sides' gradients."""
    batch = training_batch(workload.episodes)
    ids = [tuple(sequence.token_ids) for sequence in batch]
    distinct = len({row[: end + 1] for row in ids for end in range(len(row))})
    seconds = product_seconds(workload.model, distinct, dtype=dtype)
    shares = [
        "" if rate is None else f"{seconds * rate / workload.n_trained:.0%}"
        for rate in (gradient.leyden, gradient.peer)
    ]
    return [title, f"{sum(map(len, ids)):,}, {distinct:,}", f"{1000 * seconds:.0f}", *shares]


def product_seconds(folder: Path, n_tokens: int, *, dtype: str) -> float:
    """CPU seconds of the forward and backward products of every linear layer, the head included, in slices of 2,048 tokens.

    Each product is by the faster of torch's two libraries.
    """
    import torch

    from leyden.engine.forward.products import linear

    model: Any = load_model(folder)
    shapes = [module.weight.shape for module in model.modules() if isinstance(module, torch.nn.Linear)]
    kind = getattr(torch, dtype)
    seconds: list[float] = []
    for _ in range(MINIMUM_RUNS):
        total = 0.0
        for n_out, n_in in shapes:
            weight, x, g = (torch.randn(*shape).to(kind) for shape in ((n_out, n_in), (2048, n_in), (2048, n_out)))
            for _ in range(2):  # the first warms up
                began = time.process_time()
                linear(x, weight)
                linear(g, weight.T)
                linear(g.T, x.T)
                last = time.process_time() - began
            total += last
        seconds.append(total * n_tokens / 2048)
    return statistics.median(seconds)


# ---- against the peer ------------------------------------------------------------------------------------------------------


def against_peer(workload: Workload, title: str, peer: Peer | None, folder: Path, *, dtype: str) -> tuple[Row, Row]:
    """Two rows: the whole step, and the gradient alone."""
    job = write_job(workload, folder / f"{workload.name}-{dtype}.json", dtype=dtype)
    ours: list[Measured] = []
    theirs: list[Measured] = []
    for _ in range(MINIMUM_RUNS):
        ours.append(asyncio.run(train(workload, dtype=dtype)))
        if peer is None:
            continue
        try:
            theirs.append(peer_train(peer, job, workload))
        except PeerFailed as failure:
            print(f"{title}: without {peer.name}, {failure}", flush=True)
            peer, theirs = None, []
    if theirs:
        tolerance = 1e-3 if dtype == "float32" else 0.05
        require_equal(ours[0].grad_norm, theirs[0].grad_norm, "gradient norm", tolerance=tolerance)

    def row(name: str, of: Callable[[Measured], Sample]) -> Row:
        samples = [of(run) for run in ours], [of(run) for run in theirs]
        return summary(f"{name}: {title}", UNIT, *samples, peer.name if peer else None, higher_is_better=True)

    return row("RL step", lambda run: run.step), row("RL gradient alone", lambda run: run.gradient)


def require_equal(ours: float, theirs: float, what: str, *, tolerance: float = 1e-3) -> None:
    """Raises RuntimeError where the two sides did not do the same work."""
    if not abs(ours - theirs) <= tolerance * abs(theirs):
        raise RuntimeError(f"the {what} is {ours:.7g} here and {theirs:.7g} there; the two do not do the same work")


async def train(workload: Workload, *, dtype: str) -> Measured:
    """Leyden's side: `PolicyGradient`'s own functions on the recorded calls, and the embedded backend."""
    steps: list[float] = []
    gradients: list[float] = []
    norms: list[float] = []
    async with EmbeddedBackend(workload.model, device="cpu", dtype=dtype) as backend:
        for _ in range(WARM_UP_STEPS + STEPS):
            began = time.process_time()
            batch = training_batch(workload.episodes)
            in_hand = time.process_time()
            await backend.forward_backward(batch, LOSS)
            norms.append((await backend.optim_step(OPTIM)).grad_norm)
            ended = time.process_time()
            steps.append(ended - began)
            gradients.append(ended - in_hand)
    return measured(workload, steps, gradients, norms[0])


def training_batch(episodes: Sequence[Episode], *, merged: bool = True) -> list[TrainingSequence]:
    """All episodes as one minibatch; without `merged`, one sequence for each call."""
    rollouts = [
        RolloutData(
            rollout_id=str(index),
            reward=episode.reward,
            trajectories=merge_triplets(episode.calls, reward=episode.reward)
            if merged
            else [trajectory for call in episode.calls for trajectory in merge_triplets([call], reward=episode.reward)],
        )
        for index, episode in enumerate(episodes)
    ]
    groups = [Group(rollouts[start : start + GROUP_SIZE]) for start in range(0, len(rollouts), GROUP_SIZE)]
    step = build_step(groups, GRPOAdvantages())
    estimate_advantages(step, GRPOAdvantages())
    (batch,) = minibatches(step.trained, size=len(step.trained), seed=0, step=0, epoch=0)
    return batch


def peer_train(peer: Peer, job: Path, workload: Workload) -> Measured:
    """The peer's side: a process of its own that is handed the same rollouts."""
    answer: dict[str, Any] = peer.run(PEER_SCRIPT, str(job))
    return measured(workload, answer["step_cpu_s"], answer["gradient_cpu_s"], answer["grad_norm"])


def measured(workload: Workload, steps: list[float], gradients: list[float], grad_norm: float) -> Measured:
    def sample(seconds: list[float]) -> Sample:
        timed = seconds[WARM_UP_STEPS:]
        return Sample(value=workload.n_trained / statistics.median(timed), cpu_s=sum(timed))

    return Measured(sample(steps), sample(gradients), grad_norm)


def write_job(workload: Workload, path: Path, *, dtype: str) -> Path:
    """Write the job for the peer, with each rollout as the one sequence that TRL takes."""
    episodes: list[dict[str, Any]] = []
    for episode in workload.episodes:
        (trajectory,) = merge_triplets(episode.calls, reward=episode.reward)
        start = trajectory.loss_mask.index(1)
        episodes.append(
            {
                "prompt_ids": trajectory.token_ids[:start],
                "completion_ids": trajectory.token_ids[start:],
                "env_mask": trajectory.loss_mask[start:],
                "logprobs": trajectory.logprobs[start:],
                "reward": episode.reward,
            }
        )
    job = {
        "model": str(workload.model),
        "dtype": dtype,
        "group_size": GROUP_SIZE,
        "warm_up_steps": WARM_UP_STEPS,
        "steps": STEPS,
        "clip": [LOSS.clip_low, LOSS.clip_high],
        "learning_rate": OPTIM.learning_rate,
        "betas": OPTIM.betas,
        "max_grad_norm": OPTIM.max_grad_norm,
        "episodes": episodes,
    }
    path.write_text(json.dumps(job))
    return path


# ---- merged against one row for each call ----------------------------------------------------------------------------------


def merged_against_calls(model: Path) -> list[Row]:
    """Two rows: tokens of the sequences, and trained tokens a CPU second. Raises RuntimeError if the gradients differ."""
    merged: list[Gradient] = []
    calls: list[Gradient] = []
    for seed in range(MINIMUM_RUNS):
        episodes = make_episodes(model, n_groups=1, turns=(6, 6), seed=seed)
        runs = [asyncio.run(one_gradient(model, training_batch(episodes, merged=whole))) for whole in (True, False)]
        merged.append(runs[0])
        calls.append(runs[1])
        difference = float((runs[0].gradient - runs[1].gradient).norm() / runs[1].gradient.norm())
        if not difference < 1e-4:
            raise RuntimeError(f"seed {seed}: merging changes the gradient by {difference:.2g} of its norm")
    name = "Leyden, a row for each call"
    title = "6-turn rollouts, merged"
    return [
        summary(
            f"{title}: tokens of the sequences",
            "tokens",
            *_samples(merged, calls, "n_tokens"),
            name,
            higher_is_better=False,
        ),
        summary(f"{title}: same gradient", UNIT, *_samples(merged, calls, "rate"), name, higher_is_better=True),
    ]


@dataclass(frozen=True)
class Gradient:
    gradient: Any
    """All parameters' gradients, one after another."""
    n_tokens: float
    rate: float
    """Trained tokens a CPU second."""
    cpu_s: float


def _samples(merged: list[Gradient], calls: list[Gradient], name: str) -> tuple[list[Sample], list[Sample]]:
    ours, theirs = ([Sample(getattr(run, name), run.cpu_s) for run in side] for side in (merged, calls))
    return ours, theirs


async def one_gradient(folder: Path, batch: list[TrainingSequence]) -> Gradient:
    import torch

    model: Any = load_model(folder)
    async with EmbeddedBackend(model, device="cpu") as backend:
        await backend.forward_backward(batch, LOSS)  # warms up
        model.zero_grad()
        cpu = time.process_time()
        result = await backend.forward_backward(batch, LOSS)
        cpu = time.process_time() - cpu
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return Gradient(gradient, n_tokens=result.n_tokens, rate=result.n_trained / cpu, cpu_s=cpu)


# ---- workloads -------------------------------------------------------------------------------------------------------------


async def recorded_games(*, n_groups: int) -> Workload:
    """Games of the demo, played by its starting weights: the rollouts that its first step trains on."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(WEIGHTS)
    secrets = [group % NUMBERS for group in range(n_groups) for _ in range(GROUP_SIZE)]
    games = [Game(secret) for secret in secrets]
    dialogues = [[{"role": "user", "content": game.prompt()}] for game in games]
    calls: list[list[Triplet]] = [[] for _ in games]
    async with EmbeddedBackend(WEIGHTS, device="cpu", seed=0) as backend:
        while playing := [index for index, game in enumerate(games) if not game.done]:
            prompts = [_prompt_ids(tokenizer, dialogues[index]) for index in playing]
            samples = await backend.sample(prompts, SamplingParams(max_tokens=6))
            for index, prompt, sample in zip(playing, prompts, samples, strict=True):
                calls[index].append(_call(prompt, sample.token_ids, sample.logprobs))
                reply = str(tokenizer.decode(sample.token_ids, skip_special_tokens=True))
                feedback = games[index].guess(reply)
                dialogues[index] += [
                    {"role": "assistant", "content": reply},
                    {"role": "user", "content": feedback.text},
                ]
    return Workload("games", WEIGHTS, [Episode(float(game.won), made) for game, made in zip(games, calls, strict=True)])


def _prompt_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def _call(prompt: list[int], response: list[int], logprobs: list[float]) -> Triplet:
    return Triplet(
        prompt=TripletPrompt(token_ids=prompt), response=TripletResponse(token_ids=response, logprobs=logprobs)
    )


def recorded_turns(folder: Path, *, n_groups: int, turns: tuple[int, int]) -> Workload:
    """A random Qwen2 with 4 layers of width 128, saved to `folder`, and rollouts made of random tokens."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(WEIGHTS).save_pretrained(folder)  # the peer wants one; no token is ever made of text
    return Workload("turns", folder, make_episodes(folder, n_groups=n_groups, turns=turns, seed=0))


def make_episodes(folder: Path, *, n_groups: int, turns: tuple[int, int], seed: int) -> list[Episode]:
    """A prompt of 60 tokens for each group, then answers of 8 to 24 tokens and observations of 12 to 40 in turn; rewards in [0, 1)."""
    import torch

    rng = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(3, 280) for _ in range(rng.randint(low, high))]

    model: Any = load_model(folder)
    episodes: list[Episode] = []
    question: list[int] = []
    for index in range(n_groups * GROUP_SIZE):
        if index % GROUP_SIZE == 0:
            question = tokens(60, 60)
        calls: list[tuple[list[int], list[int]]] = []
        history = list(question)
        for _ in range(rng.randint(*turns)):
            calls.append((list(history), tokens(8, 24)))
            history += calls[-1][1] + tokens(12, 40)
        whole = calls[-1][0] + calls[-1][1]
        with torch.no_grad():
            logprobs_TV = torch.log_softmax(model(torch.tensor([whole])).logits[0], dim=-1)
        recorded = [
            _call(prompt, response, [float(logprobs_TV[len(prompt) + i - 1, t]) for i, t in enumerate(response)])
            for prompt, response in calls
        ]
        episodes.append(Episode(rng.random(), recorded))
    return episodes


def load_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).eval()
