"""Groups of tests are declared once for the runner, the marks and the folders, and keep to their time."""

import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from tests.conftest import GROUP_FOLDERS, SMALL_GROUPS
from tests.groups import (
    ALWAYS_MERGED,
    GROUPS,
    MAX_CHANGED_GROUPS,
    TESTS,
    Group,
    before_merge,
    call,
    counts_of,
    parts,
    run,
    set_up,
)

ROOT = Path(__file__).parents[2]


def test_every_group_has_a_mark_and_is_left_out_by_default():
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    marks = {mark.partition(":")[0] for mark in options["markers"]}
    names = {group.name for group in GROUPS}
    assert names | {"merge"} == marks
    assert set(GROUP_FOLDERS) <= names
    left_out = options["addopts"][options["addopts"].index("-m") + 1]
    assert all(name in left_out for name in names)


def test_a_group_without_tests_or_on_a_machine_that_lacks_something_is_left_out():
    ends = time.monotonic() + 60
    assert set_up(Group("empty", "dev", 5), ends) == "not run: no tests yet"
    lacking = Group("project", "dev", 5, missing=lambda: "no such device")
    assert set_up(lacking, ends) == "not run: no such device"


def test_an_environment_that_is_not_ready_in_time_leaves_its_group_out_and_one_that_cannot_be_made_does_not():
    assert set_up(Group("project", "dev", 5), time.monotonic()) == "not run: its environment was not ready in time"
    assert set_up(Group("project", "no-such", 5), time.monotonic() + 60) == "its environment cannot be made (exit 1)"


def test_only_what_holds_tests_of_a_group_is_collected_for_it():
    backends = parts(next(group for group in GROUPS if group.name == "backends"))
    assert {TESTS / "store", TESTS / "backends", TESTS / "examples"} <= set(backends)
    assert not {TESTS / "engine", TESTS / "compat"} & set(backends), "its environment has no torch"


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


def test_before_a_merge_two_groups_always_run_and_as_many_of_changed_parts_as_there_is_time_for():
    chosen, left_out = before_merge(["leyden/statistics/tests.py", "tests/vllm/test_ids.py"])
    assert [group.name for group in chosen] == ["faults", "backends", "slow", "vllm"]
    assert left_out == []
    chosen, left_out = before_merge([f"tests/{group.name}/test_x.py" for group in GROUPS])
    assert len(chosen) == len(ALWAYS_MERGED) + MAX_CHANGED_GROUPS
    assert {group.name for group in (*chosen, *left_out)} == {group.name for group in GROUPS} - {"long", "models"}


def test_each_group_but_the_longest_and_the_one_that_downloads_models_has_tests_for_a_merge():
    marked = {group.name for group in GROUPS for part in parts(group) if mentions_merge(part)}
    assert marked | SMALL_GROUPS >= {group.name for group in GROUPS} - {"long", "models"}


def mentions_merge(part: Path) -> bool:
    return any("mark.merge" in file.read_text() for file in ([part] if part.is_file() else part.rglob("*.py")))


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
    assert "only_there" not in default.stdout
    for expression in ("writers", "writers and merge"):
        asked = subprocess.run([*collect, "-m", expression], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert "No module named 'only_there'" in asked.stdout


def test_a_report_is_counted(tmp_path: Path):
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite tests="9" failures="2" errors="1" skipped="1"/></testsuites>')
    assert counts_of(report) == {"passed": 5, "failed": 3, "skipped": 1}


def test_a_test_that_fails_is_red_unless_it_may_run_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "tests").mkdir()
    for name in ("pyproject.toml", "tests/conftest.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    probe = tmp_path / "tests/test_probe.py"
    probe.write_text(
        "import pathlib, pytest\n"
        "pytestmark = pytest.mark.slow\n"
        "@pytest.mark.merge\n"
        "def test_good(): pass\n"
        "@pytest.mark.merge\n"
        "def test_every_second_time():\n"
        "    seen = pathlib.Path(__file__).with_name('seen')\n"
        "    if seen.exists():\n"
        "        return seen.unlink()\n"
        "    seen.touch()\n"
        "    assert False\n"
        "def test_of_the_night(): assert False\n"
    )
    monkeypatch.setattr("tests.groups.parts", lambda group: [probe])
    slow = next(group for group in GROUPS if group.name == "slow")
    result = run(slow, time.monotonic() + 60, marks="merge")
    assert (result.passed, result.failed, result.trouble, result.is_good) == (1, 1, "", False)
    result = run(slow, time.monotonic() + 60)
    assert (result.passed, result.failed) == (2, 1)
    assert "unsteady" not in capfd.readouterr().out
    assert run(slow, time.monotonic() + 60, marks="merge", second_try=True).is_good
    assert "unsteady: tests/test_probe.py::test_every_second_time\n" in capfd.readouterr().out
    assert not run(slow, time.monotonic() + 60, second_try=True).is_good
    probe.write_text(
        "import pytest, time\n"
        "@pytest.mark.slow\n"
        "@pytest.mark.parametrize('number', range(20))\n"
        "def test_one(number):\n"
        "    time.sleep(1)\n"
        "    assert number != 1\n"
    )
    monkeypatch.setattr("tests.groups.ENDING", 10.0)
    late = run(slow, time.monotonic() + 18)
    assert late.trouble == "its 0.3 minutes are over" and late.failed == 1 and 0 < late.passed < 19
    stopped = run(slow, time.monotonic())
    assert stopped.trouble == "its 0.0 minutes are over"
    assert not stopped.is_good
