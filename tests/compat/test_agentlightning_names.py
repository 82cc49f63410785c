"""Every public name of Agent Lightning's releases is served, or answered with a sentence."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

import leyden.compat
from leyden.compat.agentlightning.table import MODULES
from leyden.compat.finder import Answer, ForeignNameError, load
from tests.compat.make_names_table import PAGE, page_with_tables
from tests.compat.signatures import INSTEAD, compare, differences

INVENTORY = json.loads(Path(__file__).with_name("agentlightning.json").read_text())["modules"]
NAMES = [(module, name) for module, names in INVENTORY.items() for name in names]


def test_every_module_and_name_of_the_inventory_is_in_the_table() -> None:
    missing = [f"{module}:{name}" for module, name in NAMES if not covered(module, name)]
    missing += [module for module in INVENTORY if module not in MODULES]
    assert missing == []


def covered(module: str, name: str) -> bool:
    foreign = MODULES.get(module)
    return foreign is not None and (
        foreign.instead is not None or name in foreign.names or f"{module}.{name}" in MODULES
    )


@pytest.mark.parametrize("module", sorted(MODULES))
def test_names_are_loaded_or_answered(module: str) -> None:
    leyden.compat.install()
    if MODULES[module].instead is not None:
        with pytest.raises(ForeignNameError, match="no counterpart in Leyden"):
            importlib.import_module(module)
        return
    served: Any = importlib.import_module(module)
    for name, target in MODULES[module].names.items():
        if isinstance(target, Answer):
            assert re.fullmatch(r"[^\n]{20,200}\.", target.instead), f"{module}.{name}"
            with pytest.raises(ForeignNameError, match=re.escape(target.instead)):
                getattr(served, name)
        else:
            assert getattr(served, name) is load(target)


def test_importing_everything_binds_what_is_there() -> None:
    leyden.compat.install()
    namespace: dict[str, Any] = {}
    exec("from agentlightning import *", namespace)
    assert {"Trainer", "rollout", "emit_reward", "Span"} <= namespace.keys()
    assert "MongoLightningStore" not in namespace


def test_every_difference_between_signatures_has_an_answer() -> None:
    answered = [place for places in INSTEAD for place in places.split()]
    assert sorted(answered) == sorted(differences())


def test_signatures_are_compared_by_names_places_and_defaults() -> None:
    def ours(task: str, *, mode: str = "train", retries: int = 3) -> None: ...

    assert compare("(task, mode='train')", ours) == ["`mode` by name only"]
    assert compare("(task, *, retries=5)", ours) == ["`retries=5` is `retries=3`"]
    assert compare("(item, *, limit=None)", ours) == ["`item` is called `task`", "no `limit`"]
    assert compare("()", ours) == ["`task` is required"]
    assert compare("(task, *, mode='train')", ours) == []


def test_the_tables_of_the_migration_page_are_current() -> None:
    text = PAGE.read_text()
    assert text == page_with_tables(text), "run `python -m tests.compat.make_names_table`"
