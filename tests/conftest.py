"""What every test shares: which tests belong to which group, and an environment that does not differ between machines.

A test belongs to a group (the table in `groups.py`) by its mark, or by lying in `tests/<group>/`. Such a folder is not
even imported unless its group is asked for, since its modules import what only the group's environment has.
"""

from __future__ import annotations

import os
import re
import signal
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.machine_clock import MachineClock

try:
    from hypothesis import settings
except ImportError:
    pass  # an environment of a group that has no property tests
else:
    settings.register_profile("leyden", deadline=None)  # any example can be slow on a busy machine
    settings.load_profile("leyden")

pytest.register_assert_rewrite(  # modules beside the tests that judge what happened
    "tests.attack", "tests.execution.stream", "tests.gateway.conversations", "tests.store.killing"
)

HERE = Path(__file__).parent
GROUP_FOLDERS = (
    "faults",
    "frameworks",
    "crewai",
    "ray",
    "backends",
    "tracers",
    "litellm",
    "vllm",
    "writers",
    "rl_peers",
    "legacy_peers",
    "compat_peers",
    "maths_peers",
    "llama_cpp",
    "models",
    "verl",
    "rl_data",
    "gpu",
)
SMALL_GROUPS = {
    "ray",
    "tracers",
    "writers",
    "rl_data",
    "rl_peers",
    "legacy_peers",
    "compat_peers",
    "maths_peers",
    "litellm",
}
"""Groups that take so little time that all their tests are marked `merge`."""

# before anything imports torch: two threads that spin cost a small machine more than they give
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# no test fetches a model; one that tries fails at once and says so
os.environ["HF_HUB_OFFLINE"] = "1"
# a key of the developer's own must never be used, nor decide whether a test passes
for secret in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "WANDB_API_KEY"):
    os.environ.pop(secret, None)
# in the background of a script Ctrl-C is ignored, and programs that tests start would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def asked_for(config: pytest.Config) -> set[str]:
    """Return the groups of a mark expression such as "faults and merge"; the default one excludes all of them."""
    expression: str = config.option.markexpr
    return set() if expression.startswith("not") else set(re.findall(r"\w+", expression))


def pytest_configure(config: pytest.Config) -> None:
    if not asked_for(config) & {*GROUP_FOLDERS}:  # these tests know what a CPU computes
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture
def machine_clock(monkeypatch: pytest.MonkeyPatch) -> MachineClock:
    from tests.machine_clock import MachineClock  # here, because it imports the package

    return MachineClock(monkeypatch)


def group_of(path: Path) -> str | None:
    parts = path.relative_to(HERE).parts if path.is_relative_to(HERE) else ()
    return parts[0] if parts and parts[0] in GROUP_FOLDERS else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    group = group_of(collection_path)
    return True if group and group not in asked_for(config) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", help="of what was chosen, run only piece K/N: the same tests each time")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if group := group_of(item.path):
            item.add_marker(group)
        if not SMALL_GROUPS.isdisjoint(mark.name for mark in item.iter_markers()):
            item.add_marker("merge")
    number, _, count = str(config.getoption("--shard")).partition("/")
    is_mine = {item: zlib.crc32(item.nodeid.encode()) % int(count) == int(number) - 1 for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not is_mine[item]])
    items[:] = [item for item in items if is_mine[item]]
