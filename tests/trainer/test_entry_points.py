"""Components that other distributions bring, as entry points of a real distribution in a folder on `sys.path`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.cli.run_parts import job_of, read_start
from leyden.errors import ConfigError
from leyden.execution.harness.harness import harness_program
from leyden.trainer import registered_components

MODULE = """
import leyden as ly
from leyden.execution.harness.harness import HarnessProgram

class Twice(ly.Baseline):
    def __init__(self, n_epochs: int = 2) -> None:
        super().__init__(n_epochs=n_epochs)

class Quiet(ly.DummyTracer):
    pass

PROGRAM = HarnessProgram(name="mine", installer="pip", package="mine", version="1")
NOT_ONE = 3
"""
ENTRY_POINTS = """
[leyden.algorithms]
twice = brought_by_another:Twice
baseline = brought_by_another:Twice
gone = brought_by_another:Gone
broken = brought_by_nobody:Thing
[leyden.tracers]
quiet = brought_by_another:Quiet
[leyden.harnesses]
mine = brought_by_another:PROGRAM
no_harness = brought_by_another:NOT_ONE
"""


def distribution(folder: Path, name: str, entry_points: str) -> None:
    info = folder / f"{name.replace('-', '_')}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    distribution(tmp_path / "site", "leyden-more", ENTRY_POINTS)
    (tmp_path / "site" / "brought_by_another.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "brought_by_another", raising=False)
    return tmp_path / "site"


def test_a_component_is_found_by_its_name_and_imported_then(installed: Path):
    assert registered_components("algorithm")["twice"] == "brought_by_another:Twice"
    assert "brought_by_another" not in sys.modules
    trainer = ly.Trainer(algorithm={"type": "twice", "n_epochs": 3}, tracer="quiet")
    assert [type(trainer.algorithm).__name__, type(trainer.tracer).__name__] == ["Twice", "Quiet"]


def test_a_name_of_leyden_stays_leydens(installed: Path):
    assert type(ly.Trainer(algorithm="baseline").algorithm) is ly.Baseline


@pytest.mark.parametrize(
    ("name", "why"), [("gone", "AttributeError"), ("broken", "No module named 'brought_by_nobody'")]
)
def test_a_broken_one_names_its_distribution(installed: Path, name: str, why: str):
    with pytest.raises(ConfigError, match=f"{name}.*{why}.*leyden-more 1.2"):
        ly.Trainer(algorithm=name)
    ly.Trainer(algorithm="twice")  # its neighbours work


def test_an_unknown_name_is_compared_with_all(installed: Path):
    with pytest.raises(ConfigError, match="did you mean 'twice'"):
        ly.Trainer(algorithm="twicee")


def test_a_name_of_two_distributions_is_refused(installed: Path):
    distribution(installed, "leyden-rival", "[leyden.algorithms]\ntwice = brought_by_another:Quiet\n")
    distribution(installed, "leyden-more-again", "[leyden.tracers]\nquiet = brought_by_another:Quiet\n")
    with pytest.raises(
        ConfigError, match=r"leyden-more 1.2 and by leyden-rival 1.2|leyden-rival 1.2 and by leyden-more"
    ):
        ly.Trainer(algorithm="twice")
    ly.Trainer(tracer="quiet")  # two distributions that name the same class do not differ


def test_a_harness_is_found_by_its_name(installed: Path):
    assert harness_program("mine").package == "mine"
    with pytest.raises(ConfigError, match="it must be a HarnessProgram"):
        harness_program("no_harness")


def test_leyden_run_takes_them_with_their_options(installed: Path, tmp_path: Path):
    def settings(algorithm: Any) -> Any:
        (tmp_path / "t.yaml").write_text(f"agent: brought_by_another:agent\nval: t.json\nalgorithm: {algorithm}\n")
        return read_start(str(tmp_path / "t.yaml"), {})

    (tmp_path / "t.json").write_text("[1]")
    (installed / "brought_by_another.py").write_text(
        MODULE + "\n@ly.rollout\ndef agent(task: int) -> float:\n    return 1.0\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert job_of(settings("{type: twice, n_epochs: 5}")).trainer.algorithm.n_epochs == 5
        with pytest.raises(ConfigError, match=r"line 3: algorithm.n_epoch: Twice has no option 'n_epoch'"):
            job_of(settings("{type: twice, n_epoch: 5}"))
        with pytest.raises(ConfigError, match=r"line 3: algorithm: .*leyden-more 1.2"):
            job_of(settings("gone"))
