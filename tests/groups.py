"""Run the larger groups of tests, each in its own environment and within its own time: `python tests/groups.py faults`.

Without a name: every group that this machine can run, those first whose part of the package the commits of the last
day changed. A group's environment is `constraints/<environment>.in` and `.txt`; its tests carry its mark or lie in
`tests/<group>/`. To add a group: a line in GROUPS, a mark in pyproject.toml.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path.insert(0, str(ROOT))

from constraints.install import environment  # noqa: E402 (this file is run as a script)

INSTALL = ROOT / "constraints" / "install.py"
TESTS_FAILED = 1
"""Exit status of pytest; other ones say that tests were not run to their end."""
RAN_OUT_OF_TIME = 124
DAY_SECONDS = 24 * 60 * 60


def nothing() -> str | None:
    return None


def an_nvidia_gpu() -> str | None:
    return None if shutil.which("nvidia-smi") else "this machine has no NVIDIA GPU (no nvidia-smi)"


@dataclass(frozen=True)
class Group:
    name: str
    environment: str
    minutes: float
    """The most it may take, its environment's set-up included."""
    missing: Callable[[], str | None] = nothing
    """What this machine lacks for it, or None."""
    covers: tuple[str, ...] = ("leyden/", "packages/")
    """Paths that the group tests, from the repository's root. `tests/<group>/` is always one of them."""
    together: bool = False
    """Its tests mostly wait, so that some run beside each other; those that share something are an `xdist_group`."""


AGENTS = (
    "leyden/adapter/",
    "leyden/dialects/",
    "leyden/engine/",
    "leyden/tracing/",
    "examples/frameworks/",
)
ORDERS = ("packages/leyden-compat/leyden_compat/order_execution/", "packages/leyden-compat/examples/")
GROUPS = [
    Group("slow", "dev", 25, together=True),
    Group("faults", "dev", 18, together=True),
    Group("backends", "backends", 16, covers=("leyden/store/", "leyden/types/")),
    Group("ray", "ray", 8, covers=("leyden/execution/", "leyden/_lib/host/")),
    Group("tracers", "tracers", 8, covers=("leyden/tracing/",)),
    Group("writers", "writers", 6, covers=("leyden/training/",)),
    Group("rl_data", "rl-data", 4, covers=("leyden/rl/", *ORDERS)),
    Group("rl_peers", "rl-peers", 10, covers=("leyden/rl/", *ORDERS, "packages/leyden-compat/leyden_compat/qlib/")),
    Group("legacy_peers", "legacy-peers", 8, covers=("leyden/_lib/host/", "leyden/legacy/", "leyden/trainer/")),
    Group(
        "compat_peers",
        "compat-peers",
        10,
        covers=("packages/leyden-compat/leyden_compat/", "leyden/store/store_app.py"),
    ),
    Group("maths_peers", "maths-peers", 8, covers=("leyden/objectives/",)),
    Group("verl", "verl", 20, covers=("leyden/algorithm/verl/", "leyden/objectives/")),
    Group("litellm", "litellm", 5, covers=("leyden/dialects/", "leyden/gateway/", "leyden/_lib/host/")),
    Group("frameworks", "frameworks", 14, covers=AGENTS),
    Group("crewai", "crewai", 12, covers=AGENTS),
    Group("vllm", "vllm", 12, covers=("leyden/dialects/", "leyden/engine/", "leyden/gateway/", "leyden/_lib/host/")),
    Group("long", "dev", 120, together=True),
    Group("gpu", "dev", 10, missing=an_nvidia_gpu, covers=("leyden/engine/", "leyden/training/rng.py", "leyden/rl/")),
]


def parts(group: Group) -> list[Path]:
    """The folders and files in `tests/` where any test belongs to the group, found without importing one.

    Only these are given to pytest: others import what the group's environment may not have.
    """
    mark = re.compile(rf"mark\.{group.name}\b|@sizes\(.*\b{group.name}=")
    entries = sorted(entry for entry in TESTS.iterdir() if entry.is_dir() or entry.name.startswith("test_"))
    return [
        entry
        for entry in entries
        if (entry.name == group.name and any(entry.rglob("test_*.py")))
        or any(mark.search(path.read_text()) for path in ([entry] if entry.is_file() else entry.rglob("*.py")))
    ]


def changed_paths() -> list[str]:
    """Return the paths that the commits of the last day before HEAD changed, or [] without a history."""
    git = ["git", "-C", str(ROOT)]
    newest = subprocess.run(
        [*git, "log", "-1", "--format=%ct"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if not newest:
        return []
    since = f"--since=@{int(newest) - DAY_SECONDS}"
    changes = [*git, "log", "--name-only", "--format=", since]
    return sorted(set(subprocess.run(changes, capture_output=True, text=True, check=False).stdout.split()))


def in_order(groups: Sequence[Group], changed: Sequence[str]) -> list[Group]:
    """Return the groups of changed parts first, and otherwise in their order."""
    return sorted(
        groups, key=lambda group: not any(path.startswith((f"tests/{group.name}/", *group.covers)) for path in changed)
    )


def reason_to_skip(group: Group, seconds_left: float, *, asked_for: bool) -> str | None:
    if not parts(group):
        return "no tests yet"
    if not asked_for and (lacks := group.missing()):
        return lacks
    if group.minutes * 60 > seconds_left:
        return f"it may take {group.minutes:g} minutes and {max(seconds_left, 0) / 60:.1f} are left"
    return None


def run(group: Group) -> int:
    """Set the group's environment up, run its tests, and return pytest's exit status (124 when its time is over)."""
    ends = time.monotonic() + group.minutes * 60
    try:
        if status := call([sys.executable, INSTALL, group.environment], ends):
            return status
        python = environment(group.environment).python
        beside = ["-n", "logical", "--dist", "loadgroup"] if group.together else []
        return run_pytest([python, "-m", "pytest", "-m", group.name, *parts(group)], beside, ends)
    except subprocess.TimeoutExpired:
        print(f"group {group.name}: stopped, its {group.minutes:g} minutes are over", flush=True)
        return RAN_OUT_OF_TIME


def run_pytest(command: list[str | Path], beside: list[str], ends: float) -> int:
    """Run tests with the options `beside`, and those that failed once more without, and return the exit status.

    A test that measures time may fail on a busy machine and pass alone. It counts as passed, and is named in a line
    `unsteady: TEST`, so that somebody looks at it.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [*command, "-o", f"cache_dir={folder}"]
        if (status := call([*command, *beside], ends)) != TESTS_FAILED:
            return status
        failed = json.loads((Path(folder) / "v/cache/lastfailed").read_text())
        print(f"{len(failed)} failed; once more, alone", flush=True)
        if (status := call([*command, "--last-failed"], ends)) == 0:
            for name in sorted(failed):
                print(f"unsteady: {name}", flush=True)
        return status


def call(command: list[str | Path], ends: float) -> int:
    """Run a command to its end, or until `ends`; whatever it started goes with it."""
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait(timeout=ends - time.monotonic())
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def main() -> int:
    names = [group.name for group in GROUPS]
    parser = argparse.ArgumentParser(description="Run the larger groups of tests.")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"some of {', '.join(names)}; none: all")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no group that may take longer")
    parser.add_argument("--fast", action="store_true", help="the tests that belong to no group, instead of groups")
    options = parser.parse_args()
    if unknown := sorted(set(options.groups) - set(names)):
        parser.error(f"no group {', '.join(unknown)}; there are {', '.join(names)}")

    ends = time.monotonic() + options.minutes * 60
    if options.fast:
        beside = ["-n", os.environ.get("WORKERS", "logical"), "--dist", "worksteal"]
        return run_pytest([sys.executable, "-m", "pytest"], beside, ends)
    failed = []
    for group in in_order(GROUPS, changed_paths()):
        asked_for = group.name in options.groups
        if options.groups and not asked_for:
            continue
        if reason := reason_to_skip(group, ends - time.monotonic(), asked_for=asked_for):
            print(f"group {group.name}: skipped, {reason}", flush=True)
            continue
        print(f"group {group.name}: in the environment {group.environment}", flush=True)
        if status := run(group):
            print(f"group {group.name}: FAILED (exit {status})", flush=True)
            failed.append(group.name)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
