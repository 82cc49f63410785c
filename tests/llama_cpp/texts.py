"""Texts in several scripts, code, white space and special tokens, always the same."""

from __future__ import annotations

import random
from collections.abc import Sequence

PIECES = (
    "Hello", "world", "I'm", "we'LL", "DON'T", "it's", "’s", "naïve", "Ünïcödé", "éA", "Straße", "a\u0301", "مرحبا بالعالم",
    "שלום", "नमस्ते दुनिया", "สวัสดีชาวโลก", "你好世界", "こんにちは", "カタカナ", "안녕하세요", "Привет, мир", "Ελληνικά",
    "ქართული", "🙂", "👩‍👩‍👧", "🇩🇪", "﷽",
    "\u200b", "\u00a0", "\u3000", "\u2028", "\ufeff", " ", "  ", "   ", "        ", "\n", "\n\n", "\n\n\n", " \n", "\n ", "\t",
    "\t\t", "\r\n", "\r", " \t ", "0", "12", "123", "1234567", "3.14", "1e-5", "१२३", "٣٤", "½", "²", "Ⅷ", "0x1F", "v2.0",
    "def f(x):\n    return x**2\n", "for (int i=0;i<n;++i) { a[i] += b[i]; }", '{"a": [1, 2, {"b": null}]}',
    "<html><p class='x'>hi</p></html>", "SELECT * FROM t WHERE x='y';", "#!/bin/bash\nset -e", "$HOME/path_to/file.txt",
    "C:\\Users\\x", "https://example.org/a?b=c&d=e#f", "user@example.com", "!!!", "...", "—", "«quoted»", "“quotes”", "__init__",
    "--flag=value", "a_b_c", "CamelCaseString", "ALLCAPS", "```python\n", "||", "->", "=>", "!=", "===", "\\n", "%d", "@#$%^&*()",
    "\x07", "\x1b[0m", "Ġ", "Ċ", "<0x0A>", "<s>", "</s>", "<unk>", "[INST]",
)  # fmt: skip
SCRIPTS = (
    (0x20, 0x7F), (0xA0, 0x250), (0x370, 0x500), (0x590, 0x700), (0x900, 0xE80), (0x2000, 0x2BFF), (0x3040, 0x3100),
    (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1FAFF),
)  # fmt: skip


def texts(n: int, special: Sequence[str] = ()) -> list[str]:
    """Return `n` texts, a quarter of them with special tokens."""
    rng = random.Random(0)
    found = ["", *PIECES, *(f"a{token}b {token}\n" for token in special)]
    while len(found) < n:
        if rng.random() < 0.25:
            low, high = rng.choice(SCRIPTS)
            letters = (chr(rng.randrange(low, high)) if rng.random() < 0.8 else rng.choice(" \n ") for _ in range(20))
            found.append("".join(letters))
        else:
            pool = (*PIECES, *special) if rng.random() < 0.25 else PIECES
            found.append(rng.choice(["", " ", "\n"]).join(rng.choice(pool) for _ in range(rng.randrange(1, 9))))
    return found[:n]
