"""Arrange the spans of an attempt as a tree, which shows which step was part of which.

Spans whose parents are missing or broken find their place as follows (`TraceTree.from_spans`):

- a span whose parent is among the spans is below it;
- spans whose common parent is missing stay together, below a virtual span that stands for it;
- a circle of parents is cut above its earliest span;
- several roots are put below one virtual root, which lasts from the first start to the last end.
  Virtual spans are named `leyden.virtual`.

`repair_hierarchy` then moves *floating* spans: instrumentations that do not share a context leave model calls beside
the agent that made them. A span floats if no agent is above or below it, and it is a direct child of the top: the root,
or, if the root has a single child, that child, and so on down. It is moved to the innermost span that encloses it in
time. If spans that run side by side enclose it, the right one is unknown, and the span stays. A call is never moved
below another call, and no span leaves an agent's subtree.

The module knows spans and how `normalise` reads them. It changes no span.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from leyden.adapter.normalise import AgentView, is_model_call, is_reward, read_agent
from leyden.adapter.order import in_order
from leyden.errors import ConfigError
from leyden.types import Span, semconv

T = TypeVar("T")


class TraceTree:
    """A node of a tree of spans: a span, and its children in the order in which they started."""

    def __init__(self, id: str, span: Span, children: Sequence[TraceTree] = ()) -> None:
        self.id = id
        self.span = span
        self.children = list(children)

    @property
    def start_time(self) -> float | None:
        """Unix seconds; None if unknown."""
        return self.span.start_time

    @property
    def end_time(self) -> float | None:
        """Unix seconds; None if unknown."""
        return self.span.end_time

    @classmethod
    def from_spans(cls, spans: Sequence[Span]) -> TraceTree:
        """Return the tree of one attempt's spans, given in any order. If several spans have one id, the first is kept.
        Raise ConfigError if there are no spans.
        """
        ordered = in_order(spans)
        if not ordered:
            raise ConfigError("a trace without spans has no tree; was the attempt recorded?")
        nodes = {span.span_id: cls(span.span_id, span) for span in ordered}
        roots: list[TraceTree] = []
        lost: dict[str, list[TraceTree]] = {}
        cut = _circle_starts(ordered)
        for node in nodes.values():
            parent_id = node.span.parent_id
            if parent_id is None or node.id in cut:
                roots.append(node)
            elif parent_id in nodes:
                nodes[parent_id].children.append(node)
            else:
                lost.setdefault(parent_id, []).append(node)
        roots += [cls(parent_id, _virtual(parent_id, children), children) for parent_id, children in lost.items()]
        if len(roots) == 1:
            return roots[0]
        roots.sort(key=lambda node: (node.start_time or 0.0, node.span.sequence_id, node.id))
        return cls("virtual-root", _virtual("virtual-root", roots), roots)

    def add_child(self, child: TraceTree) -> None:
        self.children.append(child)

    def find_id(self, id: str) -> TraceTree | None:
        """Return the node of a span id, at or below this one; None if there is none."""
        return next((node for node in self.traverse() if node.id == id), None)

    def traverse(self) -> list[TraceTree]:
        """Return this node and all nodes below it, depth first."""
        found: list[TraceTree] = []
        waiting: list[TraceTree] = [self]
        while waiting:
            node = waiting.pop()
            found.append(node)
            waiting.extend(reversed(node.children))
        return found

    def names_tuple(self) -> tuple[str, list[Any]]:
        """Return the span's name and a list of the same pairs of the children. If the step is an agent's, the agent's
        name follows in brackets.
        """

        def names(node: TraceTree, below: list[Any]) -> tuple[str, list[Any]]:
            agent = node.agent_name()
            return node.span.name if agent is None else f"{node.span.name} [{agent}]", below

        return self._nested(names)

    def to_json(self) -> dict[str, Any]:
        """Return the tree as JSON: an object with `id`, `span` and `children`."""
        return self._nested(
            lambda node, below: {"id": node.id, "span": node.span.model_dump(mode="json"), "children": below}
        )

    def _nested(self, value_of: Callable[[TraceTree, list[T]], T]) -> T:
        """Return the value of this node, which holds the list of the values of its children, and so on down. It does
        not recurse, because a trace may be deeper than Python's stack.

        value_of: makes a node's value of the node and a list that is filled later.
        """
        nodes = self.traverse()
        below = {id(node): list[T]() for node in nodes}
        values = {id(node): value_of(node, below[id(node)]) for node in nodes}
        for node in nodes:
            below[id(node)].extend(values[id(child)] for child in node.children)
        return values[id(self)]

    def agent_name(self) -> str | None:
        """Return the name of the agent whose step this span is; None if it is no agent's step."""
        agent = read_agent(self.span)
        return None if agent is None else agent.name

    def is_reward_span(self) -> bool:
        return is_reward(self.span)

    def agents(self) -> dict[str, str | None]:
        """Return the name of the nearest agent at or above each span, by the ids of the spans at or below this node.
        None if no agent is there.

        A node of a LangGraph graph is named with its graph: `graph.node`.
        """
        names: dict[str, str | None] = {}
        waiting: list[tuple[TraceTree, AgentView | None, str | None]] = [(self, None, None)]
        while waiting:
            node, graph, name = waiting.pop()
            if (agent := read_agent(node.span)) is not None:
                if not agent.is_node:
                    graph = agent
                name = f"{graph.name}.{agent.name}" if agent.is_node and graph is not None else agent.name
            names[node.id] = name
            waiting.extend((child, graph, name) for child in node.children)
        return names

    def within_rewards(self) -> set[str]:
        """Return the ids of the spans below a span that carries a reward or computes one."""
        return {below.id for node in self.traverse() if is_reward(node.span) for below in node.traverse()[1:]}

    def repair_hierarchy(self) -> None:
        """Move model calls that instrumentation left beside an agent's step below it, in place.

        A call that ran within exactly one chain of nested steps is moved below the innermost of them; the docstring of
        `leyden.adapter.tree` has the rules.
        """
        top = self
        while len(top.children) == 1 and read_agent(top.span) is None:
            top = top.children[0]
        if read_agent(top.span) is not None:
            return
        parent_of = {child.id: node for node in top.traverse() for child in node.children}
        hosts = [host for node in top.children for host in _hosts(node)]
        floating = [
            node
            for node in top.children
            if _seconds(node) is not None and all(read_agent(below.span) is None for below in node.traverse())
        ]
        enclosing = _enclosing(floating, hosts)
        # Long spans first: a shorter one may be moved below them, which asks for their parents.
        for node in sorted(floating, key=lambda node: (-(_seconds(node) or 0.0), node.id)):
            host = _innermost(node, enclosing[node.id], parent_of)
            if host is not None:
                top.children.remove(node)
                host.children.append(node)
                parent_of[node.id] = host
        for host in hosts:
            host.children.sort(key=lambda node: (node.start_time or 0.0, node.span.sequence_id, node.id))

    def visualize(self, filename: str | Path | None = None, interested_span_match: str | None = None) -> str:
        """Return the tree in Graphviz's language: a node for each span with its name and its seconds, below its parent.

        filename: the file to write it to, if any, which `dot -Tsvg FILE` draws. `.dot` is added to a name without it.
        interested_span_match: a regular expression; only spans whose name contains a match, and the spans above them,
            are drawn.
        """
        shown = self._ids_to_show(interested_span_match)
        lines = ["digraph trace {", "rankdir=LR; node [shape=box];"]
        numbers: dict[str, int] = {}
        for node in self.traverse():
            if shown is None or node.id in shown:
                numbers[node.id] = len(numbers)
                text = node.span.name
                if (seconds := _seconds(node)) is not None:
                    text += f"\n{seconds:.3g} s"
                label = json.dumps(text, ensure_ascii=False).replace("\\u", "\\\\u")  # Graphviz has no \u
                lines.append(f"{numbers[node.id]} [label={label}];")
        for node in self.traverse():
            below = (numbers[child.id] for child in node.children if child.id in numbers)
            lines += [f"{numbers[node.id]} -> {child};" for child in below]
        dot = "\n".join([*lines, "}\n"])
        if filename is not None:
            path = Path(filename)
            path = path if path.suffix == ".dot" else path.with_name(f"{path.name}.dot")
            path.write_text(dot, encoding="utf-8")
        return dot

    def _ids_to_show(self, match: str | None) -> set[str] | None:
        """Return the ids of the spans whose name contains a match, and of the spans above them; None for all."""
        if match is None:
            return None
        shown: set[str] = set()
        for node in reversed(self.traverse()):  # children before their parents
            if re.search(match, node.span.name) or any(child.id in shown for child in node.children):
                shown.add(node.id)
        return shown

    def __repr__(self) -> str:
        return f"TraceTree(id={self.id!r}, name={self.span.name!r}, children={len(self.children)})"


def _circle_starts(ordered: Sequence[Span]) -> set[str]:
    """Return the id of the span that started first, for each circle of parents."""
    parents = {span.span_id: span.parent_id for span in ordered}
    index_of = {span.span_id: index for index, span in enumerate(ordered)}
    starts: set[str] = set()
    known: set[str] = set()
    # Go up from each span until a known one. If it is on this path, the path closed a circle.
    for span in ordered:
        path: list[str] = []
        at: str | None = span.span_id
        while at is not None and at in parents and at not in known:
            known.add(at)
            path.append(at)
            at = parents[at]
        if at in path:
            starts.add(min(path[path.index(at) :], key=index_of.__getitem__))
    return starts


def _virtual(id: str, children: Sequence[TraceTree]) -> Span:
    """Return a span for a step that was not recorded. It lasts from the first start to the last end below it."""
    first = children[0].span
    starts = [node.start_time for node in children if node.start_time is not None]
    ends = [node.end_time for node in children if node.end_time is not None]
    return Span(
        rollout_id=first.rollout_id,
        attempt_id=first.attempt_id,
        sequence_id=min(node.span.sequence_id for node in children),
        trace_id=first.trace_id,
        span_id=id,
        name=semconv.VIRTUAL,
        start_time=min(starts, default=None),
        end_time=max(ends, default=None),
    )


def _hosts(node: TraceTree) -> list[TraceTree]:
    """Return the nodes under which `repair_hierarchy` may put a floating span: those with a duration that are neither a
    model call nor below one.
    """
    found: list[TraceTree] = []
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if not is_model_call(node.span):
            if _seconds(node):
                found.append(node)
            waiting.extend(node.children)
    return found


def _seconds(node: TraceTree) -> float | None:
    if node.start_time is None or node.end_time is None:
        return None
    return node.end_time - node.start_time


def _enclosing(nodes: Sequence[TraceTree], hosts: Sequence[TraceTree]) -> dict[str, list[TraceTree]]:
    """Return the hosts that enclose each node in time, by the node's id. The nodes are visited in the order of their
    starts, so that a node is compared only with hosts that are still running then, which are few.
    """
    later = sorted(hosts, key=_start, reverse=True)
    running: list[TraceTree] = []
    found: dict[str, list[TraceTree]] = {}
    for node in sorted(nodes, key=_start):
        while later and _start(later[-1]) <= _start(node):
            running.append(later.pop())
        running = [host for host in running if (host.end_time or 0.0) >= _start(node)]
        found[node.id] = [host for host in running if host is not node and _encloses(host, node)]
    return found


def _start(node: TraceTree) -> float:
    return node.start_time or 0.0


def _innermost(node: TraceTree, enclosing: Sequence[TraceTree], parent_of: dict[str, TraceTree]) -> TraceTree | None:
    """Return the innermost of the spans that enclose a node in time; None unless they are all above each other."""
    hosts = [host for host in enclosing if not _is_above(node, host, parent_of)]
    innermost = min(hosts, key=lambda host: (_seconds(host), host.id), default=None)
    if innermost is None or not all(host is innermost or _is_above(host, innermost, parent_of) for host in hosts):
        return None
    return innermost


def _encloses(host: TraceTree, node: TraceTree) -> bool:
    if host.start_time is None or host.end_time is None or node.start_time is None or node.end_time is None:
        return False
    inside = host.start_time <= node.start_time and node.end_time <= host.end_time
    return inside and (host.start_time, host.end_time) != (node.start_time, node.end_time)


def _is_above(node: TraceTree, below: TraceTree, parent_of: dict[str, TraceTree]) -> bool:
    at = parent_of.get(below.id)
    while at is not None and at is not node:
        at = parent_of.get(at.id)
    return at is node
