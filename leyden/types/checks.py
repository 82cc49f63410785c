"""The checks that a record must pass before a store takes it, beyond its types.

Every way in calls them where the record is given, so that a record which was accepted is not refused later: stores,
sessions, the command line and importers. PostgreSQL takes no NUL in a text, and no long text in an index; SQLite takes
no number above 2**63. Control characters would mislead a reader of messages and paths, and JSON that is nested too
deeply cannot be read again.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import re
from collections.abc import Collection, Mapping
from typing import Any, Final, NoReturn, cast

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, from_json, to_json

from leyden._lib.numbers import exact_number
from leyden._lib.text import shown
from leyden.errors import ConfigError
from leyden.types import semconv
from leyden.types.feedback import Feedback, feedback_fault
from leyden.types.live import LiveRollout
from leyden.types.release import AuditRecord, Release
from leyden.types.resources import Label, ResourcesUpdate
from leyden.types.span import Span

MAX_ID_LENGTH: Final = 200
"""The most characters of an id or a name."""
MAX_JSON_DEPTH: Final = 128
"""The most levels of lists and objects in one JSON value.

Parsers stop at 200 levels, of which a reply of the store needs some for itself.
"""
MAX_JSON_DIGITS: Final = 4300
"""The most digits of a whole number, as many as Python parses."""
_HIGHEST: Final = 2**53
"""The highest sequence id that a caller may give. The counter continues from there, and must not overflow."""
_HIGHEST_WHOLE: Final = 10**MAX_JSON_DIGITS - 1
_SERIALIZABLE_DEPTH: Final = 255
"""The most levels that `to_json` writes."""
_OWN_PREFIX: Final = "leyden."
_OWN_METADATA: Final = (semconv.REPLAY_FROM, semconv.SAMPLING_KEY)
"""The names of Leyden's own that a caller may give a rollout: it repeats another one, or samples like it."""
_WHY_LENGTH: Final = 10_000
"""The most characters of a reason in the audit log."""
_STRING: Final = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_LONG_NUMBER: Final = re.compile(rf"(?<![0-9])[0-9]{{{MAX_JSON_DIGITS + 1}}}")
_SAMPLED: Final = 64
"""Every 64th character of a text is looked at for long numbers, which is 50 times as fast as a search for them. A long
number fills that many samples in a row:"""
_LONG_IN_SAMPLES: Final = re.compile(rf"[0-9]{{{(MAX_JSON_DIGITS + 1) // _SAMPLED},}}")


def check_id(what: str, value: str | None) -> None:
    """Raise ConfigError for an id that no store takes. None stands for an id that the store makes.

    what: what the message calls the id, such as "worker_id".
    """
    if value is None:
        return
    if not isinstance(cast(object, value), str):
        raise ConfigError(f"{what} is {shown(value)}; give a text")
    if not (value.isprintable() and 0 < len(value) <= MAX_ID_LENGTH):
        written = repr(value) if len(value) <= MAX_ID_LENGTH else f"{value[:20]!r}... ({len(value)} characters)"
        raise ConfigError(f"{what} {written} must have 1 to {MAX_ID_LENGTH} printable characters")


def check_attempt_id(value: str | None) -> None:
    """Raise ConfigError for an id that a new attempt cannot have, such as "latest"."""
    check_id("attempt_id", value)
    if value == "latest":
        raise ConfigError("attempt_id 'latest' stands for a rollout's newest attempt; choose another")


def check_time(what: str, seconds: float) -> None:
    """Raise ConfigError unless the time is finite."""
    if not math.isfinite(seconds):
        raise ConfigError(f"{what} {seconds!r} must be a finite number of Unix seconds")


def json_text(value: Any, what: str) -> str:
    """Return `value` as JSON that every store can write and read again: it is read as what `json_value` returns.

    what: what the message calls the value, such as "the input of a rollout".
    Raise ConfigError as `json_value` does.
    """
    try:
        text = typed_json_text(value, what)
        exact = bool(from_json(text) == value)
    except Exception:  # noqa: BLE001 -- no JSON, or a value of which `==` fails
        text, exact = "", False
    # pydantic writes dates, bytes, sets and the keys of any type, too, and they are read as others.
    return text if exact else typed_json_text(json_value(value, what), what)


def typed_json_text(value: Any, what: str) -> str:
    """Return as JSON a value of which a model has checked that it has only types of JSON, in three fifths of the time
    of `json_text`.

    what: what the message calls the value, such as "the attributes of a span".
    Raise ConfigError for a value that is not JSON (NaN and infinity are not), for one that is nested deeper than
    `MAX_JSON_DEPTH`, and for a number of more than `MAX_JSON_DIGITS` digits.
    """
    try:
        text = to_json(value, fallback=exact_number).decode()
    except PydanticSerializationError as error:
        try:  # a lone surrogate is no UTF-8, and still a JSON string
            text = json.dumps(value, allow_nan=False, default=_fields_of)
        except RecursionError:
            raise _too_deep(what) from None
        except (TypeError, ValueError):
            json_value(value, what)  # raises the error that names the part
            raise ConfigError(f"{what} must be a JSON value: {error}") from None
        if _depth(text) > MAX_JSON_DEPTH:
            raise _too_deep(what) from None
    else:
        # Most texts hold no further bracket, which is found thirty times as fast as brackets are counted.
        nested = "[" in text or text.find("{", 1) > 0
        if nested and text.count("[") + text.count("{") > MAX_JSON_DEPTH and _is_too_deep(value):
            raise _too_deep(what)
    if len(text) > MAX_JSON_DIGITS and _has_long_number(text):
        raise ConfigError(f"{what} has a number of more than {MAX_JSON_DIGITS:,} digits; give it as a string")
    # One character is found fifty times as fast as a word.
    if ("N" in text and "NaN" in text) or ("I" in text and "Infinity" in text):  # perhaps inside a string
        try:
            json.loads(text, parse_constant=_refuse_constant)
        except _Constant as constant:
            json_value(value, what)  # raises the error that names the part
            raise ConfigError(f"{what} must be a JSON value, which the number {constant} is not") from None
    return text


def _has_long_number(text: str) -> bool:
    for found in _LONG_IN_SAMPLES.finditer(text[::_SAMPLED]):
        start, end = (found.start() - 1) * _SAMPLED, (found.end() + 1) * _SAMPLED
        if _LONG_NUMBER.search(text, max(0, start), end):
            return _LONG_NUMBER.search(_STRING.sub('""', text)) is not None  # not inside a string
    return False


def check_metadata(metadata: Mapping[str, Any], *, allowed: Collection[str] = _OWN_METADATA) -> None:
    """Raise ConfigError for a rollout's metadata with a name that is Leyden's own.

    allowed: the names of Leyden's that the caller may set.
    """
    for name in metadata:
        if name.startswith(_OWN_PREFIX) and name not in allowed:
            raise ConfigError(
                f"the metadata of a rollout has {name!r}, and names with {_OWN_PREFIX!r} are Leyden's own; choose another"
            )


def json_value(value: Any, what: str) -> Any:
    """Return `value` as JSON has it, with a number of any library as that number, a tuple as a list, and a model or a
    dataclass as its fields. A value that is JSON already is returned itself.

    what: what the message calls the value, such as "task 1".
    Raise ConfigError, which names the part, for anything that an agent would get back as another value or not at all:
    NaN, dates, bytes, sets, keys that are no strings, a value that contains itself or is nested deeper than
    `MAX_JSON_DEPTH`.
    """
    try:  # most values are small and JSON already, which takes a fifth of the time to find out this way
        raw = to_json(value, inf_nan_mode="null")
        small = len(raw) <= MAX_JSON_DIGITS and raw.count(b"[") + raw.count(b"{") <= MAX_JSON_DEPTH
        if small and from_json(raw) == value:
            return value
    except Exception:  # noqa: BLE001 -- no JSON, or a value of which `==` fails
        pass
    return _json_part(value, what, (), 0)


def _json_part(value: Any, what: str, path: tuple[str | int, ...], depth: int) -> Any:
    if value is None or isinstance(value, str) or value is True or value is False:
        return value
    if depth >= MAX_JSON_DEPTH:
        raise _too_deep(what)
    if isinstance(value, BaseModel):
        value = value.model_dump()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    given: Any = value
    if isinstance(value, Mapping):
        parts: dict[str, Any] = {}
        for key, part in given.items():
            if not isinstance(key, str):
                raise ConfigError(f"{_named(what, path)} has the key {shown(key)}; keys of JSON objects are strings")
            parts[key] = _json_part(part, what, (*path, key), depth + 1)
        same = type(cast(object, value)) is dict and all(part is given[key] for key, part in parts.items())
        return given if same else parts
    if isinstance(value, list | tuple):
        items = [_json_part(part, what, (*path, index), depth + 1) for index, part in enumerate(given)]
        same = type(cast(object, value)) is list and all(map(operator.is_, items, given))
        return given if same else items
    try:
        number = exact_number(value)
    except ValueError as error:
        fault = str(error).replace("which is no number", "which JSON does not have")
        raise ConfigError(f"{_named(what, path)} {fault}; {_remedy(value)}") from None
    if isinstance(number, int) and abs(number) > _HIGHEST_WHOLE:
        raise ConfigError(
            f"{_named(what, path)} is a number of more than {MAX_JSON_DIGITS:,} digits; give it as a string"
        )
    return value if number is value or type(value) in (int, float) else number


def _named(what: str, path: tuple[str | int, ...]) -> str:
    """Return what a message calls a part: "task 1, field messages[0].content"."""
    where = "".join(f"[{part!r}]" if isinstance(part, int) or not part.isidentifier() else f".{part}" for part in path)
    return f"{what}, field {where.removeprefix('.')}" if path else what


def _remedy(value: Any) -> str:
    if isinstance(value, float) or type(value).__name__ in ("NaTType", "NAType"):
        return "leave the field out, or give None"
    if hasattr(value, "isoformat"):
        return "give its isoformat()"
    if isinstance(value, bytes | bytearray | memoryview):
        return "give a text, such as its base64"
    if isinstance(value, set | frozenset):
        return "give a sorted list"
    if hasattr(value, "tolist"):
        return "give its tolist()"
    return "JSON has None, bools, numbers, texts, lists and dicts"


def check_span(span: Span) -> None:
    """Raise ConfigError for a span whose ids or numbers no store accepts."""
    of = span.__dict__  # see `rows.span_values`
    span_id, trace_id, parent_id = of["span_id"], of["trace_id"], of["parent_id"]
    all_ids = span_id + trace_id if parent_id is None else span_id + trace_id + parent_id
    if not (span_id and trace_id and parent_id != "" and len(all_ids) <= MAX_ID_LENGTH and all_ids.isprintable()):
        # The check above is stricter, because it limits the ids' length together. Find the bad one,
        # if any.
        check_id("span_id", span_id)
        check_id("trace_id", trace_id)
        check_id("parent_id", parent_id)
    if of["sequence_id"] > _HIGHEST:
        raise ConfigError(
            f"sequence_id {span.sequence_id} of span {span.span_id!r} is above {_HIGHEST}; give 0 for the next one"
        )


def check_feedback(feedback: Feedback) -> str:
    """Return the value of feedback as JSON. Raise ConfigError for feedback that no store takes."""
    check_id("feedback_id", feedback.feedback_id)
    check_id("rollout_id", feedback.rollout_id)
    check_id("the source of feedback", feedback.source)
    check_id("resources_id", feedback.resources_id)
    check_id("arm", feedback.arm)
    if feedback.given_time is not None:
        check_time("the given_time of feedback", feedback.given_time)
    if fault := feedback_fault(feedback.kind, feedback.value):
        raise ConfigError(f"feedback about rollout {feedback.rollout_id!r}: {fault}")
    return json_text(feedback.value, "the value of feedback")


def check_version(update: ResourcesUpdate) -> str:
    """Return a version's resources as JSON. Raise ConfigError for a version that no store takes."""
    check_id("resources_id", update.resources_id)
    check_id("author", update.author)
    check_id("the parent's resources_id", update.parent and update.parent[0])
    check_time("the create_time of resources", update.create_time)
    check_time("the update_time of resources", update.update_time)
    return json_text(update.resources, "resources")


def check_label(label: Label) -> None:
    """Raise ConfigError for a label that no store takes."""
    check_id("label", label.label)
    check_id("resources_id", label.resources_id)


def check_release(release: Release) -> str:
    """Return the details of a release as JSON, or "". Raise ConfigError for a release that no store takes."""
    check_id("release_id", release.release_id)
    check_id("state", release.state)
    check_id("the resources_id of from_version", release.from_version and release.from_version[0])
    check_id("the resources_id of canary_version", release.canary_version[0])
    check_time("the create_time of a release", release.create_time)
    check_time("the update_time of a release", release.update_time)
    check_deadline(release.deadline)
    return json_text(release.details, "the details of a release") if release.details else ""


def check_deadline(deadline: float | None) -> None:
    """Raise ConfigError for a deadline that is not finite."""
    if deadline is not None and not math.isfinite(deadline):
        raise ConfigError(f"deadline {deadline!r} must be a finite number of Unix seconds, or None")


def check_audit(record: AuditRecord) -> None:
    """Raise ConfigError for a record of the audit log that no store takes."""
    check_id("label", record.label)
    check_id("release_id", record.release_id)
    check_id("state", record.state)
    for version in (record.before, record.after):
        check_id("resources_id", version and version[0])
    check_time("the time of a change", record.time)
    check_who(record.who, record.why)


def check_who(who: str | None, why: str | None) -> None:
    """Raise ConfigError for an author or a reason of a change that no store takes."""
    check_id("who", who)
    if why is not None and len(why) > _WHY_LENGTH:
        raise ConfigError(f"why has {len(why):,} characters; write at most {_WHY_LENGTH:,}")


def check_live_rollout(live: LiveRollout) -> None:
    """Raise ConfigError for a report on a live rollout that no store takes."""
    ids = live.rollout_id, live.attempt_id, live.resources_id, "none" if live.arm is None else live.arm
    together = "".join(ids)
    if not (all(ids) and together.isprintable() and len(together) <= MAX_ID_LENGTH and live.attempt_id != "latest"):
        check_id("rollout_id", live.rollout_id)
        check_attempt_id(live.attempt_id)
        check_id("resources_id", live.resources_id)
        check_id("arm", live.arm)
    check_time("the start_time of a live rollout", live.start_time)
    json_value(live.input, "the input of a rollout")
    if live.metadata:
        check_metadata(live.metadata, allowed=())
        json_value(live.metadata, "the metadata of a rollout")


def _fields_of(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    return exact_number(value)


class _Constant(Exception):
    """A number that JSON does not have, found in a text."""


def _refuse_constant(name: str) -> NoReturn:
    raise _Constant(name)


def _too_deep(what: str) -> ConfigError:
    return ConfigError(f"{what} is nested deeper than {MAX_JSON_DEPTH} levels; flatten it, or give a part as a string")


def _is_too_deep(value: Any) -> bool:
    """Return whether a value, which `to_json` can write, has more than `MAX_JSON_DEPTH` levels.

    Writing it again inside further lists is four times as fast as finding the brackets of its text that are outside of
    strings.
    """
    for _ in range(_SERIALIZABLE_DEPTH - MAX_JSON_DEPTH):
        value = [value]
    try:
        to_json(value)
    except PydanticSerializationError:
        return True
    return False


def _depth(text: str) -> int:
    depth = deepest = 0
    for bracket in re.findall(r"[\[{}\]]", _STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest
