"""Write the public names and signatures of another package's releases: `python tests/compat/make_inventory.py agentlightning`.

The wheels are downloaded with pip and read as text (`ast`); nothing of them is imported. The result is
`tests/compat/<package>.json`: by module and name, the releases that have the name, its signature in the
newest of them, and for a class its bases, its public members and the attributes that its constructor sets.
Tests and the tables of the docs read this file.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

PEERS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "agentlightning": ("agentlightning", ("0.2.0", "0.2.2", "0.3.0"), "agentlightning/"),
    "qlib": ("pyqlib", ("0.9.7",), "qlib/rl/"),
}
"""By package: its name on PyPI, the releases, oldest first, and the folder whose modules are read."""

TYPE_VARIABLES = ("TypeVar", "ParamSpec")


def inventory(package: str) -> dict[str, Any]:
    """Return the inventory of a package, from wheels that are downloaded now."""
    project, releases, folder = PEERS[package]
    modules: dict[str, dict[str, dict[str, Any]]] = {}
    for release in releases:
        for module, names in read_wheel(download(project, release), folder).items():
            known = modules.setdefault(module, {})
            for name, described in names.items():
                before = known.get(name, {}).get("releases", [])
                known[name] = {"releases": [*before, release], **described}
    ordered = {module: dict(sorted(names.items())) for module, names in sorted(modules.items())}
    return {"package": package, "releases": list(releases), "modules": ordered}


def download(project: str, release: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
        subprocess.run([*pip, f"{project}=={release}"], check=True)
        [wheel] = Path(folder).glob("*.whl")
        return wheel.read_bytes()


def read_wheel(wheel: bytes, folder: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return what each module of a wheel defines, and what its packages repeat from their modules."""
    with tempfile.TemporaryFile() as file:
        file.write(wheel)
        with zipfile.ZipFile(file) as archive:
            sources = {
                name: archive.read(name).decode()
                for name in archive.namelist()
                if name.startswith(folder) and name.endswith(".py")
            }
    trees = {module_name(path): (path, ast.parse(source)) for path, source in sources.items()}
    found: dict[str, dict[str, dict[str, Any]]] = {}

    def names(module: str) -> dict[str, dict[str, Any]]:
        if module not in found and module in trees:
            found[module] = {}  # a circle of imports ends here
            path, tree = trees[module]
            found[module] = dict(defined(tree))
            for name, origin, original in repeated(module, path, tree):
                theirs = public(trees, origin, names(origin))
                if original == "*":
                    found[module] = theirs | found[module]
                elif original in names(origin):
                    found[module].setdefault(name, names(origin)[original])
        return found.get(module, {})

    return {module: names(module) for module in trees}


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def public(trees: dict[str, Any], module: str, names: dict[str, Any]) -> dict[str, Any]:
    """Return the names that `from module import *` binds."""
    listed: list[str] | None = None
    for node in trees[module][1].body if module in trees else ():
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == "__all__" for to in node.targets):
            listed = [
                ast.literal_eval(element)
                for element in getattr(node.value, "elts", [])
                if isinstance(element, ast.Constant)
            ]
    return names if listed is None else {name: described for name, described in names.items() if name in listed}


def repeated(module: str, path: str, tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield (name, module, original name) for what a package imports from its own modules; "*" for all."""
    facade = path.endswith("__init__.py") or all(
        isinstance(node, ast.Import | ast.ImportFrom | ast.Expr) for node in tree.body
    )
    if not facade:
        return
    package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom):
            continue
        parents = package.split(".")
        base = parents[: len(parents) - node.level + 1] if node.level else []
        origin = ".".join([*base, *([node.module] if node.module else [])])
        if origin.partition(".")[0] == module.partition(".")[0]:
            for alias in node.names:
                yield alias.asname or alias.name, origin, alias.name


def defined(tree: ast.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the public functions, classes and values of a module."""
    for node in statements(tree.body):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() if is_public(node.name):
                yield node.name, {"kind": "function", "signature": signature(node)}
            case ast.ClassDef() if is_public(node.name):
                yield node.name, {"kind": "class", **class_parts(node)}
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_public(name):
                if not (isinstance(value, ast.Call) and ast.unparse(value.func).endswith(TYPE_VARIABLES)):
                    yield name, {"kind": "value"}
            case ast.AnnAssign(target=ast.Name(id=name)) if is_public(name):
                yield name, {"kind": "value"}
            case _:
                pass


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those inside `if` and `try` too. A script's own are left out."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test).startswith("__name__ =="):
            continue
        if isinstance(node, ast.If | ast.Try):
            yield from statements([*node.body, *node.orelse])
        else:
            yield node


def is_public(name: str) -> bool:
    return not name.startswith("_") and name not in ("T", "logger", "TYPE_CHECKING")


def class_parts(node: ast.ClassDef) -> dict[str, Any]:
    members: dict[str, str] = {}
    own = ""
    for part in node.body:
        match part:
            case ast.FunctionDef() | ast.AsyncFunctionDef() if part.name == "__init__":
                own = signature(part)
            case ast.FunctionDef() | ast.AsyncFunctionDef() if is_public(part.name):
                members[part.name] = signature(part)
            case ast.AnnAssign(target=ast.Name(id=name)) if is_public(name):
                members[name] = ""
            case ast.Assign(targets=[ast.Name(id=name)]) if is_public(name):
                members.setdefault(name, "")
            case _:
                pass
    attributes = [name for name in assigned(node) if name not in members]
    return {
        "signature": own,
        "bases": [ast.unparse(base) for base in node.bases],
        "members": members,
        **({"attributes": attributes} if attributes else {}),
    }


def assigned(node: ast.ClassDef) -> list[str]:
    """Return the public attributes that a class's constructor sets."""
    found = [
        target.attr
        for part in node.body
        if isinstance(part, ast.FunctionDef) and part.name == "__init__"
        for statement in ast.walk(part)
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    ]
    return sorted({name for name in found if is_public(name)})


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the parameters without annotations: `(self, task, *, mode=None)`."""
    arguments = node.args
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            argument.annotation = None
    return f"({ast.unparse(arguments)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=sorted(PEERS))
    package = parser.parse_args().package
    (HERE / f"{package}.json").write_text(written(inventory(package)))


def written(found: dict[str, Any]) -> str:
    """Return the inventory as JSON with a line for each name."""
    head = json.dumps({name: found[name] for name in ("package", "releases")})[1:-1]
    modules = [
        f"{json.dumps(module)}: {{"
        + ",".join(f"\n  {json.dumps(name)}: {json.dumps(described)}" for name, described in names.items())
        + "}"
        for module, names in found["modules"].items()
    ]
    return f'{{{head}, "modules": {{\n' + ",\n".join(modules) + "}}\n"


if __name__ == "__main__":
    main()
