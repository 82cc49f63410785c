"""A link inside the repository leads somewhere, to the heading it names."""

import re
from pathlib import Path

import pytest

from tests.docs.snippets import ROOT

PAGES = [
    path.relative_to(ROOT)
    for path in sorted(
        path for pages in ("*.md", "docs/**/*.md", "examples/**/*.md", "packages/**/*.md") for path in ROOT.glob(pages)
    )
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(path: Path) -> list[str]:
    """The links of a page to files and headings that are not there."""
    dead: list[str] = []
    for link in LINK.findall(FENCE.sub("", path.read_text())):
        file, _, anchor = link.partition("#")
        if ":" in file:
            continue
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_somewhere(page: Path):
    assert dead_links(ROOT / page) == []


def test_a_dead_link_is_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Up & down\n[a](#up--down) [b](#upside) [c](gone.md) [d](page.md#up--down) [e](https://example.org/x.md)\n"
    )
    assert dead_links(page) == ["#upside", "gone.md"]


def test_the_index_leads_to_every_page() -> None:
    docs = ROOT / "docs"
    indexes = [docs / "README.md", docs / "frameworks" / "README.md"]
    found = {
        (index.parent / link).resolve()
        for index in indexes
        for link in re.findall(r"\]\(([^)#]+\.md)", index.read_text())
    }
    assert {page.relative_to(docs) for page in docs.rglob("*.md") if page not in {indexes[0], *found}} == set()
