"""The tokenizer of a GGUF file with a byte-level vocabulary, which finds the tokens that llama.cpp finds.

The file names under `tokenizer.ggml.pre` how text is split before pairs are merged. The patterns are in llama.cpp, not
in the file. transformers has a few of them and takes GPT-2's for the others, so that "\\n\\n 12" has other tokens than
the model was trained on, and it adds GPT-2's end of text to vocabularies without one. A name that is not here is
refused. To add one, copy its patterns from llama.cpp's `llama-vocab.cpp`; `tests/llama_cpp` compares them.
"""

from __future__ import annotations

import json
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from leyden.errors import EngineError

_PREFIX: Final = "tokenizer."
_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens that are found in a text before it is split."""
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
SPLITS: Final = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("dbrx", "smaug-bpe", *_WHOLE_WORDS), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}


def byte_level_tokenizer(file: Any, fields: Any) -> Any:
    """Return the tokenizer of a GGUF file whose vocabulary is byte-level.

    file, fields: the file's name for messages, and its metadata.
    Raise EngineError if the file names no known way to split text.
    """
    found = _found(fields)
    pre = found.get("ggml.pre", "default")
    if pre not in SPLITS:
        raise EngineError(
            f"{file}: its tokenizer splits text by {pre!r}, which is not read (known are {', '.join(sorted(SPLITS))}). "
            "If it is one of these under another name, `gguf-new-metadata --pre-tokenizer NAME IN OUT` of the package gguf "
            "writes a file that says so; otherwise give the folder of safetensors that the file was made from"
        )
    tokens: list[str] = found["ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in found["ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend: Any = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS))
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS[pre]]
    bytes_as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_as_letters])
    backend.decoder = decoders.ByteLevel()
    for add, kind in ((backend.add_special_tokens, _CONTROL), (backend.add_tokens, _USER_DEFINED)):
        marked = zip(tokens, found["ggml.token_type"], strict=True)
        add([AddedToken(token, normalized=False, special=kind == _CONTROL) for token, type_ in marked if type_ == kind])
    named = _named(found)
    begin = named["bos_token"] if found.get("ggml.add_bos_token", pre in _WHOLE_WORDS) else ""
    end = named["eos_token"] if found.get("ggml.add_eos_token", False) else ""
    if begin or end:
        backend.post_processor = processors.TemplateProcessing(
            single=[*filter(None, (begin, "$A", end))],
            special_tokens=[(token, vocabulary[token]) for token in {begin, end} - {""}],
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=found.get("chat_template"), **named)


def scored_tokenizer(tokenizer: Any, fields: Any) -> Any:
    """Return the tokenizer that transformers makes of a vocabulary of pieces with scores, with llama.cpp's spaces.

    llama.cpp and Llama 2's authors put a space before a text and after each special token. transformers leaves it out
    before a space, puts it where the file says that there is none, and adds Llama's special tokens to vocabularies that
    have others.
    """
    found, backend = _found(fields), tokenizer.backend_tokenizer
    if type(backend.pre_tokenizer).__name__ == "Metaspace":  # Gemma's has none
        prefix = [normalizers.Prepend("▁")] if found.get("ggml.add_space_prefix", True) else []
        backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = None
        strip = [decoders.Strip(" ", 1, 0)] if prefix else []
        spaces = decoders.Replace("▁", " ")
        backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), *strip])
    if len(tokenizer) <= (n_tokens := len(found["ggml.tokens"])):
        return tokenizer
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < n_tokens]
    own = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=own, chat_template=found.get("chat_template"), **_named(found))


def _found(fields: Any) -> dict[str, Any]:
    return {key.removeprefix(_PREFIX): field.contents() for key, field in fields.items() if key.startswith(_PREFIX)}


def _named(found: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{name}_token": found["ggml.tokens"][found[f"ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"ggml.{key}_token_id" in found
    }
