"""Run groups of tests, each in its own environment and within its own time: `python tests/groups.py faults`.

Without a name: every group that this machine can run. With `--merge` only the tests marked `merge`, which are run
before a change is merged: those of `faults`, of `backends`, and of the groups whose part of the package the commits of
the last day changed. A group's environment is `constraints/<environment>.in` and
`.txt`; its tests carry its mark or lie in `tests/<group>/`. To add a group: a line in GROUPS, a mark in pyproject.toml.
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
from xml.etree import ElementTree

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
sys.path.insert(0, str(ROOT))

from constraints.install import environment  # noqa: E402 (this file is run as a script)

INSTALL = ROOT / "constraints" / "install.py"
NOT_RUN = "not run: "
DAY_SECONDS = 24 * 60 * 60
ALWAYS_MERGED = ("faults", "backends")
MAX_CHANGED_GROUPS = 4
"""How many groups beside these run before a merge."""


def nothing() -> str | None:
    return None


def an_nvidia_gpu() -> str | None:
    return None if shutil.which("nvidia-smi") else "this machine has no NVIDIA GPU (no nvidia-smi)"


def a_browser() -> str | None:
    found = any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    return None if found else "this machine has no Chromium (apt-get install chromium)"


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
    merge_minutes: float = 4
    """The most that its tests marked `merge` may take, without its environment's set-up."""


@dataclass(frozen=True)
class Result:
    """What came of a group, or of a piece of one."""

    piece: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    minutes: float = 0.0
    trouble: str = ""
    """Why not all of its tests were run to their end; empty: they were."""

    @property
    def is_good(self) -> bool:
        return not self.failed and not self.trouble

    @property
    def is_left_out(self) -> bool:
        return self.trouble.startswith(NOT_RUN)


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
    Group("faults", "dev", 15, together=True, merge_minutes=6),
    Group("backends", "backends", 10, covers=("leyden/store/", "leyden/types/"), together=True, merge_minutes=6),
    Group("ray", "ray", 4, covers=("leyden/execution/", "leyden/_lib/host/")),
    Group("tracers", "tracers", 3, covers=("leyden/tracing/",)),
    Group("writers", "writers", 3, covers=("leyden/training/",)),
    Group("rl_data", "rl-data", 3, covers=("leyden/rl/", *ORDERS)),
    Group("rl_peers", "rl-peers", 5, covers=("leyden/rl/", *ORDERS, "packages/leyden-compat/leyden_compat/qlib/")),
    Group("legacy_peers", "legacy-peers", 4, covers=("leyden/_lib/host/", "leyden/legacy/", "leyden/trainer/")),
    Group(
        "compat_peers",
        "compat-peers",
        6,
        covers=("packages/leyden-compat/leyden_compat/", "leyden/store/store_app.py"),
    ),
    Group("maths_peers", "maths-peers", 5, covers=("leyden/objectives/",)),
    Group("llama_cpp", "llama-cpp", 12, covers=("leyden/engine/gguf.py", "leyden/engine/gguf_tokenizer.py")),
    Group("models", "dev", 20, covers=("leyden/engine/", "leyden/cli/models.py", "examples/real_model/")),
    Group("harness", "dev", 20, covers=("leyden/execution/harness/", "leyden/gateway/", "leyden/dialects/")),
    Group("doctor", "dev", 12, covers=("leyden/doctor/",), together=True),
    Group("browser", "browser", 8, covers=("leyden/dashboard/", "leyden/report/"), missing=a_browser),
    Group("verl", "verl", 16, covers=("leyden/algorithm/verl/", "leyden/objectives/")),
    Group("litellm", "litellm", 3, covers=("leyden/dialects/", "leyden/gateway/", "leyden/_lib/host/")),
    Group("frameworks", "frameworks", 11, covers=AGENTS),
    Group("crewai", "crewai", 10, covers=AGENTS),
    Group("vllm", "vllm", 10, covers=("leyden/dialects/", "leyden/engine/", "leyden/gateway/", "leyden/_lib/host/")),
    Group("long", "dev", 120, together=True),
    Group("gpu", "dev", 10, missing=an_nvidia_gpu, covers=("leyden/engine/", "leyden/training/rng.py", "leyden/rl/")),
]
ENDING = 20.0
"""Seconds that pytest may take to report when the time of a group is over."""
QUICK = Group("quick", "dev", 18, together=True)
"""The tests that belong to no group."""


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


def before_merge(changed: Sequence[str]) -> tuple[list[Group], list[Group]]:
    """Return the groups that run before a merge, and those of changed parts that are too many to run."""
    always = [group for group in GROUPS if group.name in ALWAYS_MERGED]
    touched = [
        group
        for group in GROUPS
        if group not in always
        and group.name not in ("long", "models")
        and any(path.startswith((f"tests/{group.name}/", *group.covers)) for path in changed)
    ]
    return [*always, *touched[:MAX_CHANGED_GROUPS]], touched[MAX_CHANGED_GROUPS:]


def set_up(group: Group, ends: float) -> str:
    """Make the group's environment; return the trouble that is in the way of its tests, or ""."""
    if not parts(group) and group is not QUICK:
        return f"{NOT_RUN}no tests yet"
    if lacks := group.missing():
        return f"{NOT_RUN}{lacks}"
    try:
        status = call([sys.executable, INSTALL, group.environment], ends)
    except subprocess.TimeoutExpired:
        return f"{NOT_RUN}its environment was not ready in time"
    return f"its environment cannot be made (exit {status})" if status else ""


def run(
    group: Group, ends: float, *, marks: str = "", shard: str = "1/1", second_try: bool = False, ignore: str = ""
) -> Result:
    """Run the tests of a group whose environment is set up until `ends`.

    marks: which of its tests, as a mark expression.
    shard: which of its pieces, such as "1/2".
    second_try: run what fails once more, alone; what passes then is named in a line `unsteady: TEST`.
    ignore: a folder whose tests are left out.
    """
    began = time.monotonic()
    chosen = [] if group is QUICK else ["-m", f"{group.name} and ({marks})" if marks else group.name, *parts(group)]
    if group is QUICK:
        beside = ["-n", os.environ.get("WORKERS", str((os.cpu_count() or 2) * 3 // 2)), "--dist", "worksteal"]
    else:
        beside = ["-n", "logical", "--dist", "loadgroup"] if group.together else []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["--shard", shard, "-o", f"cache_dir={folder}/cache", *(["--ignore", ignore] if ignore else [])]
        seconds = ends - began - ENDING  # then pytest ends by itself, and says what has failed so far
        options += [f"--session-timeout={seconds:.0f}"] if seconds > 1 else []
        command = [environment(group.environment).python, "-m", "pytest", *chosen, *options, "--junitxml", report]
        trouble, over = "", f"its {max(ends - began, 0) / 60:.1f} minutes are over"
        try:
            status = call([*command, *beside], ends)
            if status == 1 and second_try:
                failed = json.loads((Path(folder) / "cache/v/cache/lastfailed").read_text())
                status = call([*command, "--last-failed"], ends)
                print(*(f"unsteady: {name}" for name in failed if status == 0), sep="\n", flush=True)
            is_over = status == 2 and time.monotonic() >= ends - ENDING
            trouble = over if is_over else "" if status in (0, 1) else f"pytest ended with {status}"
        except subprocess.TimeoutExpired:
            trouble = over
        counts = counts_of(report) if report.exists() else {}
    minutes = round((time.monotonic() - began) / 60, 1)
    return Result(group.name if shard == "1/1" else f"{group.name} {shard}", **counts, minutes=minutes, trouble=trouble)


def counts_of(report: Path) -> dict[str, int]:
    """Return how many tests of a JUnit report passed, failed and were skipped."""
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for name in total:
            total[name] += int(suite.get(name, "0"))
    failed = total["failures"] + total["errors"]
    return {"passed": total["tests"] - failed - total["skipped"], "failed": failed, "skipped": total["skipped"]}


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
    names = [group.name for group in (QUICK, *GROUPS)]
    parser = argparse.ArgumentParser(description="Run the larger groups of tests.")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"some of {', '.join(names)}; none: all")
    parser.add_argument("--merge", action="store_true", help="only what is run before a change is merged")
    parser.add_argument("--second-try", action="store_true", help="run what fails once more, alone")
    parser.add_argument("--ignore", default="", metavar="FOLDER", help="leave the tests of this folder out")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start nothing that may take longer")
    options = parser.parse_args()
    if unknown := sorted(set(options.groups) - set(names)):
        parser.error(f"no group {', '.join(unknown)}; there are {', '.join(names)}")

    ends = time.monotonic() + options.minutes * 60
    chosen, left_out = before_merge(changed_paths()) if options.merge else (GROUPS, [])
    if options.groups:
        chosen, left_out = [group for group in (QUICK, *GROUPS) if group.name in options.groups], []
    failed = False
    for group in chosen:
        minutes = group.merge_minutes if options.merge else group.minutes
        print(f"group {group.name}: in the environment {group.environment}, at most {minutes:g} minutes", flush=True)
        if trouble := set_up(group, ends - minutes * 60):
            result = Result(group.name, trouble=trouble)
        else:
            result = run(
                group,
                time.monotonic() + minutes * 60,
                marks="merge" * options.merge,
                second_try=options.second_try,
                ignore=options.ignore,
            )
        if result.is_left_out and group.name not in options.groups:
            print(f"group {group.name}: {result.trouble}", flush=True)
        elif not result.is_good:
            print(f"group {group.name}: FAILED {result.trouble}".rstrip(), flush=True)
            failed = True
    for group in left_out:
        print(f"group {group.name}: {NOT_RUN}{MAX_CHANGED_GROUPS} groups of changed parts were", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
