"""Every public name of the peers' releases is served, or answered with a sentence."""

import importlib
import re
from typing import Any

import pytest

import leyden.compat
from leyden_compat.finder import ForeignNameError, MissingName, load
from tests.compat.make_names_table import PAGES, page_with_tables
from tests.compat.signatures import INSTEAD, TABLES, compare, differences, inventory

SERVED = [(package, module) for package, table in TABLES.items() for module in sorted(table)]


@pytest.mark.parametrize("package", TABLES)
def test_every_module_and_name_of_the_inventory_is_in_the_table(package: str) -> None:
    modules = inventory(package)["modules"]
    missing = [
        f"{module}:{name}" for module, names in modules.items() for name in names if not covered(package, module, name)
    ]
    missing += [module for module in modules if module not in TABLES[package]]
    assert missing == []


def covered(package: str, module: str, name: str) -> bool:
    foreign = TABLES[package].get(module)
    return foreign is not None and (
        foreign.instead is not None or name in foreign.names or f"{module}.{name}" in TABLES[package]
    )


@pytest.mark.parametrize(("package", "module"), SERVED)
def test_names_are_loaded_or_answered(package: str, module: str) -> None:
    leyden.compat.install()
    foreign = TABLES[package][module]
    if foreign.instead is not None:
        with pytest.raises(ForeignNameError, match="no counterpart in Leyden"):
            importlib.import_module(module)
        return
    served: Any = importlib.import_module(module)
    for name, target in foreign.names.items():
        if isinstance(target, MissingName):
            assert re.fullmatch(r"[^\n]{20,200}\.", target.instead), f"{module}.{name}"
            with pytest.raises(ForeignNameError, match=re.escape(target.instead)):
                getattr(served, name)
        else:
            assert getattr(served, name) is load(target)


NOT_SUBSCRIPTED = {"FunctionalAlgorithm"}
"""Generic classes of the peers that only their own decorators make."""


@pytest.mark.parametrize("package", TABLES)
def test_a_generic_class_of_the_original_can_be_subscripted(package: str) -> None:
    plain: set[str] = set()
    for module, names in inventory(package)["modules"].items():
        for name, described in names.items():
            target = TABLES[package][module].names.get(name)
            generic = [base for base in described.get("bases", ()) if base.startswith("Generic[")]
            if generic and isinstance(target, str):
                arguments = tuple(object for _ in generic[0].split(","))
                try:
                    load(target)[arguments if len(arguments) > 1 else object]
                except TypeError:
                    plain.add(name)
    assert plain <= NOT_SUBSCRIPTED


def test_importing_everything_binds_what_is_there() -> None:
    leyden.compat.install()
    namespace: dict[str, Any] = {}
    exec("from agentlightning import *", namespace)
    assert {"Trainer", "rollout", "emit_reward", "Span"} <= namespace.keys()
    assert "MongoLightningStore" not in namespace


@pytest.mark.parametrize("package", TABLES)
def test_every_difference_between_signatures_has_an_answer(package: str) -> None:
    answered = [place for places in INSTEAD[package] for place in places.split()]
    assert sorted(answered) == sorted(differences(package))


def test_signatures_are_compared_by_names_places_and_defaults() -> None:
    def ours(task: str, *, mode: str = "train", retries: int = 3) -> None: ...

    assert compare("(task, mode='train')", ours) == ["`mode` by name only"]
    assert compare("(task, *, retries=5)", ours) == ["`retries=5` is `retries=3`"]
    assert compare("(item, *, limit=None)", ours) == ["`item` is called `task`", "no `limit`"]
    assert compare("()", ours) == ["`task` is required"]
    assert compare("(task, *, mode='train')", ours) == []


@pytest.mark.parametrize("package", TABLES)
def test_the_tables_of_the_migration_page_are_current(package: str) -> None:
    text = PAGES[package].read_text()
    assert text == page_with_tables(package, text), "run `python -m tests.compat.make_names_table`"
