"""The programs of the guides from TRL, verl and verifiers do what the pages say."""

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
