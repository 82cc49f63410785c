"""Every algorithm that trains a policy has a page with its equation, its source and its options."""

from __future__ import annotations

from pathlib import Path

import pytest

from leyden.trainer.component_registry import AlgorithmRegistry

ZOO = Path(__file__).parents[2] / "docs" / "algorithm-zoo"
SETTINGS = [
    name
    for name, component in AlgorithmRegistry.items()
    if isinstance(component, str) and ".policy_gradient." in component and name != "policy_gradient"
]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_named_setting_has_a_page_with_equation_source_and_options(name: str) -> None:
    page = (ZOO / f"{name.replace('_', '-')}.md").read_text(encoding="utf-8")
    for part in ("## Equation", "## Options", "loss = ", "arXiv:"):
        assert part in page, f"{name}: {part}"
    assert f"({name.replace('_', '-')}.md)" in (ZOO / "README.md").read_text(encoding="utf-8")
