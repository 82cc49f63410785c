"""Groups of tests are declared once for the runner, the marks and the folders, and keep to their time."""

import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from tests.conftest import GROUP_FOLDERS
from tests.groups import GROUPS, TESTS, Group, call, in_order, parts, reason_to_skip, run_pytest

ROOT = Path(__file__).parents[2]
EMPTY = Group("empty", "dev", 5)
EVERY_TEST = Group("project", "dev", 5)
"""Not a group, but a folder with tests."""


def test_every_group_has_a_mark_and_is_left_out_by_default():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    marks = {mark.partition(":")[0] for mark in options["markers"]}
    names = {group.name for group in GROUPS}
    assert names == marks
    assert set(GROUP_FOLDERS) <= names
    left_out = options["addopts"][options["addopts"].index("-m") + 1]
    assert all(name in left_out for name in names)


def test_a_group_without_tests_is_skipped():
    assert not parts(EMPTY)
    assert reason_to_skip(EMPTY, float("inf"), asked_for=True) == "no tests yet"


def test_only_what_holds_tests_of_a_group_is_collected_for_it():
    backends = parts(next(group for group in GROUPS if group.name == "backends"))
    assert {TESTS / "store", TESTS / "backends", TESTS / "examples"} <= set(backends)
    assert not {TESTS / "engine", TESTS / "compat"} & set(backends), "its environment has no torch"


def test_a_group_is_skipped_when_its_time_does_not_fit_or_the_machine_lacks_something():
    assert reason_to_skip(EVERY_TEST, 301, asked_for=False) is None
    assert "may take 5 minutes" in reason_to_skip(EVERY_TEST, 299, asked_for=False)
    lacking = Group("project", "dev", 5, missing=lambda: "no such device")
    assert reason_to_skip(lacking, 301, asked_for=False) == "no such device"
    assert reason_to_skip(lacking, 301, asked_for=True) is None


def test_every_group_has_tests():
    assert [group.name for group in GROUPS if not parts(group) and group.name not in {"long", "gpu"}] == []


def test_what_a_group_covers_exists():
    assert [path for group in GROUPS for path in group.covers if not (ROOT / path).exists()] == []


def test_a_group_whose_tests_import_the_aliases_has_them_in_its_environment():
    uses = re.compile(r"\bleyden[_.]compat\b")
    lacking = {
        group.environment: str(file.relative_to(TESTS))
        for group in GROUPS
        for part in parts(group)
        for file in ([part] if part.is_file() else sorted(part.rglob("*.py")))
        if uses.search(file.read_text())
        and "-e packages/leyden-compat"
        not in (ROOT / "constraints" / f"{group.environment}.in").read_text().splitlines()
    }
    assert lacking == {}


def test_a_size_of_the_attack_counts_as_a_mark():
    """The attack's tests get their marks from `sizes`, so that their files name none."""
    long = parts(next(group for group in GROUPS if group.name == "long"))
    assert {TESTS / "attack", TESTS / "store"} <= set(long)


def test_groups_of_changed_parts_come_first():
    names = [group.name for group in in_order(GROUPS, ["leyden/store/base.py", "tests/vllm/test_ids.py"])]
    assert names[:4] == ["slow", "faults", "backends", "vllm"]
    assert sorted(names) == sorted(group.name for group in GROUPS)
    assert in_order(GROUPS, []) == GROUPS


def test_what_runs_too_long_is_stopped_with_everything_it_started(tmp_path: Path):
    alive = tmp_path / "alive"
    child = f"import pathlib, time\nwhile True:\n    pathlib.Path({str(alive)!r}).touch(); time.sleep(0.05)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with pytest.raises(subprocess.TimeoutExpired):
        call([sys.executable, "-c", parent], time.monotonic() + 3)
    alive.unlink()
    time.sleep(0.3)
    assert not alive.exists()


def test_a_group_folder_is_collected_only_for_its_group(tmp_path: Path):
    """In a copy of the configuration: a probe in the real tree would disturb tests that run beside this one."""
    (tmp_path / "tests/writers").mkdir(parents=True)
    for name in ("pyproject.toml", "tests/conftest.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "tests/writers/test_probe.py").write_text("import only_there\n")
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q"]
    default = subprocess.run(collect, cwd=tmp_path, capture_output=True, text=True, check=False)
    asked = subprocess.run([*collect, "-m", "writers"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "only_there" not in default.stdout
    assert "No module named 'only_there'" in asked.stdout


@pytest.mark.slow
def test_a_test_that_passes_alone_the_second_time_is_named_as_unsteady(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    unsteady = tmp_path / "test_unsteady.py"
    unsteady.write_text(
        "import pathlib\n"
        "def test_good(): pass\n"
        "def test_once():\n"
        "    seen = pathlib.Path(__file__).with_name('seen')\n"
        "    first = not seen.exists()\n"
        "    seen.touch()\n"
        "    assert not first\n"
    )
    broken = tmp_path / "test_broken.py"
    broken.write_text("def test_bad(): assert False\n")
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "no:asyncio"]
    ends = time.monotonic() + 60
    assert run_pytest([*command, unsteady], ["-n", "2"], ends) == 0
    printed = capfd.readouterr().out
    assert "unsteady: " in printed and "test_unsteady.py::test_once\n" in printed
    assert "1 failed, 1 passed" in printed and "1 passed, 1 deselected" in printed
    assert run_pytest([*command, broken, unsteady], [], ends) == 1
    assert "unsteady" not in capfd.readouterr().out.replace("test_unsteady", "")


def test_a_run_that_did_not_end_is_not_run_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "test_unreadable.py").write_text("def\n")
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", tmp_path]
    assert run_pytest(command, [], time.monotonic() + 60) == 2
    assert "once more" not in capfd.readouterr().out
