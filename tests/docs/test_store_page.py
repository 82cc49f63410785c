"""The page on the store leaves out no method, no option and no limit."""

import inspect
import re

import pytest
from pydantic import BaseModel

from leyden.store import LightningStore
from leyden.types import OVERTAKES, Retention, RolloutConfig
from tests.docs.snippets import ROOT

PAGE = (ROOT / "docs" / "store.md").read_text()


def first_column(heading: str) -> list[str]:
    """The names in backticks in the first column of the table below a heading."""
    section = PAGE.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    return [name for cell in rows for name in re.findall(r"`(\w+)`", cell)]


def test_every_method_of_the_protocol_says_whether_it_may_be_repeated():
    methods = {
        name
        for name, member in vars(LightningStore).items()
        if not name.startswith("_") and (inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member))
    }
    named = first_column("## Calls that can be repeated")
    assert sorted(named) == sorted(methods)


@pytest.mark.parametrize(
    ("model", "heading"), [(RolloutConfig, "## Set retries and time limits"), (Retention, "## Limit what is kept")]
)
def test_every_field_has_its_row(model: type[BaseModel], heading: str):
    assert sorted(first_column(heading)) == sorted(model.model_fields)


def test_the_reach_of_a_priority_is_the_one_in_the_code():
    assert f"`OVERTAKES` = {OVERTAKES} older" in PAGE
