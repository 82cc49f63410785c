"""What is in the tree was finished before it was committed."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("leyden", "packages") for path in sorted((ROOT / folder).rglob("*.py"))]
ELSEWHERE = {"_auth.py", "file.py"}
"""Files of httpx, and of a user."""


def test_no_file_holds_the_marks_of_a_merge_that_was_not_finished():
    marks = r"^(<<<<<<< |>>>>>>> )"
    found = subprocess.run(["git", "grep", "-nE", marks], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode in (0, 1, 128), found.stderr  # 128: not a clone
    assert found.stdout == ""


def gone(path: Path, text: str) -> Iterator[str]:
    """The files named `x.py` or `x.sql` in a source that are neither beside it nor below a folder above it, and the
    modules that the list of its package has and the package does not.
    """
    above = [folder for folder in path.parents if folder == ROOT or ROOT in folder.parents]
    for name in re.findall(r"`([\w/]+\.(?:py|sql))`", text):
        if name not in ELSEWHERE and not any((folder / name).exists() for folder in above):
            yield name
    if path.name == "__init__.py":
        tree = ast.parse(text)
        names = {
            alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        for heads in re.findall(r"^- ((?:`[a-z_]+`(?:, )?)+):", ast.get_docstring(tree) or "", re.MULTILINE):
            for name in re.findall(r"\w+", heads):
                if name not in names and not any((path.parent / each).exists() for each in (name, f"{name}.py")):
                    yield name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_and_module_that_a_source_names_is_there(path: Path):
    assert list(gone(path, path.read_text())) == []


def test_a_name_of_a_file_or_module_that_is_gone_is_found():
    listing = '"""Of a package.\n\n- `errors`, `app`: a module each;\n- `types`: a package.\n"""\n# see `old.py`, `store/base.py`'
    assert list(gone(ROOT / "leyden" / "__init__.py", listing)) == ["old.py", "app"]


def glued(text: str) -> Iterator[str]:
    """The parameters whose entry in a docstring stands behind another sentence, where a reader does not look for it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (doc := ast.get_docstring(node)):
            arguments = node.args
            names = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
            for name in re.findall(r"[.;] (\w+)(?:, \w+)*: ", doc):
                if name in names:
                    yield f"{node.name}: {name}"


def test_a_docstring_has_one_parameter_to_a_line():
    found = [f"{path.relative_to(ROOT)}: {each}" for path in SOURCES for each in glued(path.read_text())]
    assert found == []


def test_a_glued_parameter_is_found():
    source = 'def f(a, b):\n    """Begin.\n\n    a: the first. b: the second.\n    """\n'
    assert list(glued(source)) == ["f: b"]


def test_the_type_of_a_parsed_json_object_is_defined_once():
    defined = [path for path in SOURCES if re.search(r"^Json(: TypeAlias)? = ", path.read_text(), re.MULTILINE)]
    assert defined == [ROOT / "leyden" / "_lib" / "json.py"]
