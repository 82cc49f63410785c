"""The report of a run: what it says is exact or has a reason, recorded text is never markup, and it fits in 1 MB."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

import leyden as ly
import leyden.cli
from leyden.cli import main
from leyden.cli.app import app
from leyden.errors import ConfigError
from leyden.report import page, report_data, run_data
from leyden.report.credit import advantages_of
from leyden.report.curves import curve
from leyden.report.page import LIMIT
from leyden.report.page import _pieces as page_pieces
from leyden.report.prompts import text_changes
from leyden.report.tokens import sequences, token_texts
from leyden.training import MetricsRow
from leyden.training.runs import Run, open_run
from leyden.types import Attempt, AttemptedRollout, Span, TokenRecord
from tests.doctor.policy import says_four, train
from tests.doctor.recorded import record, steps

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'>&amp;\u202eevil\x1b[31m\ud800"
GRPO = {
    "advantages": "grpo",
    "constants": {},
    "rollouts_per_task": 4,
    "failed_reward": 0.0,
    "temperature": 1.0,
    "kl_in_reward": 0.0,
    "sft_steps": 0,
}


@dataclass
class Parsed(HTMLParser):
    """A page as a browser's parser sees it."""

    document: str
    tags: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def of_folder(folder: Path) -> tuple[dict[str, Any], Parsed]:
    data = report_data([open_run(folder)])
    json.dumps(data, allow_nan=False, default=str)
    document = page(data)
    assert len(document.encode("utf-8")) <= LIMIT
    return data["runs"][0], Parsed(document)


def validated(folder: Path, rewards: Sequence[Sequence[float]], *, recorded: Sequence[float] | None = None) -> Path:
    """A run that validates the tasks 0, 1, ... once for each list of their rewards."""

    @ly.rollout
    async def agent(task: int, rollout: ly.Rollout) -> float:
        return rewards[rollout.metadata["step"]][task]

    @ly.algo
    async def search(*, store: ly.LightningStore, run: Run) -> None:
        for step, of_tasks in enumerate(rewards):
            asked = [await store.enqueue_rollout(n, mode="val", metadata={"step": step}) for n in range(len(of_tasks))]
            await store.wait_for_rollouts(rollout_ids=[each.rollout_id for each in asked])
            mean = statistics.fmean(of_tasks) if recorded is None else recorded[step]
            run.report({"reward": mean, "rollouts": len(of_tasks)}, stage="val", iteration=step)

    ly.Trainer(algorithm=search, run_dir=folder, progress=False).fit(agent)
    return folder


# ---- what it says --------------------------------------------------------------------------------


def test_the_last_validation_is_compared_with_the_first_by_task(tmp_path: Path) -> None:
    data, shown = of_folder(validated(tmp_path / "run", [[0, 0, 0, 1], [1, 1, 0, 1]]))
    assert (data["learned"]["first"], data["learned"]["last"]) == ((0, 0.25), (1, 0.75))
    difference = data["learned"]["difference"]
    assert (difference["mean"], difference["tasks"]) == (0.5, 4) and difference["low"] <= 0.5 <= difference["high"]
    assert "The validation reward rose from 0.25 to 0.75." in shown.text
    (reward,) = [each for each in data["curves"] if each["name"] == "reward"]
    assert all(low < mean < high for _, mean, low, high in reward["val"])


def test_a_validation_that_the_store_has_otherwise_than_recorded_has_no_interval(tmp_path: Path) -> None:
    data, shown = of_folder(validated(tmp_path / "run", [[0, 0], [1, 1]], recorded=[0.0, 0.5]))
    assert data["learned"]["difference"] is None and "not all rollouts" in data["learned"]["reason"]
    (reward,) = [each for each in data["curves"] if each["name"] == "reward"]
    assert [each[2] is None for each in reward["val"]] == [False, True]
    assert "No interval" in shown.text


def called(temperature: float) -> Span:
    messages = {"gen_ai.input.messages": '[{"role": "user", "content": "2 + 2"}]'}
    return Span(
        rollout_id="r",
        attempt_id="a",
        sequence_id=1,
        trace_id="t",
        span_id="s",
        name="leyden.model_call",
        attributes={"gen_ai.request.temperature": temperature, "gen_ai.operation.name": "chat", **messages},
        tokens=TokenRecord(prompt_ids=[1, 2], response_ids=[3, 4, 5], logprobs=[-0.1, -3.0, -0.1], loss_mask=[1, 1, 0]),
    )


def test_tokens_have_their_role_probability_and_colour(tmp_path: Path) -> None:
    run = open_run(record(tmp_path / "run", config={"algorithm": {"credit": GRPO}}))
    (found,) = sequences(run, [called(1.0)], None)
    assert [each["kind"] for each in found["pieces"]] == ["context", "sampled", "sampled", "masked"]
    assert [each["text"] for each in found["pieces"]] == ["[1][2]", "[3]", "[4]", "[5]"]
    assert [each["probability"] for each in found["pieces"]] == [None, math.exp(-0.1), math.exp(-3), None]
    shown = page_pieces(found, {"advantage": -0.5, "largest": 1.0})
    assert [re.findall(r'class="([^"]*)"', each) for each in shown] == [
        [],
        ["t down3"],
        ["t down3 rarest"],
        ["t masked"],
    ]
    (refused,) = sequences(run, [called(0.5)], None)
    assert "temperature 0.5" in refused["reason"]
    assert "down" not in "".join(page_pieces(refused, {"advantage": -1.0, "largest": 1.0}))


def test_the_texts_of_tokens_are_the_whole_text(tmp_path: Path) -> None:
    model = Path(leyden.cli.__file__).parent / "project/model"
    texts = token_texts(open_run(record(tmp_path / "run", config={"model": {"name": str(model)}})), max_bytes=None)
    tokenizer: Any = Tokenizer.from_file(str(model / "tokenizer.json"))
    for text in ("It is sunny in Lima!", "  héllo 🎈🎈 \n\n日本", "<|im_end|>"):
        ids = tokenizer.encode(text).ids
        found = texts(ids)
        assert len(found) == len(ids) and "".join(found) == tokenizer.decode(ids, skip_special_tokens=False)
    with pytest.raises(ConfigError, match="no folder with a tokenizer"):
        token_texts(open_run(record(tmp_path / "other")), max_bytes=None)


@pytest.mark.slow
def test_a_training_run_shows_what_the_policy_wrote_with_its_advantage(tmp_path: Path) -> None:
    train(tmp_path / "run", ly.llm_rollout(says_four), rollouts_per_task=8, n_steps=1)
    data, shown = of_folder(tmp_path / "run")
    group = data["group"]
    assert group["reason"] is None and group["estimator"] == "grpo" and group["size"] == 8
    rewards = [each["reward"] for each in group["rollouts"]]
    deviation = statistics.stdev(rewards) + 1e-4
    for each in group["rollouts"]:
        assert each["advantage"] == pytest.approx((each["reward"] - statistics.fmean(rewards)) / deviation)
        written = [piece for of in each["sequences"] for piece in of["pieces"] if piece["kind"] == "sampled"]
        assert written and all(0 < piece["probability"] <= 1 for piece in written)
        assert not any(of["reason"] or of["left_out"] for of in each["sequences"])
    assert {"up4", "down4"} & set(re.findall(r"\b(?:up|down)\d\b", shown.document))
    assert (tmp_path / "run/report.html").read_text().startswith("<!doctype html>")


def member(n: int, reward: float | None, **changes: Any) -> AttemptedRollout:
    status = "failed" if reward is None else "succeeded"
    attempt = Attempt(rollout_id=f"r{n}", attempt_id="a", sequence_id=1, start_time=0.0, status=status, reward=reward)
    given = {"rollout_id": f"r{n}", "input": 1, "start_time": 0.0, "mode": "train", "status": status, **changes}
    return AttemptedRollout(attempt=attempt, metadata={"step": 3}, **given)


@pytest.mark.parametrize(
    ("credit", "members", "reason"),
    [
        ({**GRPO, "kl_in_reward": 0.1}, range(4), "KL penalty"),
        ({**GRPO, "advantages": "gae"}, range(4), "reads more than"),
        ({**GRPO, "advantages": "my_own"}, range(4), "reads more than"),
        ({**GRPO, "sft_steps": 4}, range(4), "imitated"),
        (GRPO, range(3), "3 rollouts of its group of 4"),
        (None, range(4), "records no estimator"),
    ],
)
def test_an_advantage_that_cannot_be_known_exactly_has_the_reason(
    tmp_path: Path, credit: Any, members: range, reason: str
) -> None:
    run = open_run(record(tmp_path / "run", config={"algorithm": {"name": "x", "credit": credit}}))
    with pytest.raises(ConfigError, match=reason):
        advantages_of(run, [member(n, float(n)) for n in members])


def test_failed_rollouts_count_in_their_group_as_training_counted_them(tmp_path: Path) -> None:
    def found(failed_reward: float | None) -> dict[str, float]:
        credit = {**GRPO, "advantages": "dr_grpo", "failed_reward": failed_reward}
        run = open_run(record(tmp_path / str(failed_reward), config={"algorithm": {"credit": credit}}))
        return advantages_of(run, [member(0, 1.0), member(1, 1.0), member(2, 0.0), member(3, None)])

    assert found(-2.0) == {"r0": 1.0, "r1": 1.0, "r2": 0.0, "r3": -2.0}
    assert found(None) == pytest.approx({"r0": 1 / 3, "r1": 1 / 3, "r2": -2 / 3})


def test_a_long_curve_keeps_its_spikes_and_counts_what_is_not_finite() -> None:
    values = [float(n % 7) for n in range(5_000)]
    values[3_210], values[17] = 1e6, float("nan")
    found = curve("loss", steps(loss=values), {})
    assert len(found["train"]) <= 300 and [3_211, 1e6] in found["train"]
    assert (found["points"], found["not_finite"]) == (4_999, 1)
    middle = dict(map(tuple, curve("loss", steps(loss=[0.0, 3.0, 0.0, 3.0, 6.0, 3.0]), {})["smooth"]))
    assert (middle[1], middle[2], middle[5], middle[6]) == (0.0, 1.0, 4.0, 3.0)


def test_prompts_show_what_changed_between_versions() -> None:
    changes = text_changes("Answer in one word.\nBe brief.", "Answer in two words.\nBe brief.")
    assert "".join(text for kind, text in changes if kind != "added") == "Answer in one word.\nBe brief."
    assert "".join(text for kind, text in changes if kind != "removed") == "Answer in two words.\nBe brief."
    assert [text for kind, text in changes if kind != "same"] == ["one word.", "two words."]


# ---- bad input -----------------------------------------------------------------------------------


def test_recorded_text_is_never_markup(tmp_path: Path) -> None:
    @ly.rollout
    async def agent(task: Any) -> float:
        ly.emit_message(EVIL)
        ly.emit_reward({"primary": 1.0, "<b>": 0.5}, primary_key="primary")
        if task["n"]:
            raise ValueError(EVIL)
        return 1.0

    tasks = [{"n": n, EVIL.replace("\ud800", ""): "<i>"} for n in range(2)]
    ly.Trainer(algorithm="baseline", run_dir=tmp_path / "run", progress=False, name="<u>name").fit(agent, tasks)
    _, shown = of_folder(tmp_path / "run")
    assert not shown.tags & {"script", "img", "b:", "iframe", "link", "object", "a", "form", "base"}
    assert not any(name.startswith("on") or name in ("style", "src", "href") for name in shown.attributes)
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>" in shown.text and "<u>name" in shown.text
    assert not re.search(r"[\x00-\x08\x1b\u202a-\u202e]", shown.document)
    assert "default-src 'none'" in shown.document and "://" not in shown.document.replace("sqlite://", "")


def test_what_does_not_fit_into_a_megabyte_is_counted(tmp_path: Path) -> None:
    rollout: dict[str, Any] = {
        **dict.fromkeys(
            ("mode", "iteration", "reward", "seconds", "tokens", "cost", "answer", "advantage", "reason", "largest")
        ),
        "rollout_id": "r",
        "status": "succeeded",
        "rewards": {},
        "task": "t",
        "sequences": [],
        "left_out": [],
        "messages": [{"role": "user", "text": "&" * 3_000, "tool_calls": [], "call": ""}] * 30,
    }
    data = report_data([open_run(record(tmp_path / "run"))])
    data["runs"][0]["samples"] = {"best": [rollout] * 40, "worst": [rollout] * 40}
    document = page(data)
    assert len(document.encode()) <= LIMIT and "Left out, because a report has at most 1 MB" in document
    shown = document.count('class="rollout"')
    assert 0 < shown < 80 and f"{80 - shown:,} × rollout" in document


def test_a_damaged_an_empty_and_a_newer_run_say_what_is_missing(tmp_path: Path) -> None:
    damaged = record(tmp_path / "damaged", steps(reward=[0.1, 0.2]))
    (damaged / "metrics.jsonl").write_text("{}\n")
    (damaged / "store.sqlite").write_text("no database")
    data, shown = of_folder(damaged)
    assert data["left_out"] and "Not shown: " in shown.text and "No reward was recorded" in shown.text
    _, shown = of_folder(record(tmp_path / "empty"))
    assert "No reward was recorded" in shown.text
    newer = record(tmp_path / "newer")
    (newer / "run.json").write_text((newer / "run.json").read_text().replace('"format": 2', '"format": 99'))
    with pytest.raises(ConfigError, match="format 99"):
        of_folder(newer)


# ---- where it is written -------------------------------------------------------------------------


@ly.rollout
async def scores(task: int) -> float:
    return float(task)


def test_every_fit_ends_with_a_report_unless_it_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ly.Trainer(algorithm="baseline", run_dir=tmp_path / "run", progress=False).fit(scores, [0, 1])
    assert "The training reward is 0.5" in (tmp_path / "run/report.html").read_text()
    ly.Trainer(algorithm="baseline", run_dir=tmp_path / "without", progress=False, report=False).fit(scores, [0, 1])
    assert not (tmp_path / "without/report.html").exists()

    @ly.algo
    async def breaks(*, store: ly.LightningStore) -> None:
        await store.enqueue_rollout(1)
        raise RuntimeError("it broke")

    with pytest.raises(RuntimeError, match="it broke"):
        ly.Trainer(algorithm=breaks, run_dir=tmp_path / "broken", progress=False).fit(scores)
    assert "it broke" in (tmp_path / "broken/report.html").read_text()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/report.html").write_text("my own page")
    ly.Trainer(algorithm="baseline", run_dir=tmp_path / "mine", progress=False).fit(scores, [0, 1])
    assert (tmp_path / "mine/report.html").read_text() == "my own page" and "no report was written" in caplog.text


def test_show_says_that_a_report_is_older_than_its_run(tmp_path: Path) -> None:
    ly.Trainer(algorithm="baseline", run_dir=tmp_path / "run").fit(scores, [1])
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "run")]).stdout
    assert "report " in shown and "older than the run" not in shown
    rows = tmp_path / "run" / "metrics.jsonl"
    os.utime(rows, (rows.stat().st_atime, rows.stat().st_mtime + 60))
    assert "older than the run" in CliRunner().invoke(app, ["show", str(tmp_path / "run")]).stdout


def test_a_report_of_many_rollouts_takes_less_than_a_second_of_processor_time(tmp_path: Path) -> None:
    ly.Trainer(algorithm="baseline", run_dir=tmp_path / "run", progress=False, report=False).fit(scores, [1] * 2_000)
    run = open_run(tmp_path / "run")
    started = time.process_time()
    assert run_data(run)["outcomes"]["finished"] == 2_000
    assert time.process_time() - started < 1.0


def test_the_command_writes_one_run_or_compares_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def said(*arguments: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["leyden", "report", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
        return capsys.readouterr()

    first = validated(tmp_path / "first", [[0, 0], [0, 1]])
    second = validated(tmp_path / "second", [[0, 0], [1, 1]])
    capsys.readouterr()
    assert said(str(first))[0].strip() == str(first / "report.html")
    assert said(str(first), str(second))[0].strip() == "report.html"
    shown = Parsed((tmp_path / "report.html").read_text())
    assert "second against first" in shown.text and "Solved now, and not before: 1" in shown.text
    (tmp_path / "report.html").write_text("my own")
    assert "give --output FILE" in said(str(first), str(second), code=1)[1]
    assert said(str(first), str(second), "--output", "both.html")[0].strip() == "both.html"
    assert json.loads(said(str(first), "--json")[0])["runs"][0]["learned"]["last"] == [1, 0.5]


def test_a_run_of_metrics_alone_has_its_curves(tmp_path: Path) -> None:
    rows = [*steps(reward=[0.1, 0.4, 0.3], loss=[3.0, 2.0, 1.0]), MetricsRow(3, "val", 4.0, {"reward": 0.2})]
    data, shown = of_folder(record(tmp_path / "run", rows, status="failed", cause="no memory"))
    assert [each["name"] for each in data["curves"]] == ["reward", "loss"] and "polyline" in shown.tags
    assert "no memory" in shown.text and "ended with an error" in shown.text and not data["left_out"]
