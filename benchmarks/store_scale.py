"""What a rollout and a dashboard's questions cost in a store that holds 10,000, 100,000 and 1,000,000 rollouts.

The costs must stay flat, and so must memory.

Three durable stores in files, filled in bulk with finished rollouts of two small spans each (ten of 1 kB would be 12 GB at a million) and,
behind them, a tenth as many that wait in the queue. Then short slices of whole rollouts (enqueue, claim, 10 spans of about 1 kB one by
one, an attempt update, a span query) take turns between the three, so that the machine's moods hit all alike. At last each store is asked
what a dashboard asks: pages of 100 rollouts with their totals, the statistics, and summaries with histograms.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness import Peer, Row, Sample
from benchmarks.report import Table
from benchmarks.sides import Side, alternate, row
from benchmarks.store import SCRIPT, Contender, percentile

SIZES = (10_000, 100_000, 1_000_000)
QUEUED_SHARE = 10
"""One waiting rollout for so many finished ones."""
PAIRS = 9
QUESTIONS = 25
"""How often each store is asked each question."""
ASKED = {
    "newest": "newest 100 by `start_time`",
    "ended_last": "last 100 by `end_time`",
    "of_status": "100 of a status",
    "of_status_newest": "newest 100 of a status",
    "waiting": "100 that wait",
    "statistics": "`statistics`",
    "best": "100 with the best rewards",
    "rewards": "summary and histogram of rewards",
    "tokens": "summary and histogram of tokens",
}
HEADLINES = ()


def main(peer: Peer | None) -> list[Row | Table]:
    """Each larger store beside the smallest: CPU and wall microseconds of a rollout. No peer."""
    with ExitStack() as stack:
        sides = [stack.enter_context(Side("leyden", Path(sys.executable), SCRIPT, "leyden")) for _ in SIZES]
        for side, size in zip(sides, SIZES, strict=True):
            side.ask("open", where="file")
            side.ask("fill", rollouts=size, queued=size // QUEUED_SHARE)
            print(f"filled a store with {size:,} rollouts", flush=True)
        stores = [Contender(f"{size:,}", [side]) for side, size in zip(sides, SIZES, strict=True)]
        samples = alternate([store.slice("one") for store in stores], pairs=PAIRS)
        resident = [side.ask("memory") for side in sides]
        questions = [side.ask("questions", times=QUESTIONS) for side in sides]
    rows: list[Row] = []
    for size, taken in list(zip(SIZES, samples, strict=True))[1:]:
        for unit, of in (("rollouts/s", samples[0]), ("rollouts/CPU s", per_cpu(samples[0], stores[0]))):
            mine = taken if unit == "rollouts/s" else per_cpu(taken, stores[SIZES.index(size)])
            name = f"store in a file that holds {size:,} rollouts" + ("" if unit == "rollouts/s" else ", by CPU")
            rows.append(row(name, unit, mine, of, f"Leyden, {SIZES[0]:,} rollouts"))
    return [*rows, table(stores, resident), table_of_questions(stores, questions)]


def per_cpu(samples: list[Sample], store: Contender) -> list[Sample]:
    """Return these slices as rollouts for each second of CPU."""
    costs = store.cpu_micros["one"]
    return [Sample(value=1e6 / micros, cpu_s=one.cpu_s) for micros, one in zip(costs, samples, strict=True)]


def table(stores: list[Contender], resident: list[dict[str, float]]) -> Table:
    """Each store: its calls, its memory, its file."""
    calls = ("enqueue", "claim", "add_span", "update_attempt", "query_spans")
    return Table(
        title="Store in a file, microseconds of a call (p50 / p99) by the number of rollouts in it",
        columns=["rollouts", *(f"`{call}`" for call in calls), "resident MB", "on disk MB"],
        rows=[
            [
                store.label,
                *(
                    f"{percentile(store.micros[call], 50):,.0f} / {percentile(store.micros[call], 99):,.0f}"
                    for call in calls
                ),
                f"{memory['mb']:,.0f}",
                f"{memory['disk_mb']:,.0f}",
            ]
            for store, memory in zip(stores, resident, strict=True)
        ],
    )


def table_of_questions(stores: list[Contender], questions: list[dict[str, list[float]]]) -> Table:
    """Each store: what a dashboard asks, each page with its total."""
    return Table(
        title="Questions about a store in a file, microseconds of CPU (p50 / p90), each page with its total",
        columns=["rollouts", *ASKED.values()],
        rows=[
            [
                store.label,
                *(f"{percentile(taken[name], 50):,.0f} / {percentile(taken[name], 90):,.0f}" for name in ASKED),
            ]
            for store, taken in zip(stores, questions, strict=True)
        ],
    )
