"""`python -m leyden.compat script.py`: run a program written for another package on Leyden."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any, Final

from leyden_compat.finder import Finder, ForeignNameError, install
from leyden_compat.program import run_as_main

COMMANDS: Final = {"agl": "agentlightning.cli"}
"""The console scripts of other packages, and the module that each runs."""
INSTEAD: Final = {"qrun": "it runs workflows of Qlib itself, which Leyden does not replace; call `qrun` as it is"}
"""The console scripts that Leyden does not replace, and what to do instead."""

_EPILOG = """examples:
  python -m leyden.compat train.py --epochs 2     run a program; options after it are its own
  python -m leyden.compat -m examples.train       run a module, also one of the other package
  python -m leyden.compat agl store --port 4747   run a command of the other package

Inside a program one line above its other imports does the same: import leyden.compat
"""


def main(arguments: list[str]) -> None:
    """Run the program that the command line names, as the module `__main__`."""
    options, program = _parse(arguments)
    finder = install()
    if options.module:
        sys.path.insert(0, "")
        name, *own = options.module
        if _is_served(finder, name):
            sys.exit(_run_foreign(finder, name, [name, *own]))
        origin, spec = _module(name)
        run_as_main(origin, [str(origin), *own], spec)
    else:
        script, *own = program
        path = Path(script)
        if not path.is_file():
            if script in COMMANDS:
                sys.exit(_run_foreign(finder, COMMANDS[script], [script, *own]))
            if script in INSTEAD:
                sys.exit(f"python -m leyden.compat: no command {script!r}: {INSTEAD[script]}")
            sys.exit(f"python -m leyden.compat: cannot read {script!r}: no such file")
        sys.path.insert(0, str(path.resolve().parent))
        run_as_main(path, [script, *own])


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options and the program's own arguments. Without a program, print the help and exit with status 2."""
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


def _is_served(finder: Finder, name: str) -> bool:
    """Return whether Leyden itself provides this module, even if an installed package of that name has a file for
    it.
    """
    if (foreign := finder.module(name)) is None:
        return False
    spec = None if foreign.instead is not None else importlib.util.find_spec(name)
    return spec is None or spec.loader is finder


def _run_foreign(finder: Finder, name: str, arguments: list[str]) -> int | str | None:
    """Run a module of another package as its own `python -m` would, and return the exit status or an error."""
    for module in (f"{name}.__main__", name):
        foreign = finder.module(module)
        if foreign is not None and (foreign.instead is not None or "main" in foreign.names):
            sys.argv = arguments
            try:
                return importlib.import_module(module).main()
            except ForeignNameError as error:
                return f"error: {error}"
    return f"python -m leyden.compat: {name!r} is no program that Leyden serves; run it with its own package"


def _module(name: str) -> tuple[Path, Any]:
    """Return the file and the spec that `python -m name` would run. Exit if there is none."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.origin is None:
        sys.exit(f"python -m leyden.compat: no module named {name!r}")
    return Path(spec.origin), spec


if __name__ == "__main__":
    main(sys.argv[1:])
