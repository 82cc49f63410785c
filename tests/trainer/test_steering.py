"""Runs that are stopped, paused, extended and changed while they work, and killed meanwhile: nothing asked is lost, and a run that is
continued equals one that was never killed.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.testing import FakeUpstream
from leyden.training.runs import open_run
from leyden.training.runs.control import ControlLine, ask
from leyden.training.runs.folder import read_manifest
from tests.algorithm.apo import rules
from tests.algorithm.gepa import evolving
from tests.trainer.steering import answers, end_all, leyden, metrics, run, start, steps, until

ASKS = [[3, "set", "gain", 2.5], [4, "extend", None, {"steps": 2}], [4, "set", "gain", 3.5]]


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The rows of a run that was asked ASKS and never killed."""
    directory = tmp_path_factory.mktemp("twin")
    run("count", directory, 8, asks=ASKS)
    return metrics(directory)


def test_a_change_holds_from_the_next_step_on_and_an_extension_adds_steps(twin: list[Any]) -> None:
    assert [values["gain"] for *_, values in twin] == [1, 1, 1, 2.5, *[3.5] * 6]
    assert [values["length"] for *_, values in twin] == [8, 8, 8, 8, *[10] * 6]


@pytest.mark.parametrize(
    ("kill", "every"), [(6, 3), *(pytest.param(*each, marks=pytest.mark.faults) for each in ((5, None), (9, 100)))]
)
def test_a_killed_run_applies_its_changes_again_at_the_same_steps(
    tmp_path: Path, twin: list[Any], kill: int, every: int | None
) -> None:
    """They go on from the checkpoint of the last step, from one between the two changes, and from the beginning."""
    run("count", tmp_path, 8, code=-signal.SIGKILL, asks=ASKS, kill=kill, every=every)
    printed = run("count", tmp_path, 8, asks=ASKS, every=every)
    assert [(*place, values["gain"], values["reward"]) for *place, values in metrics(tmp_path)] == [
        (*place, values["gain"], values["reward"]) for *place, values in twin
    ], printed
    assert [line.state for line in answers(tmp_path)] == ["done"] * 3


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_run_that_is_killed_as_it_answers_a_command_goes_on_as_one_that_was_not(tmp_path: Path) -> None:
    directory, twin = tmp_path / "run", tmp_path / "twin"
    process = start("count", directory, 100, seconds=0.2)
    until(lambda: steps(directory) >= 2, process)
    command = until(lambda: leyden("set", directory, "gain=7", "--wait", 0), process)
    assert "asked; the run answers" in command or "1.0 -> 7.0" in command
    [answer] = until(lambda: answers(directory), process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process = start("count", directory, 100, seconds=0.2)
    until(lambda: open_run(directory).state == "running", process)
    said = leyden("set", directory, "algorithm.gain=9.5", "--wait", 40)
    second = answers(directory)[-1]
    assert said == f"gain 7.0 -> 9.5 from step {second.iteration + 1}\n"
    until(lambda: steps(directory) > second.iteration + 1, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    run("count", directory, 100)
    run("count", twin, 100, asks=[[line.iteration, "set", "gain", line.value] for line in (answer, second)])
    assert metrics(directory) == metrics(twin)


@pytest.mark.faults
def test_a_change_is_undone_and_made_again_when_the_algorithm_is_restarted(tmp_path: Path, twin: list[Any]) -> None:
    run("count", tmp_path, 8, asks=ASKS, every=3, fail=5)
    assert metrics(tmp_path) == twin


def test_a_paused_run_that_is_killed_stays_paused_says_so_and_goes_on_when_it_is_resumed(tmp_path: Path) -> None:
    process = start("count", tmp_path, 12, seconds=0.05, asks=[[3, "pause", None, None]])
    until(lambda: answers(tmp_path), process)
    assert leyden("set", tmp_path, "gain=2") == "gain 1.0 -> 2.0 from step 4\n"  # a paused run answers at once
    assert "is paused already" in leyden("pause", tmp_path, code=1)
    shown = json.loads(leyden("show", tmp_path, "--json"))
    assert shown["paused"] and shown["state"] == "running" and shown["paused_seconds"] > 0
    os.killpg(process.pid, signal.SIGKILL)
    assert "`leyden resume" in process.communicate()[0]
    assert "crashed: its process is gone, paused after step 3" in leyden("show", tmp_path)
    process = start("count", tmp_path, 12, seconds=0.05)
    until(lambda: "still paused after step 3" in leyden("show", tmp_path), process)
    assert steps(tmp_path) == 3
    assert leyden("resume", tmp_path) == "resumed with step 4\n"
    assert "the run is paused after step 3" in process.communicate(timeout=60)[0]
    assert [values["gain"] for *_, values in metrics(tmp_path)] == [1] * 3 + [2] * 9
    data = json.loads(leyden("show", tmp_path, "--json"))
    assert not data["paused"] and 0 < data["paused_seconds"] <= data["seconds"]


def test_stop_ends_a_run_in_its_step_as_ctrl_c_does(tmp_path: Path) -> None:
    process = start("count", tmp_path, 5, seconds=100)
    until((tmp_path / "run.json").exists, process)
    assert leyden("stop", tmp_path).startswith("stopped")
    printed, _ = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "the run was stopped before it had begun" in printed
    assert not tmp_path.exists()  # as after Ctrl-C
    directory = tmp_path / "second"
    process = start("count", directory, 500, seconds=0.05)
    until(lambda: steps(directory) >= 2, process)
    assert leyden("stop", directory).startswith("stopped")
    assert process.wait(timeout=30) != 0
    assert read_manifest(directory).record.status == "stopped"
    assert (read_manifest(directory).record.cause or "").startswith("stopped by ")


def test_stop_after_the_step_keeps_the_step_and_the_run_can_be_continued(tmp_path: Path) -> None:
    process = start("count", tmp_path, 6, seconds=0.01, asks=[[2, "stop", None, "after-step"]])
    printed, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Continue with Trainer" in printed
    assert steps(tmp_path) == 2
    assert open_run(tmp_path).state == "stopped"
    assert "stopped after step 2" in leyden("show", tmp_path)
    run("count", tmp_path, 6)
    assert [iteration for iteration, *_ in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_stop_that_a_killed_process_did_not_answer_does_not_end_the_next_one(tmp_path: Path) -> None:
    asks = [[2, "stop", None, "after-step"], [2, "pause", None, None], [2, "resume", None, None]]
    run("count", tmp_path, 4, code=-signal.SIGKILL, asks=asks, kill=2)
    run("count", tmp_path, 4)
    assert [(line.command, line.state) for line in answers(tmp_path)] == [
        ("stop", "refused"),
        ("pause", "done"),
        ("resume", "done"),
    ]


def test_requests_that_come_with_the_last_step_are_refused_unless_it_is_extended(tmp_path: Path) -> None:
    run("count", tmp_path / "one", 3, asks=[[3, "set", "gain", 2], [3, "pause", None, None]])
    assert [line.state for line in answers(tmp_path / "one")] == ["refused"] * 2
    asks = [[3, "set", "gain", 2], [3, "extend", None, {"to": 4}]]
    run("count", tmp_path / "two", 3, asks=asks)
    assert sorted((line.command, line.state) for line in answers(tmp_path / "two")) == [
        ("extend", "done"),
        ("set", "done"),
    ]
    assert metrics(tmp_path / "two")[-1][2]["gain"] == 2


def test_a_whole_number_may_be_written_as_a_float_and_a_number_as_a_whole_one(tmp_path: Path) -> None:
    run("count", tmp_path, 3, asks=[[2, "set", "val_every_n_iters", 2.0], [2, "set", "gain", 2]])
    assert [json.dumps(line.value) for line in answers(tmp_path)] == ["2", "2.0"]


REFUSED = [
    ("gian", 2, "gian is no option of this run; did you mean 'gain'?"),
    ("gain", -1, "gain is -1.0; it must be a number, above 0"),
    ("gain", "fast", "gain is 'fast'; it must be a number"),
    ("gain", None, "gain is None; it must be a number"),
    ("gain", True, "gain is True; it must be a number"),
    ("gain", [1], "gain is [1]; it must be a number"),
    ("gain", 10**400, "gain is 1000"),
    ("val_every_n_iters", 2.5, "val_every_n_iters is 2.5; it must be a whole number or null"),
    ("val_every_n_iters", True, "val_every_n_iters is True; it must be a whole number or null"),
    ("val_every_n_iters", 1e17, "val_every_n_iters is 1e+17; it must be a whole number or null"),
    ("seconds", 1, "cannot change while the run works: a clock is not set back; a new run takes it"),
    ("keep_last", 1, "cannot change while the run works: it holds from the first step to the last"),
    ("trainer.n_runners", 2, "cannot change while the run works: the trainer holds from the start"),
    ("max_iters", 9, "`leyden extend RUN --to N` raises it"),
    ("val_every_n_iters", 0, "val_every_n_iters is 0; it must be a whole number, at least 1"),
    ("gain.x", 1, "gain.x is no option"),
    ("", 1, "names no option"),
    ("algorithm..gain", 1, "names no option"),
]


def test_what_is_not_possible_is_refused_with_its_reason_and_the_run_goes_on(tmp_path: Path) -> None:
    extensions: list[Any] = [
        {"to": 3},
        {"to": 2},
        {"to": 0},
        {"steps": -4},
        {"steps": "many"},
        {"to": 5.5},
        None,
        {},
        [9],
    ]
    asks = [
        *([2, "set", path, value] for path, value, _ in REFUSED),
        *([2, "extend", None, each] for each in extensions),
    ]
    run("count", tmp_path, 3, asks=[*asks, [2, "dance", None, None]])
    found = answers(tmp_path)
    assert [line.state for line in found] == ["refused"] * (len(asks) + 1)
    by_request = {json.dumps([line.command, line.path, line.value]): str(line.reason) for line in found}
    for path, value, reason in REFUSED:
        assert reason in by_request[json.dumps(["set", path, value])]
    assert [values["gain"] for *_, values in metrics(tmp_path)] == [1, 1, 1]


def test_a_change_that_was_not_answered_before_a_kill_is_made_before_the_step_that_is_done_again(
    tmp_path: Path,
) -> None:
    run("count", tmp_path, 4, code=-signal.SIGKILL, asks=ASKS[:1], kill=3)
    run("count", tmp_path, 4)
    assert [values["gain"] for *_, values in metrics(tmp_path)] == [1, 1, 2.5, 2.5]


def test_an_algorithm_that_owns_its_loop_can_be_stopped_and_says_why_it_cannot_be_paused(tmp_path: Path) -> None:
    process = start("free", tmp_path, 1000, seconds=0.05)
    until(lambda: steps(tmp_path) >= 2, process)
    for command in (("pause",), ("extend", "--to", "2000"), ("set", "gain=2")):
        said = leyden(command[0], tmp_path, *command[1:], code=1)
        assert "free owns its loop" in said
        assert "can only be stopped" in said
    assert leyden("stop", tmp_path, "--after-step") == "stopped\n"
    process.communicate(timeout=30)
    assert open_run(tmp_path).state == "stopped"


@pytest.mark.parametrize("kind", ["apo", "gepa"])
async def test_a_search_for_prompts_is_extended_also_in_its_last_round(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("openai")
    has_asked = list[ControlLine]()

    @ly.rollout
    async def agent(task: dict[str, Any], prompt_template: ly.PromptTemplate) -> float:
        in_last = (tmp_path / "metrics.jsonl").read_text().count('"train"') == 1
        if in_last and not has_asked:
            has_asked.append(ask(tmp_path, "extend", by="ann", value={"steps": 1}))
        ly.emit_message(f"I do not know about {task['topic']}.")
        return float(rules.RULES[task["topic"]] in prompt_template.format(ticket=task["number"]))

    rounds: dict[str, Any] = {**rules.OPTIONS, "beam_rounds": 2}
    algorithm = ly.APO(**rounds) if kind == "apo" else ly.GEPA(max_steps=2, seed=3)
    reply = rules.reply if kind == "apo" else evolving.reply
    async with FakeUpstream(reply=reply) as upstream:
        trainer = ly.Trainer(
            algorithm=algorithm,
            llm_proxy=ly.LLMProxy(model_list=[{"model_name": "fake", "endpoint": upstream.endpoint}]),
            initial_resources={"prompt": ly.PromptTemplate(template=rules.SEED)},
            run_dir=tmp_path,
            progress=False,
        )
        await trainer.afit(agent, rules.TRAIN, rules.VAL)
    option = "algorithm.beam_rounds" if kind == "apo" else "algorithm.max_steps"
    assert [(line.state, line.path, line.value) for line in answers(tmp_path)] == [("done", option, 3)]
    assert [iteration for iteration, stage, _ in metrics(tmp_path) if stage == "train"] == [1, 2, 3]


@pytest.mark.faults
def test_a_baseline_is_extended_by_epochs(tmp_path: Path) -> None:
    process = start("baseline", tmp_path, 2000)
    until((tmp_path / "metrics.jsonl").exists, process)
    assert leyden("pause", tmp_path).startswith("paused after step")
    assert leyden("extend", tmp_path, "--steps", 5) == "n_epochs 2000 -> 2005\n"
    assert "cannot change while the run works" in leyden("set", tmp_path, "train_split=0.5", code=1)
    assert leyden("stop", tmp_path).startswith("stopped")
    process.communicate(timeout=30)


# ---- policies ------------------------------------------------------------------------------------


POLICY_ASKS = [
    [2, "set", "optim.learning_rate", 3e-3],
    [2, "set", "temperature", 0.8],
    [2, "set", "val_every_n_steps", 3],
    [3, "set", "rollouts_per_task", 6],
    [3, "set", "loss.clip_high", 0.5],
    [3, "extend", None, {"to": 6}],
]


@pytest.mark.faults
@pytest.mark.timeout(400)
def test_a_policy_that_is_changed_killed_and_continued_has_the_weights_of_one_that_was_not_killed(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    twin = tmp_path / "twin"
    run("policy", twin, 5, asks=POLICY_ASKS, val=2)
    assert [line.state for line in answers(twin)] == ["done"] * 6, [line.reason for line in answers(twin)]
    trained = [values for _, stage, values in metrics(twin) if stage == "train"]
    for step, values in enumerate(trained):  # a step without signal has no learning rate; the warm-up takes five steps
        rate = (1e-3 if step < 2 else 3e-3) * min(1.0, (step + 1) / 5)
        assert values.get("learning_rate", rate) == pytest.approx(rate)
    for kill, every in ((4, 1), (6, 100)):
        directory = tmp_path / f"{kill}"
        run("policy", directory, 5, code=-signal.SIGKILL, asks=POLICY_ASKS, kill=kill, every=every, val=2)
        run("policy", directory, 5, asks=POLICY_ASKS, every=every, val=2)
        for file in ("model/model.safetensors", "best/model.safetensors"):
            if (twin / file).exists():
                assert (directory / file).read_bytes() == (twin / file).read_bytes(), (kill, file)


SIM_ASKS = [
    [2, "set", "policy.lr", 1e-3],
    [2, "set", "update_kwargs.repeat", 3],
    [3, "set", "vessel.episode_per_iter", 9],
    [3, "set", "trainer.val_every_n_iters", 2],
    [4, "extend", None, {"steps": 2}],
]


def end_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((directory / "end").iterdir())}


@pytest.mark.faults
@pytest.mark.timeout(200)
def test_a_simulator_run_that_is_changed_killed_and_continued_has_the_weights_of_one_that_was_not_killed(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    twin = tmp_path / "twin"
    run("sim", twin, 6, asks=SIM_ASKS)
    assert [line.state for line in answers(twin)] == ["done"] * 5, [line.reason for line in answers(twin)]
    assert [(row[0], row[1]) for row in metrics(twin)][-1] == (8, "val")
    for kill, every in ((4, 3), (7, 1)):
        directory = tmp_path / f"{kill}"
        run("sim", directory, 6, code=-signal.SIGKILL, asks=SIM_ASKS, kill=kill, every=every)
        run("sim", directory, 6, asks=SIM_ASKS, every=every)
        assert end_of(directory) == end_of(twin), kill


@pytest.mark.faults
@pytest.mark.timeout(200)
def test_a_paused_simulator_run_ends_at_ctrl_c_stays_paused_and_is_stopped(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    process = start("sim", tmp_path, 500, seconds=0.02, asks=[[2, "pause", None, None]])
    until(lambda: answers(tmp_path), process)
    os.kill(process.pid, signal.SIGINT)
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 0, printed
    assert open_run(tmp_path).state == "stopped"
    (tmp_path / "end").rename(tmp_path / "end of the first")
    process = start("sim", tmp_path, 500, seconds=0.02)
    until(lambda: len(answers(tmp_path)) > 1, process)
    assert steps(tmp_path) == 2
    for path, reason in (
        ("policy.lrr=1", "did you mean 'policy.lr'"),
        ("policy.lr=0", "above 0"),
        ("seed=1", "holds from"),
    ):
        assert reason in leyden("set", tmp_path, path, code=1)
    assert leyden("resume", tmp_path) == "resumed with step 3\n"
    until(lambda: steps(tmp_path) > 4, process)
    assert leyden("stop", tmp_path).startswith("stopped")
    assert process.wait(timeout=30) == 0
    assert (read_manifest(tmp_path).record.cause or "").startswith("stopped by ")
