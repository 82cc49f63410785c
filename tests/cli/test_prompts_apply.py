"""What `leyden prompts apply` writes reads as exactly the prompt, and means nothing else; the rest is refused."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from leyden.cli.prompts_apply import with_prompts, write_whole
from leyden.errors import ConfigError

ANY_TEXT = st.text(st.characters(codec=None) | st.sampled_from("\"'\\\n\r\t{}#\u202e\x00\x1b`$"), max_size=30)
HOSTILE = ['x"); import os; os.abort()#', "a\\", '"""\n\\N{DASH}\r\n', "\u202e {x!r} \ud83d", "'''", ""]


@given(ANY_TEXT, ANY_TEXT)
def test_any_prompt_becomes_a_string_of_python_and_of_json(old: str, new: str) -> None:
    for line_end in ("\n", "\r\n"):
        source = f"# é{line_end}p = ({old!a}){line_end}".encode()
        changed = with_prompts(source, ".py", {"p": (old, new)}, path="a.py").decode()
        tree = ast.parse(changed)
        assert ast.literal_eval(tree.body[0].value) == new  # type: ignore[attr-defined]
        assert old == new or all(each.isprintable() or each in "\r\n" for each in changed), "nothing in it is hidden"
    source = json.dumps({"é": [1.0, old], "z": None}).encode()
    changed = with_prompts(source, ".json", {"p": (old, new)}, path="a.json").decode()
    assert json.loads(changed) == {"é": [1.0, new], "z": None}


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@pytest.mark.parametrize(
    "source",
    [
        "p = ('Be '\n     'kind.')\n",
        "p = 'Be ' \\\n 'kind.'\n",
        "p = r'Be kind.'\n",
        "p = u'''Be kind.'''\n",
        'q = f\'{len("é")}\'; p = "Be kind."\n',
        "\ufeffp = 'Be kind.'\n",
        "# coding: utf-8\np = 'Be kind.'\n",
        "é = '\\d'; p = 'Be kind.'\n",
        "q = {'Be kind.x': b'Be kind.'}; p='Be kind.'if 1 else 2\n",
        "def f():\n    return'Be kind.'\np = f()\n",
    ],
)
@pytest.mark.parametrize("new", HOSTILE)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_every_way_to_write_a_python_string_is_replaced_by_exactly_the_prompt(
    source: str, new: str, line_end: str
) -> None:
    content = source.replace("\n", line_end).encode()
    changed = with_prompts(content, ".py", {"p": ("Be kind.", new)}, path="a.py")
    values: dict[str, Any] = {}
    exec(changed, values)
    assert values["p"] == new
    assert b"\r\n" not in content or changed.count(b"\n") == changed.count(b"\r\n"), "the line ends stay"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("p = f'Be kind.{x}'\n", "line 1 has the prompt inside an f-string"),
        ("p = f'{g(\"Be kind.\")}'\n", "inside an f-string"),
        ("p = f'{x:Be kind.}'\n", "inside an f-string"),
        ("p = 'Be ' f'kind.'\n", "inside an f-string"),
        ("p = ('Be '  # first\n'kind.')\n", "a comment between its parts"),
        ("p = b'Be kind.'\n", "does not have"),
        ("p = 'Be kind. '\n", "does not have"),
        ("p = 'Be kind.'; q = 'Be kind.'\n", "has 2 times"),
        ("# coding: latin-1\np = 'Be kind.'\n", "it declares the encoding iso-8859-1"),
        ("p = 'Be kind.\n", "cannot be changed: unterminated"),
        ("p = 'caf\udce9'; q = 'Be kind.'\n", "can't decode byte"),
        ("p = 'Be kind.'\0\n", "cannot be changed"),
    ],
)
def test_python_source_that_cannot_be_changed_safely_is_refused_with_the_string_to_paste(source: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        with_prompts(source.encode(errors="surrogateescape"), ".py", {"p": ("Be kind.", 'Be "b".')}, path="a.py")
    assert why in str(refused.value)
    assert str(refused.value).endswith('To paste by hand:\np: "Be \\"b\\"."')


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"Be kind.": "Be kind."}', '{"Be kind.": "x\\"]"}'),
        ('["\\u0042e kind.", 1e400, "a\\"Be kind."]', '["x\\"]", 1e400, "a\\"Be kind."]'),
        ('\ufeff["Be kind."]\r\n', '\ufeff["x\\"]"]\r\n'),
        ('{"a": "Be kind.", "a": 1}', None),
        ('[{"a": 1, "a": "Be kind."}]', None),
        ('["Be kind.",]', None),
        ('["Be kind."] // why', None),
        ('{"Be kind.": 1}', None),
        ('["Be kind.", "Be kind."]', None),
        ('["{\\"a\\": \\"Be kind.\\"}"]', None),
    ],
)
def test_only_a_value_of_valid_json_is_replaced(before: str, after: str | None) -> None:
    if after is not None:
        changed = with_prompts(before.encode(), ".json", {"p": ("Be kind.", 'x"]')}, path="a.json")
        assert changed.decode() == after
        return
    with pytest.raises(ConfigError, match=r'To paste by hand:\np: "x\\"\]"'):
        with_prompts(before.encode(), ".json", {"p": ("Be kind.", 'x"]')}, path="a.json")


@pytest.mark.parametrize(
    ("before", "old", "new", "after"),
    [
        ("Be kind.", "Be kind.", "Better.", "Better."),
        ("Be kind.\n", "Be kind.", "Better.\nMuch.", "Better.\nMuch.\n"),
        ("Be kind.\n", "Be kind.\n", "Better.\n", "Better.\n"),
        ("\n  Be kind. \n\n", "Be kind.", "Better.", "\n  Better. \n\n"),
        ("Be\r\nkind.\r\n", "Be\nkind.", "Bet\nter.", "Bet\r\nter.\r\n"),
        ("Be kind.\n", "Be kind.", "Better.\n\n", "Better.\n\n\n"),
        ("Be kind.  \n", "Be kind.", "Better. ", None),
        ("  Be kind.\n", "Be kind.", " Better.", None),
        ("Be kind.\n", "Be kind.", "Bet\rter.", None),
        ("Be kind.\n", "Be kind.", "Better \ud83d", None),
        ("---\nBe kind.\n---\n", "Be kind.", "---", None),
        ("Be kindly.\n", "Be kind", "Better", None),
        ("Be kind.\n", "", "Better.", None),
        ("caf\udce9", "Be kind.", "Better.", None),
    ],
)
def test_a_text_file_is_changed_only_if_reading_it_gives_exactly_the_prompt(
    before: str, old: str, new: str, after: str | None
) -> None:
    content = before.encode(errors="surrogateescape")
    if after is not None:
        assert with_prompts(content, ".txt", {"p": (old, new)}, path="a.txt").decode() == after
        return
    with pytest.raises(ConfigError):
        with_prompts(content, ".txt", {"p": (old, new)}, path="a.txt")


def test_two_prompts_are_put_into_one_file_also_if_they_change_places() -> None:
    prompts = {"a": ("one", "two"), "b": ("two", "one")}
    assert with_prompts(b"a = 'one'\nb = 'two'\n", ".py", prompts, path="a.py") == b'a = "two"\nb = "one"\n'
    assert with_prompts(b'["one", "two"]', ".json", prompts, path="a.json") == b'["two", "one"]'


@pytest.mark.parametrize(
    ("content", "suffix"), [(b"a = 'one'\n", ".py"), (b'{"a": "one"}', ".json"), (b"one\n", ".txt")]
)
@pytest.mark.parametrize("other", ["six", "one"])
def test_a_text_with_which_two_prompts_began_is_not_replaced_by_one_of_them(
    content: bytes, suffix: str, other: str
) -> None:
    with pytest.raises(ConfigError, match="for another prompt too"):
        with_prompts(content, suffix, {"a": ("one", "two"), "b": ("one", other)}, path="a")


@pytest.mark.parametrize("ends", [("\n", "\r\n"), ("\r\n\n", ""), (" \r", "\r"), ("\r\n", "\n\r\n")])
def test_the_white_space_around_a_prompt_that_is_a_file_stays_byte_by_byte(ends: tuple[str, str]) -> None:
    changed = with_prompts("Be kind.".join(ends).encode(), ".md", {"p": ("Be kind.", "Better.")}, path="a.md")
    assert changed == "Better.".join(ends).encode()


def test_a_better_prompt_that_the_file_has_elsewhere_already_stays_there() -> None:
    source = b"a = 'Be kind.'\nold = {'Better.': ['Better.', b'Better.']}\n"
    changed = with_prompts(source, ".py", {"p": ("Be kind.", "Better.")}, path="a.py")
    assert changed == source.replace(b"'Be kind.'", b'"Better."')
    assert with_prompts(b'["Better.", "Be kind."]', ".json", {"p": ("Be kind.", "Better.")}, path="a.json") == (
        b'["Better.", "Better."]'
    )


def test_a_link_to_a_file_stays_a_link_when_the_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to("real.txt")
    write_whole(tmp_path / "link.txt", b"new")
    assert ((tmp_path / "link.txt").is_symlink(), (tmp_path / "real.txt").read_text()) == (True, "new")
    with pytest.raises(ConfigError, match=r"cannot be written: .*; it is as it was"):
        write_whole(tmp_path / "missing" / "a.txt", b"new")


def test_a_string_to_paste_has_escapes_that_each_language_reads() -> None:
    with pytest.raises(ConfigError) as refused:
        with_prompts(b"", ".yaml", {"p": ("Be kind.", "\U0001f600\x1b[31m")}, path="a.yaml")
    assert str(refused.value).endswith('p: "\U0001f600\\u001b[31m"'), "no pair of surrogates, which YAML does not read"
    with pytest.raises(ConfigError, match="prompts export"):  # a terminal would not show the character to copy
        with_prompts(b"", ".sh", {"p": ("Be kind.", "\x1b[31m")}, path="a.sh")


def test_a_file_that_its_owner_made_read_only_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("p = 'Be kind.'\n")
    path.chmod(0o444)
    with pytest.raises(ConfigError, match="read-only"):
        write_whole(path, b"p = 'Better.'\n")
    assert path.read_text() == "p = 'Be kind.'\n"
