"""Tasks as folders: what is read, what runs here, what is refused, and what `leyden tasks check` finds out."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

import leyden as ly
from leyden.cli import main
from leyden.errors import ConfigError
from leyden.execution.sandbox import sandbox
from leyden.execution.task_folders.check import check_task
from leyden.execution.task_folders.folder import read_task
from leyden.store import InMemoryLightningStore
from leyden.testing import FakeUpstream
from leyden.types import failure_reason, get_rewards_from_span, semconv
from tests.execution.runner.test_process_agent import Ran, run_all


def works() -> bool:
    try:
        sandbox.check_namespaces()
    except ConfigError:
        return False
    return True


pytestmark = pytest.mark.skipif(not works(), reason="this machine has no namespaces for this user")

DOCKERFILE = "FROM debian:12\nWORKDIR /app\nCOPY start/ /app/\n"
TEST = """if grep -qs forty-two /app/answer.txt; then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt; fi
"""


def make_task(folder: Path, **files: str | None) -> Path:
    """Write a task that asks for a file answer.txt. files: other texts by name, `__` for `/`; None leaves a file out."""
    texts: dict[str, str | None] = {
        "instruction__md": "Write forty-two into answer.txt.",
        "task__toml": 'schema_version = "1.1"\n[agent]\ntimeout_sec = 20\n[verifier]\ntimeout_sec = 20\n',
        "environment/Dockerfile": DOCKERFILE,
        "environment/start/question__txt": "six times seven",
        "tests/test__sh": TEST,
        "solution/solve__sh": "echo forty-two > answer.txt\n",
        **{name.replace("___", "/"): text for name, text in files.items()},
    }
    for name, text in texts.items():
        path = folder / name.replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            path.write_text(text)
    return folder


def program(line: str) -> ly.ProcessAgent:
    return ly.ProcessAgent(["sh", "-c", line], sandbox="namespace")


async def attempt(folder: Path, agent: ly.ProcessAgent) -> Ran:
    """Run an agent on the first task of a folder."""
    tasks = ly.HarborTasks(folder)
    async with InMemoryLightningStore() as store:
        (ran,) = await run_all(store, tasks.agent(agent), tasks[:1])
    return ran


def reason_of(ran: Ran) -> str:
    return ran.attempt.metadata.get("reason", "")


async def reward_of(folder: Path, line: str) -> float | None:
    ran = await attempt(folder, program(line))
    assert not reason_of(ran), reason_of(ran)
    return ran.reward


# ---- a rollout -----------------------------------------------------------------------------------


async def test_a_program_works_in_a_copy_of_the_tasks_files_and_the_tests_give_the_reward(tmp_path: Path) -> None:
    task = make_task(tmp_path / "tasks" / "answer")
    assert (
        await reward_of(
            tmp_path / "tasks", 'test "$(cat question.txt)" = "six times seven" && echo forty-two > answer.txt'
        )
        == 1.0
    )
    assert await reward_of(tmp_path / "tasks", "true") == 0.0, "the attempt before left nothing"
    assert sorted(path.name for path in (task / "environment" / "start").iterdir()) == ["question.txt"]


@pytest.mark.parametrize("ends", ["python missing.py", "true"])
async def test_behind_a_gateway_a_program_that_calls_no_model_has_no_reward(tmp_path: Path, ends: str) -> None:
    make_task(tmp_path / "answer")
    tasks = ly.HarborTasks(tmp_path)
    async with FakeUpstream() as server, InMemoryLightningStore() as store:
        proxy = ly.LLMProxy(model_list=[{"model_name": "fake", "endpoint": server.endpoint}])
        trainer = ly.Trainer(algorithm=ly.Baseline(), llm_proxy=proxy, store=store)
        summary = await trainer.afit(tasks.agent(program(f"echo forty-two > answer.txt; {ends}")), tasks)
        (rollout,) = await store.query_rollouts()
    assert rollout.status == "failed" and summary.reward is None
    reason = failure_reason(rollout)
    assert "never called the model" in reason
    assert ("exited with code 2: " in reason) == (ends != "true")


async def test_the_program_gets_the_instruction_as_its_task(tmp_path: Path) -> None:
    make_task(tmp_path / "answer")
    assert await reward_of(tmp_path, """grep -q '"Write forty-two' && echo forty-two > answer.txt""") == 1.0


async def test_the_tests_run_for_a_program_whose_time_is_over(tmp_path: Path) -> None:
    make_task(tmp_path / "answer", task__toml="[agent]\ntimeout_sec = 1.5\n")
    assert await reward_of(tmp_path, "echo forty-two > answer.txt; sleep 60") == 1.0


@pytest.mark.parametrize(
    "cheat",
    [
        "cat /tests/test.sh /solution/solve.sh {task}/tests/test.sh {task}/solution/solve.sh > answer.txt",
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "(sleep 0.5; echo forty-two > answer.txt) & exit 0",
        "ln -s {task}/tests/test.sh answer.txt",
    ],
)
async def test_a_program_that_looks_for_the_tests_or_writes_the_reward_gets_nothing(tmp_path: Path, cheat: str) -> None:
    task = make_task(tmp_path / "answer", tests___test__sh=TEST + "# forty-two\n")
    assert await reward_of(tmp_path, cheat.format(task=task)) == 0.0


@pytest.mark.parametrize(
    ("script", "rewards"),
    [
        ("echo 0.25 > /logs/verifier/reward.txt", {"primary": 0.25}),
        ("""echo '{"reward": 0.5, "speed": 3, "why": "text", "ok": true}' > /logs/verifier/reward.json""", {"primary": 0.5, "speed": 3.0}),
        ("""echo '{"score": 0.5}' > /logs/verifier/reward.json""", {"primary": 0.5}),
        ("""echo '{"speed": 3}' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt""", {"primary": 1.0, "speed": 3.0}),
        ("sleep 60", {"primary": 0.0}),
    ],
)  # fmt: skip
async def test_the_reward_is_that_of_the_files_of_harbor(
    tmp_path: Path, script: str, rewards: dict[str, float]
) -> None:
    make_task(tmp_path / "answer", tests___test__sh=script, task__toml="[verifier]\ntimeout_sec = 1.5\n")
    ran = await attempt(tmp_path, program("true"))
    assert not reason_of(ran)
    assert get_rewards_from_span(next(span for span in ran.spans if span.name == semconv.REWARD)) == rewards


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo no reward; exit 3", "wrote no reward to /logs/verifier.*exit code 3, last lines: no reward"),
        ("echo nan > /logs/verifier/reward.txt", "wrote a reward that is none"),
        ("echo [1] > /logs/verifier/reward.json", "wrote a reward that is none"),
        ("""echo '{"a": 1, "b": 2}' > /logs/verifier/reward.json""", "none called 'reward'"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "wrote no reward"),
        ("mkfifo /logs/verifier/reward.txt", "wrote no reward"),
    ],
)
async def test_tests_without_a_reward_fail_the_attempt_with_the_reason(tmp_path: Path, script: str, why: str) -> None:
    make_task(tmp_path / "answer", tests___test__sh=script)
    ran = await attempt(tmp_path, program("true"))
    assert re.search(why, reason_of(ran)), reason_of(ran)


async def test_variables_reach_their_phase_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_TEST", "s3cret")
    make_task(
        tmp_path / "answer",
        task__toml=(
            '[environment.env]\nALL = "1"\nOPENAI_API_KEY = "theirs"\nLEYDEN_TASK_FILE = "/x"\n'
            '[verifier.env]\nTOKEN = "${SECRET_OF_THE_TEST}"\nMODE = "${UNSET_HERE:-quick}"\n'
        ),
        environment___Dockerfile=DOCKERFILE + "ENV IMAGE=2\n",
        tests___test__sh='[ "$TOKEN$MODE$ALL$IMAGE" = s3cretquick12 ] && grep -q "^.12$" answer.txt && echo 1 > /logs/verifier/reward.txt',
    )
    line = 'test -z "$OPENAI_API_KEY" && test "$LEYDEN_TASK_FILE" != /x && echo "x$ALL$IMAGE$TOKEN" > answer.txt'
    assert await reward_of(tmp_path, line) == 1.0, "the attempt's own variables are no task's"


def test_a_variable_that_is_not_set_is_named(tmp_path: Path) -> None:
    task = read_task(make_task(tmp_path / "answer"))
    with pytest.raises(ConfigError, match="task answer needs the variable NOT_SET_ANYWHERE"):
        task.variables({"KEY": "${NOT_SET_ANYWHERE}"})


# ---- the dataset ---------------------------------------------------------------------------------


def test_tasks_are_a_sequence_that_a_pattern_narrows(tmp_path: Path) -> None:
    for name in ("a-1", "a-2", "b-1"):
        make_task(tmp_path / name)
    tasks = ly.HarborTasks(tmp_path, only="a-*")
    assert [task["task"] for task in tasks] == ["a-1", "a-2"]
    assert tasks[1:] == [{"task": "a-2", "instruction": "Write forty-two into answer.txt."}]
    assert len(ly.HarborTasks(tmp_path / "b-1")) == 1, "a task alone is a dataset too"
    for only, folder, why in (("c-*", tmp_path, "no task with a name like 'c-"), ("*", tmp_path / "none", "no folder")):
        with pytest.raises(ConfigError, match=why):
            ly.HarborTasks(folder, only=only)


def test_a_bad_task_is_refused_with_its_name_unless_the_pattern_leaves_it_out(tmp_path: Path) -> None:
    make_task(tmp_path / "good")
    make_task(tmp_path / "bad", tests___test__sh=None, tests___other="x")
    with pytest.raises(ConfigError, match=r"1 of 2 tasks .* bad: without tests"):
        ly.HarborTasks(tmp_path)
    assert len(ly.HarborTasks(tmp_path, only="good")) == 1


def test_a_program_must_have_a_sandbox_that_hides_the_tasks(tmp_path: Path) -> None:
    make_task(tmp_path / "answer")
    tasks = ly.HarborTasks(tmp_path)
    with pytest.raises(ConfigError, match="has no sandbox"):
        tasks.agent(ly.ProcessAgent(["true"]))


async def test_a_sandbox_that_shows_the_tasks_is_refused(tmp_path: Path) -> None:
    make_task(tmp_path / "answer")
    ran = await attempt(tmp_path, ly.ProcessAgent(["true"], sandbox=ly.Sandbox(read=[str(tmp_path)])))
    assert "which the program can read" in reason_of(ran)


# ---- what is wrong with a task ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"instruction__md": None}, "no instruction"),
        ({"instruction__md": " \n"}, "no instruction: instruction.md is empty"),
        ({"task__toml": "[agent\n"}, "task.toml cannot be read.*line 1"),
        ({"task__toml": "[agent]\ntimeout_sec = 'soon'\n"}, r"task.toml: agent.timeout_sec: "),
        ({"task__toml": None}, "task.toml: No such file"),
        ({"tests___test__sh": None}, "without tests"),
        (
            {"environment___start___copy": TEST},
            "the agent can see tests/test.sh: environment/start/copy is equal to it",
        ),
        ({"environment___docker-compose__yaml": "services: {}"}, "needs Docker: it has docker-compose.yaml"),
        ({"environment___Dockerfile": None}, "needs Docker: it has no environment/Dockerfile"),
        ({"task__toml": "[environment]\ngpus = 1\n"}, "needs Docker: it asks for a GPU"),
        ({"steps___one": "x"}, "several steps"),
    ],
)
def test_a_fault_of_the_files_is_named(tmp_path: Path, files: dict[str, str | None], why: str) -> None:
    faults = read_task(make_task(tmp_path / "answer", **files)).faults
    assert len(faults) == 1
    assert re.search(why, faults[0]), faults


def test_a_link_out_of_the_task_and_a_link_to_the_tests_are_named(tmp_path: Path) -> None:
    task = make_task(tmp_path / "answer")
    (task / "environment" / "start" / "out").symlink_to("/etc/passwd")
    (task / "environment" / "start" / "peek").symlink_to("../../tests/test.sh")
    (task / "tests" / "same").symlink_to("test.sh")
    os.mkfifo(task / "tests" / "pipe")
    assert sorted(read_task(task).faults) == [
        "environment/start/out is a symbolic link out of the task, to /etc/passwd",
        "environment/start/peek shows the agent ../../tests/test.sh",
        "tests/pipe is no regular file",
    ]


HERE = f"3.{sys.version_info.minor}"


@pytest.mark.parametrize(
    "lines",
    [
        "FROM python:3-slim\n# a comment\nWORKDIR /app",
        f"FROM docker.io/library/python:{HERE}-slim-bookworm\nLABEL a=b\nWORKDIR /work/place",
        "FROM ubuntu:24.04\nARG X=noninteractive\nRUN apt update && \\\n    apt-get install -y --no-install-recommends bash\nWORKDIR /app",
        "FROM python\nRUN pip install --no-cache-dir pytest pydantic\nWORKDIR /app\nENV A=1 B='two words'\nENV C three",
        'FROM debian\nWORKDIR /app\nCOPY ["start/question.txt", "."]\nCOPY start/*.txt deep/er/\nCMD ["bash"]',
    ],
)
def test_an_image_with_a_counterpart_here_is_taken(tmp_path: Path, lines: str) -> None:
    task = read_task(make_task(tmp_path / "answer", environment___Dockerfile=lines))
    assert task.faults == []
    task.image.copy_to(tmp_path / "copy")


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("FROM rust:1", "needs Docker.*`FROM rust:1`"),
        ("FROM python:3.8", f"needs Python 3.8, and this is {HERE}"),
        ("FROM debian\nFROM python", "needs Docker.*`FROM python`"),
        ("FROM debian\nRUN make install", "needs Docker.*`RUN make install`"),
        ("FROM debian\nRUN apt-get install -y no-such-package-here", "needs the Debian package no-such-package-here"),
        ("FROM python\nRUN pip install no-such-package-here", "needs the Python package no-such-package-here"),
        ("FROM python\nRUN pip install pytest==0.1", r"needs the Python package pytest==0.1, and \d+"),
        ("FROM python\nRUN pip install 'pytest>=1'", "needs Docker"),
        ("FROM debian\nWORKDIR /usr/src", "needs Docker.*`WORKDIR /usr/src`"),
        ("FROM debian", "sets no WORKDIR"),
        ("FROM debian\nWORKDIR /app\nCOPY --from=build a b", "needs Docker"),
        ("FROM debian\nWORKDIR /app\nCOPY start /data", "needs Docker.*`COPY start /data`"),
        ("FROM debian\nWORKDIR /app\nCOPY ../tests /app", "needs Docker"),
        ("FROM debian\nWORKDIR /app\nADD http://a.b/c /app/c", "needs Docker"),
        ("FROM debian\nWORKDIR /app\nUSER nobody", "needs Docker.*`USER nobody`"),
        ("FROM debian\nWORKDIR /app\nENV PATH=/opt:$PATH", "needs Docker.*`ENV PATH"),
    ],
)
def test_an_image_without_one_needs_docker_and_the_line_is_named(tmp_path: Path, lines: str, why: str) -> None:
    faults = read_task(make_task(tmp_path / "answer", environment___Dockerfile=lines)).faults
    assert any(re.search(why, fault) for fault in faults), faults


# ---- the check -----------------------------------------------------------------------------------


async def test_a_good_task_has_no_cause(tmp_path: Path) -> None:
    found = await check_task(read_task(make_task(tmp_path / "answer")))
    assert (found.causes, found.empty_reward, found.solution_rewards) == ([], 0.0, [1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"solution___solve__sh": None}, "without a reference solution"),
        ({"solution___solve__sh": "exit 4\n"}, "the solution fails, with a reward of 0; solve.sh ended with 4"),
        ({"tests___test__sh": "echo 1 > /logs/verifier/reward.txt"}, "the empty agent passes, with a reward of 1"),
        ({"tests___test__sh": "od -An -N2 -tu2 /dev/urandom > /logs/verifier/reward.txt"}, "flaky tests: 3 runs on one solution gave"),
        ({"tests___test__sh": "exit 0"}, "wrote no reward"),
    ],
)  # fmt: skip
async def test_the_check_names_why_a_task_measures_nothing(
    tmp_path: Path, files: dict[str, str | None], why: str
) -> None:
    found = await check_task(read_task(make_task(tmp_path / "answer", **files)))
    assert any(why in cause for cause in found.causes), found


def test_the_command_reports_each_bad_task_as_text_and_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_task(tmp_path / "bad", instruction__md=None)
    make_task(tmp_path / "good")

    def said(*options: str) -> tuple[int | str | None, str]:
        monkeypatch.setattr(sys, "argv", ["leyden", "tasks", "check", str(tmp_path), *options])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, capsys.readouterr().out

    assert said() == (1, "bad: no instruction: instruction.md: No such file or directory\n1 of 2 tasks are good\n")
    code, text = said("--json", "--only", "good")
    assert code == 0
    assert [(each["task"], each["causes"]) for each in json.loads(text)] == [("good", [])]
