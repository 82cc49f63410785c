"""Python blocks that `test_snippets.py` does not run are run as files elsewhere, or pyright checks them.

pyright finds a block that does not parse, a name or an attribute that does not exist, and an argument that a signature
does not name (presets such as `GRPO` take `**options`, which are not checked).
What the reader supplies, the reason to skip the block names in backticks: `<!-- skip: next "needs your `agent`" -->`.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import SkipTest

import pytest
from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser

from tests.docs.snippets import NOTEBOOK, ROOT, documents, parse_skips

RUN_AS_FILES = {
    "README.md",
    "docs/quickstart.md",
    "docs/algorithm-zoo/README.md",
    "docs/how-to/deploy.md",
    "docs/migrating/agent-lightning-0.1.md",
    "docs/how-to/own-loss.md",
}
"""Pages with a program whose last part begins with `if __name__ == "__main__":`; `test_learning_pages.py` runs each."""
RULES = ("reportUndefinedVariable", "reportAttributeAccessIssue", "reportCallIssue", "reportIndexIssue")
AWAIT = re.compile(r'"await" allowed only|"async" not allowed')
"""What pyright says of an `await` at the top level, which a page may use that names `NOTEBOOK`."""


def blocks(path: Path) -> Iterator[tuple[Example, str | None]]:
    """Each Python block of a page, and the reason why it is skipped, if it is."""
    parsers = [CodeBlockParser(language, lambda example: None) for language in ("python", "bash")]
    document = Document.parse(str(path), *parsers, parse_skips)
    for example in document.examples():
        try:
            example.evaluate()
            reason = None
        except SkipTest as skipped:
            reason = str(skipped)
        if document.text.startswith("```python", example.start):
            yield example, reason


def errors(pages: Mapping[str, Path], directory: Path) -> list[str]:
    """What pyright finds in the skipped blocks of the pages, whose blocks are one program for each page."""
    reasons: dict[str, dict[int, str]] = {}
    for name, path in pages.items():
        lines = [""] * len(path.read_text().splitlines())
        reasons[name] = {}
        for example, reason in blocks(path):
            first = example.line + example.parsed.line_offset
            for number, line in enumerate(str(example.parsed).splitlines(), first):
                lines[number] = line
                if reason is not None:
                    reasons[name][number] = reason
        (directory / f"{name}.py").write_text("\n".join(lines))
    settings = {"typeCheckingMode": "off", "extraPaths": [str(ROOT)], **dict.fromkeys(RULES, "error")}
    (directory / "pyrightconfig.json").write_text(json.dumps(settings))
    pyright = Path(sys.executable).with_name("basedpyright")
    command = [pyright, "--pythonpath", sys.executable, "-p", directory, "--outputjson"]
    # Tests of `leyden.compat` in this process put a folder with an `agentlightning` into PYTHONPATH.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=False, env=environment).stdout)
    found: list[str] = []
    for error in report["generalDiagnostics"]:
        name, number, message = Path(error["file"]).stem, error["range"]["start"]["line"], error["message"]
        reason = reasons[name].get(number)
        undefined = re.match(r'"(\w+)" is not defined', message)
        supplied = undefined is not None and reason is not None and f"`{undefined[1]}`" in reason
        may_await = AWAIT.search(message) and NOTEBOOK in pages[name].read_text()
        if reason is not None and not supplied and not may_await:
            found.append(f"{pages[name]}, line {number + 1}: {message}")
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)  # pyright reads every page's imports
def test_skipped_blocks_name_only_what_exists(tmp_path: Path) -> None:
    pages = {re.sub(r"\W", "_", str(path)): ROOT / path for path in documents()}
    assert errors(pages, tmp_path) == []


@pytest.mark.slow
@pytest.mark.merge
@pytest.mark.timeout(300)  # pyright reads every page's imports
def test_what_does_not_exist_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    block = "```python\nimport leyden as ly\nly.Trainers()\nly.Trainer(models=1)\nawait agent(task)\n```\n"
    page.write_text(f'{block}<!-- skip: next "needs your `task`" -->\n{block}')
    assert {error.partition("page.md, ")[2].splitlines()[0] for error in errors({"page": page}, tmp_path)} == {
        'line 10: "Trainers" is not a known attribute of module "leyden"',
        'line 11: No parameter named "models"',
        'line 12: "agent" is not defined',
        'line 12: "await" allowed only within async function',
    }


def test_no_page_hides_a_block_behind_another_name_of_python() -> None:
    assert [
        path for path in documents() if re.search(r"^\s*```(py|py3|python3)$", (ROOT / path).read_text(), re.M)
    ] == []


def test_every_program_with_a_guard_is_run_as_a_file() -> None:
    guarded = {
        str(path)
        for path in documents()
        for example, reason in blocks(ROOT / path)
        if reason is None and "__name__ ==" in str(example.parsed)
    }
    assert guarded == RUN_AS_FILES
