"""Chat completions and completions: prepare a request for recording, hide what was added to it, and assemble streams.

The module decides which fields to request from the upstream in addition to the agent's own, which to hide again in the
answer, and how the chunks of a stream become one answer. All other fields pass through unread. Pure functions of JSON
values.

Token ids have vLLM's form: with `return_token_ids` a chat answer has `prompt_token_ids`, and each of its choices
`token_ids`; in a stream the first chunk has the former and every chunk the latter. A completion has both in the choice.
`policy_versions`, beside `token_ids`, is Leyden's own: the version of the policy that sampled each token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

from leyden._lib.json import Json
from leyden.dialects.chat_reader import ChatReader, merge_fields
from leyden.dialects.encoding import dump
from leyden.dialects.fields import without

_OURS_IN_CHOICE = ("token_ids", "prompt_token_ids", "policy_versions")
"""Fields of a choice that come with token ids, and are hidden with them."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """Fields that the gateway requested and the agent did not, so that they are removed from the answer again. False in
    every field: the answer is passed on as it is.
    """

    token_ids: bool = False
    logprobs: bool = False
    usage: bool = False
    """The usage of a stream. Other answers have their usage without a request."""

    def __bool__(self) -> bool:
        return self.token_ids or self.logprobs or self.usage


def prepare(
    raw: bytes, request: Json, *, model: str, logprobs: bool | int | None, seed: int | None
) -> tuple[bytes, Hidden]:
    """Return the body for the upstream, and the fields to hide from its answer.

    raw, request: the agent's body, as bytes and parsed. Its bytes are kept if fields are only added.
    model: the upstream's name for the model.
    logprobs: the value that requests the log-probability of each sampled token and of no other; None: request no tokens
        at all.
    seed: used if the agent gave none.
    """
    added: Json = {}
    if logprobs is not None:
        if request.get("return_token_ids") is not True:
            added["return_token_ids"] = True
        wished = request.get("logprobs")
        if wished is None or wished is False:  # 0 is a request: a completion's `logprobs` is a number
            added["logprobs"] = logprobs
        options: Any = request.get("stream_options") or {}
        if request.get("stream") is True and isinstance(options, dict) and not cast(Json, options).get("include_usage"):
            added["stream_options"] = {**options, "include_usage": True}
    hidden = Hidden(
        token_ids="return_token_ids" in added, logprobs="logprobs" in added, usage="stream_options" in added
    )
    if seed is not None and request.get("seed") is None:
        added["seed"] = seed
    if request.get("model") != model:
        added["model"] = model
    return _with_fields(raw, request, added), hidden


def echoes(request: Json) -> bool:
    """Return whether the request is a completion that shall begin with its prompt (`echo`). vLLM leaves the prompt out
    of an answer with token ids.
    """
    return "prompt" in request and bool(request.get("echo"))


def _with_fields(raw: bytes, request: Json, added: Json) -> bytes:
    """Return the request's body with fields added. The original bytes are kept if no field is replaced; a body in
    another encoding than UTF-8 is written anew.
    """
    if not added:
        return raw
    body = raw.lstrip()
    if not request or not body.startswith(b"{") or any(name in request for name in added):
        return dump({**request, **added})
    return dump(added)[:-1] + b"," + body[1:]


def usage(n_prompt: int, n_response: int) -> Json:
    """Return the token counts of an answer."""
    return {"prompt_tokens": n_prompt, "completion_tokens": n_response, "total_tokens": n_prompt + n_response}


def visible(answer: Json, hidden: Hidden) -> Json | None:
    """Return a copy of `answer` (whole, or one chunk of a stream) without the hidden fields; None for a chunk that
    holds nothing but a hidden usage.
    """
    shown = dict(answer)
    if hidden.token_ids:
        shown.pop("prompt_token_ids", None)
    choices: Any = answer.get("choices")
    usage: Any = answer.get("usage")
    if hidden.usage and "usage" in answer and (usage is None or isinstance(usage, dict)):
        del shown["usage"]
        if usage and not choices:
            return None
    if isinstance(choices, list) and (hidden.token_ids or hidden.logprobs):
        shown["choices"] = [_visible_choice(choice, hidden) for choice in cast(list[Any], choices)]
    return shown


def _visible_choice(choice: Any, hidden: Hidden) -> Any:
    """Return a choice without token ids and log-probabilities that the client did not request."""
    if not isinstance(choice, dict):
        return choice
    shown = dict(cast(Json, choice))
    if hidden.token_ids:
        for name in _OURS_IN_CHOICE:
            shown.pop(name, None)
    if hidden.logprobs and "logprobs" in shown:
        shown["logprobs"] = None
    return shown


def chunks_of(answer: Json, *, usage: bool) -> list[Json]:
    """Return a whole answer as the chunks of a stream: for each choice its content in one chunk and its end in another,
    then the usage.

    usage: whether a last chunk with the usage is wanted.
    Raise TypeError, KeyError or AttributeError for a body that is no answer.
    """
    head = {name: value for name, value in answer.items() if name not in ("choices", "usage", "prompt_token_ids")}
    if head.get("object") == "chat.completion":
        head["object"] = "chat.completion.chunk"
    pieces = [piece for choice in answer["choices"] for piece in _pieces(choice)]
    chunks: list[Json] = [{**head, "choices": [piece]} for piece in pieces]
    if chunks and "prompt_token_ids" in answer:
        chunks[0]["prompt_token_ids"] = answer["prompt_token_ids"]
    return [*chunks, {**head, "choices": [], "usage": answer["usage"]}] if usage and answer.get("usage") else chunks


def _pieces(choice: Json) -> list[Json]:
    """Return a complete choice as the choices of a stream's chunks: its message as one delta, then the end with the
    finish reason. A text completion's choice is returned as it is.
    """
    if "message" not in choice:  # a completion's text
        return [choice]
    delta = dict(choice["message"])
    if delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
    rest = {name: value for name, value in choice.items() if name != "message"}
    end: Json = {
        "index": choice.get("index", 0),
        "delta": {},
        "logprobs": None,
        "finish_reason": choice.get("finish_reason"),
    }
    return [{**rest, "delta": delta, "finish_reason": None}, end]


class StreamAssembler:
    """Assembles the chunks of one stream into the answer that would have come without streaming."""

    def __init__(self) -> None:
        self.reader = ChatReader()
        """Reads the chunks, and knows what of the last one could not be read."""
        self._head: Json = {}
        """The fields beside the choices."""
        self._choices: dict[int, Json] = {}
        """The choices so far, by index. Their tool calls are with the reader."""
        self.error: str | None = None
        """The upstream's error, as JSON, if the stream contained one."""

    @property
    def finished(self) -> bool:
        """Whether every choice that began has its finish reason."""
        return bool(self._choices) and all(choice.get("finish_reason") for choice in self._choices.values())

    def feed(self, chunk: Any) -> Json:
        """Add one chunk, and return it in OpenAI's form. `reader.problems` says what cannot be read and is left out."""
        read = self.reader.chunk(chunk)
        if read.get("error"):
            self.error = json.dumps(read["error"], ensure_ascii=False)
            return read
        for name, value in read.items():
            if name != "choices" and value is not None:
                self._head.setdefault(name, value)
        if read.get("usage") is not None:
            # With `continuous_usage_stats` every chunk has a usage; the last one counts.
            self._head["usage"] = read["usage"]
        for part in read.get("choices") or ():
            self._feed_choice(part)
        return read

    def _feed_choice(self, part: Json) -> None:
        """Merge one choice of a chunk into the assembled one: texts, token ids and log-probabilities are appended."""
        choice = self._choices.setdefault(part["index"], {"finish_reason": None})
        if part.get("finish_reason"):
            choice["finish_reason"] = part["finish_reason"]
        if (delta := part.get("delta")) is not None:
            read = without(delta, ("tool_calls",)) if "tool_calls" in delta else delta
            merge_fields(choice.setdefault("message", {}), read)
        if part.get("text") is not None:
            choice["text"] = choice.get("text", "") + part["text"]
        for name in ("token_ids", "policy_versions"):
            if part.get(name) is not None:
                choice.setdefault(name, []).extend(part[name])
        if part.get("prompt_token_ids") is not None:
            choice.setdefault("prompt_token_ids", part["prompt_token_ids"])
        if part.get("logprobs") is not None:
            logprobs: Json = choice.setdefault("logprobs", {})
            for name, values in part["logprobs"].items():
                if isinstance(values, list):
                    logprobs.setdefault(name, []).extend(values)

    def answer(self) -> Json:
        """Return the answer as far as the stream has gone, in the form of an unstreamed answer."""
        choices: list[Json] = []
        for index, choice in sorted(self._choices.items()):
            calls = sorted(self.reader.calls(index), key=lambda call: (call.index, call.number))
            made: Json = {"tool_calls": [call.as_json() for call in calls if not call.legacy]}
            made |= {"function_call": call.as_json() for call in calls if call.legacy}  # noqa: B035 -- there is one
            if not made["tool_calls"]:
                del made["tool_calls"]
            message = {"message": {**choice["message"], **made}} if made else {}
            choices.append({"index": index, **choice, **message})
        return {**self._head, "choices": choices}
