"""Write the generated tables into the pages for people who migrate: `python -m tests.compat.make_names_table`."""

from pathlib import Path

from leyden_compat.finder import MissingName
from tests.compat.signatures import INSTEAD, TABLES, differences, inventory

MIGRATING = Path(__file__).resolve().parents[2] / "docs" / "migrating"
PAGES = {"agentlightning": MIGRATING / "agent-lightning.md", "qlib": MIGRATING / "qlib.md"}
NAMES, PARAMETERS = "names", "parameters"
"""The tables, by the word in the comments around them."""


def table(package: str) -> str:
    """Return the names of the inventory that have an answer, a row for each answer."""
    found = inventory(package)
    rows: dict[str, dict[str, None]] = {}
    seen: set[str] = set()
    for module, names in sorted(found["modules"].items(), key=lambda item: -len(item[0].split("."))):
        foreign = TABLES[package][module]
        if foreign.instead is not None:
            rows.setdefault(foreign.instead, {})[f"`{module.removeprefix(f'{package}.')}`"] = None
            continue
        for name in names:
            target = foreign.names.get(name)
            if isinstance(target, MissingName) and name not in seen:
                seen.add(name)
                rows.setdefault(target.instead, {})[f"`{name}`"] = None
    total = len({name for names in found["modules"].values() for name in names})
    title = {"agentlightning": "Agent Lightning", "qlib": "`qlib.rl` in pyqlib"}[package]
    head = (
        f"{total - len(seen)} of the {total} public names of {title} {', '.join(found['releases'])} work under the\nalias. "
        "The others raise an error that says what to write instead.\n\n| Names | What to write |\n|---|---|\n"
    )
    lines = [f"| {', '.join(sorted(names))} | {sentence} |\n" for sentence, names in rows.items()]
    return f"{head}{''.join(sorted(lines))}"


def parameters_table(package: str) -> str:
    """Return what functions and methods of the alias do not take as they did, and what to write."""
    found = differences(package)
    rows = [
        f"| {'<br>'.join(f'`{place}`: {found[place]}' for place in places.split())} | {sentence} |\n"
        for places, sentence in INSTEAD[package].items()
    ]
    return f"| What differs | What to write |\n|---|---|\n{''.join(sorted(rows))}"


def page_with_tables(package: str, text: str) -> str:
    for word, generated in ((NAMES, table(package)), (PARAMETERS, parameters_table(package))):
        begin, end = f"<!-- {word}: begin -->\n", f"<!-- {word}: end -->\n"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{generated}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    for package, page in PAGES.items():
        page.write_text(page_with_tables(package, page.read_text()))
