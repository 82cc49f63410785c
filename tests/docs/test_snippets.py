"""What the documentation shows works, and what checks that is itself able to fail."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.snippets import ROOT, BadSnippet, documents, run_document


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """An importable module (pickling and annotations look it up by name), and an empty working directory."""
    module = ModuleType("snippet")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    return module


@pytest.fixture
def page(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "page.md"
        path.write_text(text.replace("'''", "```"))
        return path

    return write


@pytest.mark.parametrize("path", documents(), ids=str)
def test_every_snippet_of_the_documentation_runs(path: Path, module: ModuleType):
    run_document(ROOT / path, module)


def test_later_blocks_see_earlier_names_and_may_await(page, module):
    ran = run_document(
        page("""
Run this in a notebook or in `python -m asyncio`.

'''python
from __future__ import annotations
import asyncio
from dataclasses import dataclass

@dataclass
class Answer:
    value: int
'''
'''python
await asyncio.sleep(0)
answer = Answer(42)
'''
"""),
        module,
    )
    assert ran == 2
    assert module.answer.value == 42


def test_await_at_the_top_level_needs_a_page_that_says_where_it_works(page, module):
    block = "'''python\nimport asyncio\nawait asyncio.sleep(0)\n'''\n"
    with pytest.raises(BadSnippet, match=r"line 1: await at the top level is a SyntaxError"):
        run_document(page(block), module)
    with pytest.raises(BadSnippet, match="SyntaxError"):
        run_document(page(f"{block}\nRun this in `python -m asyncio`.\n"), module)
    assert run_document(page(f"Run this in a notebook or in `python -m asyncio`.\n\n{block}"), module) == 1


def test_a_block_is_shortened_only_where_it_has_what_is_replaced(page, module):
    mark, block = '<!-- shorten: next "n = 20" "n = 2" -->', "'''python\nn = 20\n'''\n"
    run_document(page(f"{mark}\n{block}{block.replace('n =', 'm =')}"), module)
    assert (module.n, module.m) == (2, 20)
    with pytest.raises(BadSnippet, match="no 'n = 20' to shorten"):
        run_document(page(f"{mark}\n{block.replace('20', '30')}"), module)


def test_a_broken_block_fails_at_its_own_line(page, module):
    path = page("# Title\n\n'''python\nfine = 1\nbroken = 1 / 0\n'''\n")
    with pytest.raises(ZeroDivisionError) as caught:
        run_document(path, module)
    where = caught.traceback[-1]
    assert (Path(str(where.path)), where.lineno + 1) == (path, 5)


def test_a_skipped_block_needs_a_reason(page, module):
    broken = "'''python\n1 / 0\n'''\n"
    assert run_document(page(f'<!-- skip: next "needs a GPU" -->\n\n{broken}'), module) == 0
    with pytest.raises(BadSnippet, match="without a reason"):
        run_document(page(f"<!-- skip: next -->\n\n{broken}"), module)


def test_a_shell_block_runs_only_where_it_is_marked(page, module):
    failing = "'''bash\npython -m no_such_module  # fails\n'''\n"
    run_document(page(failing), module)
    with pytest.raises(AssertionError, match="no_such_module"):
        run_document(page(f"<!-- run -->\n{failing}"), module)
    run_document(page("<!-- run -->\n'''bash\npython -m this\n'''\n"), module)
    with pytest.raises(BadSnippet, match="rm"):
        run_document(page("<!-- run -->\n'''bash\nrm -rf everything\n'''\n"), module)
