"""Make the tokenizer of a GGUF file split text as llama.cpp does.

A file with a byte-level vocabulary names under `tokenizer.ggml.pre` how text is split before pairs are merged. The
patterns are in llama.cpp, not in the file, and transformers has a few of them and takes GPT-2's for the others, so that
"\n\n 12" had other tokens than the model was trained on. A name that is not here is refused. To add one, copy its
patterns from llama.cpp's `llama-vocab.cpp`; `tests/llama_cpp` compares them.
"""

from __future__ import annotations

from typing import Any, Final

from tokenizers import Regex, pre_tokenizers

from leyden.errors import EngineError

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2: Final = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",)
_DIGITS: Final = (r"\p{N}", *_GPT2)
_LLAMA3: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
)
_QWEN2: Final = (_LLAMA3[0].replace("{1,3}", ""),)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS: Final = tuple(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{a}{_LOWER}{b}" for a, b in (("*", "+"), ("+", "*")))
_REST: Final = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN: Final = (rf"{'|'.join(_WORDS)}|\p{{N}}|{_REST}",)
_GPT4O: Final = ("|".join([*(f"{word}{_CONTRACTIONS}?" for word in _WORDS), r"\p{N}{1,3}", _REST]),)
_WHOLE_WORDS: Final = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"})
"""Names of vocabularies in which a word that is a token is never merged from pieces, and texts begin with BOS."""
_SPLITS: Final = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("dbrx", "smaug-bpe", *_WHOLE_WORDS), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}


def split_as_llama_cpp(tokenizer: Any, file: Any, fields: Any) -> None:
    """Give a tokenizer that was read from a GGUF file llama.cpp's splits, if its vocabulary is byte-level.

    file, fields: the file's name for messages, and its metadata.
    Raise EngineError if the file names no known way to split text.
    """
    if fields["tokenizer.ggml.model"].contents() != "gpt2":
        return
    pre = fields["tokenizer.ggml.pre"].contents() if "tokenizer.ggml.pre" in fields else "default"
    if pre not in _SPLITS:
        raise EngineError(
            f"{file}: its tokenizer splits text by {pre!r}, which is not read (known are {', '.join(sorted(_SPLITS))}). "
            "If it is one of these under another name, `gguf-new-metadata --pre-tokenizer NAME IN OUT` of the package gguf "
            "writes a file that says so; otherwise give the folder of safetensors that the file was made from"
        )
    backend = tokenizer.backend_tokenizer
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _SPLITS[pre]]
    bytes_as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_as_letters])
    backend.model.ignore_merges = pre in _WHOLE_WORDS
    if "tokenizer.ggml.add_bos_token" not in fields:
        tokenizer.add_bos_token = pre in _WHOLE_WORDS
