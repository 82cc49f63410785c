"""Write the generated tables into docs/migrating/agent-lightning.md: `python -m tests.compat.make_names_table`."""

import json
from pathlib import Path

from leyden.compat.agentlightning.table import MODULES
from leyden.compat.finder import Answer
from tests.compat.signatures import INSTEAD, differences

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "migrating" / "agent-lightning.md"
NAMES, PARAMETERS = "names", "parameters"
"""The tables, by the word in the comments around them."""


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
        f"{total - len(seen)} of the {total} public names of Agent Lightning {', '.join(inventory['releases'])} work under the\nalias. "
        "The others raise an error with the sentence beside them.\n\n| Names | What to write |\n|---|---|\n"
    )
    lines = [f"| {', '.join(sorted(names))} | {sentence} |\n" for sentence, names in rows.items()]
    return f"{head}{''.join(sorted(lines))}"


def parameters_table() -> str:
    """Return what functions and methods of the alias do not take as they did, and what to write."""
    found = differences()
    rows = [
        f"| {'<br>'.join(f'`{place}`: {found[place]}' for place in places.split())} | {sentence} |\n"
        for places, sentence in INSTEAD.items()
    ]
    return f"| What a call can meet | What to write |\n|---|---|\n{''.join(sorted(rows))}"


def page_with_tables(text: str) -> str:
    for word, generated in ((NAMES, table()), (PARAMETERS, parameters_table())):
        begin, end = f"<!-- {word}: begin -->\n", f"<!-- {word}: end -->\n"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{generated}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text()))
