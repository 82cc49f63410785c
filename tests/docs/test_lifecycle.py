"""The picture and the tables of the life of rollouts and attempts say what `leyden.types.lifecycle` says, no more and no less.

The picture is read from its geometry: an arrow comes from the rectangle on whose edge it begins (a box stands for every status inside
it) and leads to the rectangle on whose edge it ends. So what is compared is what a reader sees.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from xml.etree import ElementTree

import pytest

from leyden.types import ATTEMPT_TRANSITIONS, ROLLOUT_TRANSITIONS
from tests.docs.snippets import ROOT

PICTURE = ROOT / "docs" / "lifecycle.svg"
PAGE = ROOT / "docs" / "store.md"
SVG = "{http://www.w3.org/2000/svg}"

Edges = set[tuple[str, str]]


@dataclass(frozen=True)
class Box:
    left: float
    top: float
    right: float
    bottom: float

    def inside(self, other: "Box") -> bool:
        return (
            other.left < self.left and other.top < self.top and self.right < other.right and self.bottom < other.bottom
        )

    def touches(self, x: float, y: float) -> bool:
        """Whether the point is on the edge."""
        across, down = self.left <= x <= self.right, self.top <= y <= self.bottom
        return (down and x in (self.left, self.right)) or (across and y in (self.top, self.bottom))


def edges_of_tables(transitions: Mapping[str, frozenset[str]]) -> Edges:
    return {(source, target) for source, targets in transitions.items() for target in targets}


def drawn_edges(machine: str, text: str) -> Edges:
    """The arrows of one of the two machines. Fails for an arrow that hangs in the air."""
    group = next(group for group in ElementTree.fromstring(text).iter(f"{SVG}g") if group.get("id") == machine)
    statuses: dict[str, Box] = {}
    boxes: list[Box] = []
    edges: Edges = set()
    children = list(group)
    for child, following in zip(children, [*children[1:], None], strict=True):
        if child.tag != f"{SVG}rect":
            continue
        left, top, width, height = (float(child.get(name, "nan")) for name in ("x", "y", "width", "height"))
        box = Box(left, top, left + width, top + height)
        boxes.append(box)
        if "status" in child.get("class", ""):
            assert following is not None
            statuses[following.text or ""] = box
    for arrow in group.iter(f"{SVG}path"):
        numbers = [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", arrow.get("d", ""))]
        sources = [box for box in boxes if box.touches(*numbers[:2])]
        targets = [box for box in boxes if box.touches(*numbers[-2:])]
        assert (len(sources), len(targets)) == (1, 1), f"where does {arrow.get('d')} lead?"
        edges |= set(product(_members(sources[0], statuses), _members(targets[0], statuses)))
    return edges


def _members(box: Box, statuses: Mapping[str, Box]) -> Iterator[str]:
    return (name for name, status in statuses.items() if status == box or status.inside(box))


def written_edges(heading: str, text: str) -> Edges:
    """The first two columns of the table below a heading: statuses, in backticks, several with commas."""
    section = text.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    edges: Edges = set()
    for line in section.splitlines():
        cells = [re.findall(r"`([a-z]+)`", cell) for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0]:
            edges |= set(product(cells[0], cells[1]))
    return edges


MACHINES = [("rollout", ROLLOUT_TRANSITIONS), ("attempt", ATTEMPT_TRANSITIONS)]


@pytest.mark.parametrize(("machine", "transitions"), MACHINES)
def test_the_picture_draws_every_transition_and_no_other(machine: str, transitions: Mapping[str, frozenset[str]]):
    assert drawn_edges(machine, PICTURE.read_text()) == edges_of_tables(transitions)


@pytest.mark.parametrize(("machine", "transitions"), MACHINES)
def test_the_table_names_every_transition_and_no_other(machine: str, transitions: Mapping[str, frozenset[str]]):
    assert written_edges(f"### Statuses of {machine}s", PAGE.read_text()) == edges_of_tables(transitions)


def test_an_arrow_that_is_not_there_is_missed():
    text = PICTURE.read_text()
    arrow = '<path class="line" d="M352,154 L510,154"/>'
    assert arrow in text
    missing = drawn_edges("rollout", text) - drawn_edges("rollout", text.replace(arrow, ""))
    assert missing == {("preparing", "running")}


def test_an_arrow_that_ends_nowhere_is_refused():
    text = PICTURE.read_text().replace("M352,154 L510,154", "M352,154 L400,154")
    with pytest.raises(AssertionError, match="where does M352,154 L400,154 lead"):
        drawn_edges("rollout", text)


def test_a_final_status_has_a_thick_edge_and_no_other_has():
    finals = re.findall(r'class="status final \w+"[^>]*/>\s*<text[^>]*>(\w+)<', PICTURE.read_text())
    assert sorted(finals) == sorted(
        status for _, transitions in MACHINES for status, following in transitions.items() if not following
    )
