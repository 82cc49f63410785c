"""The store inside one process, against Agent Lightning's: rollouts a second, and memory kept for finished ones.

A rollout is: enqueue, claim, 10 spans of about 1 kB, an attempt update, a span query. Both sides run the same program
(`peers/store_rollouts.py`), each in its own interpreter, in turn. The peer has its fastest store, in memory; Leyden has its store in
memory and its durable one in a file.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import Peer, Row, Sample, compare

PEER = "bench-agentlightning"
SCRIPT = Path(__file__).parent / "peers" / "store_rollouts.py"
LEYDEN = Peer("leyden", Path(sys.executable))

ROLLOUTS = 1000
KEPT = 10_000
"""Finished rollouts whose memory is measured."""
KEPT_BY_PEER = 2_000
"""The same for the peer, whose memory grows in proportion; its figure is scaled."""

RATES = {
    "store in memory, spans one by one": ("single", 1, False),
    "store in memory, spans in bulk": ("bulk", 1, False),
    "store in a file, spans one by one": ("single", 1, True),
    "store in a file, spans in bulk": ("bulk", 1, True),
    "store in a file, spans in bulk, 16 at a time": ("bulk", 16, True),
}


def main(peer: Peer | None) -> list[Row]:
    """Rollouts a second, then megabytes kept."""
    rows = [
        compare(
            name,
            "rollouts/s",
            side(LEYDEN, "leyden", mode, ROLLOUTS, tasks, in_file=in_file),
            peer and side(peer, "agentlightning", mode, ROLLOUTS // 2, tasks),
            peer_name=peer and f"{peer.name}, in memory",
        )
        for name, (mode, tasks, in_file) in RATES.items()
    ]
    for name, in_file, figure in (
        ("memory kept by 10,000 rollouts, store in memory", False, "kept_mb"),
        ("whole process with 10,000 rollouts, store in a file", True, "resident_mb"),
    ):
        kept = peer and side(
            peer, "agentlightning", "bulk", KEPT_BY_PEER, 1, figure="kept_mb", scale=KEPT / KEPT_BY_PEER
        )
        rows.append(
            compare(
                name,
                "MB",
                side(LEYDEN, "leyden", "bulk", KEPT, 1, in_file=in_file, figure=figure),
                kept,
                peer_name=peer and f"{peer.name}, in memory, kept; from {KEPT_BY_PEER:,}",
                higher_is_better=False,
            )
        )
    return rows


def side(
    who: Peer,
    name: str,
    mode: str,
    rollouts: int,
    tasks: int,
    *,
    in_file: bool = False,
    figure: str = "value",
    scale: float = 1.0,
) -> Callable[[], Sample]:
    """One run of the program on one side; `figure` is what is read off it."""

    def measured() -> Sample:
        with tempfile.TemporaryDirectory() as directory:
            arguments = [name, mode, str(rollouts), str(tasks), *([directory] if in_file else [])]
            answer = who.run(SCRIPT, *arguments)
        return Sample(value=float(str(answer[figure])) * scale, cpu_s=float(str(answer["cpu_s"])))

    return measured
