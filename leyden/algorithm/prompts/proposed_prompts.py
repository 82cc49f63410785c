"""Read the prompt that a reflection model proposes out of its answer.

`proposed_prompt` is the one way from an answer to a prompt, for every optimiser. It takes a text only if the answer
marks it in the way that the request asks for: between tags, in a fenced block, or as the whole answer. It refuses
anything else with the reason, so that the model can be asked again. Pure functions of texts, which know no model and no
optimiser.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from leyden.algorithm.prompts.texts import placeholders_of, problem_with
from leyden.types import PromptTemplate

_OPEN, _CLOSE = "<new_prompt>", "</new_prompt>"
_TAG = re.compile(r"<\s*(/?)\s*new_prompt\b[^<>]*>", re.IGNORECASE)
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[ \t]*([^`<\n]*?)[ \t]*\r?(?:\n|\Z)", re.MULTILINE)
_FENCED_LINE = re.compile(r"(`{3,})[ \t]*([^`\n]+?)[ \t]*\1")
_TICKS = re.compile(r"`{3,}")
_PROSE = frozenset(["", "text", "txt", "plain", "plaintext", "markdown", "md", "prompt", "instruction", "instructions"])
"""What stands behind the opening fence of a block of prose."""
_NAME = (
    r"(?P<name>(?:\w+:)?(?:(?:(?!begin|start|end)[a-z]+[_-])*"
    r"(?:think|thinking|thoughts?|reasoning|reflections?|analysis|scratch_?pad|monologue)(?:[_-][a-z]+)*|cot))"
)
_REASONING = tuple(
    (re.compile(rf"(?<![`\"'\w]){begin}", re.IGNORECASE), re.compile(end, re.IGNORECASE))
    for begin, end in (
        (rf"<\s*{_NAME}(?:\s[^<>]*)?>", rf"<\s*/\s*{_NAME}\s*>"),
        (rf"<\|(?:begin|start)_(?:of_)?{_NAME}\|>", rf"<\|end_(?:of_)?{_NAME}\|>"),  # Cohere, OpenThinker
        (rf"<\|{_NAME}\|>", rf"<\|/{_NAME}\|>"),
        (r"\[(?P<name>think)\]", r"\[/(?P<name>think)\]"),  # Mistral
        (r"◁(?P<name>think)▷", r"◁/(?P<name>think)▷"),  # Kimi
        (r"<\|channel\|>(?P<name>)analysis<\|message\|>", r"<\|channel\|>(?P<name>)final<\|message\|>"),  # gpt-oss
        (r"\Aanalysis(?P<name>)(?=[A-Z])", r"assistant(?P<name>)final"),  # gpt-oss, without its special tokens
        (r"<(?:\|channel|unused94)>(?P<name>)thought\b", r"<(?P<name>)(?:channel\||unused95)>"),  # Gemma
    )
)
"""The marks of the beginning and of the end of reasoning, as models write them into their text. A mark behind a
quotation mark or a backtick is a mention of it."""


@dataclass(frozen=True, slots=True)
class Request:
    """A question to a model that asks it for a new prompt."""

    template: str
    """The instructions, without the values of their fields."""
    text: str
    """The whole question."""

    @property
    def marks(self) -> Literal["tags", "fence", "none"]:
        """The marks that the instructions want around the new prompt."""
        return "tags" if _TAG.search(self.template) else "fence" if "```" in self.template else "none"

    def has(self, text: str) -> bool:
        """Return whether a text of an answer only repeats the question."""
        tag, fence = _TAG.pattern.replace("(/?)", "/?"), "(?:`{3,}|~{3,})"
        marked = rf"{tag}\s*{re.escape(text)}\s*{tag}|{fence}[^\n]*\n\s*{re.escape(text)}\s*\n\s*{fence}"
        return text in self.template or re.search(marked, self.text, re.IGNORECASE) is not None


@dataclass(frozen=True, slots=True)
class _Marked:
    """A text between marks, and the index after them in the answer."""

    text: str
    end: int
    language: str = ""
    """What stands behind the opening fence of a block."""
    is_announced: bool = False
    """Whether the text before the block ends with a colon."""


class _Unreadable(Exception):
    """The answer has no prompt; the reason is a sentence for the model that wrote it."""


def proposed_prompt(
    answer: str, prompt: PromptTemplate, request: Request, *, max_characters: int
) -> tuple[str | None, str]:
    """Return the text of the new prompt in an answer, and ""; or None and why the answer has none that can be used, as
    a sentence for the model.

    Braces of the text that are no placeholders of `prompt` are doubled (`with_own_placeholders`).

    prompt: the prompt to replace.
    max_characters: the largest number of characters of a prompt.
    """
    try:
        found = _marked_texts(answer, request)
    except _Unreadable as error:
        return None, str(error)
    usable: dict[str, str] = {}
    problem = ""
    for each in found:
        text = with_own_placeholders(each.text, prompt)
        if each.text and request.has(each.text):
            problem = "it only repeats the request"
        elif (fault := problem_with(text, prompt, max_characters=max_characters)) is not None:
            problem = fault
        else:
            usable[text] = each.language.lower()
    chosen = [text for text, language in usable.items() if language in _PROSE] or list(usable)
    if len(chosen) == 1:
        return chosen[0], ""
    return None, f"it has {len(chosen)} texts that can be the new prompt; write only one" if chosen else problem


def without_reasoning(answer: str) -> str | None:
    """Return an answer without the reasoning at its beginning; None if the reasoning has no end."""
    try:
        return _after_reasoning(answer)
    except _Unreadable:
        return None


# ---- marks ---------------------------------------------------------------------------------------


def _marked_texts(answer: str, request: Request) -> list[_Marked]:
    """Return the texts that an answer marks as the new prompt, at least one. Tags come before all other marks."""
    if found := _outside_reasoning(answer, _TAG, _in_tags):
        return found
    text = _after_reasoning(answer)
    if not text:
        raise _Unreadable("it is empty")
    if request.marks == "none" and (opened := _first(text, 0, 0)) is not None:
        _end_of_reasoning(text, opened)  # raises if there is none
    whole = _without_fence(text)
    if request.marks == "none" or (request.marks == "tags" and whole != text):
        return [_Marked(whole, len(answer))]
    if request.marks == "tags":
        raise _Unreadable(f"it does not have the new prompt between {_OPEN} and {_CLOSE}")
    if not (found := _outside_reasoning(answer, _FENCE, _in_fence)):
        raise _Unreadable("it does not have the new prompt in a block, between lines of ```")
    prose = [each for each in found if each.language.lower() in _PROSE]
    for block, following in pairwise(prose):
        if block.text != following.text and (block.text.endswith(":") or not following.is_announced):
            raise _Unreadable(
                f"it has {len(prose)} blocks that may be one block with others inside; write the new prompt alone, "
                "between lines of ````"
            )
    return found


def _outside_reasoning(
    text: str, begins: re.Pattern[str], read: Callable[[str, re.Match[str]], _Marked]
) -> list[_Marked]:
    """Return what `read` makes of each mark that is not part of reasoning. Reasoning that ends without having begun
    takes everything before it, because a chat template may begin it.
    """
    found, at = list[_Marked](), 0
    while mark := begins.search(text, at):
        opened = _first(text, at, 0)
        closed = _first(text, at, 1)
        if closed is not None and closed.start() < min(mark.start(), opened.start() if opened else len(text)):
            found.clear()
            text, at = text[closed.end() :], 0  # a line begins behind reasoning
        elif opened is not None and opened.start() < mark.start():
            text, at = text[_end_of_reasoning(text, opened) :], 0
        else:
            found.append(read(text, mark))
            at = found[-1].end
    if found and (closed := _first(text, at, 1)) is not None:
        opened = _first(text, at, 0)
        if opened is None or closed.start() < opened.start():
            raise _Unreadable("it has the new prompt inside of reasoning")
    return found


def _first(text: str, at: int, which: Literal[0, 1]) -> re.Match[str] | None:
    found = [mark for each in _REASONING if (mark := each[which].search(text, at)) is not None]
    return min(found, key=lambda mark: mark.start(), default=None)


def _end_of_reasoning(text: str, opened: re.Match[str]) -> int:
    ends = next(end for begin, end in _REASONING if begin is opened.re)
    for closed in ends.finditer(text, opened.end()):
        if closed["name"].lower() == opened["name"].lower():
            return closed.end()
    raise _Unreadable(f"its reasoning after {opened[0]} has no end, so it seems to be cut off")


def _after_reasoning(answer: str) -> str:
    text = answer.strip()
    while (opened := _first(text, 0, 0)) is not None and opened.start() == 0:
        text = text[_end_of_reasoning(text, opened) :].strip()
    closed, opened = _first(text, 0, 1), _first(text, 0, 0)
    if closed is not None and (opened is None or closed.start() < opened.start()):
        return _after_reasoning(text[closed.end() :])
    return text


def _in_tags(text: str, tag: re.Match[str]) -> _Marked:
    after = _TAG.search(text, tag.end())
    if not tag[1] and after is None:
        raise _Unreadable(f"it has no {_CLOSE}, so it seems to be cut off")
    if tag[1] or after is None or not after[1]:
        raise _Unreadable(f"it has {_OPEN} or {_CLOSE} inside the new prompt; write each once, around the new prompt")
    inside = text[tag.end() : after.start()].strip()
    for mark in ("**", "`"):
        around = text[: tag.start()].endswith(mark) and text[after.end() :].startswith(mark)
        if around and inside.startswith(mark) and inside.endswith(mark):  # each tag is in bold, or in backticks
            inside = inside.removeprefix(mark).removesuffix(mark).strip()
    return _Marked(_without_fence(inside), after.end())


def _without_fence(text: str) -> str:
    fence = _FENCE.match(text)
    if fence is None:
        in_a_line = _FENCED_LINE.fullmatch(text)
        return in_a_line[2] if in_a_line else text
    block = _in_fence(text, fence)
    return block.text if block.end >= len(text) else text


def _in_fence(text: str, fence: re.Match[str]) -> _Marked:
    """Return the text between an opening fence and its closing one. A block inside has its own
    fences: shorter ones, other characters, or an opening one with a language.
    """
    is_announced = text[: fence.start()].rstrip().endswith(":")
    open_fences = [fence[1]]
    for each in _FENCE.finditer(text, fence.end()):
        if not each[1].startswith(open_fences[-1]):
            continue
        if each[2]:
            open_fences.append(each[1])
        elif len(open_fences) > 1:
            open_fences.pop()
        else:
            return _Marked(text[fence.end() : each.start()].strip(), each.end(), fence[2], is_announced)
    ticks = list(_TICKS.finditer(text, fence.end()))
    if len(ticks) == 1 and ticks[0][0] == fence[1]:  # at the end of the last line
        return _Marked(text[fence.end() : ticks[0].start()].strip(), ticks[0].end(), fence[2], is_announced)
    raise _Unreadable(f"it has a block without its closing {fence[1]}, so it seems to be cut off")


# ---- braces --------------------------------------------------------------------------------------


def with_own_placeholders(text: str, prompt: PromptTemplate) -> str:
    """Return a text as a template that has no placeholders but those of `prompt`: every other brace is doubled, unless
    it is doubled already.

    Models write `{"answer": {ticket}}`, `\\boxed{}` and `{customer}`, in which only `{ticket}` gets a value. A text for
    another engine than `f-string` is returned unchanged.
    """
    if prompt.engine != "f-string":
        return text
    names = "|".join(map(re.escape, placeholders_of(prompt)))
    braces = re.compile(rf"\{{\{{|\{{(?:{names})\}}|[{{}}]" if names else r"\{\{|[{}]")
    written, at, doubled = list[str](), 0, list[bool]()  # doubled: whether each open brace is doubled
    while brace := braces.search(text, at):
        written.append(text[at : brace.start()])
        at = brace.end()
        if brace[0] in ("{", "{{"):
            doubled.append(brace[0] == "{{")
            written.append("{{")
        elif brace[0] != "}":
            written.append(brace[0])
        else:
            is_double = text.startswith("}", at) and (not doubled or doubled[-1])
            at += is_double
            if doubled and doubled[-1] == is_double:
                doubled.pop()
            written.append("}}")
    return "".join([*written, text[at:]])
