"""Render conversations by a model's chat template: prompts with tools, responses with tool calls.

`Chat` renders a request to a prompt, chooses the parser of tool calls, and keeps responses, so that the next prompt
continues their exact ids. `PartialReply` is one response while it grows. The module knows a tokenizer, and no model, no
decoder and no HTTP.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any, Literal, cast

from leyden._lib.host.http import Refusal
from leyden._lib.json import Json
from leyden.engine.refusal import bad_request
from leyden.engine.text import StreamedText, Text
from leyden.engine.tools import PARSERS, Reader, Schemas, ToolCall, ToolParser, parse
from leyden.engine.turns import TurnKey, Turns, turn_keys
from leyden.engine.wire import ChatRequest, CompletionRequest

logger = logging.getLogger("leyden.engine")

_REMEMBERED_PROMPTS = 4096
"""The number of prompts that are cached."""
_REMEMBERED_LENGTH = 8192
"""The most characters of a prompt that is cached. Longer prompts are seldom repeated, and would fill the memory."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens that the policy continues."""

    token_ids: list[int]
    """Shape (P,). Do not change the list, because the prompt may be cached."""
    text: str = ""
    """The conversation as the chat template wrote it; empty for a text completion."""


class Chat:
    """A tokenizer's chat template, with a cache of recent prompts, because agents repeat theirs."""

    def __init__(self, text: Text, *, model: str, eos_ids: frozenset[int], tool_parser: str | None) -> None:
        """model: the model's name, for errors.
        eos_ids: the tokens that end a turn.
        tool_parser: the name of a parser of tool calls; None takes the first that can read the calls that the template
            writes.
        """
        self._text = text
        self._model = model
        self._tool_parser = tool_parser
        self._prompts: OrderedDict[str, Prompt] = OrderedDict()
        self._ends = {token: text.piece(token)[0] for token in eos_ids}
        self._turns = Turns(list(self._ends.values()))
        self._nonce = secrets.token_hex(4)
        self._mark = re.compile(f"leyden{self._nonce}x[0-9]+x")
        self._left_out_beside_calls = False
        if unstopped := self._unstopped_end():
            logger.warning(
                "the chat template of the model %r ends an answer with %s, at which sampling does not stop (it stops at %s): a "
                "model that follows the template answers up to max_tokens. Add the token to eos_token_id in the model's "
                "generation_config.json, make it the tokenizer's eos_token, or send it in stop_token_ids",
                model,
                unstopped,
                ", ".join(f"{text!r} ({token})" for token, text in self._ends.items()) or "no token",
            )

        if left_out := self._left_out():
            logger.warning(
                "the chat template of the model %r writes the names of tools, and leaves out: %s. The model does not see them; "
                "save the tokenizer with a template that renders the whole function",
                model,
                ", ".join(left_out),
            )

    def prompt(self, request: ChatRequest) -> Prompt:
        """Return the prompt of a conversation, ready for the assistant's turn.

        Raise Refusal if the template cannot express the request.
        """
        if not getattr(self._text.tokenizer, "chat_template", None):
            raise bad_request(
                f"the tokenizer of the model {self._model!r} has no chat template; prompt it by /v1/completions with a few "
                "examples and stop, or give the engine "
                "chat_template='chatml', 'gemma' or a file with a Jinja template",
                param="messages",
                code="no_chat_template",
            )
        options = request.template_options
        key = json.dumps([request.messages, request.tools, options])
        keys = [each for each in turn_keys(request.messages, request.tools) if each in self._turns]
        prompt = self._prompts.get(key)
        if prompt is not None and not keys:
            self._check_parser(request)
            self._prompts.move_to_end(key)
            return prompt
        text = self._written(request.messages, request.tools, options)
        self._check_parser(request)
        if keys:
            return self._continued(text, keys, request.schemas)
        prompt = Prompt(self._text.encode(text, special=False), text)
        if len(key) <= _REMEMBERED_LENGTH:
            self._prompts[key] = prompt
            while len(self._prompts) > _REMEMBERED_PROMPTS:
                self._prompts.popitem(last=False)
        return prompt

    def reply(self, request: CompletionRequest, prompt: Prompt, index: int) -> PartialReply:
        """Return the reader of one response.

        index: the response's index among the request's choices.
        """
        parser = self.parser
        if parser is None or not (isinstance(request, ChatRequest) and request.may_call):
            return PartialReply(StreamedText(self._text, request.stops), None)
        kept = self._kept

        def new_id(calls: str) -> str:
            """Return a new id for the last of the response's `calls`: a random one or, with a seed, one derived from
            the request and these calls.
            """
            length = parser.call_id_length
            if request.seed is None:
                digits = secrets.token_hex(12)
            else:
                known = json.dumps([request.seed, index, prompt.token_ids, calls])
                digits = blake2b(known.encode(), digest_size=12).hexdigest()
            return f"call_{digits}" if length is None else digits[:length]

        return PartialReply(StreamedText(self._text, request.stops, kept), Reader(parser, request.schemas), new_id)

    def ended(
        self, request: CompletionRequest, prompt: Prompt, response_ids: Sequence[int], reply: PartialReply
    ) -> None:
        """Keep the ids of a response that has ended, so that a later prompt that contains its text continues them.

        Do nothing for a text completion, or if the response may have ended at a text that the client did not receive,
        such as a stop string.
        """
        end = self._ends.get(response_ids[-1], "")
        if not isinstance(request, ChatRequest) or not (end or not (request.stops or request.stop_token_ids)):
            return
        answer: Json = {"role": "assistant", "content": reply.content}
        if reply.call_ids:
            answer["tool_calls"] = [{"id": call_id} for call_id in reply.call_ids]
        *earlier, key = turn_keys([*request.messages, answer], request.tools)
        before = earlier[-1] if earlier else None
        said = reply.content, reply.calls
        self._turns.add(key, prompt.text, prompt.token_ids, response_ids, said, end, before=before)

    def has_call(self, ids: Sequence[int], schemas: Schemas) -> bool:
        """Return whether the last of `ids`, a response so far, completes a tool call."""
        parser = self.parser
        assert parser is not None, "the request was checked"
        # Only the end is decoded at first. Each token holds at least one byte, and up to four
        # tokens may make one character.
        tail = ids[-(len(parser.end) + 4) :]
        if parser.end not in self._text.decode(tail, self._kept):
            return False
        return bool(parse(self._text.decode(ids, self._kept), parser, schemas)[1])

    def _continued(self, text: str, keys: list[TurnKey], schemas: Schemas) -> Prompt:
        """Return the prompt for a text. Its beginning gets the ids of an earlier turn that were sampled, if they are
        proven to be that text.

        keys: the keys of earlier responses that are kept.
        """
        parser = self.parser

        def read(turn: str) -> tuple[str, list[ToolCall]]:
            assert parser is not None, "a turn that called tools was read by a parser"
            return parse(turn, parser, schemas)

        known = self._turns.longest(text, keys, read)
        if known is None:
            return Prompt(self._text.encode(text, special=False), text)
        token_ids, end = known
        return Prompt([*token_ids, *self._text.encode(text[end:], special=False)], text)

    # ---- what the template can express ----------------------------------------------------------

    def _unstopped_end(self) -> str:
        """Return what the template writes at the end of an answer; empty if a response stops there, or if there is no
        template that could tell.
        """
        answer = {"role": "assistant", "content": f"leyden{self._nonce}"}
        known = {*self._text.tokenizer.added_tokens_decoder, *self._ends}
        found = ""
        # Some templates end the last answer of a conversation in another way than earlier ones.
        for more in ([], [_QUESTION]):
            try:
                text = self._render([_QUESTION, answer, *more], [], add_generation_prompt=False)
            except Exception:  # noqa: BLE001 -- a template may raise any error for messages that it does not accept
                return ""
            _, answered, end = text.partition(answer["content"])
            if not answered:
                return ""
            token = next((each for each in self._text.encode(end, special=False) if each in known), None)
            if token in self._ends:
                return ""
            found = found or (
                f"{end!r}, which is no token" if token is None else f"{self._text.piece(token)[0]!r} ({token})"
            )
        return found

    def _left_out(self) -> list[str]:
        """Return what the template leaves out of tools whose names it writes. A template without tools leaves out
        nothing here, because requests with tools are refused.
        """
        try:
            text = self._render([_QUESTION], [_TOLD_TOOL])
        except Exception:  # noqa: BLE001 -- a template may raise any error for messages that it does not accept
            return []
        if _TOLD_TOOL["function"]["name"] not in text:
            return []
        return [what for what, word in _TOLD.items() if word not in text]

    @cached_property
    def parser(self) -> ToolParser | None:
        """The parser of tool calls: the named one, or the first that can read the calls that the template writes; None
        if none can.
        """
        if self._tool_parser is not None:
            return PARSERS[self._tool_parser]
        for parser in PARSERS.values():
            if parse(self._probed_turn, parser, _PROBE_SCHEMAS)[1] == [_PROBE]:
                return parser
        return None

    @cached_property
    def _kept(self) -> frozenset[int]:
        """The special tokens that must stay in a response's text, because tool calls consist of them."""
        tokens = () if self.parser is None else self.parser.tokens
        known: dict[int, Any] = self._text.tokenizer.added_tokens_decoder
        return frozenset(number for number, token in known.items() if token.special and token.content in tokens)

    @cached_property
    def _probed_turn(self) -> str:
        """The template's text of a turn that calls a tool; empty if it drops the call or the tool's answer."""
        begun = self._attempt([_QUESTION], add_generation_prompt=True)
        whole = self._attempt([_QUESTION, _PROBE_CALL, _PROBE_RESULT], add_generation_prompt=True)
        start = len(begun) if whole.startswith(begun) else whole.find(_QUESTION["content"]) + len(_QUESTION["content"])
        turn, result, _ = whole[start:].partition(_PROBE_RESULT["content"])
        if not result or _PROBE.name not in turn:
            return ""
        return turn[: min((at for end in self._ends.values() if (at := turn.find(end)) >= 0), default=len(turn))]

    def _attempt(self, messages: list[Json], **options: Any) -> str:
        """Return the template's text of messages, with a tool; empty if the template refuses them."""
        try:
            return self._render(messages, [_PROBE_TOOL], **options)
        except Exception:  # noqa: BLE001 -- a template may raise any error for messages that it does not accept
            return ""

    def _check_parser(self, request: ChatRequest) -> None:
        """Raise Refusal for a request whose tool calls could not be read."""
        if request.may_call and self.parser is None:
            raise bad_request(
                f"the chat template of the model {self._model!r} writes tool calls in a form that is not known here; "
                f"name the form with the engine's option tool_parser (known: {', '.join(PARSERS)}), "
                f"or send tool_choice='none'",
                param="tools",
                code="no_tool_parser",
            )

    def _written(self, messages: list[Json], tools: list[Json], options: Mapping[str, Any]) -> str:
        """Return the template's text of a conversation, which is proven to hold every text of it.

        A template may read a content as a list of parts where it gets a string. It then writes nothing of it, or raises
        an error. Such contents are given as parts.
        """
        given, refused, text, dropped = messages, None, "", list[_Text]()
        try:
            text, dropped = self._proven(given, tools, options)
        except Exception as error:  # noqa: BLE001 -- a template may raise any error for messages that it does not accept
            refused = error
        unread = {each.message for each in dropped if each.kind == "content"}
        if refused or unread:
            given = [
                {**message, "content": [{"type": "text", "text": message["content"]}]}
                if refused or index in unread
                else message
                for index, message in enumerate(messages)
            ]
            try:
                text, dropped = self._proven(given, tools, options)
            except Exception as error:
                if refused:
                    raise bad_request(f"the chat template refuses the messages: {refused}", param="messages") from error
        # Templates of Llama 3.1 and Mistral leave out what an answer says beside its calls, as in
        # the training of these models.
        beside = [each for each in dropped if each.kind == "content" and messages[each.message].get("tool_calls")]
        if lost := [each for each in dropped if each not in beside]:
            raise self._drops(lost[0], messages)
        if beside and not self._left_out_beside_calls:
            self._left_out_beside_calls = True
            logger.warning(
                "the chat template of the model %r leaves out what an answer says beside its tool calls, so later turns do not "
                "have it",
                self._model,
            )
        return text

    def _proven(self, messages: list[Json], tools: list[Json], options: Mapping[str, Any]) -> tuple[str, list[_Text]]:
        """Return the template's text of a conversation, and the texts of the conversation that the template does not
        write.

        Each text gets a mark of its own, at its end and, unless the assistant said it, at its beginning. All marks must
        be in the template's text. Templates that trim, quote or escape a text keep its marks, and so do those that drop
        the reasoning before an earlier answer.
        A text that is written as it is between its marks must be there without them, too.
        """
        marked: list[_Text] = []
        contents: list[tuple[str, str, _Text]] = []
        whole = f"leyden{self._nonce}w"

        def mark(text: str, kind: _Kind, message: int, *, also_before: bool = False) -> str:
            own = [f"leyden{self._nonce}x{len(marked) + number}x" for number in range(1 + also_before)]
            marked.extend(_Text(each, kind, message) for each in own)
            return "".join([*own[1:], text, own[0]])

        def marked_message(index: int, message: Json) -> Json:
            content: str | list[Json] = message["content"]
            before = message["role"] != "assistant"
            text = str(content[0]["text"]) if isinstance(content, list) else content
            if text.strip():
                given, text = text, mark(text, "content", index, also_before=before)
                if before:
                    contents.append((text, given.strip(), marked[-1]))
                # A template that writes a part as it is, not its text, writes this key with it.
                content = [{"type": "text", "text": text, whole: ""}] if isinstance(content, list) else text
            calls = [
                {**call, "function": _marked_call(call["function"], partial(mark, kind="call", message=index))}
                for call in cast(list[Json], message.get("tool_calls", []))
            ]
            return {**message, "content": content, **({"tool_calls": calls} if calls else {})}

        def marked_tool(tool: Json) -> Json:
            return {**tool, "function": {**tool["function"], "name": mark(tool["function"]["name"], "tool", -1)}}

        text = self._render(
            [marked_message(index, message) for index, message in enumerate(messages)],
            list(map(marked_tool, tools)),
            options,
        )
        plain = self._render(messages, tools, options)
        # Each search begins where the one before it ended, because a search of the whole text for
        # each message would take time that grows with the square of their number.
        lost: list[_Text] = []
        start = 0
        for marked_text, given, each in contents:
            if (at := plain.find(given, start)) >= 0:
                start = at + len(given)
            elif given not in plain and marked_text in text:
                lost.append(each)
        written = set(self._mark.findall(text))
        has_parts = whole in text
        dropped = [each for each in marked if each.mark not in written or (has_parts and each.kind == "content")]
        return plain, [*dropped, *lost]

    def _drops(self, text: _Text, messages: list[Json]) -> Refusal:
        """Return the refusal of a conversation of which the template drops a text."""
        template = f"the chat template of the model {self._model!r}"
        if text.kind == "tool":
            return bad_request(
                f"{template} has no place for tools, so the model cannot know of them; take a model that was trained "
                "to call tools, give the engine chat_template=FILE with a template that renders 'tools', or send none",
                param="tools",
                code="template_without_tools",
            )
        message = messages[text.message]
        if text.kind == "call" or message["role"] == "tool":
            return bad_request(
                f"{template} drops tool calls or their results; save the tokenizer with a template that renders "
                "'tool_calls' and the role 'tool'",
                param="messages",
                code="template_without_tool_calls",
            )
        return bad_request(
            f"{template} drops the content of messages[{text.message}], of the role {message['role']!r}, so the "
            "model would not see it; save the tokenizer with a template that renders it, or send the message without it",
            param="messages",
            code="template_drops_content",
        )

    def _render(
        self,
        messages: list[Json],
        tools: list[Json],
        options: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of the chat template for a conversation.

        options: further variables.
        """
        text: Any = self._text.tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **(options or {}),
        )
        return cast(str, text)


_Kind = Literal["content", "call", "tool"]


@dataclass(frozen=True, slots=True)
class _Text:
    """A text of a conversation, and the mark by which it is found in the prompt."""

    mark: str
    kind: _Kind
    message: int
    """The index of its message; -1 for a tool."""


def _marked_call(function: Json, mark: Callable[[str], str]) -> Json:
    argument = mark("")
    return {**function, "name": mark(function["name"]), "arguments": {**function["arguments"], argument: argument}}


class PartialReply:
    """One response while it grows: its content, and the tools that it calls."""

    def __init__(self, text: StreamedText, reader: Reader | None, new_id: Callable[[str], str] = str) -> None:
        """text: decodes the response.
        reader: finds tool calls in the text; None: it may call no tool.
        new_id: returns an id for a call, given all calls so far as JSON.
        """
        self._text = text
        self._reader = reader
        self._new_id = new_id
        self.content = ""
        """The content so far, without the tool calls."""
        self.calls: list[ToolCall] = []
        self.call_ids: list[str] = []
        """The id of each of `calls`."""

    def advance(self, ids: Sequence[int], *, final: bool) -> tuple[str, list[Json]]:
        """Return the content and the calls, in OpenAI's wire format, that are new since the last call and that no later
        token can change.

        ids: all ids of the response so far.
        final: whether the response has ended.
        """
        piece = self._text.advance(ids, final=final)
        if self._reader is None:
            self.content += piece
            return piece, []
        piece, calls = self._reader.feed(piece, final=final)
        self.content += piece
        wired: list[Json] = []
        for call in calls:
            self.calls.append(call)
            self.call_ids.append(self._new_id(json.dumps([[call.name, call.arguments] for call in self.calls])))
            function = {"name": call.name, "arguments": call.arguments_text}
            wired.append({"id": self.call_ids[-1], "type": "function", "function": function})
        return piece, wired


_PROBE = ToolCall("leyden_probe", {"word": "sesame"})
_PROBE_PARAMETERS: Json = {
    "type": "object",
    "properties": {"word": {"type": "string", "description": "A word."}},
    "required": ["word"],
}
_PROBE_SCHEMAS: Schemas = {_PROBE.name: _PROBE_PARAMETERS}
_PROBE_TOOL: Json = {
    "type": "function",
    "function": {"name": _PROBE.name, "description": "A probe.", "parameters": _PROBE_PARAMETERS},
}
_TOLD = {
    "the descriptions of tools": "sesame-tool",
    "the names of parameters": "sesame_parameter",
    "the descriptions of parameters": "sesame-parameter",
    "the names of fields within parameters": "sesame_field",
    "the descriptions of fields within parameters": "sesame-field",
}
"""Words by which the parts of a tool are found in the template's text."""
_TOLD_FIELD: Json = {"type": "string", "description": _TOLD["the descriptions of fields within parameters"]}
_TOLD_PARAMETER: Json = {
    "type": "object",
    "description": _TOLD["the descriptions of parameters"],
    "properties": {_TOLD["the names of fields within parameters"]: _TOLD_FIELD},
}
_TOLD_TOOL: Json = {
    "type": "function",
    "function": {
        "name": "leyden_told",
        "description": _TOLD["the descriptions of tools"],
        "parameters": {"type": "object", "properties": {_TOLD["the names of parameters"]: _TOLD_PARAMETER}},
    },
}
_PROBE_ID = "leyden000"
"""Nine letters and digits, which Mistral's template requires."""
_QUESTION: Json = {"role": "user", "content": "Which tools are there?"}
_PROBE_CALL: Json = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": _PROBE_ID, "type": "function", "function": {"name": _PROBE.name, "arguments": _PROBE.arguments}}
    ],
}
_PROBE_RESULT: Json = {"role": "tool", "tool_call_id": _PROBE_ID, "name": _PROBE.name, "content": "The cave is open."}
