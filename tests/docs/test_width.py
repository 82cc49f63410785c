"""Prose of the pages has at most 100 columns, so that it reads well in a terminal and a difference is small.

Code, tables and the addresses of links may be longer, as may a line that cannot be broken.
"""

import re
from collections.abc import Iterator

import pytest

from tests.docs.snippets import ROOT
from tests.docs.test_links import PAGES

COLUMNS = 100
KEPT_LONG = {"CHANGELOG.md"}


def long_lines(text: str) -> Iterator[str]:
    code = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            code = not code
        shown = re.sub(r"\]\([^)]*\)", "]", line)
        breakable = " " in shown.strip()[:COLUMNS].lstrip("-* ")
        if len(shown) > COLUMNS and breakable and not code and not re.match(r" {4}|\s*(\||<!--|!\[)", line):
            yield line


@pytest.mark.parametrize("page", [page for page in PAGES if str(page) not in KEPT_LONG], ids=str)
def test_prose_has_at_most_100_columns(page):
    assert list(long_lines((ROOT / page).read_text())) == []


def test_a_long_line_is_found():
    words, code = "word " * 21, f"```\n{'code ' * 30}\n```"
    text = f"{words}\n{code}\n| {words} |\n{'x' * 120}\n[{words[:80]}](https://{'y' * 60}) end\n{words}again"
    assert list(long_lines(text)) == [words, f"{words}again"]
