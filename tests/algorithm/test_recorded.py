"""SFT and DPO on rollouts that an earlier run recorded, with a real model: which are chosen, and that they teach."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("openai")

from safetensors.torch import load_file  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import leyden as ly  # noqa: E402
from leyden.adapter.transcript import answer_of  # noqa: E402
from leyden.algorithm.policy_gradient.recorded import (  # noqa: E402
    PreferencePair,
    RecordedReward,
    best_of_groups,
    pairs_of_groups,
)
from leyden.cli.app import app  # noqa: E402
from leyden.cli.demo import WEIGHTS  # noqa: E402
from leyden.errors import ConfigError, LeydenError, NoTrainingData  # noqa: E402
from leyden.objectives.losses import PPOLoss  # noqa: E402
from leyden.training.runs import open_run  # noqa: E402
from tests.algorithm.asking import Rows, ask, backend  # noqa: E402

RECORDED = [
    RecordedReward("a1", "a", 0.0),
    RecordedReward("b1", "b", 0.5),
    RecordedReward("a2", "a", 1.0),
    RecordedReward("b2", "b", 0.5),
    RecordedReward("a3", "a", 1.0),
    RecordedReward("c1", "c", 0.2),
]


def test_the_best_of_a_group_is_the_earliest_of_several() -> None:
    assert best_of_groups(RECORDED) == ["a2", "b1", "c1"]
    assert best_of_groups(RECORDED, min_reward=0.5) == ["a2", "b1"]


def test_a_pair_is_the_best_and_the_worst_of_a_group_that_differ() -> None:
    assert pairs_of_groups(RECORDED) == [PreferencePair("a2", "a1")]
    assert pairs_of_groups(RECORDED, min_margin=1.0) == []


@ly.llm_rollout
async def says_four(task: int, llm: ly.LLM) -> float:
    """The reward is 1 for "4"; the given policy says it in about one game of four."""
    return float((await ask(llm)).strip() == "4")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that recorded 16 groups and learned next to nothing."""
    directory = tmp_path_factory.mktemp("recorded") / "run"
    optim = ly.OptimParams(learning_rate=1e-9)
    algorithm = ly.GRPO(backend(), n_steps=2, tasks_per_step=8, rollouts_per_task=8, max_tokens=4, optim=optim)
    ly.Trainer(algorithm=algorithm, run_dir=directory).fit(says_four, list(range(16)))
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_recorded_rollouts_teach_a_policy(recorded: Path, tmp_path: Path, kind: str) -> None:
    rows = Rows()
    options: dict[str, Any] = {
        "source": recorded,
        "query": {"mode_in": ["train"]},
        "items_per_step": 16,
        "n_steps": 12,
        "warmup_steps": 1,
        "validate_first": True,
        "val_every_n_steps": 12,
        "max_tokens": 4,
        "optim": ly.OptimParams(learning_rate=1e-3),
        "writers": [rows],
    }
    algorithm = ly.SFT(backend(), min_reward=1.0, **options) if kind == "sft" else ly.DPO(backend(), **options)
    trainer = ly.Trainer(algorithm=algorithm, run_dir=tmp_path / "run", concurrency=48)
    trainer.fit(says_four, None, val_dataset=list(range(96)))
    before, after = (row["reward"] for row in rows.val)
    assert before < 0.5
    assert after > before + 0.15
    assert rows.train[-1]["loss"] < rows.train[0]["loss"]
    if kind == "dpo":
        assert rows.train[0]["margin"] == pytest.approx(0.0, abs=1e-4), "policy and reference are one at first"
        assert rows.train[-1]["accuracy"] > 0.9
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(("kind", "every"), [("sft", None), ("dpo", None), ("dpo", 9)])
def test_a_validation_set_without_an_interval_is_measured_after_the_last_step(
    recorded: Path, tmp_path: Path, kind: str, every: int | None
) -> None:
    options: dict[str, Any] = {"source": recorded, "items_per_step": 2, "n_steps": 2, "max_tokens": 4}
    make = ly.SFT if kind == "sft" else ly.DPO
    algorithm = make(backend(), **options, val_every_n_steps=every)
    ly.Trainer(algorithm=algorithm, run_dir=tmp_path / "run").fit(says_four, None, val_dataset=list(range(3)))
    (row,) = (run := open_run(tmp_path / "run")).metrics("val")
    assert (row.iteration, row.metrics["rollouts"]) == (2, 3) and "reward" in row.metrics
    assert [each.iteration for each in run.metrics("train")] == [1, 2]


@pytest.mark.parametrize("make", [ly.SFT, ly.DPO])
def test_tasks_to_train_on_are_said_to_be_used_by_nothing(
    recorded: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = make(backend(), source=recorded, n_steps=1, items_per_step=2)
    ly.Trainer(algorithm=algorithm, store="memory").fit(says_four, [1, 2])
    (warned,) = [message for message in caplog.messages if "train_dataset is used by nothing" in message]
    assert f"because {make.__name__} learns from recorded rollouts alone" in warned


def test_a_source_without_rewards_to_learn_from_is_named(recorded: Path) -> None:
    for options, message in (
        ({"source": recorded, "min_reward": 2.0}, "0 items|finds nothing to learn from: 128 recorded rollouts"),
        ({}, "finds nothing to learn from: 0 recorded rollouts .* give source= the run that recorded them"),
    ):
        with pytest.raises(NoTrainingData, match=message):
            ly.Trainer(algorithm=ly.SFT(backend(), n_steps=1, **options), store="memory").fit(says_four, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ly.SFT(backend(), select="bests"), "select is 'bests'; did you mean 'best'"),
        (lambda: ly.SFT(backend(), items_per_step=0), "items_per_step is 0"),
        (lambda: ly.SFT(backend(), source="no such run"), None),
        (lambda: ly.DPO(backend(), beta=0.0), "beta is 0"),
        (lambda: ly.DPO(backend(), label_smoothing=0.7), "label_smoothing is 0.7"),
        (lambda: ly.DPO(backend(), min_margin=-1.0), "min_margin is -1"),
    ],
)
def test_wrong_options_are_refused(make: Any, message: str | None) -> None:
    if message is None:
        with pytest.raises(ConfigError, match="no such run"):
            ly.Trainer(algorithm=make(), store="memory").fit(says_four, None)
        return
    with pytest.raises(ConfigError, match=message):
        make()


# ---- named settings of PolicyGradient ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("setting", [ly.GRPO, ly.DrGRPO, ly.RLOO, ly.REINFORCEpp, ly.ReMax])
def test_each_setting_learns_a_toy_problem_whose_best_answer_is_known(setting: Any) -> None:
    """The reward is 1 for "4": the best policy always says 4."""
    random.seed(0)
    rows = Rows()
    size = (
        {"tasks_per_step": 32, "rollouts_per_task": 1}
        if setting is ly.ReMax
        else {"tasks_per_step": 2, "rollouts_per_task": 32}
    )
    algorithm = setting(
        backend(),
        # a baseline of one rollout is noisier than one of many, and one optimizer step slower than four
        n_steps=30 if setting in (ly.RLOO, ly.ReMax) else 14,
        max_tokens=4,
        optim=ly.OptimParams(learning_rate=1e-3),
        warmup_steps=1,
        minibatch_size=None if setting is ly.RLOO else 16,  # RLOO has no clip range for a second step
        seed=3,
        writers=[rows],
        **size,
    )
    ly.Trainer(algorithm=algorithm, store="memory", concurrency=64).fit(says_four, [0])
    assert rows.train[0]["reward"] < 0.55
    assert sum(row["reward"] for row in rows.train[-3:]) / 3 > 0.85


@pytest.mark.slow
@pytest.mark.parametrize("own_critic", [False, True])
def test_ppo_learns_with_a_value_head_and_with_a_critic_of_its_own(own_critic: bool) -> None:
    rows = Rows()
    policy = backend(value_head=not own_critic)
    options: dict[str, Any] = {"critic": backend(value_head=True)} if own_critic else {}
    algorithm = ly.PPO(
        policy,
        n_steps=20,
        tasks_per_step=16,
        rollouts_per_task=4,
        minibatch_size=16,
        max_tokens=4,
        optim=ly.OptimParams(learning_rate=1e-3),
        warmup_steps=1,
        seed=3,
        writers=[rows],
        **options,
    )
    ly.Trainer(algorithm=algorithm, store="memory", concurrency=64).fit(says_four, [0])
    assert rows.train[0]["reward"] < 0.55
    assert sum(row["reward"] for row in rows.train[-3:]) / 3 > 0.85
    assert rows.train[-1]["value"] == pytest.approx(rows.train[-1]["reward"], abs=0.35), "the critic follows the reward"
    assert ("critic_loss" in rows.train[0]) == own_critic


@pytest.mark.parametrize("setting", [ly.PPO, ly.REINFORCEpp])
def test_a_step_in_which_all_rewards_are_equal_trains_no_policy_and_goes_on_with_the_critic(setting: Any) -> None:
    """After a step with a gradient, Adam moves the weights even if the next gradients are 0."""
    games = itertools.count()

    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        await ask(llm)
        game = next(games)
        return float(game % 2) if game < 8 else 1.0

    rows = Rows()
    size: dict[str, Any] = {"n_steps": 3, "tasks_per_step": 4, "rollouts_per_task": 2, "minibatch_size": 4}
    options: dict[str, Any] = {"critic": backend(value_head=True)} if setting is ly.PPO else {}
    algorithm = setting(backend(), max_tokens=4, writers=[rows], **size, **options)
    ly.Trainer(algorithm=algorithm, store="memory", concurrency=8).fit(agent, [0])
    first, *others = rows.train
    assert first["optimizer_steps"] > 0
    assert [row["optimizer_steps"] for row in others] == [0, 0]
    assert {row["policy_version"] for row in others} == {first["policy_version"]}
    if setting is ly.PPO:
        assert all(row["critic_loss"] > 0 for row in others)


@pytest.mark.parametrize("term", ["entropy", "value"])
def test_other_terms_of_the_loss_train_the_policy_even_if_all_rewards_are_equal(term: str) -> None:
    @ly.llm_rollout
    async def agent(task: int, llm: ly.LLM) -> float:
        await ask(llm)
        return 1.0

    rows = Rows()
    size: dict[str, Any] = {
        "n_steps": 1,
        "tasks_per_step": 2,
        "rollouts_per_task": 2,
        "max_tokens": 4,
        "writers": [rows],
    }
    if term == "entropy":
        algorithm = ly.REINFORCEpp(backend(), loss=PPOLoss(entropy_coefficient=0.01), **size)
    else:
        algorithm = ly.PPO(backend(value_head=True), **size)
    ly.Trainer(algorithm=algorithm, store="memory").fit(agent, [0])
    assert rows.train[0]["optimizer_steps"] > 0


# ---- imitation as the first steps of another algorithm ------------------------------------------


def imitating(rows: Rows, **options: Any) -> ly.GRPO:
    policy = options.pop("backend", None) or backend()
    defaults = {"tasks_per_step": 4, "rollouts_per_task": 8, "max_tokens": 4, "warmup_steps": 0}
    return ly.GRPO(policy, writers=[rows], optim=ly.OptimParams(learning_rate=1e-3), **(defaults | options))


def test_the_first_steps_imitate_successes_as_sft_does_and_the_others_compare(tmp_path: Path) -> None:
    rows = Rows()
    algorithm = imitating(rows, sft_steps=1, n_steps=1)
    ly.Trainer(algorithm=algorithm, run_dir=tmp_path / "first", concurrency=32).fit(says_four, list(range(4)))
    (row,) = rows.train
    assert row["imitated"] == round(32 * row["reward"]) > 0
    same = ly.SFT(
        backend(),
        source=tmp_path / "first",
        select="all",
        min_reward=1.0,
        items_per_step=row["imitated"],
        n_steps=1,
        warmup_steps=0,
        optim=ly.OptimParams(learning_rate=1e-3),
    )
    ly.Trainer(algorithm=same, run_dir=tmp_path / "same").fit(says_four, None)
    given, *made = (
        load_file(folder / "model.safetensors")
        for folder in (Path(WEIGHTS), tmp_path / "first" / "model", tmp_path / "same" / "model")
    )
    assert any(not torch.equal(made[0][name], given[name]) for name in made[0])
    for name, weight in made[0].items():
        torch.testing.assert_close(weight, made[1][name], rtol=0, atol=1e-5)

    algorithm = imitating(rows := Rows(), sft_steps=1, n_steps=3)
    ly.Trainer(algorithm=algorithm, store="memory", concurrency=32).fit(says_four, list(range(4)))
    assert [("imitated" in row, "cross_entropy" in row, "kl" in row) for row in rows.train] == [
        (True, True, False),
        (False, False, True),
        (False, False, True),
    ]
    assert [row["policy_version"] for row in rows.train] == [1, 2, 3]


def test_groups_of_equal_successes_are_imitated_and_a_step_without_success_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reward = 0.6

    @ly.llm_rollout
    async def equal(task: int, llm: ly.LLM) -> float:
        await ask(llm)
        return reward

    for limit, imitated in ((0.6, 32), (0.7, 0)):
        rows = Rows()
        algorithm = imitating(rows, sft_steps=3, n_steps=3, success_reward=limit)
        ly.Trainer(algorithm=algorithm, store="memory", concurrency=32).fit(equal, [1])
        assert rows.column("imitated") == [imitated] * 3
        assert rows.column("optimizer_steps") == [bool(imitated)] * 3
        warned = [message for message in caplog.messages if "nothing to learn" in message]
        assert len(warned) == (not imitated)


def test_dynamic_sampling_replaces_groups_without_success_while_it_imitates() -> None:
    @ly.llm_rollout
    async def solves_odd_tasks(task: int, llm: ly.LLM) -> float:
        await ask(llm)
        return float(task % 2)

    for tasks, groups, imitated in (([1, 3, 5, 7], 2, 16), ([0, 2, 4, 6], 4, 0)):
        rows = Rows()
        algorithm = imitating(rows, sft_steps=1, n_steps=1, tasks_per_step=2, max_groups_per_step=4)
        ly.Trainer(algorithm=algorithm, store="memory", concurrency=32).fit(solves_odd_tasks, tasks)
        assert [(row["groups"], row["imitated"]) for row in rows.train] == [(groups, imitated)]


@pytest.mark.parametrize(("steps", "message"), [(-1, "sft_steps is -1"), (4, "sft_steps is 4 and n_steps is 3; .*")])
def test_a_number_of_imitating_steps_that_cannot_be_is_refused(steps: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        imitating(Rows(), sft_steps=steps, n_steps=3)


# ---- rows of tokens in a file --------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of the tokens of the recorded run, without those of validation."""
    path = tmp_path_factory.mktemp("rows") / "tokens.jsonl"
    said = CliRunner().invoke(app, ["dataset", str(recorded), "--format", "tokens", "--output", str(path)])
    assert said.exit_code == 0, said.output
    return path


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_file_of_tokens_teaches_exactly_what_its_run_teaches(
    recorded: Path, written: Path, tmp_path: Path, kind: str
) -> None:
    def train(name: str, **source: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        rows = Rows()
        options: dict[str, Any] = {"items_per_step": 4, "n_steps": 3, "max_tokens": 4, "writers": [rows], **source}
        algorithm = ly.SFT(backend(), min_reward=1.0, **options) if kind == "sft" else ly.DPO(backend(), **options)
        ly.Trainer(algorithm=algorithm, run_dir=tmp_path / name).fit(says_four, None)
        kept = [{key: row[key] for key in row if "seconds" not in key} for row in rows.train]
        return kept, load_file(tmp_path / name / "model" / "model.safetensors")

    (metrics, weights), (same, others) = train("run", source=recorded), train("file", source=written)
    for row, other in zip(metrics, same, strict=True):
        assert {name: row[name] for name in ("items", "loss")} == {name: other[name] for name in ("items", "loss")}
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda row: row.pop("input_ids"),
            "row 2: input_ids: missing; make the file with leyden dataset --format tokens",
        ),
        (lambda row: row["assistant_masks"].append(1), "row 2: it has .* input_ids, .* assistant_masks and"),
        (
            lambda row: row["assistant_masks"].__setitem__(0, 2),
            r"row 2: assistant_masks.0: must be less than or equal to 1",
        ),
        (lambda row: row["input_ids"].__setitem__(0, "4"), r"row 2: input_ids.0: must be a valid integer"),
        (lambda row: row["input_ids"].__setitem__(0, 10**6), "10000"),
        (lambda row: row["provenance"].pop("rollout"), r"row 2: provenance.rollout: missing"),
        (lambda row: row.update(assistant_masks=[0] * len(row["input_ids"])), "row 2: assistant_masks has no 1"),
        (lambda row: row["provenance"].update(reward=float("nan")), r"row 2"),
    ],
)
def test_a_row_that_is_not_of_tokens_is_named(written: Path, tmp_path: Path, change: Any, message: str) -> None:
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    change(rows[1])
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    algorithm = ly.SFT(backend(), source=damaged, n_steps=1, items_per_step=len(rows), select="all")
    with pytest.raises(LeydenError, match=message):
        ly.Trainer(algorithm=algorithm, store="memory").fit(says_four, None)


def test_what_a_file_cannot_give_is_refused(written: Path, tmp_path: Path) -> None:
    row = json.loads(written.read_text().splitlines()[0])
    other = {**row, "provenance": {**row["provenance"], "reward": 0.25}}
    (tmp_path / "two.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(other)}\n")
    with pytest.raises(ConfigError, match="with different rewards, groups or tasks"):
        ly.Trainer(algorithm=ly.SFT(backend(), source=tmp_path / "two.jsonl"), store="memory").fit(says_four, None)
    for options in ({"query": {"mode_in": ["train"]}}, {"reward": "style"}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))}=.* has no effect on the rows of .*tokens.jsonl"):
            ly.SFT(backend(), source=written, **options)
    with pytest.raises(ConfigError, match=r"nothing\.jsonl cannot be read"):
        ly.Trainer(algorithm=ly.SFT(backend(), source=tmp_path / "nothing.jsonl"), store="memory").fit(says_four, None)


def test_another_reward_chooses_other_rollouts(recorded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(recorded, folder)
    judges = tmp_path / "judges_of_answers.py"
    judges.write_text("def is_five(record):\n    return record.answer.strip() == '5'\n")
    said = CliRunner().invoke(app, ["rescore", str(folder), "--judge", f"{judges}:is_five", "--name", "five", "--json"])
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["have_a_score"] == 128

    chosen: list[list[str]] = []
    for reward in (None, "five"):
        algorithm = ly.SFT(backend(), source=folder, reward=reward, min_reward=1.0, n_steps=1, items_per_step=2)
        ly.Trainer(algorithm=algorithm, store="memory").fit(says_four, None)
        chosen.append(list(algorithm._items))
    answers = {
        rollout_id: answer_of(spans)
        for rollout_id, spans in open_run(folder)
        .read_store(lambda store: store.query_spans_of([*chosen[0], *chosen[1]]))
        .items()
    }
    assert {answers[each].strip() for each in chosen[0]} == {"4"}
    assert {answers[each].strip() for each in chosen[1]} == {"5"}
