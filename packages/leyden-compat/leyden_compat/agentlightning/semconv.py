"""Agent Lightning's names of spans and attributes, and functions that rename Leyden's to them.

`agl_attributes` renames what Leyden recorded, so that a program finds the names that it knows. Leyden reads both
families of names, so nothing is renamed on the way into a store.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from typing import Final, TypeVar

from pydantic import BaseModel

from leyden.types import semconv

AGL_ANNOTATION: Final = semconv.AGL_ANNOTATION
AGL_MESSAGE: Final = "agentlightning.message"
AGL_OBJECT: Final = "agentlightning.object"
AGL_EXCEPTION: Final = "agentlightning.exception"
AGL_OPERATION: Final = "agentlightning.operation"
AGL_REWARD: Final = semconv.AGL_REWARD
AGL_VIRTUAL: Final = "agentlightning.virtual"


class LightningResourceAttributes(Enum):
    """Attributes of a span's resource."""

    ROLLOUT_ID = "agentlightning.rollout_id"
    ATTEMPT_ID = "agentlightning.attempt_id"
    SPAN_SEQUENCE_ID = "agentlightning.span_sequence_id"
    TRACER_NAME = "agentlightning.tracer.name"


class LightningSpanAttributes(Enum):
    """Attributes of emitted spans; REWARD, LINK and TAG are prefixes."""

    REWARD = semconv.AGL_REWARD
    LINK = semconv.AGL_LINK_PREFIX
    TAG = "agentlightning.tag"
    MESSAGE_BODY = "agentlightning.message.body"
    OBJECT_TYPE = "agentlightning.object.type"
    OBJECT_LITERAL = "agentlightning.object.literal"
    OBJECT_JSON = "agentlightning.object.json"
    OPERATION_NAME = semconv.AGL_OPERATION_NAME
    OPERATION_INPUT = semconv.AGL_OPERATION_INPUT
    OPERATION_OUTPUT = semconv.AGL_OPERATION_OUTPUT


class RewardAttributes(Enum):
    """The last part of a reward's attributes: `agentlightning.reward.0.name` and `.value`."""

    REWARD_NAME = "name"
    REWARD_VALUE = "value"


class RewardPydanticModel(BaseModel):
    """One dimension of a reward."""

    name: str
    value: float


class LinkAttributes(Enum):
    """The last part of a link's attributes."""

    KEY_MATCH = "key_match"
    VALUE_MATCH = "value_match"


class LinkPydanticModel(BaseModel):
    """A link to the spans whose attribute `key_match` has the value `value_match`."""

    key_match: str
    value_match: str


class SpanNames(StrEnum):
    """Names of emitted spans, as version 0.2 lists them."""

    REWARD = AGL_REWARD
    MESSAGE = AGL_MESSAGE
    OBJECT = AGL_OBJECT
    EXCEPTION = AGL_EXCEPTION
    VIRTUAL = AGL_VIRTUAL
    ROLLOUT_ID = "agentlightning.rollout_id"
    ATTEMPT_ID = "agentlightning.attempt_id"
    SPAN_SEQUENCE_ID = "agentlightning.span_sequence_id"


class SpanAttributeNames(StrEnum):
    """Attributes of emitted spans, as version 0.2 lists them."""

    MESSAGE = "message"
    OBJECT = "object"


_SPAN_NAMES: Final[Mapping[str, str]] = {
    semconv.ANNOTATION: AGL_ANNOTATION,
    semconv.REWARD: AGL_ANNOTATION,  # a reward is an annotation there
    semconv.MESSAGE: AGL_MESSAGE,
    semconv.OBJECT: AGL_OBJECT,
    semconv.EXCEPTION: AGL_EXCEPTION,
    semconv.OPERATION: AGL_OPERATION,
    semconv.VIRTUAL: AGL_VIRTUAL,
}

_RENAMED_BELOW: Final = ("reward", "link", "tag", "message", "object", "operation")
"""The first parts of attribute names after `leyden.` that Agent Lightning has too."""

V = TypeVar("V")


def agl_span_name(name: str) -> str:
    """Return Agent Lightning's name of an emitted span, and any other name as it is."""
    return _SPAN_NAMES.get(name, name)


def agl_attributes(attributes: Mapping[str, V]) -> dict[str, V]:
    """Return attributes of an emitted span under Agent Lightning's names, and others as they are."""
    return {_agl_key(key): value for key, value in attributes.items()}


def _agl_key(key: str) -> str:
    family, _, rest = key.partition(".")
    if family == "leyden" and rest.partition(".")[0] in _RENAMED_BELOW and "." in rest:
        return f"agentlightning.{rest}"
    return key
