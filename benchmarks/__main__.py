"""`python -m benchmarks NAME`: run a benchmark, write down its rows, bring the pages that show them up to date."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path

from benchmarks import report
from benchmarks.harness import ROOT, Peer
from constraints.install import SetUpFailed, environment, install, is_installed

NOT_BENCHMARKS = {"__init__", "__main__", "harness", "report", "sides"}


def names() -> list[str]:
    return sorted({path.stem for path in Path(__file__).parent.glob("*.py")} - NOT_BENCHMARKS)


def find_peer(environment_name: str | None, *, python: Path | None, prepare: bool) -> Peer | None:
    """The peer a benchmark declares, if it is installed (or can be, with `prepare`); None after saying why not."""
    if environment_name is None:
        return None
    if python is None:
        try:
            if prepare:
                install(environment_name)
            if not is_installed(environment_name):
                raise SetUpFailed(f"{environment_name} is not installed; `make bench` installs it")
            python = environment(environment_name).python
        except SetUpFailed as failure:
            print(f"Measuring Leyden alone: {failure}", flush=True)
            return None
    return Peer(peer_name(environment_name), python)


def peer_name(environment_name: str) -> str:
    """The peer's package and version, for example `trl 1.16.0`: the first that the environment asks for, as pinned."""
    env = environment(environment_name)
    wanted = next(line for line in env.wanted.read_text().splitlines() if line and not line.startswith("#"))
    package = re.split(r"[^\w.-]", wanted, maxsplit=1)[0]
    pinned = re.search(rf"^{re.escape(package)}==(\S+)$", env.pins.read_text(), re.MULTILINE | re.IGNORECASE)
    return f"{package} {pinned[1]}" if pinned else package


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure Leyden, beside a peer.")
    parser.add_argument("name", nargs="?", help="which benchmark; none: list them")
    parser.add_argument("--prepare", action="store_true", help="install the peer first, if the benchmark has one")
    parser.add_argument("--peer-python", type=Path, help="the Python of an environment that has the peer already")
    options = parser.parse_args()
    if options.name not in names():
        listed = ", ".join(names()) or "none yet"
        print(f"benchmarks: {listed}" + (f" (no {options.name!r})" if options.name else ""))
        return 2 if options.name else 0
    benchmark = importlib.import_module(f"benchmarks.{options.name}")
    peer = find_peer(getattr(benchmark, "PEER", None), python=options.peer_python, prepare=options.prepare)
    measured = benchmark.main(peer)
    path = report.save(options.name, measured)
    report.rewrite_pages()
    print(report.shown(measured), end="")
    print(f"written to {path.relative_to(ROOT)} and to the pages in docs/benchmarks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
