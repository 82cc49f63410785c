"""Replace the first prompts in a file by better ones: in Python source, JSON, or any text.

Pure functions of texts, and one that writes a file whole or not at all. To support another format,
add a function to `_FORMATS`.
"""

from __future__ import annotations

import ast
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from leyden.errors import ConfigError


def with_prompts(text: str, suffix: str, prompts: Mapping[str, tuple[str, str]], *, path: str) -> str:
    """Return a file's text with each new prompt in the place of the old one.

    text: the content of the file.
    suffix: the ending of the file's name, such as ".py".
    prompts: the old and the new text of each prompt, by name.
    path: the file's path, for error messages.
    Raise ConfigError if an old prompt is not in the file exactly once, or if the file is no valid
    Python or JSON.
    """
    find = _FORMATS.get(suffix, _in_text)
    try:
        found = [(name, new, list(find(text, old, new))) for name, (old, new) in prompts.items() if old != new]
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    for name, _, places in found:
        if len(places) != 1:
            how_often = "does not have" if not places else f"has {len(places)} times"
            raise ConfigError(
                f"{path} {how_often} the text with which the run began for the prompt {name!r}; it is needed once, as one "
                "string. leyden prompts export writes the best prompts to files of their own"
            )
    # from the end backwards, because a replacement moves everything behind it
    for start, end, literal in sorted((place for _, _, [place] in found), reverse=True):
        text = text[:start] + literal + text[end:]
    return text


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a crash leaves either the old text or the new one. Its mode stays."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="", dir=path.parent, delete=False) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    written = Path(file.name)
    written.chmod(path.stat().st_mode)
    written.replace(path)


# ---- formats -------------------------------------------------------------------------------------


def _in_text(text: str, old: str, new: str) -> Iterator[tuple[int, int, str]]:
    """Yield where the old text begins and ends, and what to write there."""
    start = text.find(old)
    while start >= 0:
        yield start, start + len(old), new
        start = text.find(old, start + len(old))


def _in_json(text: str, old: str, new: str) -> Iterator[tuple[int, int, str]]:
    """Yield where the old text stands as a JSON string, with or without escaped characters."""
    json.loads(text)  # raises ValueError for a file that is no JSON
    escaped = json.dumps(old)
    for literal in {escaped, json.dumps(old, ensure_ascii=False)}:
        yield from _in_text(text, literal, json.dumps(new, ensure_ascii=literal == escaped))


def _in_python(text: str, old: str, new: str) -> Iterator[tuple[int, int, str]]:
    """Yield where the old text stands as a string literal of Python source."""
    lines = text.encode().splitlines(keepends=True)

    def offset(line: int, column: int) -> int:
        """Return the character at a place that `ast` gives as a line (from 1) and bytes in it."""
        return len(b"".join([*lines[: line - 1], lines[line - 1][:column]]).decode())

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and node.value == old and node.end_lineno and node.end_col_offset is not None:
            start, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
            yield start, end, _literal(new)


def _literal(text: str) -> str:
    """Return a text as a Python string literal, between triple quotes if it has several lines."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    readable = f'"""{escaped}"""' if "\n" in text else f'"{escaped}"'
    try:  # a carriage return, for example, would be read back as another text
        is_right = ast.literal_eval(readable) == text
    except (SyntaxError, ValueError):
        is_right = False
    return readable if is_right else repr(text)


_FORMATS: dict[str, Callable[[str, str, str], Iterator[tuple[int, int, str]]]] = {
    ".py": _in_python,
    ".json": _in_json,
}
