"""`python -m leyden.compat script.py`: run a program written for another package on Leyden."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

from leyden.compat.finder import install
from leyden.compat.program import run_as_main

_EPILOG = """examples:
  python -m leyden.compat train.py --epochs 2     run a program; options after it are its own
  python -m leyden.compat -m examples.train       run a module

Inside a program one line above its other imports does the same: import leyden.compat
"""


def main(arguments: list[str]) -> None:
    """Run the program that the command line names, as the module `__main__`."""
    options, program = _parse(arguments)
    install()
    if options.module:
        sys.path.insert(0, "")
        name, *own = options.module
        origin, spec = _module(name)
        run_as_main(origin, [str(origin), *own], spec)
    else:
        script, *own = program
        path = Path(script)
        if not path.is_file():
            sys.exit(f"python -m leyden.compat: cannot read {script!r}: no such file")
        sys.path.insert(0, str(path.resolve().parent))
        run_as_main(path, [script, *own])


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m leyden.compat",
        usage="python -m leyden.compat [-h] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        description="Run a program written for agentlightning or qlib.rl on Leyden, under its own imports.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module instead of a script"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="SCRIPT", help="the program and its arguments")
    options = parser.parse_args(arguments)
    if not (options.module or options.program):
        parser.print_help()
        sys.exit(2)
    return options, options.program


def _module(name: str) -> tuple[Path, Any]:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.origin is None:
        sys.exit(f"python -m leyden.compat: no module named {name!r}")
    return Path(spec.origin), spec


if __name__ == "__main__":
    main(sys.argv[1:])
