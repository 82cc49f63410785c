"""Resolve an environment anew and write down every version: `python constraints/lock.py dev` writes `dev.txt`.

The resolve happens in an empty environment, so nothing depends on what was installed before. Leyden itself is left out,
and a version's local part too (`2.13.0+cpu` is pinned as `2.13.0`): which build is taken is the package index's affair.
What `NAME-without.in` lists is removed before the versions are written down.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TORCH = "torch==2.13.0"
UNWANTED = {"torchvision": "nothing here reads images, and its pins follow torch's"}
HEADER = """\
# Every package of one environment, exactly. Written by `make lock ENV={name}` from {sources}; do not edit.
# torch's own requirements differ from one build to another (CPU, CUDA); each build pins them itself.
"""


def lock(name: str) -> Path:
    sources = [path for path in (HERE / f"{name}.in", HERE / f"{name}-optional.in") if path.exists()]
    if not sources:
        raise SystemExit(f"constraints/{name}.in is missing: write there what the environment is for")
    editable = any(line.startswith("-e ") for path in sources for line in path.read_text().splitlines())
    requirements = [argument for path in sources for argument in ("--requirement", str(path))]
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True, symlinks=True)
        pip = [f"{folder}/bin/python", "-m", "pip"]
        guard = Path(folder) / "guard.txt"
        guard.write_text(TORCH + "\n")
        tools = ["hatchling", "editables"] if editable else []
        subprocess.run([*pip, "install", "--quiet", "--no-compile", "--constraint", guard, *tools, *requirements],
                       cwd=ROOT, check=True)  # fmt: skip
        if (without := HERE / f"{name}-without.in").exists():
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", "--requirement", str(without)], check=True)
        frozen = subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True).stdout
    pins = [
        re.sub(r"\+[\w.]+$", "", line)
        for line in frozen.splitlines()
        if "==" in line and not line.startswith(("-e", "#"))
    ]
    for package, why in UNWANTED.items():
        if any(pin.startswith(f"{package}==") for pin in pins):
            raise SystemExit(f"{name} would contain {package}: {why}; find what asks for it")
    target = HERE / f"{name}.txt"
    header = HEADER.format(name=name, sources=" and ".join(path.name for path in sources))
    target.write_text(header + "\n".join(sorted(pins, key=str.lower)) + "\n")
    return target


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python constraints/lock.py ENV")
    print(f"wrote {lock(sys.argv[1]).relative_to(ROOT)}")
