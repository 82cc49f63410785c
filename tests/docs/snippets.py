"""Run the code blocks of a Markdown file, in order, as one program.

- ```` ```python ```` blocks run in one module for each file, so a later block sees the names of an earlier one.
- A page may use `await` at the top level only after it has said so, with `NOTEBOOK` in its text: in a file that is a
  SyntaxError.
- `<!-- shorten: next "n_steps=20" "n_steps=2" -->` runs the next block with the second text in place of the first (more
  pairs may follow), so that a page can show a program as a reader runs it and the test takes seconds.
- ```` ```bash ```` blocks run only below the line `<!-- run -->`, and only commands that begin with `leyden` or
  `python -m`.
- `<!-- skip: next "why" -->` leaves out the next block, `<!-- skip: start "why" -->` to `<!-- skip: end -->` several.
  The reason is demanded.
"""

import ast
import asyncio
import inspect
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest import SkipTest

from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser, SkipParser

ROOT = Path(__file__).parents[2]
RUN_MARK = "<!-- run -->"
NOTEBOOK = "`python -m asyncio`"
"""What a page must name before its first top-level `await`."""
_SHORTEN = re.compile(r'<!-- shorten: next((?: "[^"]+" "[^"]+")+) -->\s*$')
COMMANDS = (("leyden",), ("python", "-m"))


class BadSnippet(AssertionError):
    """A block that is marked in a way that the runner does not accept."""


def documents() -> list[Path]:
    """Every file whose snippets are run here, relative to the repository's root; those of docs/frameworks need the frameworks."""
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    return [path.relative_to(ROOT) for path in pages if path.parent.name != "frameworks"]


def run_document(path: Path, module: ModuleType) -> int:
    """Run the blocks of `path` in the working directory, the Python ones in `module`; how many ran.

    Raises what a block raises, with the document's own line in the traceback.
    """
    ran = 0

    def count(evaluate: Callable[[Example], None]) -> Callable[[Example], None]:
        def counted(example: Example) -> None:
            nonlocal ran
            evaluate(example)
            ran += 1

        return counted

    python = CodeBlockParser("python", count(lambda example: run_python(example, module)))
    bash = CodeBlockParser("bash", count(run_bash))
    document = Document.parse(str(path), python, bash, parse_skips)
    for example in document.examples():
        try:
            example.evaluate()
        except SkipTest:
            continue
    return ran


def parse_skips(document: Document):
    for region in SkipParser()(document):
        action, reason = region.parsed
        if action != "end" and not reason:
            raise BadSnippet(f"{document.path}, {document.line_column(region.start)}: skip: {action} without a reason")
        yield region


def run_python(example: Example, module: ModuleType) -> None:
    source = "\n" * (example.line + example.parsed.line_offset) + shortened(example)
    code = compile(source, example.path, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    awaits = bool(code.co_flags & inspect.CO_COROUTINE)
    if awaits and NOTEBOOK not in example.document.text[: example.start]:
        raise BadSnippet(
            f"{example.path}, line {example.line}: await at the top level is a SyntaxError in a file; write "
            f"asyncio.run(main()), or say above that the blocks run in a notebook or in {NOTEBOOK}"
        )
    result = eval(code, module.__dict__)
    if awaits:
        asyncio.run(result)


def shortened(example: Example) -> str:
    """Return the block as it is run, with what a mark above it replaces."""
    mark = _SHORTEN.search(example.document.text[: example.start])
    source = str(example.parsed)
    texts = re.findall('"([^"]+)"', mark[1]) if mark else []
    for shown, run in zip(texts[::2], texts[1::2], strict=True):
        if shown not in source:
            raise BadSnippet(f"{example.path}, line {example.line}: the block has no {shown!r} to shorten")
        source = source.replace(shown, run)
    return source


def run_bash(example: Example) -> None:
    if not example.document.text[: example.start].rstrip().endswith(RUN_MARK):
        return
    for line in example.parsed.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if not any(tuple(words[: len(command)]) == command for command in COMMANDS):
            raise BadSnippet(
                f"{example.path}, line {example.line}: only `leyden` and `python -m` are run, not {line!r}"
            )
        done = subprocess.run(words, env=shell_environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise AssertionError(
                f"{example.path}, line {example.line}: {line!r} exits {done.returncode}\n{done.stderr}"
            )


def shell_environment() -> dict[str, str]:
    """The environment of a shell in which this interpreter's commands, and this checkout, come first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PATH": path, "PYTHONPATH": python_path}
