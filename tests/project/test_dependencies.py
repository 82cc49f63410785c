"""Whatever Leyden imports is declared, as a dependency of the core or of an extra: nothing is there by the grace of another package."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = {"transfer_queue": "transferqueue"}
"""Of modules that may not be installed here and are named unlike their distribution."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"leyden": "leyden", "leyden_compat": "packages/leyden-compat/leyden_compat"}
"""The packages of this repository and their folders."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> set[str]:
    requirements = [
        *PROJECT["dependencies"],
        *(one for extra in PROJECT["optional-dependencies"].values() for one in extra),
    ]
    return {normal(re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]) for requirement in requirements}


@cache
def owners() -> dict[str, str]:
    """The distribution of each module that is installed here, by dotted name."""
    wanted = {name.partition(".")[0] for name in imports()}
    found: dict[str, str] = {}
    for distribution in distributions():
        owner = normal(distribution.name)
        for line in (distribution.read_text("RECORD") or "").splitlines():  # `files` would parse each line
            path = line.partition(",")[0]
            if path.partition("/")[0].partition(".")[0] in wanted and path.endswith((".py", ".so", ".pyd")):
                folder, _, name = path.rpartition("/")
                module = f"{folder}/{name.partition('.')[0]}".strip("/").replace("/", ".")
                found[module.removesuffix(".__init__")] = owner
    return found


@cache
def imports() -> dict[str, set[str]]:
    """The modules of other packages that Leyden imports, and the files that do."""
    found: dict[str, set[str]] = {}
    for file in (file for folder in OURS.values() for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                top = name.partition(".")[0]
                if top not in OURS and top not in sys.stdlib_module_names:
                    found.setdefault(name, set()).add(str(file.relative_to(ROOT)))
    return found


def distribution_of(module: str) -> str:
    """The distribution that has the module; for one that is not installed here, the name that it most likely has."""
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next(
        (owners()[prefix] for prefix in prefixes if prefix in owners()), DISTRIBUTIONS.get(parts[0], normal(parts[0]))
    )


def test_every_import_is_of_a_declared_dependency():
    allowed = declared()
    undeclared = {
        f"{module} ({distribution_of(module)}), in {', '.join(sorted(files))}"
        for module, files in imports().items()
        if distribution_of(module) not in allowed
    }
    assert not undeclared, "declare it in pyproject.toml, or do not import it"
