"""The store against Agent Lightning's: rollouts a second in one process and over HTTP, microseconds of each call, memory kept.

A rollout is: enqueue, claim, 10 spans of about 1 kB, an attempt update, a span query. Every side runs the same program
(`peers/store_side.py`) in a process of its own that stays, and short slices of all sides take turns. The peer has its fastest store, in
memory; Leyden has its store in memory and its durable one in a file. Beside them runs the floor: the same rows by raw SQL, with
nothing checked and no object made, on SQLite from Python, over HTTP the same behind aiohttp alone, on PostgreSQL Leyden's statements
through bare libpq. No store made of these can be faster, so it says what a ratio can be.

Modes: `one` sends spans one by one; `spans` sends a rollout's spans in one call; `bulk` carries 50 rollouts in each call that can carry
several.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.harness import MINIMUM_RUNS, Peer, PeerFailed, Row, Sample
from benchmarks.report import Table
from benchmarks.sides import Side, alternate, cpu_seconds_of, row
from constraints.install import environment

PEER = "bench-agentlightning"
SCRIPT = Path(__file__).parent / "peers" / "store_side.py"
PAIRS = 7
SLICE_SECONDS = 1.0
"""How long one slice takes about: so long that each has its share of the peer's collections of its whole heap."""
TOGETHER_SECONDS = 4.0
"""The same for clients of one server: they begin together, and the slice ends with the last of them; both must be a small part of it."""
CLIENTS = 8
KEPT = 10_000
"""Finished rollouts whose memory is measured."""
KEPT_BY_PEER = 2_500
"""The same for the peer, whose memory grows in proportion; its figure is scaled."""
RETAINED = 1_000
"""How many of those retention keeps, in the row about that."""
HEADLINES = ("store in a file, spans one by one", f"store over HTTP, {CLIENTS} client processes, spans in bulk")
MODES = {"one": "spans one by one", "spans": "spans in bulk", "bulk": "everything in bulk"}
CALLS = ("enqueue", "claim", "add_span", "update_attempt", "add_many_spans", "query_spans")


class Contender:
    """A store at work: its process, or several clients of one server; it knows what a slice of it is and what its calls took."""

    def __init__(
        self,
        label: str,
        workers: Sequence[Side],
        server_cpu: Callable[[], float] = lambda: 0.0,
        *,
        batch: int = 50,
        slice_seconds: float = SLICE_SECONDS,
    ) -> None:
        """server_cpu: CPU seconds that the server of these workers has used. batch: how many rollouts a call of mode `bulk` carries."""
        self.label = label
        self._slice_seconds = slice_seconds
        self._batch = batch
        self._workers = workers
        self._server_cpu = server_cpu
        self._sizes: dict[tuple[str, int], int] = {}
        self.micros: dict[str, list[float]] = defaultdict(list)
        self.cpu_micros: dict[str, list[float]] = defaultdict(list)
        """CPU microseconds of a rollout, all processes together, by mode."""

    def open(self, where: str) -> None:
        """Begin anew, with a store that holds no more than its warm-up."""
        for worker in self._workers:
            worker.ask("open", where=where)

    def slice(self, mode: str, tasks: int = 1) -> Callable[[], Sample]:
        """Runs of `mode`, `tasks` rollouts at a time in each worker; rollouts a second of all workers together."""

        def run() -> Sample:
            if (mode, tasks) not in self._sizes:
                self._sizes[mode, tasks] = self._size(mode, tasks)
            return self._run(mode, self._sizes[mode, tasks], tasks, remember=tasks == 1)

        return run

    def _size(self, mode: str, tasks: int) -> int:
        """Find how many rollouts of each worker make a slice, by trying ever longer slices."""
        step = size = self._batch if mode == "bulk" else tasks
        while True:
            rate = self._run(mode, size, tasks).value / len(self._workers)
            if size / rate > self._slice_seconds / 4:
                return max(1, round(rate * self._slice_seconds / step)) * step
            size *= 2

    def _run(self, mode: str, rollouts: int, tasks: int, *, remember: bool = False) -> Sample:
        """remember: for the table of calls."""
        before = self._server_cpu()
        for worker in self._workers:
            worker.tell("run", mode=mode, rollouts=rollouts, tasks=tasks, batch=self._batch)
        answers = [worker.answer() for worker in self._workers]
        cpu_s = sum(answer["cpu_s"] for answer in answers) + self._server_cpu() - before
        total = rollouts * len(answers)
        if remember:
            for answer in answers:
                for call, taken in answer["micros"].items():
                    self.micros[call] += taken
            self.cpu_micros[mode].append(cpu_s / total * 1e6)
        return Sample(value=total / max(answer["seconds"] for answer in answers), cpu_s=cpu_s)


def main(peer: Peer | None) -> list[Row | Table]:
    """Rates in one process, rates over HTTP, memory; then the table of calls."""
    with contenders(peer) as (ours, theirs, floor):
        rows = in_process(ours, theirs, floor, peer)
    postgres_rows, on_postgres = postgres()
    http_rows, over_http = http(peer)
    columns = [*ours.values(), *on_postgres, *floor.values(), *([theirs] if theirs else []), *over_http]
    return [*rows, *postgres_rows, *http_rows, *memory(peer), calls(columns)]


@contextmanager
def contenders(
    peer: Peer | None,
) -> Iterator[tuple[dict[str, Contender], Contender | None, dict[str, Contender]]]:
    """Leyden's stores by where they are, the peer, and the floor by where it is."""
    with ExitStack() as stack:

        def at_work(label: str, name: str, where: str, python: Path = Path(sys.executable)) -> Contender:
            contender = Contender(label, [stack.enter_context(Side(name, python, SCRIPT, name))])
            contender.open(where)
            return contender

        ours = {
            "memory": at_work("in memory", "leyden", "memory"),
            "file": at_work("in a file", "leyden", "file"),
            "power": at_work('in a file, `durability="power"`', "leyden", "power"),
        }
        floor = {
            "memory": at_work("raw SQL, in memory", "sqlite3", "memory"),
            "file": at_work("raw SQL, in a file", "sqlite3", "file"),
        }
        theirs = None
        if peer is not None:
            try:
                theirs = at_work(f"{peer.name}, in memory", "agentlightning", "memory", peer.python)
            except PeerFailed as failure:
                print(f"Measuring Leyden alone: {failure}", flush=True)
        yield ours, theirs, floor


def in_process(
    ours: dict[str, Contender], theirs: Contender | None, floor: dict[str, Contender], peer: Peer | None
) -> list[Row]:
    """Each mode in memory, then in a file, paired with the same slices of the peer and of the floor; for each mode all begin with stores
    that hold no more than their warm-up.

    Not in memory and in a file in turn: the slices in memory would share the cores with the kernel, which writes what a file left.
    """
    rows: list[Row] = []
    floors: list[Row] = []
    peer_name = f"{peer.name}, in memory" if peer and theirs else None
    for where, said_where in (("memory", "in memory"), ("file", "in a file")):
        for mode, said in MODES.items():
            _open_anew((ours[where], where), (floor[where], where), (theirs, "memory"))
            slices = [ours[where].slice(mode), floor[where].slice(mode)]
            if theirs:
                slices += [theirs.slice(mode), theirs.slice("one")] if mode == "bulk" else [theirs.slice(mode)]
            mine, raw, *others = alternate(slices, pairs=PAIRS)
            name = f"store {said_where}, {said}"
            rows.append(row(name, "rollouts/s", mine, others[0] if others else [], peer_name))
            if len(others) > 1:
                one_by_one = f"{peer_name}, one by one"
                rows.append(row(f"{name}, the peer one by one", "rollouts/s", mine, others[1], one_by_one))
            floors.append(row(f"{name}, of raw SQL", "rollouts/s", mine, raw, "raw SQL"))
    _open_anew((ours["file"], "file"), (ours["power"], "power"), (theirs, "memory"))
    sides = [ours["file"], ours["power"], *([theirs] if theirs else [])]
    file, power, *others = alternate([side.slice("spans", 16) for side in sides], pairs=PAIRS)
    other = others[0] if others else []
    said = "spans in bulk, 16 at a time"
    rows.append(row(f"store in a file, {said}", "rollouts/s", file, other, peer_name))
    rows.append(row(f'store in a file, durability="power", {said}', "rollouts/s", power, other, peer_name))
    alternate([ours["power"].slice("one")], pairs=2)  # for the table of calls
    return rows + floors


def _open_anew(*sides: tuple[Contender | None, str]) -> None:
    for side, where in sides:
        if side:
            side.open(where)


def postgres() -> tuple[list[Row], list[Contender]]:
    """Leyden and the floor, each on a PostgreSQL of its own on this machine, where the environment with one is installed."""
    if not environment("backends").python.exists():
        print("store on PostgreSQL: left out; `python constraints/install.py backends` brings one", flush=True)
        return [], []
    rows: list[Row] = []
    floors: list[Row] = []
    with ExitStack() as stack:

        def at_work(label: str, name: str) -> Contender:
            side = stack.enter_context(Side(name, environment("backends").python, SCRIPT, name))
            pid = side.ask("open", where="postgres")["server_pid"]
            return Contender(label, [side], lambda: cpu_seconds_of(pid))

        ours = at_work("on PostgreSQL", "leyden")
        floor = at_work("bare libpq, on PostgreSQL", "libpq")
        for mode, said in MODES.items():
            mine, bare = alternate([ours.slice(mode), floor.slice(mode)], pairs=MINIMUM_RUNS)
            name = f"store on PostgreSQL, {said}"
            rows.append(row(name, "rollouts/s", mine, [], None))
            floors.append(row(f"{name}, of bare libpq", "rollouts/s", mine, bare, "bare libpq, the same statements"))
    return rows + floors, [ours, floor]


# ---- over HTTP -------------------------------------------------------------------------------------------------------


def http(peer: Peer | None) -> tuple[list[Row], list[Contender]]:
    """One client, then eight client processes, of a server on this machine: Leyden's keeps a file, and so does the floor's; the
    peer's keeps its memory."""
    rows: list[Row] = []
    floors: list[Row] = []
    with ExitStack() as stack:
        sides = [
            served(stack, "leyden", "file", Path(sys.executable), "over HTTP, a file behind it"),
            served(stack, "sqlite3", "file", Path(sys.executable), "raw HTTP, raw SQL in a file behind it"),
        ]
        peer_name = None
        if peer is not None:
            try:
                label = f"{peer.name}, over HTTP, memory behind it"
                sides.append(served(stack, "agentlightning", "memory", peer.python, label))
                peer_name = f"{peer.name}, memory behind it"
            except PeerFailed as failure:
                print(f"store over HTTP: Leyden alone: {failure}", flush=True)
        for who, group in zip(("1 client", f"{CLIENTS} client processes"), zip(*sides, strict=True), strict=True):
            for mode, said in MODES.items():
                name = f"store over HTTP, {who}, {said}"
                mine, floor, *others = alternate([side.slice(mode) for side in group], pairs=MINIMUM_RUNS)
                rows.append(row(name, "rollouts/s", mine, others[0] if others else [], peer_name))
                floors.append(row(f"{name}, of raw HTTP and SQL", "rollouts/s", mine, floor, "raw HTTP and SQL"))
            rows.append(tail(f"store over HTTP, {who}, p99 of a claim", "claim", [group[0], *group[2:]], peer_name))
        return rows + floors, [alone for alone, _ in sides]


def served(stack: ExitStack, name: str, where: str, python: Path, label: str) -> tuple[Contender, Contender]:
    """A server of this side in its own process; one client of it, and that one with all the others, each in its own."""
    server, *clients = [stack.enter_context(Side(name, python, SCRIPT, name)) for _ in range(1 + CLIENTS)]
    url = server.ask("serve", where=where)["url"]
    for client in clients:
        client.tell("open", where=url)
    for client in clients:
        client.answer()
    # The peer's client sends spans one by one all the same; smaller batches only keep its slices short.
    alone, together = (20, 5) if name == "agentlightning" else (50, 50)
    one = Contender(label, clients[:1], server.cpu_seconds, batch=alone)
    return one, Contender(label, clients, server.cpu_seconds, batch=together, slice_seconds=TOGETHER_SECONDS)


def tail(name: str, call: str, sides: Sequence[Contender], peer_name: str | None) -> Row:
    """The 99th percentile of a call in milliseconds, of everything that ran."""
    p99 = [percentile(side.micros[call], 99) / 1000 for side in sides]
    ratio = p99[1] / p99[0] if len(p99) > 1 else None
    return Row(
        row=name,
        unit="ms",
        leyden=p99[0],
        peer=p99[1] if len(p99) > 1 else None,
        peer_name=peer_name,
        ratio=ratio,
        n=len(sides[0].micros[call]),
        min=ratio or p99[0],
        max=ratio or p99[0],
        cpu_s=0.0,
    )


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory(peer: Peer | None) -> list[Row]:
    """Megabytes that finished rollouts keep: with and without retention, and the whole process of a file."""
    theirs = grown("agentlightning", "memory", peer.python, KEPT_BY_PEER) if peer else None
    peer_name = f"{peer.name}, in memory, kept; from {KEPT_BY_PEER:,}" if peer and theirs else None
    rows: list[Row] = []
    for name, where, keep in (
        ("memory kept by 10,000 rollouts, store in memory", "memory", None),
        (f"the same, where retention keeps {RETAINED:,} of them", "memory", RETAINED),
        ("whole process with 10,000 rollouts, store in a file", "file", None),
    ):
        ours = grown("leyden", where, Path(sys.executable), KEPT, keep=keep)
        assert ours is not None
        rows.append(row(name, "MB", ours, theirs or [], peer_name, higher_is_better=False))
    return rows


def grown(name: str, where: str, python: Path, rollouts: int, *, keep: int | None = None) -> list[Sample] | None:
    """Five samples while so many rollouts are added; None where the side is missing.

    In memory, each is what a fifth of them added, scaled to `KEPT`. Of a file, it is the whole process; with `keep`, which says how many
    finished rollouts stay after each fifth, it is all that the process grew by.
    """
    samples: list[Sample] = []
    fifth = rollouts // MINIMUM_RUNS
    try:
        with Side(name, python, SCRIPT, name) as side:
            side.ask("open", where=where)
            first = last = side.ask("memory")["mb"]
            for _ in range(MINIMUM_RUNS):
                cpu_s = side.ask("run", mode="spans", rollouts=fifth)["cpu_s"]
                if keep is not None:
                    side.ask("prune", max_rollouts=keep)
                now = side.ask("memory")["mb"]
                value = now if where == "file" else (now - last) * KEPT / fifth if keep is None else now - first
                samples.append(Sample(value=value, cpu_s=cpu_s))
                last = now
    except PeerFailed as failure:
        if name == "leyden":
            raise
        print(f"memory: Leyden alone: {failure}", flush=True)
        return None
    return samples


# ---- the table of calls ----------------------------------------------------------------------------------------------


def calls(contenders: Sequence[Contender]) -> Table:
    """Each store: median and 99th percentile of its calls, and the CPU of a rollout in each mode."""

    def spread(taken: Sequence[float]) -> str:
        return f"{percentile(taken, 50):,.0f} / {percentile(taken, 99):,.0f}" if taken else ""

    def middle(costs: Sequence[float]) -> str:
        return f"{statistics.median(costs):,.0f}" if costs else ""

    return Table(
        title="Store, microseconds: p50 / p99 of a call (10 spans in the last two), and the CPU of a rollout, client and server together",
        columns=["store", *(f"`{call}`" for call in CALLS), *(f"CPU, {said}" for said in MODES.values())],
        rows=[
            [
                side.label,
                *(spread(side.micros[call]) for call in CALLS),
                *(middle(side.cpu_micros[mode]) for mode in MODES),
            ]
            for side in contenders
        ],
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that so many percent do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
