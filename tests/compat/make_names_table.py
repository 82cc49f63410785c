"""Write the table of answered names into docs/migrating/agent-lightning.md: `python -m tests.compat.make_names_table`."""

import json
from pathlib import Path

from leyden.compat.agentlightning.table import MODULES
from leyden.compat.finder import Answer

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "migrating" / "agent-lightning.md"
BEGIN, END = "<!-- names: begin -->\n", "<!-- names: end -->\n"


def table() -> str:
    """Return the names of the inventory that have an answer, a row for each answer."""
    inventory = json.loads((HERE / "agentlightning.json").read_text())
    rows: dict[str, dict[str, None]] = {}
    seen: set[str] = set()
    for module, names in sorted(inventory["modules"].items(), key=lambda item: -len(item[0].split("."))):
        foreign = MODULES[module]
        if foreign.instead is not None:
            rows.setdefault(foreign.instead, {})[f"`{module.removeprefix('agentlightning.')}`"] = None
            continue
        for name in names:
            target = foreign.names.get(name)
            if isinstance(target, Answer) and name not in seen:
                seen.add(name)
                rows.setdefault(target.instead, {})[f"`{name}`"] = None
    total = len({name for names in inventory["modules"].values() for name in names})
    head = (
        f"{total - len(seen)} of the {total} public names of Agent Lightning {', '.join(inventory['releases'])} work under the "
        "alias. The others raise an error with the sentence beside them.\n\n| Names | What to write |\n|---|---|\n"
    )
    lines = [f"| {', '.join(sorted(names))} | {sentence} |\n" for sentence, names in rows.items()]
    return f"{BEGIN}\n{head}{''.join(sorted(lines))}\n{END}"


def page_with(text: str, generated: str) -> str:
    before, _, rest = text.partition(BEGIN)
    return before + generated + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(), table()))
