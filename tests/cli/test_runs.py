"""`leyden runs`, `show` and `plot`, on runs that a trainer made."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import leyden as ly
from leyden.cli import main
from leyden.errors import ConfigError
from leyden.training.runs import open_run
from leyden.training.runs.opening import begin_run

REWARDS = (0.1, 0.2, 0.4, 0.8)
TOO_LONG = "the prompt has 1000 tokens; the context has 64"

Said = Callable[..., tuple[str, str]]


@ly.rollout
async def agent(task: dict[str, int]) -> float:
    if task["n"] == 3:
        raise ValueError(TOO_LONG)
    ly.emit_message(f"thinking of {task['n']}")
    return task["n"] / 10


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run in `.leyden/first`: four rollouts, one of which failed, and a curve of four steps."""
    folder = tmp_path_factory.mktemp("work")
    run = folder / ".leyden" / "first"
    ly.Trainer(algorithm="baseline", run_dir=run).fit(agent, [{"n": n} for n in range(4)])
    rows: list[dict[str, Any]] = [
        {"iteration": number, "stage": "train", "seconds": 1.0 * number, "reward": reward, "loss": -reward}
        for number, reward in enumerate(REWARDS, start=1)
    ]
    rows += [{"iteration": 0, "stage": "val", "seconds": 0.0, "reward": 0.05}]
    rows += [{"iteration": 4, "stage": "val", "seconds": 4.5, "reward": 0.7}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def said(recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs a command in that folder, and returns its standard output and standard error."""
    monkeypatch.chdir(recorded)

    def call(*arguments: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["leyden", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        assert ended.value.code == code, told.err
        return told.out, told.err

    return call


def test_runs_are_listed_with_their_rewards(said: Said) -> None:
    head, line = said("runs")[0].splitlines()
    assert head.split() == ["name", "kind", "algorithm", "model", "state", "steps", "reward", "started", "took", "size"]
    assert line.split()[:2] == ["first", "fit"]
    assert "0.1 -> 0.8" in line
    assert "▁▂▄█" in line


def test_programs_read_runs_as_json(said: Said) -> None:
    (run,) = json.loads(said("runs", "--json")[0])
    assert (run["name"], run["iterations"], run["reward"]["best_iteration"]) == ("first", 4, 4)
    assert run["val_reward"]["values"] == [0.05, 0.7]
    assert run["bytes"]["records"] > 1000 and run["bytes"]["model"] == run["bytes"]["checkpoints"] == 0


def test_a_folder_without_runs_says_how_to_make_one(said: Said, tmp_path: Path) -> None:
    assert (
        said("runs", "--dir", str(tmp_path))[0]
        == f"no runs in {tmp_path}; a trainer's fit() makes one, and so does leyden demo\n"
    )
    assert said("runs", "--dir", str(tmp_path / "none"), code=1)[1] == (
        f"leyden: --dir {tmp_path / 'none'}: there is no such folder\n"
    )


@pytest.mark.parametrize("name", ["latest", "first", "fir", ".leyden/first"])
def test_a_run_is_shown_with_what_failed_and_an_example_of_it(said: Said, name: str) -> None:
    shown = said("show", name)[0]
    assert re.search(r"^run +first", shown, re.M)
    assert "0.1 -> 0.8, best 0.8 at step 4" in shown
    assert "1 failed, 3 succeeded" in shown
    example = re.search(rf"1 x .*{TOO_LONG}\n +leyden show {re.escape(name)} (ro-\w+)", shown)
    assert example is not None
    assert TOO_LONG in said("show", name, example[1])[0]


def test_the_warnings_of_a_run_are_shown_each_once(said: Said) -> None:
    earlier = json.loads(said("show", "first", "--json")[0])["warnings"]  # that a rollout has failed
    with (Path(".leyden") / "first" / "run.log").open("a") as log:
        for text in ("WARNING it learns nothing; mend it", "INFO no warning", "WARNING it learns nothing; mend it"):
            log.write(f"2026-01-02 10:15:00.000 {text}\n")
    assert json.loads(said("show", "first", "--json")[0])["warnings"] == [*earlier, "it learns nothing; mend it"]
    assert "\nwarning     it learns nothing; mend it\n" in said("show", "first")[0]


def test_failed_best_and_worst_rollouts_are_found(said: Said) -> None:
    assert TOO_LONG in said("show", "latest", "--failed")[0]
    best, worst = (said("show", "latest", order)[0].splitlines() for order in ("--best", "--worst"))
    assert [line.split(maxsplit=2)[1:] for line in best[::2]] == [
        ["0.2", "{'n': 2}"],
        ["0.1", "{'n': 1}"],
        ["0", "{'n': 0}"],
    ]
    assert best[1::2] == [f"    answer: thinking of {n}" for n in (2, 1, 0)]
    assert (best[::2], best[1::2]) == (worst[::2][::-1], worst[1::2][::-1])
    (one,) = json.loads(said("show", "latest", "--best", "-n", "1", "--json")[0])
    assert (one["reward"], one["input"], one["answer"]) == (0.2, {"n": 2}, "thinking of 2")


def test_the_best_and_the_worst_rollouts_name_their_step(said: Said, tmp_path: Path) -> None:
    """A training rollout that was requested after two steps belongs to the third, a validation to the second."""

    @ly.algo
    async def search(*, store: ly.LightningStore) -> None:
        for mode, reward in (("train", 5), ("val", 7)):
            rollout = await store.enqueue_rollout({"n": reward}, mode=mode, metadata={"step": 2})
            await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id])

    run = str(tmp_path / "run")
    ly.Trainer(algorithm=search, run_dir=run, progress=False).fit(agent)
    worst = said("show", run, "--worst")[0].splitlines()
    assert [line.split(maxsplit=1)[1] for line in worst[::2]] == ["0.5  step 3  {'n': 5}", "0.7  step 2  {'n': 7}"]
    assert [one["iteration"] for one in json.loads(said("show", run, "--best", "--json")[0])] == [2, 3]


@pytest.mark.parametrize(("order", "rewards"), [("--best", "0.2 0.1 0.1"), ("--worst", "0 0.1 0.1")])
def test_of_equal_rewards_the_newest_are_listed(said: Said, tmp_path: Path, order: str, rewards: str) -> None:
    """After training, the worst answers of interest are those of the trained model, not of the untrained one."""

    @ly.algo
    async def search(*, store: ly.LightningStore) -> None:
        for step, n in enumerate((0, 2, 1, 1, 1, 1)):
            rollout = await store.enqueue_rollout({"n": n}, mode="val", metadata={"step": step})
            await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id])

    run = str(tmp_path / "run")
    ly.Trainer(algorithm=search, run_dir=run, progress=False).fit(agent)
    listed = json.loads(said("show", run, order, "-n", "3", "--json")[0])
    assert [one["reward"] for one in listed] == [float(reward) for reward in rewards.split()]
    assert [one["iteration"] for one in listed][1:] == [5, 4]


def test_a_run_that_reported_no_metric_is_not_said_to_have_a_curve(said: Said, tmp_path: Path) -> None:
    run = tmp_path / "run"
    summary = ly.Trainer(algorithm="baseline", run_dir=run, progress=False).fit(agent, [{"n": 1}])
    (run / "metrics.jsonl").write_text("")
    assert "leyden plot" not in str(replace(summary, reward=None, val_reward=None, metrics={}))
    assert "leyden plot run --metric lr" in str(
        replace(summary, run_dir=Path(".leyden/run"), reward=None, metrics={"lr": 0.1})
    )
    assert summary.reward is not None and "leyden plot" not in str(summary)  # one point is no curve
    assert said("plot", str(run), code=1)[1] == (
        "leyden: run ended without metrics, so there is nothing to draw; see it with `leyden show run`\n"
    )


def test_the_time_of_a_resumed_run_leaves_out_the_pause(said: Said, tmp_path: Path) -> None:
    """The manifest says that the run worked for 100 s, was stopped, and was resumed an hour later."""
    directory, manifest = begin_run(tmp_path / "run", config={})
    now = time.time()
    manifest.record.start_time, manifest.record.end_time, manifest.record.status = now - 3700, now - 3600, "stopped"
    manifest.write(directory)
    for _ in range(2):  # a second resume adds nothing but its own pause
        _, resumed = begin_run(directory, resume=True, config={})
        resumed.record.status, resumed.record.end_time = "stopped", time.time()
        resumed.write(directory)
    seconds = json.loads(said("runs", "--dir", str(tmp_path), "--json")[0])[0]["seconds"]
    assert 99 < seconds < 110


def test_a_rollout_is_shown_by_a_part_of_its_id(said: Said) -> None:
    (one,) = json.loads(said("show", "latest", "--best", "-n", "1", "--json")[0])
    identifier = one["rollout_id"]
    shown = said("show", "latest", identifier[:-1])[0]
    assert f"rollout     {identifier}" in shown
    assert "state       succeeded, reward 0.2" in shown
    assert "thinking of 2" in shown
    data = json.loads(said("show", "latest", identifier, "--json")[0])
    assert (data["rollout"]["rollout_id"], data["reward"], data["tokens"]) == (identifier, 0.2, [])


def test_a_store_is_read_as_its_folder_is(said: Said) -> None:
    store = ".leyden/first/store.sqlite"
    (run,) = json.loads(said("runs", store, "--json")[0])
    assert (run["name"], run["state"], run["directory"]) == ("first", "succeeded", None)
    shown = said("show", store)[0]
    assert "1 failed, 3 succeeded" in shown
    assert f"1 x [exception] ValueError: {TOO_LONG}" in shown
    assert said("show", store, "--best")[0] == said("show", "first", "--best")[0]


@pytest.mark.parametrize("command", ["runs", "show", "plot"])
def test_a_store_server_that_is_away_is_reported(said: Said, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr("leyden.cli.run_views.WAIT_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    assert said(command, url, code=1)[1].startswith(f"leyden: the store at {url} does not answer (connection refused)")


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["show", "nothing"], "there is no run 'nothing'"),
        (["show", "latest", "ro-"], "'ro-' is in the ids of several rollouts"),
        (["show", "latest", "zz"], "run first has no rollout 'zz'"),
        (["show", "latest", "--best", "--failed"], "--failed and --best are different views"),
        (["plot", "latest", "--metric", "rewrd"], "first has no metric 'rewrd'; did you mean 'reward'?"),
        (["plot", "latest", "--metric", "xyz"], "there are: loss, reward"),
        (["show", "latest", "-n", "3"], "--limit is for a list of rollouts; give --failed, --best or --worst"),
        (["show", "latest", "--full"], "--full is for one rollout; give its id"),
        (["plot", "latest", "--json", "-o", "c.svg"], "--json prints the points, and --output writes a picture"),
        (["plot", "latest", "--json", "--width", "60"], "--width and --height are for the drawing in a terminal"),
        (["plot", "latest", "-o", "c.svg", "--height", "9"], "--width and --height are for the drawing in a terminal"),
        (["plot", "latest", "-o", "curve.pdf"], "must end in .svg or .png"),
        (["plot", "latest", "-o", "none/curve.svg"], "cannot write none/curve.svg"),
    ],
)
def test_what_cannot_be_shown_is_said(said: Said, arguments: list[str], fault: str) -> None:
    assert fault in said(*arguments, code=1)[1]


def test_a_curve_is_drawn_with_both_stages_and_labels(said: Said) -> None:
    lines = said("plot", "latest", "--height", "6", "--width", "60")[0].splitlines()
    assert lines[0] == "reward of first"
    assert re.fullmatch(r" 0\.8 ┤ +·*●", lines[1])
    assert lines[6].startswith("0.05 ┤○")
    assert lines[-1].split() == ["●", "train", "○", "val"]
    assert max(map(len, lines)) <= 60
    loss = said("plot", "latest", "--metric", "loss")[0]
    assert loss.startswith("loss of first, train\n")
    assert re.search("[\u2801-\u28ff]", loss)


def test_curves_of_several_runs_go_into_one_file(said: Said, tmp_path: Path) -> None:
    assert said("plot", "latest", "first", "-o", str(tmp_path / "c.svg"))[0] == f"{tmp_path / 'c.svg'}\n"
    tree = ElementTree.parse(tmp_path / "c.svg")
    names = [text.text for text in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert names[-4:] == ["first train", "first val", "first train", "first val"]
    assert len(list(tree.iter("{http://www.w3.org/2000/svg}polyline"))) == 4


def test_a_curve_without_matplotlib_is_svg(said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert (
        "PNG needs matplotlib (pip install matplotlib)" in said("plot", "latest", "-o", f"{tmp_path}/c.png", code=1)[1]
    )


def test_a_value_that_is_no_number_is_null_in_the_json_of_a_plot(said: Said, recorded: Path) -> None:
    folder = recorded / ".leyden" / "broken"
    ly.Trainer(algorithm="baseline", run_dir=folder, progress=False).fit(agent, [{"n": 1}])
    row = {"iteration": 1, "stage": "train", "seconds": 1.0, "loss": None}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")

    def refused(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    out, _ = said("plot", "broken", "--metric", "loss", "--json")
    assert json.loads(out, parse_constant=refused) == [{"name": "train", "iterations": [1], "values": [None]}]
    shutil.rmtree(folder)


def test_a_run_that_was_stopped_says_how_to_continue_it(said: Said, recorded: Path) -> None:
    manifest = recorded / ".leyden" / "first" / "run.json"
    before = manifest.read_text()
    manifest.write_text(json.dumps({**json.loads(before), "status": "stopped", "cause": "interrupted"}))
    try:
        assert "continue    Trainer(..., run_dir='.leyden/first').fit(..., resume=True)" in said("show", "latest")[0]
    finally:
        manifest.write_text(before)
    assert "continue" not in said("show", "latest")[0]


# ---- options, columns and widths -----------------------------------------------------------------

GRPO = {"name": "leyden.algorithm.policy_gradient.settings.GRPO", "options": {"tasks_per_step": 8}}
OPTIM = {"algorithm.optim": "leyden.engine.policy_backend.OptimParams"}
LONG = "an experiment with a very long name 中文名字的实验运行🎉"


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of four runs of one algorithm: two learning rates, its default, and one of an earlier version."""
    monkeypatch.chdir(tmp_path)

    def make(folder: str, number: int, config: dict[str, Any], name: str | None = None) -> None:
        directory, manifest = begin_run(Path(".leyden") / folder, name=name, config={"algorithm": GRPO, **config})
        record = manifest.record
        record.start_time, record.end_time, record.status = 1000.0 * number, 1000.0 * number + 1, "succeeded"
        manifest.write(directory)
        rows = [{"iteration": n, "stage": "train", "seconds": n, "reward": n / 10, "loss": -n / number} for n in (1, 2)]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    started = {"program": "/a b/train.py", "command": ["/v/bin/python", "train.py", "--lr", "1e-4"], "cwd": "/a b"}
    for number, rate in enumerate((1e-4, 3e-4), start=1):
        changed = {**OPTIM, "algorithm.optim.learning_rate": rate, "trainer.n_runners": 2}
        make(f"20261123-01010{number}-a21{number}", number, {"not_default": changed, **started})
    make("20261123-010103-a213", 3, {"not_default": {"algorithm.tasks_per_step": 4, "trainer.n_runners": 2}}, LONG)
    make("20261123-010104-a214", 4, {})
    return tmp_path / ".leyden"


def test_options_that_differ_are_columns_and_a_run_of_an_earlier_version_says_nothing(tuned: Path, said: Said) -> None:
    head, *lines = said("runs", "--dir", str(tuned))[0].splitlines()
    places = {name: head.index(name) for name in ("learning_rate", "tasks_per_step")}
    assert "n_runners" not in head and "optim" not in head.replace("learning_rate", ""), "all have the same"

    def shown(name: str) -> list[str]:
        from rich.cells import cell_len

        wide = [cell_len(line) - len(line) for line in lines]
        return [line[places[name] - more :].split()[0] for line, more in zip(lines, wide, strict=True)]

    assert shown("learning_rate") == ["-", "(default)", "0.0003", "0.0001"]
    assert shown("tasks_per_step") == ["-", "4", "(default)", "(default)"]
    rows = json.loads(said("runs", "--dir", str(tuned), "--json")[0])
    assert [row["options"] and row["options"].get("algorithm.optim.learning_rate") for row in rows] == [
        None,
        None,
        3e-4,
        1e-4,
    ]
    assert rows[0]["options"] is None and rows[0]["command"] is None


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("learning_rate", ["-", "(default)", 3e-4, 1e-4]),
        ("optim.learning_rate", ["-", "(default)", 3e-4, 1e-4]),
        ("algorithm.optim.learning_rate", ["-", "(default)", 3e-4, 1e-4]),
        ("tasks_per_step", [8, 4, 8, 8]),
        ("loss", [-0.5, -2 / 3, -1.0, -2.0]),
        ("train/reward", [0.2] * 4),
    ],
)
def test_any_option_or_metric_can_be_a_column(tuned: Path, said: Said, column: str, values: list[Any]) -> None:
    rows = json.loads(said("runs", "--dir", str(tuned), "--columns", f" {column} ,", "--json")[0])
    assert [row["columns"] for row in rows] == [{column: value} for value in values]
    assert said("runs", "--dir", str(tuned), "--columns", column)[0].splitlines()[0].split().count(column) == 1


def test_a_column_that_no_run_has_is_refused_with_the_nearest_one(tuned: Path, said: Said) -> None:
    error = said("runs", "--dir", str(tuned), "--columns", "learning_rat", code=1)[1]
    assert error.endswith("no run has an option or a metric 'learning_rat'; did you mean 'learning_rate'?\n")
    path = tuned / "20261123-010104-a214" / "run.json"
    manifest = json.loads(path.read_text())
    manifest["config"]["not_default"] = {"algorithm.critic_optim.learning_rate": 1.0}
    path.write_text(json.dumps(manifest))
    error = said("runs", "--dir", str(tuned), "--columns", "learning_rate", code=1)[1]
    assert "fits several options: algorithm.critic_optim.learning_rate, algorithm.optim.learning_rate" in error


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120])
def test_names_and_values_are_whole_at_any_width(
    tuned: Path, said: Said, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr("leyden.cli.output.is_on_terminal", lambda _: True)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    lines = said("runs", "--dir", str(tuned))[0].splitlines()
    names = [*(f"20261123-01010{n}-a21{n}" for n in (1, 2, 4)), f"{LONG} (20261123-010103-a213)"]
    for name in names:
        (at,) = [n for n, line in enumerate(lines) if line.startswith(name)]
        assert "succeeded" in "".join(lines[at : at + 2]) and "0.1 -> 0.2" in "".join(lines[at : at + 3])
    from rich.cells import cell_len

    assert all(cell_len(line) <= width or line in names for line in lines), lines
    assert len(lines) <= (13 if width == 30 else 9)
    chosen = said("runs", "--dir", str(tuned), "--columns", "learning_rate,n_runners,loss")[0]
    assert "0.0003" in chosen and "n_runners" in chosen and "-0.666667" in chosen


def test_a_run_is_shown_with_its_options_and_the_command_that_started_it(tuned: Path, said: Said) -> None:
    shown = said("show", str(tuned / "20261123-010101-a211"))[0]
    assert "options     optim OptimParams, optim.learning_rate 0.0001, trainer.n_runners 2\n" in shown
    assert "command     cd '/a b' && /v/bin/python train.py --lr 1e-4\n" in shown
    of_old = said("show", str(tuned / "20261123-010104-a214"))[0]
    assert "options" not in of_old and "command" not in of_old


def test_the_legend_of_a_plot_says_what_differs(tuned: Path, said: Said) -> None:
    runs = [str(each) for each in sorted(tuned.iterdir())]
    drawn = said("plot", *runs[:2], "--width", "80")[0]
    assert drawn.splitlines()[-1].strip().split("   ") == [
        "● learning_rate 0.0001, train",
        "○ learning_rate 0.0003, train",
    ]
    lines = said("plot", *runs, "--width", "60")[0].splitlines()[-4:]
    assert [line.strip() for line in lines] == [
        "● learning_rate 0.0001, tasks_per_step (default), train",
        "○ learning_rate 0.0003, tasks_per_step (default), train",
        f"▲ {LONG}: learning_rate (default), tasks_per_step 4, train",
        "△ 20261123-010104-a214 train",
    ]
    points = json.loads(said("plot", *runs[:2], "--json")[0])
    assert [each["name"] for each in points] == ["learning_rate 0.0001, train", "learning_rate 0.0003, train"]


def test_two_runs_that_nothing_tells_apart_keep_their_names(tuned: Path, said: Said) -> None:
    shutil.copytree(tuned / "20261123-010101-a211", tuned / "again")
    path = tuned / "again" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "run_id": "other"}))
    points = json.loads(said("plot", str(tuned / "20261123-010101-a211"), str(tuned / "again"), "--json")[0])
    first, second = (each["name"] for each in points)
    assert first != second and "other" in second


# ---- comparing -----------------------------------------------------------------------------------


def test_runs_are_compared_in_a_table_and_as_json(tuned: Path, said: Said) -> None:
    runs = [str(each) for each in sorted(tuned.iterdir())]
    out = said("compare", *runs[:2])[0].splitlines()
    assert out[0].split() == ["20261123-010101-a211", "20261123-010102-a212"]
    cells = {line[: out[0].index("2026")].strip(): line[out[0].index("2026") :].split() for line in out[1:6]}
    assert cells["algorithm.optim.learning_rate"] == ["0.0001", "0.0003"]
    assert cells["reward: first last best"] == ["0.1", "0.2", "0.2"] * 2
    assert "  not compared: 20261123-010101-a211: it has no store of rollouts; " in "\n".join(out)
    data = json.loads(said("compare", *runs, "--json")[0])
    assert data["configuration"]["algorithm.optim.learning_rate"] == [1e-4, 3e-4, "(default)", "-"]
    assert len(data["runs"]) == 4 and len(data["against_first"]) == 3


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["20261123-010101-a211"], "a comparison needs two runs, and one was given: 20261123-010101-a211"),
        (["20261123-010101-a211", "20261123"], "'20261123' fits 4 runs; there are: "),
        (["20261123-010101-a211", "nope"], "there is no run 'nope'"),
    ],
)
def test_runs_that_cannot_be_compared_are_named(
    tuned: Path, said: Said, monkeypatch: pytest.MonkeyPatch, arguments: list[str], fault: str
) -> None:
    monkeypatch.chdir(tuned.parent)
    assert fault in said("compare", *arguments, code=1)[1]


def test_flipped_tasks_are_printed_with_ids_rewards_and_answers(
    said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, offset in (("first", 0), ("second", 8)):

        @ly.rollout
        async def shifted(task: dict[str, int], offset: int = offset) -> float:
            ly.emit_message(f"answer {offset}")
            return float(task["n"] >= offset)

        ly.Trainer(algorithm="baseline", run_dir=Path(".leyden") / name, progress=False).fit(
            shifted, val_dataset=[{"n": n} for n in range(10)]
        )
    out = said("compare", "first", "second")[0]
    assert "reward -0.8 (95 % interval -0.943 to -0.49, Wilson; 0 better, 8 worse)" in out
    assert "8 solved before, and not now, the first 5:\n    {'n': 0}\n" in out
    assert re.search(r"      before 1  ro-\w+  answer 0\n      after  0  ro-\w+  answer 8\n", out)
    itself = said("compare", "first", ".leyden/first")[0]
    assert "all are the same run" in itself and "solved" not in itself


# ---- pruning -------------------------------------------------------------------------------------


@pytest.fixture
def pruned(tuned: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of four old runs, of which the oldest has a tag, and a damaged one, in which commands run."""
    monkeypatch.chdir(tuned.parent)
    said("note", "20261123-010101-a211", "--tag", "good")
    (tuned / "damaged").mkdir()
    (tuned / "damaged" / "run.json").write_text("{")
    return tuned


def names_in(folder: Path) -> list[str]:
    return sorted(path.name[-4:] for path in folder.iterdir())


def test_pruning_says_first_what_it_frees_and_removes_nothing_without_an_answer(pruned: Path, said: Said) -> None:
    before = names_in(pruned)
    out, error = said("runs", "--prune", "--keep", "1", code=1)
    assert out.startswith("2 runs can be removed, ") and "20261123-010101-a211 stays: it has the tag good" in out
    assert "nothing was removed, because nobody can be asked; add --yes" in error and "damaged" in error
    data = json.loads(said("runs", "--prune", "--keep", "1", "--json")[0])
    assert [each["directory"][-4:] for each in data["would_remove"]] == ["a213", "a212"]
    assert data["stay"] == {".leyden/20261123-010101-a211": "it has the tag good"} and data["removed"] == []
    assert len(data["damaged"]) == 1 and names_in(pruned) == before


def test_pruning_removes_what_was_said(pruned: Path, said: Said) -> None:
    assert said("runs", "--prune", "--keep", "2", "--yes")[0].splitlines()[-1].startswith("removed 1 run, ")
    assert names_in(pruned) == ["a211", "a213", "a214", "aged"]
    data = json.loads(said("runs", "--prune", "--older-than", "1", "--state", "succeeded", "--yes", "--json")[0])
    assert len(data["removed"]) == 2 and data["failed"] == {} and data["freed_bytes"] > 1000
    assert names_in(pruned) == ["a211", "aged"]
    assert "no run can be removed" in said("runs", "--prune", "--keep", "0")[0]


def test_a_run_that_cannot_be_removed_keeps_no_other(pruned: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = Path.unlink

    def denied(self: Path, **options: Any) -> None:
        if "a213" in str(self):
            raise PermissionError(30, "Read-only file system", str(self))
        unlink(self, **options)

    monkeypatch.setattr(Path, "unlink", denied)  # root may remove everything, so the system's answer is made here
    out, error = said("runs", "--prune", "--keep", "0", "--yes", code=1)
    assert "removed 2 runs" in out and "is not removed: [Errno 30] Read-only file system" in error
    assert names_in(pruned) == ["a211", "a213", "aged"]
    data = json.loads(said("runs", "--prune", "--keep", "0", "--yes", "--json", code=1)[0])
    assert list(data["failed"]) == [".leyden/20261123-010103-a213"] and data["removed"] == []


def test_ctrl_c_says_how_far_pruning_came(pruned: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = Path.unlink

    def interrupted(self: Path, **options: Any) -> None:
        if "a213" in str(self) and self.name == "run.json":
            raise KeyboardInterrupt
        unlink(self, **options)

    monkeypatch.setattr(Path, "unlink", interrupted)
    error = said("runs", "--prune", "--keep", "0", "--yes", code=130)[1]
    assert "1 of 3 runs are removed, and a part of " in error and "is still listed" in error
    monkeypatch.undo()
    monkeypatch.chdir(pruned.parent)
    assert names_in(pruned) == ["a211", "a212", "a213", "aged"]
    said("runs", "--prune", "--keep", "0", "--yes")
    assert names_in(pruned) == ["a211", "aged"]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--prune"], "needs --older-than, --keep or --state"),
        (["--prune", "--tag", "good", "--keep", "1"], "never for tagged ones"),
        (["--prune", "http://127.0.0.1:1", "--keep", "1"], "--prune is for the runs in a folder"),
        (["--keep", "1"], "--older-than, --keep and --yes are for --prune"),
        (["--prune", "--state", "faild"], "--state faild: did you mean 'failed'?"),
    ],
)
def test_a_prune_that_is_not_clear_is_refused(pruned: Path, said: Said, arguments: list[str], fault: str) -> None:
    assert fault in said("runs", *arguments, code=1)[1]
    assert len(names_in(pruned)) == 5


# ---- names, tags and notes -----------------------------------------------------------------------


def test_a_run_is_named_tagged_and_found_by_both(tuned: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tuned.parent)
    first = "20261123-010101-a211"
    out, _ = said("note", first, "too slow <b>", "--tag", "good", "--tag", "paper", "--name", "baseline")
    assert out.splitlines()[:2] == [f"run         baseline  (.leyden/{first})", "tags        good, paper"]
    assert re.fullmatch(r"note        too slow <b>  \(.+, \d s ago\)", out.splitlines()[2])
    assert open_run("baseline").record.run_id == open_run(first).record.run_id
    (row,) = json.loads(said("runs", "--tag", "good", "--json")[0])
    assert (row["name"], row["tags"], row["notes"][0]["text"]) == ("baseline", ["good", "paper"], "too slow <b>")
    assert "good, paper" in said("runs")[0] and "too slow <b>" in said("runs")[0]
    shown = said("show", "baseline")[0].splitlines()
    assert shown[1] == "tags        good, paper" and shown[2].startswith("note        too slow <b>  (")
    assert json.loads(said("note", "baseline", "--untag", "good", "--json")[0])["tags"] == ["paper"]
    assert said("runs", "--tag", "good")[0] == (
        "no run in .leyden has the tag good; leyden note RUN --tag good puts it on one\n"
    )


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["20261123-010101-a211", "--name", "./a"], "the name './a' looks like a path or an option"),
        (["20261123-010101-a211", "--name", "-n"], "the name '-n' looks like a path or an option"),
        (["20261123-010101-a211", "--name", "latest"], "the name 'latest' means the newest run; choose another one"),
        (["20261123-010101-a211", "--name", "20261123-010102-a212"], "is another run's; choose another one"),
        (["20261123-010101-a211", "--name", LONG], "is another run's; choose another one"),
        (["20261123", "x"], "fits 4 runs; there are: "),
        (["nope", "x"], "there is no run 'nope'"),
        (["20261123-010101-a211", "--untag", "x"], "the run has no tag 'x'; its tags: none"),
    ],
)
def test_a_note_that_cannot_be_kept_is_refused(
    tuned: Path, said: Said, monkeypatch: pytest.MonkeyPatch, arguments: list[str], fault: str
) -> None:
    monkeypatch.chdir(tuned.parent)
    assert fault in said("note", *arguments, code=1)[1]


# ---- folders that were moved, copied or damaged --------------------------------------------------


@pytest.fixture
def two_runs(said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of two runs, `first` and `second`, in which commands run."""
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        ly.Trainer(algorithm="baseline", run_dir=Path(".leyden") / name, progress=False).fit(agent, [{"n": 1}])
    return tmp_path / ".leyden"


def test_a_run_is_found_by_the_name_of_its_folder_and_by_its_recorded_name(two_runs: Path, said: Said) -> None:
    (two_runs / "first").rename(two_runs / "renamed")
    for name in ("renamed", "first", "ren", "fir"):
        assert open_run(name).directory == Path(".leyden/renamed"), name
    shutil.copytree(two_runs / "renamed", two_runs / "copied")
    for name in ("renamed", "copied", "cop"):
        assert open_run(name).record.name == "first"
    with pytest.raises(ConfigError, match=r"'first' fits 2 runs; there are: (copied, renamed|renamed, copied); give"):
        open_run("first")
    shutil.copytree(two_runs / "renamed", two_runs / "first")
    assert open_run("first").directory == Path(".leyden/first"), "its folder has the name"
    listed = said("runs")[0]
    assert "first (renamed)" in listed and "first (copied)" in listed and "second " in listed


DAMAGE: dict[str, tuple[str, Any]] = {
    "truncated run.json": ("run.json", b'{"format": 2, "run_'),
    "binary run.json": ("run.json", bytes(range(256))),
    "empty run.json": ("run.json", b""),
    "list run.json": ("run.json", b"[]"),
    "deep run.json": ("run.json", b"[" * 100_000),
    "wrong pid": ("run.json", {"pid": "x", "status": "running"}),
    "wrong time": ("run.json", {"start_time": "yesterday"}),
    "infinite time": ("run.json", {"start_time": float("inf")}),
    "wrong config": ("run.json", {"config": 5}),
    "wrong status": ("run.json", {"status": "dancing"}),
    "run.json is a folder": ("run.json", None),
    "no permission": ("run.json", PermissionError),
    "binary metrics": ("metrics.jsonl", bytes(range(256))),
    "no JSON in metrics": ("metrics.jsonl", b"{}\n{\n"),
    "zeros in metrics": ("metrics.jsonl", b"\0" * 64),
    "wrong types in metrics": ("metrics.jsonl", b'{"iteration": "x", "stage": "train", "seconds": 1}\n'),
    "wrong stage in metrics": ("metrics.jsonl", b'{"iteration": 1, "stage": ["train"], "seconds": 1}\n'),
    "a number over 1.8e308": (
        "metrics.jsonl",
        b'{"iteration": 1, "stage": "train", "seconds": 1, "reward": 1%s}\n' % (b"0" * 400),
    ),
    "seconds over 1.8e308": ("metrics.jsonl", b'{"iteration": 1, "stage": "train", "seconds": -1%s}\n' % (b"0" * 400)),
    "a time that is none": ("run.json", {"end_time": 1e300}),
    "metrics is a folder": ("metrics.jsonl", None),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_run_is_a_line_and_hides_no_other_run(
    two_runs: Path, said: Said, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, content = DAMAGE[case]
    path = two_runs / "first" / name
    if content is PermissionError:  # root may read everything, so the system's answer is made here
        stat = Path.stat

        def denied(self: Path, **options: Any) -> Any:
            if self == Path(".leyden/first/run.json"):
                raise PermissionError(13, "Permission denied", str(self))
            return stat(self, **options)

        monkeypatch.setattr(Path, "stat", denied)
    elif content is None:
        path.unlink()
        path.mkdir()
    else:
        changed = {**json.loads(path.read_text()), **content} if isinstance(content, dict) else content
        path.write_bytes(changed if isinstance(changed, bytes) else json.dumps(changed).encode())
    out, error = said("runs")
    assert "second" in out
    assert [line for line in error.splitlines() if line.startswith("a run is left out: ") and name in line], error
    assert [row["name"] for row in json.loads(said("runs", "--json")[0])] == ["second"]
    assert "first" in said("show", "first", code=1)[1]
    assert said("show", "latest")[0].startswith("run         second")


def test_a_configuration_of_other_types_is_shown_as_far_as_it_can_be(two_runs: Path, said: Said) -> None:
    path = two_runs / "first" / "run.json"
    manifest = json.loads(path.read_text())
    for config in ({"algorithm": [1], "model": "x", "data": 3}, {"data": {"train": 1, "val": {"length": "y"}}}):
        path.write_text(json.dumps({**manifest, "config": config}))
        assert "first" in said("runs")[0]
        assert said("show", "first")[0].startswith("run         first")


def test_a_folder_of_runs_that_cannot_be_listed_is_an_error(
    two_runs: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", denied)
    assert "the runs in .leyden cannot be listed: Permission denied" in said("runs", code=1)[1]


@pytest.mark.parametrize("name", ["x" * 5000, "a/" * 3000, "\0", "", ".", "..", "/"])
def test_a_name_that_no_run_can_have_is_no_run(said: Said, name: str) -> None:
    assert said("show", name, code=1)[1].startswith("leyden: ")


def test_files_that_an_editor_has_marked_as_utf_8_are_read(two_runs: Path, said: Said) -> None:
    for name in ("run.json", "metrics.jsonl", "failures.jsonl"):
        path = two_runs / "first" / name
        if path.exists():
            path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert {row["name"] for row in json.loads(said("runs", "--json")[0])} == {"first", "second"}
    assert said("show", "first/", "--failed")[1] == ""


def test_runs_says_that_the_folder_of_runs_is_a_file(
    said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".leyden").write_text("")
    assert "Not a directory" in said("runs", code=1)[1]
