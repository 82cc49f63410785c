"""The programs of the guides from Agent Lightning 1.0, TRL, verl and verifiers do what the pages say."""

import json
from pathlib import Path

import pytest

from tests.docs.test_learning_pages import programs, rewards_of, run_program

PAGES = {"trl": 1, "verl": 1, "verifiers": 2}
"""By guide: which of its programs is the one on Leyden that trains."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES)
def test_the_program_after_learns(tmp_path: Path, page: str) -> None:
    program = programs(f"docs/migrating/{page}.md")[PAGES[page]]
    assert "import leyden" in program and "ly.GRPO(" in program
    run_program(program, tmp_path)
    [run] = (tmp_path / ".leyden").iterdir()
    rewards = rewards_of(run)
    assert len(rewards) == 12 and rewards[0] < 0.5
    assert rewards[-1] > 0.8


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_program_of_its_own_is_the_agent_of_the_guide_from_agent_lightning_1_0(tmp_path: Path) -> None:
    _, agent, trainer = programs("docs/migrating/agent-lightning-1.0.md")
    (tmp_path / "agent.py").write_text(agent)
    run_program(trainer, tmp_path)
    [run] = (tmp_path / ".leyden").iterdir()
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(step["rollouts"], step["failed"]) for step in steps] == [(16, 0), (16, 0)]  # each has posted its reward
    assert all(step["response_tokens"] > 0 for step in steps)
