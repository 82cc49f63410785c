"""Write `leyden/compat/qlib/inventory.json`: the public names of `qlib.rl`, and their signatures.

    python tests/compat/make_qlib_inventory.py pyqlib-0.9.7-cp311-....whl

The wheel is read, never imported. Names that begin with an underscore are left out, as are module
variables that only a module itself uses (`T`, `_logger`).
"""

import ast
import json
import sys
import zipfile
from pathlib import Path

OUTPUT = Path(__file__).parents[2] / "leyden" / "compat" / "qlib" / "inventory.json"
PRIVATE = {"T", "__all__"}


def signature(node: ast.AST) -> str | None:
    """Return the parameters of a function, or of a class's `__init__`; None for anything else."""
    if isinstance(node, ast.ClassDef):
        made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        return signature(made[0]) if made else ""
    return ast.unparse(node.args) if isinstance(node, ast.FunctionDef) else None


def public_names(source: str) -> dict[str, str | None]:
    """Return name -> signature of a module's own public names and of those in its `__all__`."""
    names: dict[str, str | None] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names[node.name] = signature(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and target.id == "__all__" and node.value is not None:
                    names |= dict.fromkeys(ast.literal_eval(node.value))
                elif isinstance(target, ast.Name):
                    names[target.id] = None
    return {name: found for name, found in sorted(names.items()) if not name.startswith("_") and name not in PRIVATE}


def main(wheel: Path) -> None:
    """Read the wheel and write the inventory."""
    modules: dict[str, dict[str, str | None]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for path in sorted(archive.namelist()):
            if path.startswith("qlib/rl/") and path.endswith(".py"):
                module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                modules[module] = public_names(archive.read(path).decode())
    OUTPUT.write_text(json.dumps({"package": wheel.name.split("-cp")[0], "modules": modules}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
