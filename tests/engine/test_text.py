"""Text that arrives token by token is the text of the whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from leyden.engine.text import StreamedText, Text, cut_at_stop
from tests.engine import tiny

TEXT = Text(tiny.tokenizer())
ALPHABET = "ab\u00e9\u4e2d\U0001f600 "


@given(
    st.text(ALPHABET, max_size=20),
    st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 4), min_size=1),
)
def test_streamed_pieces_make_up_the_text_before_the_first_stop_string(text: str, stops: list[str], sizes: list[int]):
    ids = TEXT.encode(text, special=False)
    stream, pieces, end, turn = StreamedText(TEXT, stops), list[str](), 0, 0
    while True:
        end = min(len(ids), end + sizes[turn % len(sizes)])
        turn += 1
        pieces.append(stream.advance(ids[:end], final=end == len(ids)))
        assert "\N{REPLACEMENT CHARACTER}" not in pieces[-1]
        if end == len(ids):
            break
    assert "".join(pieces) == cut_at_stop(text, stops)


@given(st.lists(st.integers(0, 258), max_size=30), st.integers(1, 5))
def test_any_tokens_stream_to_what_they_decode_to(ids: list[int], size: int):
    stream, text = StreamedText(TEXT, []), ""
    for end in range(0, len(ids) + size, size):
        text += stream.advance(ids[:end], final=end >= len(ids))
    assert text == TEXT.decode(ids)


@given(st.text(ALPHABET, max_size=30), st.text(ALPHABET, min_size=1, max_size=4))
def test_a_stop_string_is_seen_with_the_token_that_completes_it(text: str, stop: str):
    ids = TEXT.encode(text, special=False)
    seen = next((n for n in range(1, len(ids) + 1) if TEXT.ends_with_stop([stop], ids[:n])), None)
    if stop in text:
        assert seen == len((text[: text.index(stop)] + stop).encode())
    else:
        assert seen is None
