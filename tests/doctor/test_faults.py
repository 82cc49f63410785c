"""The doctor names each fault of the table first, and finds nothing in healthy runs."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("openai")

from tests.doctor import learning_faults, machine_faults
from tests.doctor.faults import Case
from tests.doctor.healthy import HEALTHY


def parameters(*cases: Case) -> list[Any]:
    """Return the cases as parameters. Those that take a real run are in the group `doctor`, and every tenth of them
    runs before a merge.
    """
    in_group = [pytest.mark.doctor], [pytest.mark.doctor, pytest.mark.merge]
    return [
        pytest.param(each, id=each.name, marks=() if each.recorded else in_group[n % 10 == 0])
        for n, each in enumerate(cases)
    ]


@pytest.mark.parametrize("case", parameters(*learning_faults.FAULTS, *machine_faults.FAULTS))
def test_a_fault_is_named_first(case: Case, tmp_path: Path) -> None:
    diagnosis, _ = case.look(tmp_path / "run")
    assert list(diagnosis.findings)[:1] == [case.rule], diagnosis


@pytest.mark.parametrize("case", parameters(*HEALTHY))
def test_a_healthy_run_has_no_finding(case: Case, tmp_path: Path) -> None:
    diagnosis, _ = case.look(tmp_path / "run")
    assert not diagnosis.findings, diagnosis
