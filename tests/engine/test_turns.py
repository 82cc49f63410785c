"""Conversations of all kinds merge: the next prompt continues what was sampled, however its text would be tokenised again."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from leyden.adapter import merge_triplets
from leyden.engine.chat_prompts import Chat, Prompt
from leyden.engine.text import Text
from leyden.engine.wire import ChatRequest, parse_request
from leyden.types import Triplet, TripletPrompt, TripletResponse
from tests.engine import tiny

WORDS = [
    "the",
    "lightning",
    "jar",
    "is",
    "left",
    "of",
    "Größe",
    "42",
    "higher",
    "higherer",
    "雷",
    "🌩",
    "def f(x):\n    return x",
]
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"where": {"type": "string"}}}},
}


def trained_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges, so that a text has many tokenisations."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    corpus = [" ".join(random.Random(n).choices(WORDS, k=30)) for n in range(200)]
    backend.train_from_iterator(
        [*corpus, *['{"name": "look", "arguments": {"where": "left"}}'] * 50],
        trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=list(tiny.SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=tiny.SPECIAL[0],
        eos_token=tiny.SPECIAL[2],
        additional_special_tokens=[tiny.SPECIAL[1]],
    )
    fast.chat_template = tiny.TEMPLATE_WITH_TOOLS
    return fast


TOKENIZER = trained_tokenizer()
END = TOKENIZER.eos_token_id


def new_chat() -> Chat:
    return Chat(Text(TOKENIZER), model="policy", eos_ids=frozenset([END]), tool_parser=None)


def request(messages: list[Any], **options: Any) -> ChatRequest:
    body = {"model": "policy", "messages": messages, **options}
    return parse_request(json.dumps(body).encode(), ChatRequest)


class Conversation:
    """A client, a policy that samples what a test says, and the record of its calls."""

    def __init__(self, chat: Chat, **options: Any) -> None:
        self.chat = chat
        self.options = options
        self.messages: list[Any] = []
        self.record: list[Triplet] = []

    def prompt(self) -> Prompt:
        return self.chat.prompt(request(self.messages, **self.options))

    def answer(self, sampled: list[int]) -> Any:
        """Sample these ids, and return the message that the client gets."""
        asked = request(self.messages, **self.options)
        prompt, reply = self.chat.prompt(asked), self.chat.reply(asked, self.prompt(), 0)
        content, calls = "", []
        for end in [*range(1, len(sampled), 3), len(sampled)]:
            piece, new = reply.advance(sampled[:end], final=end == len(sampled))
            content, calls = content + piece, calls + new
        self.chat.ended(asked, prompt, sampled, reply)
        self.record.append(
            Triplet(
                prompt=TripletPrompt(token_ids=prompt.token_ids),
                response=TripletResponse(token_ids=sampled, logprobs=[-1.0] * len(sampled)),
            )
        )
        message: Any = {"role": "assistant", "content": content}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return message

    def goes_on(self) -> bool:
        """Whether the next prompt begins with the ids of the last call."""
        last = self.record[-1]
        begun = last.prompt.token_ids + last.response.token_ids
        return self.prompt().token_ids[: len(begun)] == begun


def in_pieces(text: str, draw: random.Random) -> list[int]:
    """A tokenisation of a text, most often not the tokenizer's own: of pieces cut anywhere."""
    ids, at = list[int](), 0
    while at < len(text):
        end = at + draw.randint(1, 6)
        ids += TOKENIZER.encode(text[at:end], add_special_tokens=False)
        at = end
    return ids


def drawn_text(draw: random.Random) -> str:
    space = draw.choice([" ", "  ", "\n", "\n\n"])
    return (
        draw.choice(["", " ", "\n"]) + space.join(draw.choices(WORDS, k=draw.randint(1, 6))) + draw.choice(["", "\n"])
    )


def drawn_response(draw: random.Random, *, with_tools: bool) -> list[int]:
    match draw.randrange(4):
        case 0:  # any ids at all, halves of characters among them
            ids = [draw.randrange(3, len(TOKENIZER)) for _ in range(draw.randint(1, 12))]
        case 1 if with_tools:
            before = draw.choice(["", "I look.\n"])
            ids = in_pieces(before + '<tool_call>{"arguments": {"where":"left"},  "name":"look"}</tool_call>', draw)
        case _:
            ids = in_pieces(drawn_text(draw), draw)
    return ids if draw.random() < 0.1 else [*ids, END]


@settings(max_examples=60)
@given(seed=st.integers(0, 10**9), with_tools=st.booleans(), strips=st.booleans())
def test_every_turn_of_a_conversation_merges_to_one_trajectory(seed: int, with_tools: bool, strips: bool):
    draw = random.Random(seed)
    conversation = Conversation(new_chat(), **({"tools": [TOOL]} if with_tools else {}))
    conversation.messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": drawn_text(draw)}]
    for _ in range(draw.randint(2, 6)):
        message = conversation.answer(drawn_response(draw, with_tools=with_tools))
        if strips and message["content"]:
            message["content"] = message["content"].strip()
        conversation.messages.append(message)
        for call in message.get("tool_calls", []):
            conversation.messages.append({"role": "tool", "tool_call_id": call["id"], "content": drawn_text(draw)})
        if not message.get("tool_calls"):
            conversation.messages.append({"role": "user", "content": drawn_text(draw)})
    (trajectory,) = merge_triplets(conversation.record)
    sampled = [token for call in conversation.record for token in call.response.token_ids]
    assert [t for t, mine in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if mine] == sampled
    assert trajectory.token_ids == conversation.record[-1].prompt.token_ids + conversation.record[-1].response.token_ids


def test_the_test_samples_ids_that_the_tokenizer_would_not_choose():
    draw = random.Random(0)
    ids = [in_pieces(drawn_text(draw), draw) for _ in range(100)]
    others = sum(TOKENIZER.encode(TOKENIZER.decode(each), add_special_tokens=False) != each for each in ids)
    assert others > 50


def test_conversations_that_begin_alike_are_told_apart():
    chat, draw = new_chat(), random.Random(1)
    ones = [Conversation(chat) for _ in range(8)]
    for number, one in enumerate(ones):
        one.messages = [{"role": "user", "content": "Count."}]
        one.messages += [one.answer([*in_pieces(f"higher {number}", draw), END]), {"role": "user", "content": "On."}]
    assert all(one.goes_on() for one in ones)


@pytest.mark.parametrize("change", ["question", "answer", "inner space", "tools", "order", "system"])
def test_a_history_that_was_changed_is_written_by_the_template(change: str):
    conversation = Conversation(new_chat(), tools=[TOOL])
    conversation.messages = [{"role": "user", "content": "Where?"}]
    conversation.messages.append(conversation.answer([*in_pieces("left of  the jar", random.Random(2)), END]))
    conversation.messages.append({"role": "user", "content": "Sure?"})
    assert conversation.goes_on()
    match change:
        case "question":
            conversation.messages[0]["content"] += " "
        case "answer":
            conversation.messages[1]["content"] += "."
        case "inner space":
            conversation.messages[1]["content"] = "left of the jar"
        case "tools":
            conversation.options = {"tools": [{"type": "function", "function": {"name": "other"}}]}
        case "order":
            conversation.messages.insert(0, conversation.messages.pop())
        case _:
            conversation.messages.insert(0, {"role": "system", "content": "Be brief."})
    prompt = conversation.prompt()
    assert prompt.token_ids == TOKENIZER.encode(prompt.text, add_special_tokens=False)


def test_a_text_that_only_looks_like_the_end_of_a_turn_is_not_put_back():
    """The policy wrote the end's text with ordinary tokens: the template's text ends there, and what was sampled does not."""
    conversation = Conversation(new_chat())
    conversation.messages = [{"role": "user", "content": "Where?"}]
    ids = [each for letter in "left<|im_end|>right" for each in TOKENIZER.encode(letter, add_special_tokens=False)]
    conversation.messages += [conversation.answer([*ids, END]), {"role": "user", "content": "Sure?"}]
    prompt = conversation.prompt()
    assert prompt.token_ids == TOKENIZER.encode(prompt.text, add_special_tokens=False)


@pytest.mark.parametrize("cut", [{"stop": ["right"]}, {"stop_token_ids": [7]}])
def test_a_response_that_something_unseen_ended_is_not_put_back(cut: dict[str, Any]):
    conversation = Conversation(new_chat(), **cut)
    conversation.messages = [{"role": "user", "content": "Where?"}]
    conversation.messages.append(conversation.answer(in_pieces("left, right", random.Random(0))))
    conversation.messages.append({"role": "user", "content": "Sure?"})
    prompt = conversation.prompt()
    assert prompt.token_ids == TOKENIZER.encode(prompt.text, add_special_tokens=False)


def test_examples_in_a_prompt_are_not_taken_for_answers_and_stay_cached():
    conversation = Conversation(new_chat())
    conversation.messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2 + 2?"},
    ]
    assert conversation.prompt() is conversation.prompt()
