"""Write the table of docs/how-to/coding-agents.md from what the group's last run left in `.harness`."""

import json
import re
from pathlib import Path
from typing import Any

from leyden.execution.harness import HarnessProgram
from leyden.execution.harness.programs import PROGRAMS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "coding-agents.md"
START, END = "<!-- harness:start -->", "<!-- harness:end -->"


def row(kind: HarnessProgram, found: dict[str, Any]) -> str:
    prompt = max(call["prompt_tokens"] for call in found["calls"][:2])
    turns = f"{found['merged']} of {found['continued']}" if found["continued"] else "one turn"
    proven = sum(not (call["error"] or call["refused"]) for call in found["calls"])
    exact = f"{proven - found['wrong_ids']} of {found['served']}"
    cells = [f"`{kind.name}`", kind.installer, kind.version, kind.dialect, exact, turns, f"{prompt:,}", kind.remarks]
    return f"| {' | '.join(cells)} |"


KINDS = ("agent", "title", "subagent", "summary", "cut stream", "refused")  # as roles.py names them


def roles(found: dict[str, Any]) -> list[str]:
    """Return the cells of a row of roles: the calls of each kind, and how many have the right role."""
    kinds, right = found["kinds"], found["right"]
    for kind, other in (("summary", "unused summary"), ("refused", "sent again")):
        kinds[kind] = kinds.get(kind, 0) + kinds.pop(other, 0)
    return [*(str(kinds.get(kind) or "-") for kind in KINDS), f"{sum(right.values())} of {sum(kinds.values())}"]


def table() -> str:
    lines = [
        "| name | from | version | API | calls exact | turns merged | longest prompt | remarks |",
        f"|{'---|' * 8}",
    ]
    for kind in PROGRAMS.values():
        if not kind.unsupported:
            lines.append(row(kind, json.loads((ROOT / ".harness" / f"{kind.name}.json").read_text())))
    lines += ["", "| cannot be used | why |", "|---|---|"]
    lines += [f"| `{kind.name}` | {kind.unsupported} |" for kind in PROGRAMS.values() if kind.unsupported]
    lines += ["", f"| calls of | {' | '.join(KINDS)} | role right |", f"|{'---|' * (len(KINDS) + 2)}"]
    for kind in PROGRAMS.values():
        if (file := ROOT / ".harness" / f"{kind.name}.roles.json").exists():
            lines.append(f"| `{kind.name}` | {' | '.join(roles(json.loads(file.read_text())))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    page = PAGE.read_text()
    block = re.compile(f"{START}.*{END}", re.DOTALL)
    assert block.search(page), f"{PAGE} has no {START}"
    PAGE.write_text(block.sub(lambda _: f"{START}\n{table()}\n{END}", page))
