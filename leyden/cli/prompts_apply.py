"""Replace the first prompts in a file by better ones: in Python source, JSON, or plain text.

A prompt may hold anything that a model has written, so a file is changed only if its language is
known here, and only after its new content was read again and proven to be the old content with the
new prompts. Any other file is refused, with the string to paste. To support another language, add a
class to `_LANGUAGES`. Pure functions of bytes, and one that writes a file whole or not at all.
"""

from __future__ import annotations

import ast
import codecs
import io
import json
import os
import re
import shlex
import tempfile
import tokenize
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from leyden._lib.formatting import harmless
from leyden.errors import ConfigError

_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"(?=(\s*:)?)', re.DOTALL)
_SCRIPT = (".js", ".jsx", ".mjs", ".cjs", ".ts", ".tsx", ".mts", ".cts")
_JSON_LIKE = (*_SCRIPT, ".json", ".jsonc", ".json5", ".go", ".java", ".cs", ".yaml", ".yml", ".toml")
"""Endings of languages that read a JSON string as a string of their own."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in a text where an old prompt stands as a string."""

    start: int
    end: int
    literal: str
    """What to write there."""


class _Language(Protocol):
    """A language in which prompts are found and replaced."""

    def places(self, text: str, old: str, new: str) -> Iterable[_Place]:
        """Return where the old prompt stands. Raise ValueError for a text that cannot be read, and
        ConfigError for a place that must not be changed.
        """
        ...

    def meaning(self, text: str, replaced: Mapping[str, str]) -> Any:
        """Return what the text means, equal for equal meanings, with strings replaced by others."""
        ...


def with_prompts(content: bytes, suffix: str, prompts: Mapping[str, tuple[str, str]], *, path: str) -> bytes:
    """Return a file's content with each new prompt in the place of the old one.

    suffix: the ending of the file's name, such as ".py".
    prompts: the old and the new text of each prompt, by name.
    path: the file's path, for error messages.
    Raise ConfigError if an old prompt is not in the file exactly once, if the file cannot be read,
    or if the new content would not give exactly the new prompts.
    """
    changed = {name: pair for name, pair in prompts.items() if pair[0] != pair[1]}
    if not changed:
        return content
    language = _LANGUAGES.get(suffix.lower())
    if language is None:
        raise _refused(f"{path} is no Python, JSON or text file, so it is not changed", suffix, changed)
    mark = codecs.BOM_UTF8 if content.startswith(codecs.BOM_UTF8) else b""
    try:
        text = content[len(mark) :].decode()
        found = [(name, list(language.places(text, old, new))) for name, (old, new) in changed.items()]
        for name, places in found:
            if len(places) != 1:
                how_often = "does not have" if not places else f"has {len(places)} times"
                raise _refused(
                    f"{path} {how_often} the text with which the run began for the prompt {name!r}; it is needed once, as "
                    "one string",
                    suffix,
                    {name: changed[name]},
                )
        after = text
        # from the end backwards, because a replacement moves everything behind it
        for place in sorted((place for _, [place] in found), key=lambda place: place.start, reverse=True):
            after = after[: place.start] + place.literal + after[place.end :]
        if language.meaning(after, {}) != language.meaning(text, dict(changed.values())):
            raise ValueError("the prompt would be read as another text")
        return mark + after.encode()
    except ConfigError:
        raise
    except _Unfit as error:
        raise _refused(f"{path} is not changed: {error}", suffix, changed) from None
    except (SyntaxError, ValueError, RecursionError) as error:
        raise _refused(f"{path} cannot be changed: {error}", suffix, changed) from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a crash leaves either the old content or the new one. Its mode stays,
    and a link stays a link.

    Raise ConfigError if it cannot be written.
    """
    target = path.resolve()
    try:
        if not target.stat().st_mode & 0o222:  # its folder alone decides whether it can be replaced
            raise ConfigError(
                f"{path} is read-only; it is as it was, and chmod u+w {shlex.quote(str(path))} lets it change"
            )
        with tempfile.NamedTemporaryFile("wb", dir=target.parent, delete=False) as file:
            written = Path(file.name)
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                written.chmod(target.stat().st_mode)
                written.replace(target)
            except BaseException:
                written.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; it is as it was") from error


class _Unfit(Exception):
    """Why a place that has the old prompt must not be changed."""


def _refused(why: str, suffix: str, prompts: Mapping[str, tuple[str, str]]) -> ConfigError:
    """Return the error for a file that is not changed, with the strings to paste."""
    write = _literal_for(suffix.lower())
    if write is None or (write is shlex.quote and any(harmless(new) != new for _, new in prompts.values())):
        return ConfigError(f"{why}; leyden prompts export writes the best prompts to files of their own")
    lines = [f"{name}: {write(new)}" for name, (_, new) in prompts.items()]
    return ConfigError("\n".join([f"{why}. To paste by hand:", *lines]))


def _literal_for(suffix: str) -> Callable[[str], str] | None:
    """Return a function that writes a text as a string of a file's language; None if unknown."""
    if suffix in (".py", ".pyi", ".pyw", ".ipynb"):
        return _python_literal
    if suffix in _JSON_LIKE:
        return _json_literal
    return shlex.quote if suffix in (".sh", ".bash", ".zsh") else None


# ---- Python --------------------------------------------------------------------------------------


class _Python:
    def places(self, text: str, old: str, new: str) -> Iterator[_Place]:
        lines = text.encode().splitlines(keepends=True)

        def offset(line: int, column: int) -> int:
            """Return the character at a line (from 1) and bytes in it, as `ast` counts."""
            return len(b"".join([*lines[: line - 1], lines[line - 1][:column]]).decode())

        tree = _parsed(text)
        inside = {id(part) for node in ast.walk(tree) if _is_f_string(node) for part in ast.walk(node)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or node.value != old or type(node.value) is not str:
                continue
            if id(node) in inside:
                raise _Unfit(f"line {node.lineno} has the prompt inside an f-string, whose expressions would be lost")
            start = offset(node.lineno, node.col_offset)
            end = offset(node.end_lineno or node.lineno, node.end_col_offset or 0)
            if _has_comment(text[start:end]):
                raise _Unfit(f"line {node.lineno} has the prompt with a comment between its parts, which would be lost")
            literal = _python_literal(new)
            yield _Place(start, end, literal.replace("\n", "\r\n") if b"\r\n" in lines[0] else literal)

    def meaning(self, text: str, replaced: Mapping[str, str]) -> str:
        tree = _parsed(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and type(node.value) is str:
                node.value = replaced.get(node.value, node.value)
                node.kind = None
        return ast.dump(tree)


def _parsed(text: str) -> ast.Module:
    """Return the syntax tree of a Python file, which must be in UTF-8."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(text.encode()).readline)
    if encoding != "utf-8":
        raise ValueError(f"it declares the encoding {encoding}, and only utf-8 is supported")
    with warnings.catch_warnings():  # of the user's own strings, such as an invalid escape
        warnings.simplefilter("ignore")
        return ast.parse(text)


def _is_f_string(node: ast.AST) -> bool:
    return type(node).__name__ in ("JoinedStr", "TemplateStr")


def _has_comment(text: str) -> bool:
    """Return whether there is a comment between the parts of a string literal."""
    tokens = tokenize.generate_tokens(io.StringIO(f"({text}\n)").readline)
    return any(token.type == tokenize.COMMENT for token in tokens)


def _python_literal(text: str) -> str:
    """Return a text as a Python string literal, between triple quotes if it has several lines.
    Characters that an editor does not show are escaped.
    """
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    escaped = "".join(each if each.isprintable() or each == "\n" else _escape(each) for each in escaped)
    return f'"""{escaped}"""' if "\n" in text else f'"{escaped}"'


def _escape(character: str) -> str:
    return repr(character)[1:-1]


# ---- JSON ----------------------------------------------------------------------------------------


class _Json:
    def places(self, text: str, old: str, new: str) -> Iterator[_Place]:
        json.loads(text, object_pairs_hook=_without_doubles)
        for found in _JSON_STRING.finditer(text):
            if found[1] is None and json.loads(found[0]) == old:  # no key
                is_ascii = found[0].isascii() and not old.isascii()
                yield _Place(found.start(), found.end(), json.dumps(new) if is_ascii else _json_literal(new))

    def meaning(self, text: str, replaced: Mapping[str, str]) -> str:
        def value(read: Any) -> Any:
            """Return a value with its strings replaced; objects are lists of pairs already."""
            if isinstance(read, str):
                return replaced.get(read, read)
            if isinstance(read, tuple):  # an object
                return {"pairs": [[key, value(each)] for key, each in cast("tuple[tuple[str, Any], ...]", read)]}
            return [value(each) for each in cast("list[Any]", read)] if isinstance(read, list) else read

        return repr(value(json.loads(text, object_pairs_hook=tuple)))


def _without_doubles(pairs: list[tuple[str, Any]]) -> None:
    """Raise ValueError if an object has a key twice: a program reads only the last value."""
    if double := [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]:
        raise ValueError(f"an object has the key {double[0]!r} more than once")


def _json_literal(text: str) -> str:
    """Return a text as a JSON string. Characters that an editor does not show are escaped, and no
    others, because YAML and TOML do not read the two escapes that JSON has for an emoji.
    """
    written = json.dumps(text, ensure_ascii=False)
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in written)


# ---- text ----------------------------------------------------------------------------------------


class _Text:
    """A file that is one prompt as a whole, which a program reads with or without the white space
    at its ends, and with line breaks of any system.
    """

    def places(self, text: str, old: str, new: str) -> Iterator[_Place]:
        read = _as_read(text)
        for ends in (str, partial(_without_end, end="\n"), str.rstrip, str.strip):
            if not old or ends(read) != old:
                continue
            start = read.index(old)
            after = read[:start] + new + read[start + len(old) :]
            if ends(_as_read(after)) != new:
                raise _Unfit("the new prompt has line breaks or white space that would be read as others")
            yield _Place(0, len(text), after.replace("\n", "\r\n") if "\r\n" in text else after)
            return

    def meaning(self, text: str, replaced: Mapping[str, str]) -> str:
        read = _as_read(text).strip()
        return {old.strip(): new.strip() for old, new in replaced.items()}.get(read, read)


def _as_read(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _without_end(text: str, *, end: str) -> str:
    return text.removesuffix(end)


_LANGUAGES: dict[str, _Language] = {
    **dict.fromkeys((".py", ".pyi", ".pyw"), _Python()),
    ".json": _Json(),
    **dict.fromkeys((".txt", ".text", ".md", ".markdown", ".prompt", ".jinja", ".jinja2", ".j2", ".poml"), _Text()),
}
