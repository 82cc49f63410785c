"""The tree of an attempt: every span once, whatever became of its parent; what floats is put where it can only belong."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.adapter import TracerTraceToTriplet, TraceTree
from leyden.errors import ConfigError
from leyden.types import Span, semconv
from tests.adapter.traces import agent, gateway_call, recorded, reward, sdk_call, span


def shape(node: TraceTree) -> Any:
    """The tree as nested tuples of small ids."""
    name = "virtual" if node.span.name == semconv.VIRTUAL else int(node.id, 16)
    return (name, *(shape(child) for child in node.children)) if node.children else name


def repaired(*spans: Span) -> Any:
    tree = TraceTree.from_spans(spans)
    tree.repair_hierarchy()
    return shape(tree)


def test_children_are_below_their_parents_in_the_order_in_which_they_started():
    spans = [
        span("c", 3, 4, id=3, parent=1),
        span("b", 2, 4, id=2, parent=1),
        span("a", 1, 5, id=1),
        span("d", 2, 3, id=4, parent=2),
    ]
    tree = TraceTree.from_spans(spans)
    assert shape(tree) == (1, (2, 4), 3)
    assert tree.names_tuple() == ("a", [("b", [("d", [])]), ("c", [])])
    assert tree.find_id(f"{4:016x}") is tree.children[0].children[0]
    assert tree.find_id("nowhere") is None
    assert tree.to_json()["children"][1]["span"]["name"] == "c"


def test_a_trace_may_be_deeper_than_calls_can_be():
    levels = 5000
    tree = TraceTree.from_spans([span("a", n, 9999, id=n, parent=n - 1 or None) for n in range(1, levels + 1)])
    told: Any = tree.to_json()
    name, below = tree.names_tuple()
    for level in range(2, levels + 1):
        (told,), ((name, below),) = told["children"], below
        assert (told["id"], name) == (f"{level:016x}", "a")
    assert told["children"] == below == []
    assert len(drawn_names(tree.visualize())) == levels


def test_lost_parents_are_stood_for_and_several_roots_get_one():
    spans = [span("a", 1, 2, id=1), span("b", 3, 4, id=2, parent=99), span("c", 5, 9, id=3, parent=99)]
    tree = TraceTree.from_spans(spans)
    assert shape(tree) == ("virtual", 1, ("virtual", 2, 3))
    assert (tree.start_time, tree.end_time) == (1, 9)
    assert (tree.children[1].id, tree.children[1].start_time) == (f"{99:016x}", 3)


def test_a_circle_is_cut_above_its_earliest_span():
    circle = [span("a", 2, 3, id=1, parent=2), span("b", 1, 3, id=2, parent=3), span("c", 3, 3, id=3, parent=1)]
    assert shape(TraceTree.from_spans([*circle, span("d", 4, 5, id=4, parent=1)])) == (2, (1, 3, 4))
    assert shape(TraceTree.from_spans([span("a", 1, 2, id=1, parent=1)])) == 1


def test_a_trace_without_spans_has_no_tree():
    with pytest.raises(ConfigError, match="was the attempt recorded"):
        TraceTree.from_spans([])
    assert TracerTraceToTriplet().adapt([]) == []


@st.composite
def broken_traces(draw: st.DrawFn) -> list[Span]:
    ids = range(1, draw(st.integers(1, 12)) + 1)
    spans: list[Span] = []
    for id in ids:
        start = draw(st.integers(0, 20))
        parent = draw(st.none() | st.integers(1, 15))
        name = draw(st.sampled_from(["step", "agent"]))
        end = start + draw(st.integers(0, 20))
        spans.append(
            agent("a", start, end, id=id, parent=parent)
            if name == "agent"
            else span("s", start, end, id=id, parent=parent)
        )
    return spans


@given(broken_traces(), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_any_parents_at_all_give_one_tree_with_each_span_once_repaired_or_not(
    spans: list[Span], shuffler: random.Random
):
    tree = TraceTree.from_spans(spans)
    shuffled = spans.copy()
    shuffler.shuffle(shuffled)
    again = TraceTree.from_spans(shuffled)
    assert shape(again) == shape(tree)
    for _ in range(2):
        real = sorted(node.id for node in tree.traverse() if node.span.name != semconv.VIRTUAL)
        assert real == sorted(one.span_id for one in spans)
        tree.repair_hierarchy()
    again.repair_hierarchy()
    again.repair_hierarchy()
    assert shape(again) == shape(tree)


# ---- repair --------------------------------------------------------------------------------------------------------------------


def test_a_floating_call_goes_to_the_innermost_span_that_encloses_it():
    a, b = agent("a", 1, 10, id=1), agent("b", 2, 8, id=2, parent=1)
    assert repaired(a, b, sdk_call(3, 4, id=3)) == ("virtual", (1, (2, 3)))
    assert repaired(a, b, sdk_call(8.5, 9, id=3)) == ("virtual", (1, 2, 3))
    assert repaired(a, b, sdk_call(9, 11, id=3)) == ("virtual", (1, 2), 3)


def test_below_a_session_span_calls_find_their_agents_too():
    session = span("session", 0, 20, id=9)
    spans = [
        session,
        agent("a", 1, 10, id=1, parent=9),
        sdk_call(3, 4, id=3, parent=9),
        agent("b", 11, 19, id=2, parent=9),
    ]
    assert repaired(*spans, sdk_call(12, 13, id=4, parent=9)) == (9, (1, 3), (2, 4))


def test_between_agents_side_by_side_nobody_can_tell():
    spans = [agent("a", 1, 10, id=1), agent("b", 2, 9, id=2), sdk_call(3, 4, id=3)]
    assert repaired(*spans) == ("virtual", 1, 2, 3)
    assert TracerTraceToTriplet(agent_match="a|b").adapt(spans) == []


def test_agents_and_what_is_theirs_stay_where_they_were_recorded():
    assert repaired(agent("a", 1, 10, id=1), agent("b", 2, 5, id=2)) == ("virtual", 1, 2), "they ran at the same time"
    inside = [agent("a", 1, 10, id=1), span("tool", 2, 8, id=2, parent=1), sdk_call(3, 4, id=3, parent=1)]
    assert repaired(*inside) == (1, 2, 3), "the call is the agent's own, made while the tool ran"


def test_a_call_is_never_put_below_another_call():
    assert repaired(sdk_call(1, 10, id=1), sdk_call(2, 3, id=2)) == ("virtual", 1, 2)


# ---- the drawing -------------------------------------------------------------------------------------------------------------


def drawn_names(dot: str) -> list[str]:
    labels = re.findall(r"^\d+ \[label=(.*)\];$", dot, re.MULTILINE)
    return [json.loads(label).partition("\n")[0] for label in labels]


def test_the_drawing_has_a_node_for_each_span_below_its_parent():
    spans = [span("run", 0, 10, id=1), agent("planner", 0, 5, id=2, parent=1), reward(0.5, 10, id=3, parent=1)]
    dot = TraceTree.from_spans(spans).visualize()
    assert drawn_names(dot) == ["run", "invoke_agent planner", "leyden.reward"]
    assert re.findall(r"^\d+ -> \d+;$", dot, re.MULTILINE) == ["0 -> 1;", "0 -> 2;"]
    assert '"run\\n10 s"' in dot


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=60))
@settings(max_examples=60)
def test_whatever_a_name_holds_it_stays_one_quoted_label(name: str):
    dot = TraceTree.from_spans([span(name, 1, 2, id=1), span("b", 1, 2, id=2, parent=1)]).visualize()
    (line,) = (line for line in dot.split("\n") if line.startswith("0 ["))
    assert re.fullmatch(r'0 \[label="(?:[^"\\]|\\.)*"\];', line)


def test_only_what_is_asked_for_and_what_is_above_it_is_drawn():
    spans = [
        span("run", 0, 9, id=1),
        span("a", 1, 2, id=2, parent=1),
        span("b", 3, 4, id=3, parent=1),
        span("needle", 3, 4, id=4, parent=3),
    ]
    assert drawn_names(TraceTree.from_spans(spans).visualize(interested_span_match="need")) == ["run", "b", "needle"]


def test_the_drawing_is_written_where_it_is_asked_for(tmp_path: Path):
    tree = TracerTraceToTriplet().visualize(recorded("openinference_langgraph"), tmp_path / "v1.trace")
    written = (tmp_path / "v1.trace.dot").read_text()
    assert written == tree.visualize(tmp_path / "again.dot") == (tmp_path / "again.dot").read_text()
    assert len(drawn_names(written)) == len(tree.traverse())


def test_spans_without_times_are_drawn_too():
    bare = gateway_call(0, 0, id=1, prompt=[1], response=[2])
    bare.start_time = bare.end_time = None
    assert drawn_names(TraceTree.from_spans([bare]).visualize()) == ["leyden.model_call"]


def test_thousands_of_floating_spans_are_placed_in_no_time() -> None:
    steps = [span("step", at, at + 0.5, id=2 * at + 2, parent=1) for at in range(4000)]
    calls = [gateway_call(at + 0.1, at + 0.2, id=2 * at + 3, parent=1, prompt=[1], response=[2]) for at in range(2000)]
    tree = TraceTree.from_spans([span("root", 0, 4001, id=1), *steps, *calls])
    began = time.process_time()
    tree.repair_hierarchy()
    assert time.process_time() - began < 3  # comparing each with each takes 20 s
    assert all(len(step.children) == 1 for step in tree.children[:2000])
