"""`leyden samples`: the time series that the monitors of a store have written, each as a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from leyden._lib.numbers import mean_of
from leyden.cli.output import AsJson, cell, echo, echo_json, terminal
from leyden.cli.store_options import WAIT_SECONDS, ServerToken, ServerWait, StoreAddress

if TYPE_CHECKING:
    from rich.table import Table

    from leyden.types import Sample

_WIDTH = 40
"""Characters of a line, each of which is the mean of its share of the time."""


def samples(
    url: StoreAddress,
    name: Annotated[
        list[str] | None,
        typer.Argument(help="Metrics, such as cpu_percent; all by default.", show_default=False),
    ] = None,
    worker: Annotated[
        str | None, typer.Option(help="Only those of this worker; '' for those of the store and of all workers.")
    ] = None,
    hours: Annotated[float, typer.Option(min=0.01, max=168, help="How far to look back; samples are kept a week.")] = 1,
    token: ServerToken = None,
    wait: ServerWait = WAIT_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Draw the recent history of a store's metrics, such as CPU, memory and disk: a line for each, from its lowest
    value to its highest.

    A monitor writes them (`leyden store --monitor`, `Trainer(monitor=True)`), and a gateway its own.

    \b
    Examples:
      leyden samples http://127.0.0.1:4747
      leyden samples http://127.0.0.1:4747 cpu_percent memory_percent --hours 24
      leyden samples .leyden/20260102-101500-ab12/store.sqlite --worker runner-0
      leyden samples http://127.0.0.1:4747 disk_free_percent --json | jq '.[-1].value'
    """
    import asyncio
    import time

    now = time.time()
    found = asyncio.run(_read(url, token, wait, name, worker or None, now - 3600 * hours))
    if worker == "":
        found = [each for each in found if each.worker_id is None]
    if as_json:
        echo_json([each.model_dump(mode="json") for each in found])
    elif found:
        terminal().print(_table(found, now - 3600 * hours, now))
    else:
        echo("no such samples in this time; a monitor writes them: leyden store --monitor, or Trainer(monitor=True)")


async def _read(
    url: str, token: str | None, wait_seconds: float, names: Sequence[str] | None, worker_id: str | None, since: float
) -> list[Sample]:
    """Return the samples of these metrics and of this worker, or of all, by time.

    since: Unix seconds.
    """
    from leyden.cli.connecting import answer_of, store_in_words, store_to_read

    async with store_to_read(url, token, wait_seconds) as store:
        pages = [
            await answer_of(
                store_in_words(url), store.query_samples(name=name, worker_id=worker_id, measured_from=since)
            )
            for name in (names or [None])
        ]
    return sorted((sample for page in pages for sample in page), key=lambda sample: sample.time)


def _table(samples: Sequence[Sample], begin: float, end: float) -> Table:
    """Return a table with a row for each series.

    begin, end: Unix seconds of its lines.
    """
    from rich.table import Table

    from leyden._lib.formatting import figure
    from leyden.training.runs.chart import sparkline

    series: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        series.setdefault((sample.name, sample.worker_id or ""), []).append(sample)
    table = Table(box=None, pad_edge=False)
    span = f"{(end - begin) / 3600:g} h" if end - begin >= 3600 else f"{(end - begin) / 60:g} min"
    for column in ("metric", "worker", "lowest", "highest", "last", f"{span} ago to now"):
        table.add_column(column, justify="right" if column in ("lowest", "highest", "last") else "left")
    for (name, worker), each in sorted(series.items()):
        values = [sample.value for sample in each]
        shown = (figure(value, 3) for value in (min(values), max(values), values[-1]))
        table.add_row(cell(name), cell(worker), *shown, sparkline(_means(each, begin, end), _WIDTH))
    return table


def _means(samples: Sequence[Sample], begin: float, end: float) -> list[float | None]:
    """Return the mean of each of `_WIDTH` equal parts of the time; None for a part without a sample."""
    parts: list[list[float]] = [[] for _ in range(_WIDTH)]
    for sample in samples:
        parts[min(_WIDTH - 1, max(0, int((sample.time - begin) / (end - begin) * _WIDTH)))].append(sample.value)
    return [mean_of(part) if part else None for part in parts]
