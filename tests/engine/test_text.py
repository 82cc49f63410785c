"""Text that arrives token by token is the text of the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from leyden.engine.text import Offsets, StreamedText, Text, cut_at_stop
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


def with_byte_tokens() -> Text:
    """A tokenizer like Llama 2's and Gemma's: SentencePiece's spaces, and a token for each byte."""
    names = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abc", "\u2581a", "\u2581bc"]
    vocabulary = {name: index for index, name in enumerate(names)}
    merges = [("\u2581", "a"), ("b", "c"), ("\u2581", "bc")]
    vocabulary["bc"] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Text(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))


TOKENIZERS = {"byte level": TEXT, "byte tokens": with_byte_tokens()}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(said=st.text("ab c\u00e9\u4e2d\U0001f600", max_size=20))
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(name: str, said: str):
    text = TOKENIZERS[name]
    ids = text.encode(said, special=False)
    joined = b"".join(bytes(text.piece(token)[1]) for token in ids)
    assert joined.removeprefix(b" " if name == "byte tokens" else b"") == text.decode(ids).encode() == said.encode()


@given(st.lists(st.integers(3, 258), max_size=30))
def test_parts_of_characters_have_their_bytes(ids: list[int]):
    pieces = [TEXT.piece(token) for token in ids]
    assert all(len(raw) == 1 for _, raw in pieces)
    assert b"".join(bytes(raw) for _, raw in pieces).decode(errors="replace") == TEXT.decode(ids)


def test_special_and_unknown_tokens_have_their_names():
    for text in TOKENIZERS.values():
        token = text.tokenizer.eos_token_id
        name = text.tokenizer.eos_token
        assert text.piece(token) == (name, list(name.encode()))
        assert text.piece(5000) == ("", [])


@pytest.mark.parametrize("name", TOKENIZERS)
@given(said=st.text("ab c\u00e9\u4e2d\U0001f600", max_size=20), size=st.integers(1, 5))
def test_each_token_has_the_place_of_its_character_in_the_text(name: str, said: str, size: int):
    text = TOKENIZERS[name]
    ids = [*text.encode(said, special=False), text.tokenizer.eos_token_id]
    offsets, places = Offsets(text), list[int]()
    for at in range(0, len(ids), size):
        places += offsets.of(ids[at : at + size])
    assert len(places) == len(ids)
    assert places[-1] == len(text.decode(ids)) == len(said)
    for index, (token, place) in enumerate(zip(ids[:-1], places, strict=False)):
        piece = text.piece(token)[0]
        if "\N{REPLACEMENT CHARACTER}" in piece:
            assert bytes(text.piece(token)[1]) in said[place].encode()
        else:
            assert said.startswith(piece.removeprefix(" ") if index == 0 and name == "byte tokens" else piece, place)
