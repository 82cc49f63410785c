"""`leyden prompts` shows what APO has tried, from the run's folder alone."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden._lib.formatting import figure
from leyden.algorithm.evaluation import Evaluation
from leyden.cli import main
from leyden.gateway import UpstreamModel
from leyden.testing import FakeUpstream
from leyden.training.runs.recorded_runs import open_run
from tests.algorithm.apo import rules

pytest.importorskip("openai")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds with two prompts each; its best prompt has some rules more than the first."""
    directory = tmp_path_factory.mktemp("work") / "prompted"

    async def optimise() -> None:
        async with FakeUpstream(reply=rules.reply) as upstream:
            trainer = ly.Trainer(
                algorithm=ly.APO(
                    beam_width=2,
                    branch_factor=1,
                    beam_rounds=2,
                    resource_name="prompt",
                    budget=ly.Budget(rollouts=1000, cost=5, cost_per_attempt=0.01),
                ),
                llm_proxy=ly.LLMProxy(model_list=[{"model_name": "fake", "endpoint": upstream.endpoint}]),
                initial_resources={"prompt": ly.PromptTemplate(template=rules.SEED)},
                run_dir=directory,
                progress=False,
            )
            await trainer.afit(rules.quick, rules.TRAIN, rules.VAL)

    asyncio.run(optimise())
    return directory


@pytest.fixture(scope="module")
def found(run: Path) -> set[str]:
    """The rules that the run's best prompt states."""
    best = ly.APO().get_best_prompt(run).template
    return {rule for rule in rules.RULES.values() if rule in best}


@pytest.fixture
def leyden(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process; return its exit code and what it printed."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["leyden", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


def test_the_best_prompt_is_printed_and_exported(
    run: Path, found: set[str], leyden: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, printed, _ = leyden("prompts", "best", str(run))
    assert code == 0
    assert printed.startswith(rules.SEED)
    assert {rule for rule in rules.RULES.values() if rule in printed} == found
    assert len(found) >= 2
    _, as_json, _ = leyden("prompts", "best", str(run), "--json")
    assert json.loads(as_json)["prompt"]["template"] == printed.rstrip("\n")
    _, path, _ = leyden("prompts", "export", str(run), "--out", str(tmp_path / "out"))
    assert path.strip() == str(tmp_path / "out" / "prompt.txt")
    assert Path(path.strip()).read_text() == printed.rstrip("\n")


def test_the_history_has_rewards_decisions_and_reasons(run: Path, leyden: Callable[..., tuple[int, str, str]]) -> None:
    _, printed, _ = leyden("prompts", "history", str(run))
    first, *others = printed.splitlines()[1:]
    assert "the first prompts" in first
    assert [line.split()[0] for line in others] == sorted(line.split()[0] for line in others)
    assert all("RULE: " in line for line in others)
    _, as_json, _ = leyden("prompts", "history", str(run), "--json")
    records = json.loads(as_json)
    assert len(records) == len(others) + 1
    assert (first.split()[0], first.split()[2:4]) == ("0", [str(records[0]["tasks"]), "best"])
    accepted = [record["reward"] for record in records if record["accepted"]]
    assert accepted == sorted(accepted) and len(accepted) >= 2
    assert any(record["comparison"].startswith("0.2 (95 % interval") for record in records)


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_the_history_keeps_rounds_and_rewards_on_a_narrow_terminal(
    run: Path, leyden: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    _, as_json, _ = leyden("prompts", "history", str(run), "--json")
    monkeypatch.setattr("leyden.cli.output.is_on_terminal", lambda _: True)
    monkeypatch.setenv("COLUMNS", str(width))
    _, printed, _ = leyden("prompts", "history", str(run))
    lines = printed.splitlines()
    assert lines[0].split()[:3] == ["round", "reward", "tasks"] and max(map(len, lines)) <= width
    rows = [line.split() for line in lines[1:] if line.split()[0].isdecimal()]
    records = json.loads(as_json)
    assert [(row[0], row[1], row[2]) for row in rows] == [
        (str(record["round"]), figure(record["reward"], 3), str(record["tasks"])) for record in records
    ]
    assert printed.count("RULE: ") >= len(rows) - 1


def test_the_diff_shows_the_rules_that_were_added(
    run: Path, found: set[str], leyden: Callable[..., tuple[int, str, str]]
) -> None:
    _, printed, _ = leyden("prompts", "diff", str(run))
    added = [line[1:] for line in printed.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert (len(added), set(added)) == (len(found), found)


def test_what_is_left_of_the_budget_is_shown(run: Path, leyden: Callable[..., tuple[int, str, str]]) -> None:
    _, printed, _ = leyden("show", str(run))
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-2])
    assert last["stage"] == "train"
    assert f"budget left {last['budget_rollouts_left']:,} rollouts, " in printed
    assert last["budget_rollouts_left"] < 1000


def test_a_run_without_prompts_is_named(leyden: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    @ly.rollout
    async def one(task: int) -> float:
        return 1.0

    ly.Trainer(algorithm="baseline", run_dir=tmp_path / "base", progress=False).fit(one, [1])
    for command in ("history", "diff"):
        code, _, error = leyden("prompts", command, str(tmp_path / "base"))
        assert (code, "has no history of prompts" in error) == (1, True)
    code, _, error = leyden("prompts", "best", str(tmp_path / "base"))
    assert (code, "has no best prompt" in error) == (1, True)


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("agent.py", f"# é\nPROMPT = '{rules.SEED}'  # the prompt\nprint(PROMPT)\n"),
        ("prompts.json", json.dumps({"other": "x", "prompt": rules.SEED}, indent=2)),
        ("prompt.txt", f"{rules.SEED}\r\n"),
    ],
)
def test_the_best_prompt_is_put_into_a_file(
    run: Path, leyden: Callable[..., tuple[int, str, str]], tmp_path: Path, name: str, before: str
) -> None:
    file = tmp_path / name
    file.write_bytes(before.encode())
    file.chmod(0o755)
    _, best, _ = leyden("prompts", "best", str(run))
    best = best.rstrip("\n")
    code, printed, _ = leyden("prompts", "apply", str(run), str(file), "--dry-run")
    assert (code, file.read_bytes().decode()) == (0, before)
    assert any(line.startswith("+") and rules.RULES["refund"] in line for line in printed.splitlines()) == (
        rules.RULES["refund"] in best
    )
    assert any(line.startswith("+") and "+++" not in line for line in printed.splitlines())
    assert leyden("prompts", "apply", str(run), str(file))[0] == 0
    after = file.read_bytes().decode()
    if name == "agent.py":
        values: dict[str, Any] = {}
        exec(after, values)
        assert values["PROMPT"] == best
        assert after.startswith("# é\n") and after.endswith("  # the prompt\nprint(PROMPT)\n")
    elif name == "prompts.json":
        assert json.loads(after) == {"other": "x", "prompt": best}
    else:
        assert after == f"{best}\n".replace("\n", "\r\n")
    assert file.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("agent.py", "x = 1\n", "does not have the text with which the run began for the prompt 'prompt'"),
        ("agent.py", f"a = '{rules.SEED}'\nb = '{rules.SEED}'\n", "has 2 times the text"),
        ("agent.py", "x = (", "agent.py cannot be changed: "),
        ("prompts.json", "{", "prompts.json cannot be changed: "),
        *[
            (
                name,
                f"'{rules.SEED}'\n",
                'is no Python, JSON or text file, so it is not changed. To paste by hand:\nprompt: "',
            )
            for name in ("a.js", "a.tsx", "a.yaml", "a.toml", "a.go")
        ],
        ("a.sh", f"PROMPT='{rules.SEED}'\n", "To paste by hand:\nprompt: '"),
        ("a.ipynb", json.dumps({"source": [f"p = '{rules.SEED}'"]}), 'To paste by hand:\nprompt: """'),
        ("a.rb", f"'{rules.SEED}'\n", "leyden prompts export writes the best prompts"),
        ("Makefile", f"{rules.SEED}\n", "leyden prompts export writes the best prompts"),
    ],
)
def test_a_file_without_the_first_prompt_is_refused_and_stays(
    run: Path, leyden: Callable[..., tuple[int, str, str]], tmp_path: Path, name: str, text: str, message: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    code, _, error = leyden("prompts", "apply", str(run), str(file))
    assert (code, message in error, file.read_text()) == (1, True, text)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifty rollouts of an agent that has its two prompts in its code."""
    directory = tmp_path_factory.mktemp("work") / "recorded"
    topics = list(rules.RULES)

    @ly.rollout
    async def hard_coded(task: dict[str, Any], llm: ly.LLM) -> float:
        messages = [
            {"role": "system", "content": 'You are kind. Reply as {"answer": "..."}.'},
            {"role": "user", "content": f"Answer the ticket: ticket about {task['topic']}, number {task['number']}"},
        ]
        answer = await llm.openai().chat.completions.create(model=llm.model, messages=messages)
        text = answer.choices[0].message.content
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": f"Shorten this answer: {text}"},
        ]
        await llm.openai().chat.completions.create(model=llm.model, messages=messages)
        return float(task["topic"] == "refund")

    async def record() -> None:
        def reply(body: dict[str, Any]) -> str:
            return "Short." if len(body["messages"]) > 2 else f"Gladly. {len(str(body))}"

        async with FakeUpstream(reply=reply) as upstream:
            trainer = ly.Trainer(
                algorithm=Evaluation(models=[UpstreamModel("fake", upstream.endpoint)], llms={"llm": ("fake", {})}),
                run_dir=directory,
                progress=False,
            )
            tasks = [{"topic": topics[number % 5], "number": number % 25} for number in range(50)]
            await trainer.afit(hard_coded, val_dataset=tasks)

    asyncio.run(record())
    return directory


def test_hard_coded_prompts_and_tasks_are_recovered_exactly(
    recorded: Path, leyden: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, printed, paths = leyden("prompts", "extract", str(recorded), "--out", str(tmp_path / "out"), "--json")
    assert code == 0
    found = json.loads(printed)
    templates = {prompt["name"]: prompt["template"] for prompt in found["prompts"]}
    assert templates == {
        "system_prompt": 'You are kind. Reply as {{"answer": "..."}}.',
        "user_prompt": "Answer the ticket: ticket about {topic}, number {number}",
        "user_prompt_2": "Shorten this answer: {answer_1}",
    }
    assert (found["rollouts"], found["mean_reward"]) == (50, 0.2)
    tasks = [{"topic": list(rules.RULES)[number % 5], "number": number} for number in range(25)]
    assert found["tasks"] == tasks
    assert (tmp_path / "out" / "user_prompt.txt").read_text() == templates["user_prompt"]
    assert [json.loads(line) for line in (tmp_path / "out" / "tasks.jsonl").read_text().splitlines()] == tasks
    assert len(paths.splitlines()) == 4


def test_what_to_change_in_the_agent_is_said(recorded: Path, leyden: Callable[..., tuple[int, str, str]]) -> None:
    _, printed, _ = leyden("prompts", "extract", str(recorded))
    assert "--- user_prompt: user message from call 1 on, in 50 of 50 rollouts" in printed
    assert "{answer_1} is the answer to call 1, such as 'Gladly. " in printed
    assert "{topic} is task['topic'], such as 'refund', 'delivery', 'password'" in printed
    assert "resources['user_prompt'].format(topic=task['topic'], number=task['number'])" in printed
    assert "resources['user_prompt_2'].format(answer_1=...)" in printed
    assert "tasks     25 different ones in 50 rollouts\nreward    0.2, the mean of 50 rollouts" in printed


def test_a_prompt_that_is_a_resource_already_is_named(
    leyden: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    async def record() -> None:
        async with FakeUpstream(reply=rules.reply) as upstream:
            trainer = ly.Trainer(
                algorithm=Evaluation(
                    models=[UpstreamModel("fake", upstream.endpoint)],
                    llms={"llm": ("fake", {})},
                    resources={"prompt": ly.PromptTemplate(template=rules.SEED)},
                ),
                run_dir=tmp_path / "run",
                progress=False,
            )
            await trainer.afit(rules.support, val_dataset=rules.VAL)

    asyncio.run(record())
    _, printed, _ = leyden("prompts", "extract", str(tmp_path / "run"))
    assert "it comes from the resource 'prompt' already" in printed
    assert "To have the prompts improved" not in printed


def test_rollouts_without_model_calls_are_refused(run: Path, leyden: Callable[..., tuple[int, str, str]]) -> None:
    code, _, error = leyden("prompts", "extract", str(run), "--limit", "20")
    assert (code, "the calls of 20 rollouts have no prompt in common: 0 model calls" in error) == (1, True)


def test_reflection_calls_are_no_rollouts_and_are_counted_once(
    run: Path, leyden: Callable[..., tuple[int, str, str]]
) -> None:
    _, printed, _ = leyden("show", str(run), "--json")
    shown = json.loads(printed)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert shown["reflection_calls"] == sum(row.get("reflection_calls", 0) for row in rows) >= 4
    recorded = asyncio.run(_rollouts_of(run))
    assert (
        sum(shown["rollouts_by_status"].values()) == sum(each.run_id is not None for each in recorded) < len(recorded)
    )
    calls = f"{shown['rollouts_by_status']['succeeded']:,} succeeded; {shown['reflection_calls']} reflection calls"
    assert f"rollouts    {calls}\n" in leyden("show", str(run))[1]
    assert f"rollouts: {calls}\n" in (run / "run.log").read_text()


async def _rollouts_of(run: Path) -> Sequence[ly.Rollout]:
    async with open_run(run).open_store() as store:
        return await store.query_rollouts()


def test_prompts_are_extracted_from_a_run_without_any_reward(
    leyden: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    @ly.rollout
    async def agent(task: str, llm: ly.LLM) -> float:
        text = f"Answer the customer in one kind sentence: {task}"
        await llm.openai().chat.completions.create(model=llm.model, messages=[{"role": "user", "content": text}])
        raise ValueError("no such tool")

    async def record() -> None:
        async with FakeUpstream(reply="Yes.") as upstream:
            models = [UpstreamModel("m", upstream.endpoint, record_tokens=False)]
            evaluation = Evaluation(models=models, llms={"llm": ("m", {})})
            await ly.Trainer(algorithm=evaluation, run_dir=tmp_path / "run", progress=False).afit(agent, ["a", "b"])

    asyncio.run(record())
    code, printed, _ = leyden("prompts", "extract", str(tmp_path / "run"))
    assert code == 0 and "no rollout has one" in printed


def test_prompts_are_applied_to_files_alone(run: Path, leyden: Callable[..., tuple[int, str, str]]) -> None:
    assert leyden("prompts", "apply", str(run), "/dev/zero")[2].startswith("leyden: /dev/zero is no file")
