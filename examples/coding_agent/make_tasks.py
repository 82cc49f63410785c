"""Make coding tasks from small packages: a bug is planted in one, and the package's own tests find it.

    python examples/coding_agent/make_tasks.py tasks          # 225 tasks in Harbor's format, in the folder tasks/
    leyden tasks check tasks

The sources come from the package index, in pinned versions, with their tests (pip; about 1 MB). A task is written only
if the tests pass on the original and fail on the bug. `--sizes` chooses among five:

| size | the bug | the instruction has |
|---|---|---|
| token | one line | what `line` has, and the wrong part of the line |
| line | one line | the file, the line's number, its text, and the test that fails |
| lines | three lines, in several files if the package has them | the same of each line, and the tests that fail |
| file | one line | the file, and the test that fails |
| several | three lines, in several files if the package has them | the tests that fail |

The agent sees the package with the bug, and neither its tests nor its history. For another package, add it to PACKAGES;
for another kind of bug, add a case to `edits`.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
SIZES = {"token": 1, "line": 1, "lines": 3, "file": 1, "several": 3}
"""The number of bugs in a task of each size, the easiest first."""
OF_HARNESSES = ("line", "file", "several")
"""The sizes for an agent that reads files and runs commands."""
SECONDS = 2.0
"""How many CPU seconds the tests of a task may take here."""


@dataclass(frozen=True)
class Package:
    """A package of the index whose source distribution has tests. All are under the MIT or a BSD licence."""

    name: str
    version: str
    source: str
    """The folder of the package in the source distribution."""
    tests: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """For each module, the test files that cover it."""
    more: tuple[str, ...] = ()
    """Further files that the tests need."""


_BOLTONS = (
    "dictutils", "formatutils", "iterutils", "jsonutils", "listutils", "mathutils", "namedutils", "pathutils", "setutils",
    "statsutils", "strutils", "tableutils", "timeutils", "typeutils", "urlutils",
)  # fmt: skip
_SEMVER = ("bump", "compare", "format", "index", "match", "parsing", "replace", "semver")
PACKAGES = {
    package.name: package
    for package in (
        Package("inflection", "0.5.1", "inflection", {"__init__.py": ["test_inflection.py"]}),
        Package(
            "parse",
            "1.22.4",
            "parse",
            {"__init__.py": [f"tests/test_{name}.py" for name in ("bugs", "findall", "parse", "parsetype", "result", "search")]},
        ),
        Package(
            "semver",
            "3.1.1",
            "src/semver",
            {"version.py": [f"tests/test_{name}.py" for name in _SEMVER]},
            ("tests/conftest.py", "tests/coerce.py", "tests/semverwithvprefix.py"),
        ),
        Package(
            "toolz",
            "1.2.0",
            "toolz",
            {f"{name}.py": [f"toolz/tests/test_{name}.py"] for name in ("dicttoolz", "functoolz", "itertoolz", "recipes")},
        ),
        Package("boltons", "26.2.0", "boltons", {f"{name}.py": [f"tests/test_{name}.py"] for name in _BOLTONS}),
    )
}  # fmt: skip


# ---- bugs ----------------------------------------------------------------------------------------

_COMPARED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}  # fmt: skip
_CALCULATED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "+"),
}
_COMBINED: dict[type[ast.boolop], tuple[str, str]] = {ast.And: (" and ", " or "), ast.Or: (" or ", " and ")}


@dataclass(frozen=True)
class Edit:
    """One line of a module, as it is and with a bug."""

    module: str
    number: int
    """The line's number, from 1."""
    right: str
    wrong: str
    part: str
    """The wrong part of the line."""
    function: str


def edits(module: str, text: str) -> Iterator[Edit]:
    """Yield every bug that can be planted in a module. Each changes one line of a function."""
    lines = text.splitlines()
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            for start, end, old, new in _changes(node):
                line = lines[start[0] - 1]
                # columns of `ast` count bytes
                if start[0] != end[0] or not line.isascii() or line[start[1] : end[1]].count(old) != 1:
                    continue
                changed = line[start[1] : end[1]].replace(old, new)
                wrong = line[: start[1]] + changed + line[end[1] :]
                yield Edit(module, start[0], line, wrong, (new or changed).strip(), function.name)


def _changes(node: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int], str, str]]:
    """Yield start, end, old and new text of each change of a node."""

    def between(left: ast.expr, right: ast.expr) -> tuple[tuple[int, int], tuple[int, int]]:
        return (left.end_lineno or 0, left.end_col_offset or 0), (right.lineno, right.col_offset)

    def whole(each: ast.expr) -> tuple[tuple[int, int], tuple[int, int]]:
        return (each.lineno, each.col_offset), (each.end_lineno or 0, each.end_col_offset or 0)

    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            yield *between(left, right), *_COMPARED[type(operator)]
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _CALCULATED:
            yield *between(left, right), *_CALCULATED[type(operator)]
        case ast.BoolOp(op=operator, values=[left, right]):
            yield *between(left, right), *_COMBINED[type(operator)]
        case ast.UnaryOp(op=ast.Not()):
            yield *whole(node), "not ", ""
        case ast.Constant(value=bool() as value):
            yield *whole(node), str(value), str(not value)
        case ast.Constant(value=int() as value):
            yield *whole(node), str(value), str(value + 1)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            start, end = whole(value)
            yield start, end, ast.unparse(value), "None"
        case _:
            pass


# ---- tasks ---------------------------------------------------------------------------------------

DOCKERFILE = """FROM python:3.11-slim
RUN pip install pytest
WORKDIR /app
COPY {name} /app/{name}
"""
TOML = """schema_version = "1.1"

[metadata]
package = "{package.name} {package.version}"
size = "{size}"

[verifier]
timeout_sec = 600.0

[agent]
timeout_sec = 600.0
"""
TEST = """#!/bin/bash
exec python -P /tests/verify.py
"""
SOLUTION = """#!/bin/bash
cp -r /solution/{name} /app/
"""


@dataclass(frozen=True)
class Outcome:
    """The end of a run of the tests."""

    passed: int
    failures: list[tuple[str, str]]
    """Name and message of each test that fails."""


def run_tests(app: Path, tests: Path) -> Outcome | None:
    """Run the tests of a task on a package; None if they take too long, or cannot be collected."""
    report = app.parent / "report.xml"
    options = ["--app", app, "--report", report, "--seconds", str(2 * SECONDS)]
    subprocess.run([sys.executable, "-P", tests / "verify.py", *options], cwd=app, capture_output=True, check=False)
    if not report.exists():
        return None
    cases = [*ElementTree.parse(report).iter("testcase")]
    failures = [
        (case.get("name", ""), fault.get("message", ""))
        for case in cases
        for fault in (*case.iter("failure"), *case.iter("error"))
    ]
    if any(not case.get("classname") for case in cases):  # a test file that cannot be imported
        return None
    skipped = sum(case.find("skipped") is not None for case in cases)
    return Outcome(len(cases) - len(failures) - skipped, failures)


class Source:
    """An unpacked source distribution: its modules, and its tests on a copy with bugs."""

    def __init__(self, package: Package, folder: Path) -> None:
        self.package, self.root = package, folder
        self.folder = folder / package.source
        self.texts = {module: (self.folder / module).read_text() for module in package.tests}
        self._known: dict[tuple[frozenset[str], tuple[tuple[str, str], ...]], Outcome | None] = {}
        self.licence = next(each for each in sorted(folder.iterdir()) if each.name.upper().startswith("LICEN"))

    def with_bugs(self, bugs: list[Edit]) -> dict[str, str]:
        """Return the changed modules."""
        changed: dict[str, list[str]] = {}
        for bug in bugs:
            changed.setdefault(bug.module, self.texts[bug.module].splitlines())[bug.number - 1] = bug.wrong
        return {module: "\n".join(lines) + "\n" for module, lines in changed.items()}

    def copy(self, target: Path, changed: dict[str, str]) -> None:
        """Copy the package without its tests, with the changed modules."""
        shutil.copytree(self.folder, target, ignore=shutil.ignore_patterns("tests", "__pycache__", "*.so"))
        shutil.copy(self.licence, target / "LICENSE")
        for module, text in changed.items():
            (target / module).write_text(text)

    def outcome(self, modules: Iterable[str], changed: dict[str, str]) -> Outcome | None:
        """Return the outcome of these modules' tests on the package with the changed modules, see `run_tests`."""
        key = frozenset(modules), tuple(sorted(changed.items()))
        if key not in self._known:
            with tempfile.TemporaryDirectory() as folder:
                self.write_tests(Path(folder) / "tests", modules)
                self.copy(Path(folder) / "app" / self.package.name, changed)
                self._known[key] = run_tests(Path(folder) / "app", Path(folder) / "tests")
        return self._known[key]

    def write_tests(self, target: Path, modules: Iterable[str]) -> None:
        """Write the tests of these modules, and the program that runs them."""
        target.mkdir()
        for module in modules:
            for file in (*self.package.tests[module], *self.package.more):
                shutil.copy(self.root / file, target)
        shutil.copy(HERE / "verify.py", target)
        (target / "test.sh").write_text(TEST)


def make_task(source: Source, size: str, bugs: list[Edit], target: Path) -> bool:
    """Write a task, and return True; write nothing if the tests do not find the bug, or take too long."""
    name = source.package.name
    changed = source.with_bugs(bugs)
    passed, wrong = source.outcome(changed.keys(), {}), source.outcome(changed.keys(), changed)
    if passed is None or passed.failures or wrong is None or not wrong.failures:
        return False
    (target / "environment").mkdir(parents=True)
    (target / "solution" / name).mkdir(parents=True)
    (target / "instruction.md").write_text(instruction(name, size, bugs, wrong.failures))
    (target / "task.toml").write_text(TOML.format(package=source.package, size=size))
    (target / "environment" / "Dockerfile").write_text(DOCKERFILE.format(name=name))
    source.copy(target / "environment" / name, changed)
    for module in changed:
        (target / "solution" / name / module).write_text(source.texts[module])
    (target / "solution" / "solve.sh").write_text(SOLUTION.format(name=name))
    source.write_tests(target / "tests", changed.keys())
    (target / "tests" / "expected").write_text(str(passed.passed))
    return True


def instruction(name: str, size: str, bugs: list[Edit], failures: list[tuple[str, str]]) -> str:
    """Return what the agent is told."""
    match size:
        case "file":
            where = f"`{name}/{bugs[0].module}` has a bug in one line."
        case "several":
            where = f"The package `{name}` has {len(bugs)} bugs, each in one line."
        case _:
            where = "\n\n".join(
                f"Line {bug.number} of `{name}/{bug.module}`, in `{bug.function}`, has a bug"
                + f", and its wrong part is `{bug.part}`" * (size == "token")
                + f":\n\n```python\n{bug.wrong}\n```"
                for bug in bugs
            )
    shown = "\n\n".join(
        f"{test}:\n{message[:400]}" for test, message in failures[: 1 if size in ("token", "line") else 3]
    )
    return f"{where}\n\nCorrect it in place. These tests fail:\n\n```\n{shown}\n```\n"


def make_tasks(
    source: Source, per_size: int, out: Path, rng: random.Random, sizes: Sequence[str] = OF_HARNESSES
) -> dict[str, int]:
    """Write tasks of these sizes from one package, no two with the same bug, and return how many of each."""
    possible = sorted(
        {edit for module, text in source.texts.items() for edit in edits(module, text) if edit.wrong != edit.right},
        key=lambda edit: (edit.module, edit.number, edit.wrong),
    )
    rng.shuffle(possible)
    made = dict.fromkeys(sizes, 0)
    for size in sizes:
        while made[size] < per_size and (bugs := _found_bugs(source, possible, SIZES[size])):
            made[size] += make_task(source, size, bugs, out / f"{source.package.name}-{size}-{made[size]:03}")
    return made


def _found_bugs(source: Source, possible: list[Edit], n_bugs: int) -> list[Edit]:
    """Remove bugs from `possible` and return them: each is found by the tests, in modules as different as there are.
    Empty if there are not enough.
    """
    bugs: list[Edit] = []
    n_modules = min(n_bugs, len(source.texts))
    for edit in possible.copy():
        if len(bugs) < n_modules and edit.module in {bug.module for bug in bugs}:
            continue
        possible.remove(edit)
        if (edit.module, edit.number) in {(bug.module, bug.number) for bug in bugs}:
            continue
        outcome = source.outcome([edit.module], source.with_bugs([edit]))
        if outcome is not None and outcome.failures:
            bugs.append(edit)
            if len(bugs) == n_bugs:
                return bugs
    return []


# ---- sources -------------------------------------------------------------------------------------


def unpack(package: Package, folder: Path) -> Source:
    """Download a source distribution and unpack it."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-binary", ":all:", "--no-deps", "-d", folder]
    subprocess.run([*command, f"{package.name}=={package.version}"], check=True)
    archive = next(folder.glob(f"{package.name}-*.tar.gz"))
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return Source(package, folder / archive.name.removesuffix(".tar.gz"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a new folder for the tasks")
    parser.add_argument("--packages", default=",".join(PACKAGES), help="names of PACKAGES (default: all)")
    parser.add_argument(
        "--sizes",
        type=lambda text: text.split(","),
        default=OF_HARNESSES,
        metavar="SIZE,...",
        help=f"of {', '.join(SIZES)} (default: {', '.join(OF_HARNESSES)})",
    )
    parser.add_argument("--per-size", type=int, default=15, help="tasks of each size and package (default: 15)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    names = given.packages.split(",")
    if unknown := {*given.sizes} - SIZES.keys():
        parser.error(f"there is no size {', '.join(sorted(unknown))}; there are {', '.join(SIZES)}")
    for name in names:
        if importlib.util.find_spec(name):
            parser.error(
                f"{name} is installed in this environment, so the agent could read the answer there; uninstall it"
            )
    given.out.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            made = make_tasks(
                unpack(PACKAGES[name], Path(folder)), given.per_size, given.out, random.Random(given.seed), given.sizes
            )
            print(name, *(f"{size}: {n}" for size, n in made.items()), flush=True)


if __name__ == "__main__":
    main()
