"""The page on adapters shows the picture that its own code draws, and leaves out no option and no adapter."""

import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from leyden.adapter import TracerTraceToTriplet
from leyden.trainer.component_registry import AdapterRegistry
from tests.docs.snippets import ROOT, run_document

PAGE = ROOT / "docs" / "adapters.md"


def test_the_picture_is_the_one_that_the_page_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    module = ModuleType("adapters_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    run_document(PAGE, module)
    drawn = (tmp_path / "trace.svg").read_text()
    assert (ROOT / "docs" / "trace.svg").read_text() == drawn, (
        "copy the picture that the page's code draws to docs/trace.svg"
    )


def test_every_adapter_and_every_option_is_told():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    told = {name for line in rows for name in re.findall(r"`(\w+)`", line)}
    assert told >= set(AdapterRegistry)
    assert told >= {path.rpartition(".")[2] for path in AdapterRegistry.values()}
    assert told >= set(inspect.signature(TracerTraceToTriplet).parameters)
