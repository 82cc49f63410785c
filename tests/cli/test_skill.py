"""The skill that `leyden init` installs, followed to the letter by a program that knows nothing else.

`Follower` runs the skill's commands as they stand, in fresh folders with a mistake each. It reads only what the commands
print, and mends what an error, a warning or the skill's table names, by fixed rules. Where a rule says "as in a fresh
project", it looks into the files of another `leyden init`, as a user would.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai")
pytest.importorskip("torch")

YAML, AGENT, TRAIN, HELD_OUT = "train.yaml", "agent.py", "train.jsonl", "held_out.jsonl"
LEYDEN = [sys.executable, "-m", "leyden"]
WITHOUT = """
import sys
from importlib.machinery import PathFinder
from pathlib import Path


class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] == "openai" and (Path(__file__).parent / "without-openai").exists():
            return None
        return super().find_spec(name, path, target)


sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""
PIP = """#!/bin/sh
case "$*" in
*leyden\\[*) rm "$SITE/without-openai" ;;
*) touch "$SITE/$2.py" ;;
esac
"""
"""A pip without an index: it ends the absence of openai, or installs an empty module."""


class Stuck(Exception):
    """No rule fits what a command has printed."""


class Follower:
    """Works in a project's folder by what its skill and Leyden's commands say."""

    def __init__(self, folder: Path, fresh: Path, site: Path) -> None:
        self.folder, self.fresh = folder, fresh
        self.environment = {
            **os.environ,
            "SITE": str(site),
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{site}:{os.environ['PATH']}",
            "PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}",
        }
        skill = (folder / ".claude/skills/leyden/SKILL.md").read_text()
        self.commands = [
            line for block in re.findall(r"```bash\n(.*?)```", skill, re.DOTALL) for line in block.splitlines()
        ]
        self.did: list[str] = []

    def follow(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run all commands, and return the rewards of the start and of the trained model."""
        for _ in range(4):
            results = [self.until_done(command) for command in self.commands]
            shown = next(each for each in results if isinstance(each, dict) and "warnings" in each)
            if not self.diagnose(shown):
                before, after = (each["reward"] for each in results if isinstance(each, dict) and "tasks_file" in each)
                assert results[-1]["against_first"][0]["difference"]["mean"] > 0
                return before, after
            for command in self.commands:
                self.move_run(command)
        raise Stuck(f"{self.did}")

    def until_done(self, command: str) -> Any:
        for _ in range(5):
            done = self.run(command)
            if not (isinstance(done, dict) and "error" in done):
                return done
            self.mend(done["error"]["message"], done["error"].get("remedy", ""))
            self.move_run(command)
        raise Stuck(f"{command}: {done}")

    def run(self, command: str) -> Any:
        ended = subprocess.run(
            command.replace("leyden", f"{sys.executable} -m leyden", 1),
            shell=True,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        return json.loads(ended.stdout)

    def move_run(self, command: str) -> None:
        """Move the folder of a command's run away, so that the command can be repeated."""
        found = re.search(r"run[_-]dir[= ](\S+)", command)
        if found and (self.folder / found[1]).exists():
            (self.folder / found[1]).rename(self.folder / f".leyden/run-{time.time_ns()}")

    # ---- rules -----------------------------------------------------------------------------------

    def mend(self, message: str, remedy: str) -> None:
        """Do what an error says."""
        for pattern, act in self.rules():
            if found := re.search(pattern, f"{message}\n{remedy}", re.DOTALL):
                self.did.append(found[0][-120:])
                return act(*found.groups())
        raise Stuck(f"{message} | {remedy}")

    def rules(self) -> Iterator[tuple[str, Callable[..., None]]]:
        """Yield what a message and its remedy may say, and what is done then."""
        yield r"pip install '?([\w\[\],-]+)", lambda what: self.pip(what)
        yield r"cannot load '([\w./-]+)'.*did you mean '([\w./-]+)'", self.replace
        yield r"'([\w./-]+)'[^']*did you mean '([\w./-]+)'", self.replace
        yield r"has no '(\w+)'; there are agents: (\w+)", self.replace
        yield r"(\w+\.jsonl), line (\d+) is not JSON.*write one JSON value on each line", self.drop_line
        yield r"(\w+\.jsonl) cannot be read: No such file.*give a file of tasks", self.split_tasks
        yield r"(\w+\.\w+), line (\d+): [^,]*(?:correct the line|indent with spaces)", self.line_as_fresh
        yield r"no agent; .*decorate the function with .*@leyden\.(llm_rollout)", self.decorate
        yield r"add one, such as (agent): (agent\.py:agent)", self.add_line
        yield r"trainer\.(\w+): .*check that the directory can be written to", self.without_option
        yield (
            r"(port)=(\d+): Address already in use.*port=(0) for a free one",
            lambda name, _, new: self.option(name, new),
        )
        yield r"Lower the learning_rate", self.lower_rate
        yield r"(learning_rate) of optim is 0.*it must be above 0", self.option_as_fresh
        yield r"use llm\.sampling_parameters\['temperature'\] in the agent", self.without_temperature
        yield r"(?:algorithm|trainer)\b.*?\b(\w+) (?:is|=).*(?:it must be|a group needs)", self.option_as_fresh
        yield r"See such rollouts with `leyden show latest --failed`", self.mend_agent

    def diagnose(self, shown: dict[str, Any]) -> bool:
        """Do what the skill's table says about a run's failures and warnings. Return whether something was to be done."""
        if shown["failures"]:
            self.mend_agent()
            return True
        text = " ".join(shown["warnings"])
        if re.search(r"answers (that )?were cut by max_tokens", text):
            self.option_as_fresh("max_tokens")
        elif "The learning rate (" in text and "may be too large" in text:
            self.lower_rate()
        else:
            return False
        self.did.append(text[-120:])
        return True

    # ---- what is done ----------------------------------------------------------------------------

    def edit(self, name: str, pattern: str, new: str) -> None:
        text = (self.folder / name).read_text()
        changed = re.sub(pattern, new, text, count=1)
        if changed == text:
            raise Stuck(f"{pattern!r} is not in {name}")
        (self.folder / name).write_text(changed)

    def replace(self, old: str, new: str) -> None:
        self.edit(YAML, rf"(?<![\w.-]){re.escape(old)}(?![\w.-])", new)

    def option(self, name: str, value: str) -> None:
        self.edit(YAML, rf"\b{name}: [^,}}\n#]+", f"{name}: {value}")

    def option_as_fresh(self, name: str) -> None:
        (value,) = re.findall(rf"\b{name}: ([^,}}\n#]+)", (self.fresh / YAML).read_text())
        self.option(name, value)

    def lower_rate(self) -> None:
        (rate,) = re.findall(r"learning_rate: ([\d.e-]+)", (self.folder / YAML).read_text())
        self.option("learning_rate", str(min(float(rate) / 3, 1e-3)))

    def without_temperature(self) -> None:
        self.edit(AGENT, r', *"temperature": 0\b', "")

    def without_option(self, name: str) -> None:
        self.edit(YAML, rf"\n  {name}: .*", "")

    def add_line(self, name: str, value: str) -> None:
        (self.folder / YAML).write_text(f"{name}: {value}\n{(self.folder / YAML).read_text()}")

    def drop_line(self, name: str, number: str) -> None:
        lines = (self.folder / name).read_text().splitlines(keepends=True)
        del lines[int(number) - 1]
        (self.folder / name).write_text("".join(lines))

    def split_tasks(self, name: str) -> None:
        """Move the last third of the other tasks to the file that is missing."""
        other = TRAIN if name == HELD_OUT else HELD_OUT
        lines = (self.folder / other).read_text().splitlines(keepends=True)
        (self.folder / other).write_text("".join(lines[: len(lines) * 2 // 3]))
        (self.folder / name).write_text("".join(lines[len(lines) * 2 // 3 :]))

    def line_as_fresh(self, name: str, number: str) -> None:
        lines = (self.folder / name).read_text().splitlines(keepends=True)
        before = max(0, int(number) - 4)
        lines[before : int(number)] = (self.fresh / name).read_text().splitlines(keepends=True)[before : int(number)]
        (self.folder / name).write_text("".join(lines))

    def decorate(self, decorator: str) -> None:
        self.edit(AGENT, r"async def agent", f"@ly.{decorator}\nasync def agent")

    def pip(self, what: str) -> None:
        subprocess.run(["pip", "install", what], env=self.environment, check=True)

    def mend_agent(self) -> None:
        """Mend the lines of agent.py that a failed rollout names by its number, or by the value that it returned."""
        failed = self.run("leyden show latest --failed --json")[0]
        if what := re.search(r"pip install '?([\w\[\],-]+)", failed["reason"]):
            return self.pip(what[1])
        shown = json.dumps(self.run(f"leyden show latest {failed['rollout_id']} --json"))
        if numbers := re.findall(r"agent\.py\\*\", line (\d+)", shown):
            return self.line_as_fresh(AGENT, numbers[-1])
        lines = (self.folder / AGENT).read_text().splitlines()
        returned = re.search(r"returned is ('\w+')", failed["reason"])
        wanted = returned[1] if returned else "return None" if "ended without a reward" in failed["reason"] else None
        if wanted is None:
            raise Stuck(failed["reason"])
        number = next(number for number, line in enumerate(lines, 1) if "return" in line and wanted in line)
        self.line_as_fresh(AGENT, str(number))


# ---- mistakes ------------------------------------------------------------------------------------


def edit(name: str, old: str, new: str) -> Callable[[Path, Path], None]:
    def change(folder: Path, site: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


def in_trainer(line: str) -> Callable[[Path, Path], None]:
    return edit(YAML, "  concurrency: 32\n", f"  concurrency: 32\n  {line}\n")


REWARD = 'return float(f"sunny in {task[\'city\']}" in (message.content or ""))'
MISTAKES: dict[str, Callable[[Path, Path], object]] = {
    "the model's name is wrong": edit(YAML, "model: model", "model: modle"),
    "an extra is missing": lambda folder, site: (site / "without-openai").touch(),
    "a package is missing": edit(AGENT, "import json\n", "import json\n\nimport weather_service\n"),
    "the agent returns None": edit(AGENT, REWARD, f"return None and {REWARD.removeprefix('return ')}"),
    "the agent returns a text": edit(AGENT, REWARD, "return 'good' if 'sunny' in (message.content or '') else 'bad'"),
    "the agent raises": edit(AGENT, "{task['city']}?", "{task['town']}?"),
    "the agent's file has a syntax error": edit(AGENT, "for _ in range(3):", "for _ in range(3:"),
    "the agent has no decorator": edit(AGENT, "@ly.llm_rollout\n", ""),
    "the agent's name is wrong": edit(YAML, "agent.py:agent", "agent.py:agnet"),
    "temperature 0": edit(AGENT, "**llm.sampling_parameters", '**{**llm.sampling_parameters, "temperature": 0}'),
    "a key is wrong": edit(YAML, "tasks_per_step", "tasks_per_stpe"),
    "a section is wrong": edit(YAML, "algorithm:", "algoritm:"),
    "the algorithm's name is wrong": edit(YAML, "type: grpo", "type: grppo"),
    "a line of the tasks is broken": edit(TRAIN, '{"city": "Oslo"}', '{"city": "Oslo"'),
    "the held-out tasks are missing": lambda folder, site: (folder / HELD_OUT).unlink(),
    "a tab in the YAML": edit(YAML, "  n_steps", "\tn_steps"),
    "the store cannot be written": in_trainer("store: {type: sqlite, path: /proc/store.db}"),
    "the port is in use": in_trainer("port: PORT"),
    "no step": edit(YAML, "n_steps: 12", "n_steps: 0"),
    "groups of one": edit(YAML, "rollouts_per_task: 8", "rollouts_per_task: 1"),
    "the learning rate is 100": edit(YAML, "learning_rate: 5.0e-4", "learning_rate: 100"),
    "the learning rate is 0": edit(YAML, "learning_rate: 5.0e-4", "learning_rate: 0"),
    "one token": edit(YAML, "max_tokens: 64", "max_tokens: 4"),
}


def project(folder: Path) -> Path:
    subprocess.run([*LEYDEN, "init", str(folder)], check=True, capture_output=True)
    return folder


def follower(tmp_path: Path) -> Follower:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(WITHOUT)
    (site / "pip").write_text(PIP)
    (site / "pip").chmod(0o700)
    return Follower(project(tmp_path / "a project"), project(tmp_path / "fresh"), site)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_of_the_skill_runs_as_it_stands(tmp_path: Path) -> None:
    works = follower(tmp_path)
    assert len(works.commands) >= 8 and all(command.startswith("leyden ") for command in works.commands)
    before, after = works.follow()
    assert works.did == []
    assert after["low"] > before["mean"], (before, after)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_and_mended_by_what_the_commands_print(mistake: str, tmp_path: Path) -> None:
    works = follower(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        MISTAKES[mistake](works.folder, tmp_path / "site")
        text = (works.folder / YAML).read_text()
        (works.folder / YAML).write_text(text.replace("PORT", str(listener.getsockname()[1])))
        before, after = works.follow()
    assert works.did, "the mistake was not noticed"
    assert after["low"] > before["mean"], (works.did, before, after)
    shutil.rmtree(works.folder)
