"""The demo's runs: what may be chosen anew when one goes on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("openai")
pytest.importorskip("matplotlib")

from leyden.cli.demo.command import demo
from leyden.cli.demo.demo_run import DemoOptions, set_steps, start_run
from leyden.errors import ConfigError
from leyden.training import CsvWriter, MetricsRow


def steps_of(directory: Path) -> int:
    return json.loads((directory / "demo.json").read_text())["steps"]


def test_a_run_can_be_made_longer_and_never_shorter_than_it_is(tmp_path: Path) -> None:
    start_run(tmp_path / "run", DemoOptions(steps=3))
    writer = CsvWriter(tmp_path / "run" / "metrics.csv")
    writer.open()
    for iteration in range(1, 4):
        writer.write(MetricsRow(iteration, "train", 1.0, {"reward": 0.5}))
    writer.close()
    set_steps(tmp_path / "run", 5)
    assert steps_of(tmp_path / "run") == 5
    with pytest.raises(ConfigError, match=r"--steps is 2, but the run in .*run has done 3 steps; give 3 or more"):
        set_steps(tmp_path / "run", 2)
    assert steps_of(tmp_path / "run") == 5
    with pytest.raises(ConfigError, match="is no run of the demo"):
        set_steps(tmp_path, 2)


def test_other_choices_of_a_resumed_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"leave --seed, --games out \(--steps may change\)"):
        demo(seed=1, games=3, steps=60, resume=tmp_path)


def test_a_run_to_resume_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no run 'nothing'"):
        demo(resume=Path("nothing"))
    assert not list(tmp_path.iterdir())


def demo_program(*arguments: str) -> tuple[dict[str, Any], str]:
    """Run `leyden demo`; return its figures, and what it wrote to standard error."""
    command = [sys.executable, "-m", "leyden", "demo", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_finished_demo_goes_on_with_more_steps_and_neither_begins_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, said = demo_program("--run-dir", ".leyden/first", "--steps", "1", "--games", "10")
    assert "WARNING" not in said
    assert "iteration 1/1" in said
    second, said = demo_program("--resume", "first", "--steps", "2")
    assert "blocks the event loop" not in said
    assert (first["rollouts"], second["rollouts"]) == (120, 240)
    assert second["rewards"][:1] == first["rewards"] and len(second["rewards"]) == 2
    assert second["success_before"] == first["success_before"]
