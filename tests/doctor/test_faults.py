"""The doctor names each fault of the table first, and finds nothing in healthy runs."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("openai")

from tests.doctor import learning_faults, machine_faults
from tests.doctor.faults import Case
from tests.doctor.healthy import HEALTHY


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] if case.slow else [], id=case.name)
        for case in (*learning_faults.FAULTS, *machine_faults.FAULTS)
    ],
)
def test_a_fault_is_named_first(case: Case, tmp_path: Path) -> None:
    diagnosis, _ = case.look(tmp_path / "run")
    assert list(diagnosis.findings)[:1] == [case.rule], diagnosis


@pytest.mark.parametrize("case", HEALTHY, ids=lambda case: case.name)
def test_a_healthy_run_has_no_finding(case: Case, tmp_path: Path) -> None:
    diagnosis, _ = case.look(tmp_path / "run")
    assert not diagnosis.findings, diagnosis
