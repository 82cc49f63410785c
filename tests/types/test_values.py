"""Rewards, ids, resources and rollouts as values."""

from __future__ import annotations

import re
import time
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import SpanKind as OtelKind
from opentelemetry.trace import StatusCode as OtelCode
from pydantic import TypeAdapter, ValidationError

from leyden._lib import ids
from leyden.errors import ConfigError
from leyden.types import (
    LLM,
    UNSET,
    Attempt,
    AttemptedRollout,
    NamedResources,
    PaginatedResult,
    PromptTemplate,
    ProxyLLM,
    RolloutConfig,
    Span,
    find_final_reward,
    find_reward_spans,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
    reward_attributes,
)


def span(**attributes: object) -> Span:
    return Span.model_validate(
        {
            "rollout_id": "r",
            "attempt_id": "a",
            "sequence_id": 1,
            "trace_id": "t",
            "span_id": "s",
            "name": "n",
            "attributes": attributes,
        }
    )


@given(st.dictionaries(st.text(min_size=1), st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_rewards_written_in_a_span_are_read_from_it_in_order(rewards: dict[str, float]) -> None:
    found = span(**reward_attributes(rewards))
    assert list(get_rewards_from_span(found).items()) == list(rewards.items())
    assert get_reward_value(found) == next(iter(rewards.values()))
    assert is_reward_span(found)


@pytest.mark.parametrize("bad", [{}, {"r": float("nan")}, {"r": float("inf")}])
def test_a_reward_that_is_no_number_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="reward"):
        reward_attributes(bad)


def test_the_final_reward_is_the_last_one() -> None:
    spans = [span(**reward_attributes({"a": 1.0})), span(), span(**reward_attributes({"a": 0.0})), span()]
    assert find_final_reward(spans) == 0.0
    assert find_reward_spans(spans) == [spans[0], spans[2]]
    assert find_final_reward([span()]) is None


@pytest.mark.parametrize(
    ("name", "attributes", "expected"),
    [
        (
            "agentlightning.annotation",
            {
                "agentlightning.reward.0.name": "task",
                "agentlightning.reward.0.value": 1,
                "agentlightning.reward.1.name": "style",
                "agentlightning.reward.1.value": 0.5,
            },
            {"task": 1.0, "style": 0.5},
        ),
        ("agentlightning.annotation", {"reward": 0.25}, {"primary": 0.25}),
        ("score", {"agentops.task.output": '{"type": "reward", "value": 0.75}'}, {"primary": 0.75}),
        ("score", {"agentops.entity.output": '{"type": "reward", "value": 1}'}, {"primary": 1.0}),
        ("score", {"agentops.entity.output": '{"type": "reward", "value": null}'}, {}),
        ("score", {"agentops.entity.output": '{"a": "reward"'}, {}),
        ("another", {"reward": 0.25}, {}),
        ("leyden.reward", {"leyden.reward.0.value": "high"}, {}),
        ("leyden.reward", {"leyden.reward.0.value": float("nan")}, {}),
    ],
)
def test_agent_lightnings_rewards_are_read_in_each_of_their_forms_and_nonsense_is_none(
    name: str, attributes: dict[str, object], expected: dict[str, float]
) -> None:
    found = span(**attributes)
    found.name = name
    assert get_rewards_from_span(found) == expected
    primary = next(iter(expected.values()), None)
    assert get_reward_value(found) == primary
    assert find_final_reward([found]) == primary
    assert is_reward_span(found) == bool(expected)


@pytest.mark.parametrize(
    ("make", "form"),
    [
        (ids.rollout_id, "ro-[0-9a-f]{24}"),
        (ids.attempt_id, "at-[0-9a-f]{8}"),
        (ids.resources_id, "rs-[0-9a-f]{12}"),
        (ids.trace_id, "[0-9a-f]{32}"),
        (ids.span_id, "[0-9a-f]{16}"),
    ],
)
def test_ids_have_the_shape_of_their_kind_and_do_not_repeat(make: object, form: str) -> None:
    made = [make() for _ in range(200)]  # type: ignore[operator]
    assert all(re.fullmatch(form, name) for name in made)
    assert len(set(made)) == 200


def test_rollouts_made_later_sort_behind_those_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now, made = time.time_ns(), list[str]()
    for later in range(0, 5_000_000_000, 1_000_000):
        monkeypatch.setattr(time, "time_ns", lambda at=now + later: at)
        made.append(ids.rollout_id())
    assert made == sorted(made)


@given(st.lists(st.text() | st.integers(), max_size=4), st.lists(st.text() | st.integers(), max_size=4))
def test_derived_ids_are_equal_for_equal_parts(a: list[str | int], b: list[str | int]) -> None:
    assert ids.derived_id("ro", *a) == ids.derived_id("ro", *a)
    same = "\x1f".join(map(str, a)) == "\x1f".join(map(str, b))
    assert (ids.derived_id("ro", *a) == ids.derived_id("ro", *b)) == same


@pytest.mark.parametrize("kind", ["SpanKind.CLIENT", "SPAN_KIND_CLIENT", "client", "CLIENT", OtelKind.CLIENT])
@pytest.mark.parametrize("code", ["StatusCode.ERROR", "STATUS_CODE_ERROR", "error", OtelCode.ERROR])
def test_a_spans_kind_and_status_are_read_in_every_spelling_of_opentelemetry(kind: Any, code: Any) -> None:
    values = {**span().model_dump(), "kind": kind, "status": {"status_code": code}}
    read = Span.model_validate(values)
    assert (read.kind, read.status.status_code) == ("CLIENT", "ERROR")


@pytest.mark.parametrize("kind", [2, 3, "SpanKind.ODD", None, ["CLIENT"]])
def test_a_kind_that_means_several_or_nothing_is_refused(kind: Any) -> None:
    with pytest.raises(ValidationError, match="kind"):
        Span.model_validate({**span().model_dump(), "kind": kind})


@pytest.mark.parametrize("parent_id", [None, "", "0" * 16])
def test_a_parent_of_zeros_is_none(parent_id: str | None) -> None:
    assert Span.model_validate({**span().model_dump(), "parent_id": parent_id}).parent_id is None


def test_resources_are_read_back_as_their_kind() -> None:
    adapter = TypeAdapter(NamedResources)
    resources = {
        "a": LLM(endpoint="e", model="m"),
        "b": ProxyLLM(endpoint="e", model="m"),
        "c": PromptTemplate(template="t"),
    }
    read = adapter.validate_json(adapter.dump_json(resources))
    assert read == resources
    assert [type(value) for value in read.values()] == [LLM, ProxyLLM, PromptTemplate]


def test_a_proxys_url_carries_the_ids_and_needs_them() -> None:
    proxy = ProxyLLM(endpoint="http://x:1/v1/", model="m")
    assert proxy.get_base_url("r", "a") == "http://x:1/rollout/r/attempt/a/v1"
    assert type(proxy.with_attempted_rollout("r", "a")) is LLM
    with pytest.raises(ConfigError, match="attempt_id"):
        proxy.get_base_url("r")


def test_a_template_says_which_value_is_missing() -> None:
    assert PromptTemplate(template="{a} {{b}}").format(a=1) == "1 {b}"
    with pytest.raises(ConfigError, match="'a'"):
        PromptTemplate(template="{a}").format(b=1)
    with pytest.raises(ConfigError, match="jinja"):
        PromptTemplate(template="x", engine="jinja").format()


@pytest.mark.parametrize(
    "bad", [{"max_attempts": 0}, {"timeout_seconds": 0}, {"unresponsive_seconds": -1}, {"retries": 2}]
)
def test_a_config_that_cannot_be_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RolloutConfig.model_validate(bad)


def test_a_rollout_is_not_given_anothers_attempt() -> None:
    attempt = Attempt(rollout_id="other", attempt_id="a", sequence_id=1, start_time=0.0)
    with pytest.raises(ValidationError, match="other"):
        AttemptedRollout(rollout_id="mine", input=None, start_time=0.0, attempt=attempt)


def test_a_page_is_a_sequence_and_unset_is_false() -> None:
    page = PaginatedResult([1, 2, 3], limit=3, offset=0, total=9)
    assert (list(page), page[1], list(page[1:]), len(page)) == ([1, 2, 3], 2, [2, 3], 3)
    assert not UNSET
    assert repr(UNSET) == "UNSET"


@pytest.mark.parametrize(
    "template",
    [
        "{task.__class__}",
        "{task[0]}",
        "{task!r}",
        "{task:>200000000}",
        "{}",
        "{0}",
        '{"a": 1}',
        "{task.__init__.__globals__[os].environ[PATH]}",
        "{task!r:>{width}}",
        "{task:{width}}",
        "{ task }",
        "{class.x}",
        "{self.template}",
    ],
)
def test_a_template_reads_nothing_but_the_values_that_it_is_given(template: str) -> None:
    with pytest.raises(ConfigError, match="no plain name"):
        PromptTemplate(template=template).format(task="t")
    with pytest.raises(ConfigError, match="no plain name"):
        _ = PromptTemplate(template=template).placeholders


def test_a_refused_placeholder_and_its_template_are_named() -> None:
    class Spied:
        read: ClassVar[list[str]] = []

        def __getattribute__(self, name: str) -> Any:
            Spied.read.append(name)
            return object.__getattribute__(self, name)

    template = PromptTemplate(template="Solve {task.answer}, please. " + 100 * "x")
    with pytest.raises(
        ConfigError, match=r"the template 'Solve \{task.answer\}, please. x+\.\.\.' has the placeholder \{task.a"
    ):
        template.format(task=Spied())
    assert Spied.read == []


@pytest.mark.parametrize("template", ['Answer as {"a": 1}', "a set {", "a set }", "{task", "f(x) { return {task}; }"])
def test_braces_that_are_text_are_refused_with_the_way_to_write_them(template: str) -> None:
    with pytest.raises(ConfigError, match=r"write \{\{ and \}\} for braces.*escape") as refused:
        PromptTemplate(template=template).format(task="t")
    assert repr(template) in str(refused.value)
    assert PromptTemplate(template=PromptTemplate.escape(template)).format(task="t") == template


@given(st.text() | st.text(alphabet="{}a!:.["), st.text() | st.text(alphabet="{}"))
def test_escaped_text_is_rendered_as_it_is(text: str, value: str) -> None:
    escaped = PromptTemplate.escape(text)
    assert PromptTemplate(template=escaped).format() == text
    assert PromptTemplate(template=escaped + "{x}" + escaped).format(x=value) == text + value + text


def test_a_template_names_its_placeholders() -> None:
    assert PromptTemplate(template="{b} {a} {{c}} {b}").placeholders == ("b", "a")
    assert PromptTemplate(template="{a}").format(a=3) == "3"
    with pytest.raises(ConfigError, match="cannot be read"):
        PromptTemplate(template="{a").format(a=1)


@pytest.mark.parametrize("ids", [(123, "a"), ("r", 5), ("", "a"), ("r", None)])
def test_a_proxys_url_needs_ids_that_are_text(ids: tuple[object, object]) -> None:
    proxy = ProxyLLM(endpoint="http://x:1/v1/", model="m")
    for method in (proxy.get_base_url, proxy.get_api_key):
        with pytest.raises(ConfigError, match="needs rollout_id and attempt_id as text"):
            method(*ids)  # pyright: ignore[reportArgumentType] -- what is tested
