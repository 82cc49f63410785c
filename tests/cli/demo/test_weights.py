"""The demo's starting policy: an ordinary model folder that plays like its sloppy teacher."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import make_weights
from benchmarks.make_weights import conversation, prompt_ids, record_games, success_rate
from leyden.adapter import TraceToTrajectory
from leyden.cli.demo import WEIGHTS
from leyden.cli.demo.game import NUMBERS, Game, sloppy_probability, sloppy_reply
from leyden.store import open_store
from leyden.types import AttemptedRollout

FOLDER = WEIGHTS


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Several threads are slower at this size, and add in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER)


@pytest.mark.slow
@pytest.mark.merge
def test_the_folder_loads_offline_and_without_a_warning() -> None:
    program = (
        "import sys, warnings; warnings.simplefilter('error')\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "AutoModelForCausalLM.from_pretrained(sys.argv[1]); AutoTokenizer.from_pretrained(sys.argv[1])\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(FOLDER)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "Loading weights" not in line]
    assert said == []


def test_the_weights_are_small_float32_and_stored_once() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 500_000
    with safe_open(FOLDER / "model.safetensors", framework="pt") as tensors:
        names = set(tensors.keys())
        assert {tensors.get_tensor(name).dtype for name in names} == {torch.float32}
    assert "lm_head.weight" not in names, "the output layer is the embedding"
    json.loads((FOLDER / "tokenizer.json").read_text(encoding="utf-8"))


def test_model_and_tokenizer_agree_on_the_vocabulary(model, tokenizer) -> None:
    assert len(tokenizer) == model.config.vocab_size == model.get_input_embeddings().weight.shape[0]
    assert tokenizer.convert_tokens_to_ids(["<|pad|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    for settings in (model.config, model.generation_config):
        assert settings.eos_token_id == tokenizer.eos_token_id == 2
        assert settings.pad_token_id == tokenizer.pad_token_id == 0


def test_a_number_is_one_token_and_any_text_comes_back_whole(tokenizer) -> None:
    for number in range(NUMBERS):
        assert len(tokenizer.encode(str(number))) == 1
    assert len(tokenizer.encode("2048")) == 4
    for text in ("higher 6..9", "not a number; it was 3", "Grüße, 你好 🙂\n\tdone"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("seed", range(20))
def test_each_turn_extends_the_last_prompt_and_reply_token_by_token(tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    game, messages, seen = Game(rng.randrange(NUMBERS)), [], []
    text = game.prompt()
    while not game.done:
        messages.append({"role": "user", "content": text})
        prompt = prompt_ids(tokenizer, messages)
        assert prompt[: len(seen)] == seen
        reply = sloppy_reply(game, rng, attention=0.5)
        seen = prompt + tokenizer.encode(reply) + [tokenizer.eos_token_id]
        messages.append({"role": "assistant", "content": reply})
        text = game.guess(reply).text


async def test_a_recorded_game_is_one_sequence_in_which_the_players_tokens_are_trained(tokenizer) -> None:
    rng = random.Random(0)
    games = [(secret, conversation(secret, rng)) for secret in range(NUMBERS)]
    async with open_store("memory://") as store:
        await record_games(store, tokenizer, games)
        rollouts = [each for each in await store.query_rollouts() if isinstance(each, AttemptedRollout)]
        spans_of = await store.query_spans_of([each.rollout_id for each in rollouts])
    won = {each.input["secret"]: each.attempt.reward for each in rollouts}
    for rollout in rollouts:
        secret, messages = games[rollout.input["secret"]]
        [trajectory] = TraceToTrajectory().adapt(spans_of[rollout.rollout_id])
        assert trajectory.token_ids == [
            *prompt_ids(tokenizer, messages[:-1]),
            *tokenizer.encode(messages[-1]["content"]),
            tokenizer.eos_token_id,
        ]
        said = [token for token, mask in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if mask]
        assert tokenizer.decode(said, skip_special_tokens=True) == "".join(each["content"] for each in messages[1::2])
        assert won[secret] == float(messages[-1]["content"] == str(secret))
    assert set(won.values()) == {0.0, 1.0}


def test_the_teachers_probabilities_are_its_frequencies() -> None:
    rng, game = random.Random(0), Game(7)
    game.guess("3")
    replies = [sloppy_reply(game, rng, attention=0.25) for _ in range(20_000)]
    for reply in map(str, range(NUMBERS)):
        expected = sloppy_probability(game, reply, attention=0.25)
        assert replies.count(reply) / len(replies) == pytest.approx(expected, abs=0.01)


def test_the_policy_wins_about_as_often_as_its_teacher(model, tokenizer) -> None:
    # 1,000 games have a standard error of 0.016; the teacher wins 0.447, the fitted policy 0.433 of 12,000
    assert success_rate(model, tokenizer, games=1000, seed=1) == pytest.approx(0.44, abs=0.05)


def test_the_same_seed_makes_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two", "other"):
        seed = "1" if name == "other" else "0"
        make_weights.main(
            ["--out", str(tmp_path / name), "--seed", seed, "--steps", "5", "--games", "100", "--rounds", "1"]
        )
    capsys.readouterr()
    files = {file.name for file in (tmp_path / "one").iterdir()}
    assert files == {file.name for file in FOLDER.iterdir()}
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    weights = "model.safetensors"
    assert (tmp_path / "one" / weights).read_bytes() != (tmp_path / "other" / weights).read_bytes()


def test_the_teacher_speaks_in_turns() -> None:
    messages = conversation(3, random.Random(0))
    assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
