"""Replace the first prompts in a file by better ones: in Python source, JSON, or plain text.

A prompt may hold anything that a model has written, so a file is changed only if its language is known here, and only
after its new content was read again: it must be the old content with the new prompts. Any other file is refused, with
the string to paste. To support another language, add how it is read and written to `_LANGUAGES`.
"""

from __future__ import annotations

import ast
import codecs
import io
import json
import re
import shlex
import stat
import tokenize
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from leyden._lib.atomic import open_aside
from leyden._lib.formatting import harmless
from leyden.errors import ConfigError


class _Place(NamedTuple):
    """A string in a user's file that is a prompt of the run, with the offsets of its literal."""

    start: int
    end: int
    prompt: str


def with_prompts(content: bytes, suffix: str, prompts: Mapping[str, tuple[str, str]], *, path: str) -> bytes:
    """Return a file's content with each new prompt in the place of the old one.

    suffix: the ending of the file's name, such as ".py".
    prompts: the old and the new text of each prompt, by name.
    path: the file's path, for error messages.
    Raise ConfigError if an old prompt is not in the file exactly once, if the file cannot be read, or if the new
    content would not give exactly the new prompts.
    """
    changed = {name: pair for name, pair in prompts.items() if pair[0] != pair[1]}
    if not changed:
        return content
    to_paste = _to_paste(suffix.lower(), [(name, new) for name, (_, new) in changed.items()])
    if suffix.lower() not in _LANGUAGES:
        raise ConfigError(f"{path} is no Python, JSON or text file, so it is not changed{to_paste}")
    find, write = _LANGUAGES[suffix.lower()]
    better = dict(changed.values())
    wanted = {*better, *better.values()}
    try:
        mark = codecs.BOM_UTF8 if content.startswith(codecs.BOM_UTF8) else b""
        text = after = content[len(mark) :].decode()
        places = sorted(find(text, wanted))
        in_file, in_run = Counter(place.prompt for place in places), Counter(old for old, _ in prompts.values())
        for name, (old, _) in changed.items():
            if in_run[old] > 1:
                raise ValueError(f"the run began with the text of the prompt {name!r} for another prompt too")
            if in_file[old] != 1:
                has = f"has {in_file[old]} times" if in_file[old] else "does not have"
                raise ValueError(
                    f"it {has} the text with which the run began for the prompt {name!r}; it is needed once, as one string"
                )
        for start, end, old in reversed(places):  # from the end, because a replacement moves all that follows
            if old in better:
                literal = write(better[old])
                after = after[:start] + (literal.replace("\n", "\r\n") if "\r\n" in text else literal) + after[end:]
        outside, found = _split(text, places)
        if _split(after, sorted(find(after, wanted))) != (outside, [better.get(each, each) for each in found]):
            raise ValueError("a new prompt would be read as another text")
        return mark + after.encode()
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be changed: {error}{to_paste}") from error


def _split(text: str, places: Iterable[_Place]) -> tuple[list[str], list[str]]:
    borders = [_Place(0, 0, ""), *places, _Place(len(text), len(text), "")]
    return [text[one.end : other.start] for one, other in pairwise(borders)], [each.prompt for each in borders[1:-1]]


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a crash leaves either the old content or the new one. Its mode stays, and a link stays a
    link. Raise ConfigError if it cannot be written.
    """
    target = path.resolve()
    try:
        mode = stat.S_IMODE(target.stat().st_mode)
        if not mode & 0o222:  # its folder alone decides whether it can be replaced
            remedy = f"chmod u+w {shlex.quote(str(path))} lets it change"
            raise ConfigError(f"{path} is read-only; it is as it was, and {remedy}")
        with open_aside(target, "wb") as file:
            file.write(content)
            Path(file.name).chmod(mode)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; it is as it was") from error


def _in_python(text: str, wanted: Collection[str]) -> Iterator[_Place]:
    lines = text.encode().splitlines(keepends=True)
    encoding, _ = tokenize.detect_encoding(iter(lines).__next__)
    if encoding != "utf-8":
        raise ValueError(f"it declares the encoding {encoding}, and only utf-8 is supported")
    with warnings.catch_warnings(action="ignore"):  # of the user's own strings, such as an invalid escape
        nodes = list(ast.walk(ast.parse(text)))

    def offset(line: int, column: int) -> int:
        """Return the character at a line (from 1) and bytes in it, as `ast` counts."""
        return len(b"".join([*lines[: line - 1], lines[line - 1][:column]]).decode())

    f_strings = [node for node in nodes if type(node).__name__ in ("JoinedStr", "TemplateStr")]
    inside = {id(part) for node in f_strings for part in ast.walk(node)}
    for node in nodes:
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or node.value not in wanted:
            continue
        if id(node) in inside:
            raise ValueError(f"line {node.lineno} has the prompt inside an f-string, whose expressions would be lost")
        start = offset(node.lineno, node.col_offset)
        end = offset(node.end_lineno or node.lineno, node.end_col_offset or 0)
        tokens = tokenize.generate_tokens(io.StringIO(f"({text[start:end]}\n)").readline)
        if any(token.type == tokenize.COMMENT for token in tokens):
            raise ValueError(f"line {node.lineno} has the prompt with a comment between its parts, which would be lost")
        yield _Place(start, end, node.value)


def _python_literal(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    escaped = "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in escaped)
    return f'"""{escaped}"""' if "\n" in text else f'"{escaped}"'


def _in_json(text: str, wanted: Collection[str]) -> Iterator[_Place]:
    def refuse_doubles(pairs: list[tuple[str, Any]]) -> None:
        for key, count in Counter(key for key, _ in pairs).items():
            if count > 1:  # a program reads only the last value
                raise ValueError(f"an object has the key {key!r} more than once")

    json.loads(text, object_pairs_hook=refuse_doubles)
    for found in re.finditer(r'("(?:[^"\\]|\\.)*")(\s*:)?', text):
        if not found[2] and (prompt := json.loads(found[1])) in wanted:  # no key
            yield _Place(*found.span(1), prompt)


def _json_literal(text: str) -> str:
    """Return a text as a JSON string. Characters that an editor does not show are escaped, and no others, because YAML
    and TOML do not read the two escapes that JSON has for an emoji.
    """
    written = json.dumps(text, ensure_ascii=False)
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in written)


def _whole_text(text: str, wanted: Collection[str]) -> Iterator[_Place]:
    """Yield where a prompt is the whole file, as programs read it: with the white space at its ends, without the last
    line break, or without more of it, and with line breaks of any system.
    """
    start, end = len(text) - len(text.lstrip()), len(text.rstrip())
    before_break = len(text.removesuffix("\n").removesuffix("\r"))
    for span in ((0, len(text)), (0, before_break), (0, end), (start, end)):
        prompt = text[slice(*span)].replace("\r\n", "\n").replace("\r", "\n")
        if prompt and prompt in wanted:
            yield _Place(*span, prompt)
            return


def _to_paste(suffix: str, prompts: Collection[tuple[str, str]]) -> str:
    """Return the end of an error message: the strings to paste, or how to get the prompts."""
    write = _LITERALS.get(suffix)
    if write is None or (write is shlex.quote and any(harmless(new) != new for _, new in prompts)):
        return "; leyden prompts export writes the best prompts to files of their own"
    return "\n".join([". To paste by hand:", *(f"{name}: {write(new)}" for name, new in prompts)])


_TEXT = (".txt", ".text", ".md", ".markdown", ".prompt", ".jinja", ".jinja2", ".j2", ".poml")
_SCRIPT = (".js", ".jsx", ".mjs", ".cjs", ".ts", ".tsx", ".mts", ".cts")
_LIKE_JSON = (*_SCRIPT, ".json", ".jsonc", ".json5", ".go", ".java", ".cs", ".yaml", ".yml", ".toml")
_LITERALS: Mapping[str, Callable[[str], str]] = {
    **dict.fromkeys((".py", ".pyi", ".pyw", ".ipynb"), _python_literal),
    **dict.fromkeys(_LIKE_JSON, _json_literal),
    **dict.fromkeys((".sh", ".bash", ".zsh"), shlex.quote),
}
"""How languages write a text as a string, by the ending of a file."""
_LANGUAGES: Mapping[str, tuple[Callable[[str, Collection[str]], Iterator[_Place]], Callable[[str], str]]] = {
    **dict.fromkeys((".py", ".pyi", ".pyw"), (_in_python, _python_literal)),
    ".json": (_in_json, _json_literal),
    **dict.fromkeys(_TEXT, (_whole_text, str)),
}
"""The two functions of a language, by the ending of its files: one finds the prompts in a file's text, the other writes
a prompt as a literal. Both raise SyntaxError or ValueError for what cannot be read or must not be changed."""
