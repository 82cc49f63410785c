"""Make every fault and every healthy run, and write their table into docs/doctor.md: `python -m tests.doctor.table`."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from tests.doctor import learning_faults, machine_faults
from tests.doctor.faults import Case
from tests.doctor.healthy import HEALTHY

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
MARKED = re.compile(r"(?s)(<!-- faults:start -->\n).*(?=<!-- faults:end -->)")


def row(case: Case) -> str:
    with tempfile.TemporaryDirectory() as folder:
        diagnosis, seconds = case.look(Path(folder) / "run")
    first = next(iter(diagnosis.findings), None)
    found = "none" if first is None else f"`{first}`"
    found += "" if first == case.rule else f" (not `{case.rule}`)"
    return f"| {case.name} | {'recorded rows' if case.recorded else 'a real run'} | {found} | {seconds:.1f} |"


def main() -> None:
    tables: list[str] = []
    for title, cases in (
        ("fault", [*learning_faults.FAULTS, *machine_faults.FAULTS]),
        ("healthy run", HEALTHY),
    ):
        rows = [row(case) for case in cases]
        tables.append(
            "\n".join((f"| {title} | what was looked at | first finding | seconds |", "|---|---|---|---|", *rows))
        )
    text = "\n\n".join(tables)
    if not PAGE.exists() or not MARKED.search(PAGE.read_text()):
        sys.exit(f"{text}\n\n{PAGE} has no marks for the table")
    PAGE.write_text(MARKED.sub(lambda found: f"{found[1]}\n{text}\n\n", PAGE.read_text()))


if __name__ == "__main__":
    main()
