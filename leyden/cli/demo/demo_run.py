"""Train the demo's agent with the parts that production uses, small enough for a laptop.

A run has the starting weights, a policy backend in its own process, the gateway, a durable store and
`PolicyGradient`. Afterwards this module reads the metrics, draws the curve, and returns a game from before and one from
after training.
"""

# matplotlib leaves some parameters of its public functions without a type:
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import csv
import itertools
import json
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from leyden._lib.atomic import private_directory, write_file
from leyden.algorithm import PolicyGradient
from leyden.cli.demo import WEIGHTS
from leyden.cli.demo.demo_agent import play
from leyden.cli.demo.game import NUMBERS, Game
from leyden.engine import IsolatedBackend, OptimParams, PolicyBackend, VLLMBackend
from leyden.errors import ConfigError
from leyden.gateway import LLMProxy
from leyden.store import SqliteLightningStore
from leyden.trainer import RunSummary, Trainer
from leyden.training import CsvWriter, ProgressBar
from leyden.training.runs.folder import MANIFEST, store_path
from leyden.types import Rollout, Span, find_final_reward, semconv

_OPTIONS_FILE = "demo.json"
_METRICS = "metrics.csv"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The user's choices, which are kept in the run directory for a resume."""

    seed: int = 0
    steps: int = 40
    games: int = 1000
    """The number of games on which success is measured, before and after training."""
    deterministic: bool = False
    """Whether responses depend on weights, prompt and seed alone.

    Two such runs end with the same weights, to the bit. They are slower.
    """
    engine: str = "embedded"
    """The engine that samples: "embedded", or "vllm" for a vLLM server on the CPU."""
    vllm_python: str | None = None
    """The Python interpreter that has vLLM; None: this one."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The result of a run."""

    success_before: float
    """The share of games won before training."""
    success_after: float
    """The share of games won after training."""
    train_seconds: float
    """Seconds in training steps, without measuring."""
    rollouts: int
    """The number of games that were played for training."""
    model_calls: int
    """The number of model calls in the games for training."""
    run: str
    """The run directory."""
    rewards: list[float] = field(default_factory=list[float])
    """The share of games won in each step."""


def start_run(directory: Path, options: DemoOptions) -> None:
    """Write the user's choices into the run directory, where `run_demo` reads them.

    Raise ConfigError for a directory that holds a run already, or cannot hold one.
    """
    if any((directory / name).exists() for name in (_OPTIONS_FILE, MANIFEST)):
        raise ConfigError(
            f"{directory} holds a run already: continue it with leyden demo --resume {directory}, or choose another --run-dir"
        )
    if inside := next(directory.glob(f"*/{MANIFEST}"), None):
        raise ConfigError(
            f"{directory} is a folder of runs ({inside.parent.name} is one); "
            f"choose a new folder, such as --run-dir {directory / 'demo'}"
        )
    try:
        private_directory(directory)
        write_file(directory / _OPTIONS_FILE, json.dumps(asdict(options)))
    except OSError as error:
        raise ConfigError(f"cannot keep a run in {directory}: {error}; choose another --run-dir") from error


def set_steps(directory: Path, steps: int) -> None:
    """Set the total number of steps after which the run in `directory` ends.

    Raise ConfigError for a directory without a run of the demo, and for a run that has done more steps.
    """
    options = _chosen(directory)
    done = len(read_metrics(directory, "train")) if (directory / _METRICS).exists() else 0
    if steps < done:
        raise ConfigError(f"--steps is {steps}, but the run in {directory} has done {done} steps; give {done} or more")
    write_file(directory / _OPTIONS_FILE, json.dumps(asdict(replace(options, steps=steps))))


def run_demo(directory: Path) -> tuple[DemoResult, RunSummary]:
    """Train in `directory` with the options of its `demo.json`, from where its run ended, if any.

    Raise ConfigError for a directory without a run of the demo.
    """
    options = _chosen(directory)
    # Import it now, because the agent's first call would make all games wait for the import.
    import_module("openai.resources.chat.completions")
    secrets = random.Random(f"demo/{options.seed}")
    train = [{"secret": secret} for secret in range(NUMBERS)]
    games = [{"secret": secrets.randrange(NUMBERS)} for _ in range(options.games)]
    trainer = Trainer(
        algorithm=_algorithm(options, directory),
        llm_proxy=LLMProxy(launch_mode="engine", deterministic_seed=options.seed if options.deterministic else None),
        concurrency=48,  # more calls at once cost the openai client more for each, and the policy little less
        run_dir=directory,
        progress=False,  # the algorithm has a bar, and the command shows the figures
    )
    summary = trainer.fit(play, train, val_dataset=games, resume=(directory / MANIFEST).exists())
    return _result(directory), summary


def _backend(options: DemoOptions) -> PolicyBackend:
    """Return the engine that samples and trains, as `options.engine` says."""
    if options.engine == "vllm":
        return VLLMBackend(
            WEIGHTS,
            python=options.vllm_python,
            seed=options.seed,
            device="cpu",
            max_length=128,
            extra_arguments=["--enforce-eager"],  # compiling takes longer than the demo
        )
    return IsolatedBackend(
        WEIGHTS,
        seed=options.seed,
        deterministic=options.deterministic,
        device="cpu",
        max_batch_rows=128,
        max_length=128,
    )


def _algorithm(options: DemoOptions, directory: Path) -> PolicyGradient:
    """Return the demo's algorithm: 120 games for each step, and validation before and after."""
    return PolicyGradient(
        _backend(options),
        n_steps=options.steps,
        tasks_per_step=10,
        rollouts_per_task=12,
        minibatch_size=16,
        epochs=2,
        optim=OptimParams(learning_rate=1e-3, betas=(0.9, 0.99)),
        max_tokens=4,
        timeout_seconds=120.0,
        val_every_n_steps=options.steps,
        validate_first=True,
        seed=options.seed,
        callbacks=[ProgressBar(unit="games")],
        writers=[CsvWriter(directory / _METRICS)],
    )


def _chosen(directory: Path) -> DemoOptions:
    """Return the options of the run in a directory. Raise ConfigError if it has none."""
    try:
        return DemoOptions(**json.loads((directory / _OPTIONS_FILE).read_text()))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{directory} is no run of the demo ({_OPTIONS_FILE} is missing); give the folder of one, or start one with "
            "leyden demo"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{directory / _OPTIONS_FILE} cannot be read: {error}") from error


# ---- what came of it -----------------------------------------------------------------------------


def read_metrics(directory: Path, stage: str) -> list[dict[str, float]]:
    """Return the rows of `metrics.csv` of one stage (`train`, `val`), without empty cells."""
    with (directory / _METRICS).open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.pop("stage") == stage]
    return [{name: float(cell) for name, cell in row.items() if cell} for row in rows]


def _result(directory: Path) -> DemoResult:
    """Return the result of the run in a directory, computed from its metrics."""
    measured, steps = read_metrics(directory, "val"), read_metrics(directory, "train")
    return DemoResult(
        success_before=measured[0]["reward"],
        success_after=measured[-1]["reward"],
        train_seconds=round(sum(row["rollout_seconds"] + row["update_seconds"] for row in steps), 1),
        rollouts=int(sum(row["rollouts"] for row in steps)),
        model_calls=int(sum(row["model_calls"] for row in steps)),
        run=str(directory),
        rewards=[row["reward"] for row in steps],
    )


def draw_curve(directory: Path) -> Path:
    """Draw the share of games won in each step. Return the path of `curve.png` in `directory`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = read_metrics(directory, "train")
    games = list(itertools.accumulate(row["rollouts"] for row in steps))
    measured = [row["reward"] for row in read_metrics(directory, "val")]
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=130)
    axes.plot(games, [row["reward"] for row in steps], color="#7c3aed", linewidth=1.8, label="won in each step")
    axes.plot([0.0, games[-1]], [measured[0], measured[-1]], "o", color="#111827", label="measured before and after")
    axes.set(
        xlabel="games played", ylabel="share of games won", ylim=(0, 1.02), title="Guess the number: GRPO on 2 cores"
    )
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    path = directory / "curve.png"
    figure.savefig(path)
    pyplot.close(figure)
    return path


async def games_before_and_after(directory: Path) -> tuple[list[str], list[str]]:
    """Return the lines of one measured game, as it was played before and after training.

    The game is the first one that was lost before training; if none was lost, the first one.
    """
    async with SqliteLightningStore(store_path(directory)) as store:
        measured = [rollout for rollout in await store.query_rollouts(mode_in=["val"]) if rollout.status == "succeeded"]
        steps = [rollout.metadata["step"] for rollout in measured]  # more than two if the run was lengthened
        after = {rollout.metadata["place"]: rollout for rollout in measured if rollout.metadata["step"] == max(steps)}
        before = [
            rollout
            for rollout in measured
            if rollout.metadata["step"] == min(steps) and rollout.metadata["place"] in after
        ]
        games = await store.query_spans_of([rollout.rollout_id for rollout in before])
        lost = [rollout for rollout in before if find_final_reward(games[rollout.rollout_id]) == 0.0]
        first = min(lost or before, key=lambda rollout: rollout.metadata["place"])
        second = after[first.metadata["place"]]
        later = await store.query_spans_of([second.rollout_id])
        return _transcript(first, games[first.rollout_id]), _transcript(second, later[second.rollout_id])


def _transcript(rollout: Rollout, spans: Sequence[Span]) -> list[str]:
    """Return a recorded game as lines, with the game's replies computed again."""
    game, lines = Game(rollout.input["secret"]), [f"guess 0..{NUMBERS - 1}   (it is {rollout.input['secret']})"]
    for span in sorted(
        (span for span in spans if span.name == semconv.MODEL_CALL), key=lambda span: span.start_time or 0
    ):
        messages: Any = span.attributes[semconv.GEN_AI_OUTPUT_MESSAGES]
        reply = str(json.loads(messages)[0].get("content") or "")
        lines.append(f"  > {reply}")
        lines.append(game.guess(reply).text)
    return lines


def python_line(directory: Path) -> str:
    """Return the shell command that plays a game with the trained agent."""
    this = Path(sys.executable)
    found = shutil.which(this.name)
    if found is not None and Path(found) == this:
        python = this.name
    else:
        python = str(this.relative_to(Path.cwd())) if this.is_relative_to(Path.cwd()) else str(this)
    return f'{python} -c "from leyden.cli.demo.watch import watch; watch({str(directory / "model")!r}, secret=7)"'
