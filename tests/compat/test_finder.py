"""Foreign packages under their own names: served from tables, in every process of a program."""

import importlib
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from leyden_compat.finder import install

PROGRAM = """
import multiprocessing
import subprocess
import sys

import agentlightning as agl
from agentlightning.types import Rollout
from agentlightning.litagent.decorator import rollout


def work(number):
    import agentlightning.adapter.base
    return number * 2


if __name__ == "__main__":
    import leyden

    assert agl.Rollout is Rollout is leyden.Rollout
    assert agl.types.core.Rollout is Rollout
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [1, 2]))
    grandchild = "import agentlightning, sys; print(agentlightning.Rollout.__module__)"
    print(subprocess.run([sys.executable, "-c", grandchild], check=True, text=True, capture_output=True).stdout.strip())
    print(sys.argv)
"""


def run(folder: Path, *command: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *command], cwd=folder, text=True, capture_output=True, check=False)
    assert done.returncode == status, done.stderr
    return done


@pytest.mark.parametrize("as_module", [False, True])
@pytest.mark.slow
@pytest.mark.merge
def test_a_program_and_its_child_processes_find_leyden(tmp_path: Path, as_module: bool) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    options = ["-m", "program"] if as_module else ["program.py"]
    lines = run(tmp_path, "-m", "leyden.compat", *options, "--epochs", "2").stdout.splitlines()
    assert lines[:2] == ["[2, 4]", "leyden.types.rollout"]
    assert lines[2].endswith("program.py', '--epochs', '2']")


@pytest.mark.slow
@pytest.mark.merge
def test_one_import_at_the_top_is_enough(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import leyden.compat\n" + PROGRAM)
    assert run(tmp_path, "program.py").stdout.splitlines()[0] == "[2, 4]"


def test_a_name_without_a_counterpart_says_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import leyden.compat\nfrom agentlightning import Rollou\n")
    assert "cannot import name 'Rollou'" in run(tmp_path, "program.py", status=1).stderr


def test_the_real_package_already_imported_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "agentlightning.py").write_text("real = True\n")
    (tmp_path / "late.py").write_text("import agentlightning\nimport leyden.compat\n")
    assert "the real agentlightning is already imported" in run(tmp_path, "late.py", status=1).stderr

    (tmp_path / "early.py").write_text(
        "import leyden.compat\nimport agentlightning\nprint(hasattr(agentlightning, 'real'))\n"
    )
    assert run(tmp_path, "early.py").stdout == "False\n"


def test_an_installed_qlib_has_its_backtest_which_meets_leydens_classes(tmp_path: Path) -> None:
    package = tmp_path / "qlib" / "rl" / "order_execution"
    package.mkdir(parents=True)
    (tmp_path / "qlib" / "__init__.py").write_text("")
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("raise AssertionError('Leyden stands for this package')")
    (package / "strategy.py").write_text(
        "from qlib.rl.interpreter import StateInterpreter\nclass SAOEStrategy: reads = StateInterpreter\n"
    )
    (tmp_path / "program.py").write_text(
        "from qlib.rl.order_execution import SAOEStrategy\nimport qlib.rl.order_execution.strategy as module\n"
        "print(module.SAOEStrategy is SAOEStrategy, module.__file__, SAOEStrategy.reads.__module__)\n"
    )
    printed = run(tmp_path, "-m", "leyden.compat", "program.py").stdout.split()
    assert printed == ["True", str(package / "strategy.py"), "leyden_compat.qlib.parts"]
    (package / "strategy.py").unlink()
    assert "`pip install pyqlib`" in run(tmp_path, "-m", "leyden.compat", "program.py", status=1).stderr


@pytest.mark.parametrize("name", ["finder", "importing", "agentlightning", "agentlightning.store", "qlib.parts"])
def test_a_module_has_two_names_and_is_loaded_once(name: str) -> None:
    again = importlib.import_module(f"leyden.compat.{name}")
    assert again is importlib.import_module(f"leyden_compat.{name}")
    assert again.__name__ == f"leyden_compat.{name}"


def test_a_module_that_is_not_there_is_missing_under_the_name_that_was_written() -> None:
    for name in ("leyden.compat.nothing", "leyden.compat.nothing.more", "leyden.compat.finder.more"):
        with pytest.raises(ModuleNotFoundError, match=r"leyden\.compat\."):
            importlib.import_module(name)


def test_a_module_runs_under_either_name(tmp_path: Path) -> None:
    one, other = (
        run(tmp_path, "-m", f"{name}.importing", "--help").stdout for name in ("leyden.compat", "leyden_compat")
    )
    assert one == other and "Import a running Agent Lightning" in one


def test_help_has_examples_and_a_missing_script_is_named(tmp_path: Path) -> None:
    assert "python -m leyden.compat train.py" in run(tmp_path, "-m", "leyden.compat", "--help").stdout
    assert "'absent.py': no such file" in run(tmp_path, "-m", "leyden.compat", "absent.py", status=1).stderr


def test_a_function_of_the_main_script_takes_a_foreign_module_to_another_process() -> None:
    install()
    script: dict[str, Any] = {"__name__": "__main__"}
    exec("import agentlightning as agl\ndef emitter(): return agl.emit_reward", script)
    assert pickle.loads(cloudpickle.dumps(script["emitter"]))() is script["agl"].emit_reward
