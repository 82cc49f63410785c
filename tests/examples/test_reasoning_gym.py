"""The reasoning-gym example, run as its reader runs it: a command, a run directory, scores that are the package's own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from leyden import SqliteLightningStore, find_final_reward
from leyden.training.runs.folder import store_path
from leyden.types import semconv

# reasoning_gym imports cellpylib, whose invalid escape sequences are a warning whenever Python compiles it; importorskip ignores warnings
reasoning_gym = pytest.importorskip("reasoning_gym")
for name in ("torch", "transformers", "openai"):
    pytest.importorskip(name)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
]  # a run of two steps starts two processes and loads torch in one of them

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "reasoning_gym"


def train(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLE / "train.py"), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, with its output beside it."""
    directory = tmp_path_factory.mktemp("gym") / "run"
    done = train("--steps", 2, "--held-out", 40, "--run-dir", directory)
    assert done.returncode == 0, done.stderr
    (directory / "stdout.txt").write_text(done.stdout)
    return directory


async def test_every_reward_is_what_the_package_says_of_the_recorded_answer(run_dir: Path) -> None:
    verifier = reasoning_gym.get_score_answer_fn("chain_sum")
    async with SqliteLightningStore(store_path(run_dir)) as store:
        rollouts = await store.query_rollouts()
        spans_of = await store.query_spans_of([rollout.rollout_id for rollout in rollouts])
    assert [sum(rollout.mode == mode for rollout in rollouts) for mode in ("train", "val")] == [2 * 512, 2 * 40]
    assert {rollout.status for rollout in rollouts} == {"succeeded"}
    rewards = set()
    for rollout in rollouts:
        spans = spans_of[rollout.rollout_id]
        [call] = [span for span in spans if span.name == semconv.MODEL_CALL]
        [message] = json.loads(call.attributes[semconv.GEN_AI_OUTPUT_MESSAGES])
        reward = find_final_reward(spans)
        assert reward == verifier(answer=message["content"], entry=rollout.input)
        rewards.add(reward)
    assert {0.0, 1.0} <= rewards


async def test_the_tasks_are_the_packages_own_and_the_held_out_ones_are_not_trained_on(run_dir: Path) -> None:
    async with SqliteLightningStore(store_path(run_dir)) as store:
        rollouts = await store.query_rollouts()
    for rollout in rollouts[::16]:
        metadata = rollout.input["metadata"]
        seed = {"train": 0, "val": 1_000_000}[rollout.mode]
        made = reasoning_gym.create_dataset(
            "chain_sum", min_terms=3, max_terms=3, min_digits=1, max_digits=1, seed=seed, size=10_000
        )[metadata["source_index"]]
        assert (rollout.input["question"], rollout.input["answer"]) == (made["question"], made["answer"])
    held_out = {rollout.input["question"] for rollout in rollouts if rollout.mode == "val"}
    trainable = reasoning_gym.create_dataset(
        "chain_sum", min_terms=3, max_terms=3, min_digits=1, max_digits=1, seed=0, size=3000
    )
    assert len(held_out) > 30
    assert held_out.isdisjoint(task["question"] for task in trainable)


def test_the_command_says_the_scores_and_leaves_a_model(run_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    said = (run_dir / "stdout.txt").read_text()
    assert "score on 40 held-out tasks: " in said
    assert " after 1,024 rollouts" in said
    trained, start = (
        AutoModelForCausalLM.from_pretrained(path) for path in (run_dir / "model", EXAMPLE / "weights" / "chain_sum")
    )
    assert any(not one.equal(other) for one, other in zip(trained.parameters(), start.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.merge
def test_another_run_in_the_same_folder_is_refused_and_changes_nothing(run_dir: Path) -> None:
    done = train("--steps", 7, "--run-dir", run_dir)
    assert done.returncode == 2
    assert "holds a run already" in done.stderr
    assert json.loads((run_dir / "options.json").read_text())["steps"] == 2


@pytest.mark.slow
def test_a_resumed_run_keeps_its_own_options(run_dir: Path) -> None:
    done = train("--resume", run_dir)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (run_dir / "stdout.txt").read_text(), "all steps were done already"


@pytest.mark.parametrize("kind", ["chain_sum", "spell_backward", "rotate_matrix", "number_filtering"])
def test_the_shipped_weights_are_small(kind: str) -> None:
    assert 0 < sum(file.stat().st_size for file in (EXAMPLE / "weights" / kind).iterdir()) < 1_000_000


def test_the_pupil_of_the_starting_weights_is_wrong_in_most_of_his_answers() -> None:
    program = (
        "import random\nfrom make_weights import PUPILS\nfrom tasks import KINDS, held_out_tasks, score\n"
        "for kind in KINDS.values():\n"
        "    found, rng = held_out_tasks(kind, 200), random.Random(0)\n"
        "    assert {score(task, task['answer']) for task in found} == {1.0}, kind\n"
        "    right = sum(score(task, PUPILS[kind.name](task, rng)) == 1.0 for task in found)\n"
        "    assert 40 < right < 120, (kind, right)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{EXAMPLE}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
