"""`leyden eval`, as a user runs it: on a hosted model, and on what a run has trained."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.cli import main
from leyden.cli.demo import WEIGHTS
from leyden.cli.demo.demo_agent import play
from leyden.testing import FakeUpstream, Reply

AGENT = """
import openai
import leyden as ly

@ly.llm_rollout
async def agent(task: dict, llm: ly.LLM) -> float:
    if task["q"] == "bad":
        raise ValueError("no question")
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        answer = await client.chat.completions.create(
            model=llm.model, messages=[{"role": "user", "content": task["q"]}], **llm.sampling_parameters
        )
    return float(answer.choices[0].message.content == task["a"])
"""

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs a command in a folder with an agent and tasks; returns exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "agent_to_measure.py").write_text(AGENT)
    questions = [{"q": "one", "a": "1"}, {"q": "two", "a": "2"}, {"q": "bad", "a": ""}]
    (tmp_path / "tasks.json").write_text(json.dumps(questions))

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["leyden", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, told.out, told.err

    return call


def answers(request: dict[str, Any]) -> Reply:
    return Reply("1")


async def test_an_agent_is_measured_on_a_hosted_model_and_its_rollouts_are_kept(said: Said, tmp_path: Path) -> None:
    async with FakeUpstream(reply=answers) as upstream:
        arguments = ["eval", "agent_to_measure:agent", "--tasks", "tasks.json", "--model", f"fake={upstream.endpoint}"]
        code, out, err = await asyncio.to_thread(
            said, *arguments, "--repeats", "2", "--price", "1000,0", "--json", "-o", "each.jsonl"
        )
    assert code == 0, err
    data = json.loads(out)
    assert (data["tasks"], data["rollouts"], data["failed"], data["model_calls"]) == (3, 6, 2, 4)
    assert data["reward"]["mean"] == 0.5
    assert data["reward_with_failures_as_zero"]["mean"] == pytest.approx(1 / 3)
    assert data["failures"][0]["reason"] == "ValueError: no question"
    assert data["cost"] == pytest.approx(data["prompt_tokens"] / 1000)
    assert data["unpriced_calls"] == 0
    rows = [json.loads(line) for line in (tmp_path / "each.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [1.0, 1.0, 0.0, 0.0, None, None]
    (run,) = json.loads((await asyncio.to_thread(said, "runs", "--json"))[1])
    assert (run["kind"], run["state"], run["reward"]["last"]) == ("eval", "succeeded", 0.5)
    shown = (await asyncio.to_thread(said, "show", "latest", data["failures"][0]["example"]))[1]
    assert "ValueError: no question" in shown


async def test_a_file_of_prices_prices_the_models_that_it_names(said: Said, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text("{currency: EUR, models: {fak*: {prompt: 0, answer: 1000}}}")
    (tmp_path / "none.yaml").write_text("models: {other: {prompt: 1, answer: 1}}")
    async with FakeUpstream(reply=answers) as upstream:
        arguments = ["eval", "agent_to_measure:agent", "--tasks", "tasks.json", "--model", f"fake={upstream.endpoint}"]
        code, out, err = await asyncio.to_thread(said, *arguments, "--price", "prices.yaml")
        cost = sum(len(call.response_ids) for call in upstream.calls) / 1000
        unknown = await asyncio.to_thread(said, *arguments, "--price", "none.yaml", "--json")
    assert code == 0, err
    assert f"; cost {cost:.4g} EUR" in out
    assert {name: json.loads(unknown[1])[name] for name in ("cost", "unpriced_calls")} == {
        "cost": None,
        "unpriced_calls": 2,
    }


def test_an_agent_that_always_fails_is_reported_with_one(said: Said, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"q": "bad"}\n')
    code, out, _ = said("eval", "agent_to_measure:agent", "--tasks", "bad.jsonl", "--model", "m=http://127.0.0.1:9/v1")
    assert code == 1
    assert "reward      none: every rollout failed" in out
    assert "1 x ValueError: no question" in out


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--tasks", "none.jsonl"], "none.jsonl cannot be read: No such file or directory"),
        (["--tasks", "tasks.json"], "has a parameter 'llm'"),
        (["--tasks", "tasks.json", "--model", "policy"], "must be NAME=URL, NAME=FOLDER or NAME=RUN"),
        (["--tasks", "tasks.json", "--resources", "nothing"], "there is no run 'nothing'"),
        (["--tasks", "tasks.json", "--price", "1"], "--price is '1'; it must be two numbers"),
        (["--tasks", "tasks.json", "--temperature", "0"], "--temperature is suggested to an agent with its model"),
        (["--tasks", "tasks.json", "--max-tokens", "9"], "--max-tokens is suggested to an agent with its model"),
        (["--tasks", "tasks.json", "-o", "none/x.jsonl"], "does not exist"),
    ],
)
def test_what_cannot_be_measured_is_said_before_a_run_begins(
    said: Said, tmp_path: Path, arguments: list[str], fault: str
) -> None:
    code, _, err = said("eval", "agent_to_measure:agent", *arguments)
    assert code == 1
    assert err.startswith("leyden: ")
    assert fault in err
    assert not (tmp_path / ".leyden").exists()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_what_a_run_has_trained_is_measured_under_its_own_settings(said: Said, tmp_path: Path) -> None:
    algorithm = ly.PolicyGradient(
        ly.IsolatedBackend(WEIGHTS, device="cpu", max_length=128), n_steps=1, tasks_per_step=2, max_tokens=4
    )
    run = tmp_path / ".leyden" / "trained"
    ly.Trainer(algorithm=algorithm, run_dir=run).fit(play, [{"secret": secret} for secret in range(4)])
    (tmp_path / "games.jsonl").write_text("".join(f'{{"secret": {secret}}}\n' for secret in range(10)))
    code, out, err = said(
        "eval", "leyden.cli.demo.demo_agent:play", "--tasks", "games.jsonl", "-r", "trained", "--json"
    )
    assert code == 0, err
    after = json.loads(out)
    assert after["failed"] == 0
    assert after["response_tokens"] <= 4 * after["model_calls"]
    options = ["--resources", "trained", "--model", f"policy={WEIGHTS}", "--json"]
    code, out, err = said("eval", "leyden.cli.demo.demo_agent:play", "--tasks", "games.jsonl", *options)
    assert code == 0, err
    assert json.loads(out)["failed"] == 0
    assert (
        "names other"
        in said(
            "eval",
            "leyden.cli.demo.demo_agent:play",
            "--tasks",
            "games.jsonl",
            "-r",
            "trained",
            "-m",
            "other=http://x/v1",
        )[2]
    )
