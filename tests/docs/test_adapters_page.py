"""The page on adapters leaves out no option and no adapter."""

import inspect
import re

from leyden.adapter import TracerTraceToTriplet
from leyden.trainer.component_registry import AdapterRegistry
from tests.docs.snippets import ROOT

PAGE = ROOT / "docs" / "adapters.md"


def test_every_adapter_and_every_option_is_told():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    told = {name for line in rows for name in re.findall(r"`(\w+)`", line)}
    assert told >= set(AdapterRegistry)
    assert told >= {path.rpartition(".")[2] for path in AdapterRegistry.values()}
    assert told >= set(inspect.signature(TracerTraceToTriplet).parameters)
