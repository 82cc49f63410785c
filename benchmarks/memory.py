"""Memory of a gradient on the CPU by the size of the vocabulary: logits in chunks, as the engine computes them, and whole.

Eight sequences of 256 tokens, all trained, the clipped policy loss and AdamW; a Qwen2 with two layers of width 256. Each number is a
process of its own with one thread: the peak of its resident memory above that of the loaded model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.harness import Peer, Row
from benchmarks.report import Table

HEADLINES = ()
SCRIPT = Path(__file__).parent / "peers" / "memory_side.py"
VOCABULARIES = (8_000, 32_000)


def main(peer: Peer | None) -> list[Row | Table]:
    return [by_vocabulary()]


def run(vocabulary: int, *, whole: bool) -> dict[str, float]:
    options = {
        "layers": 2,
        "width": 256,
        "vocabulary": vocabulary,
        "trained": 255,
        "whole_logits": whole,
        "backend": {},
    }
    found = Peer("leyden", Path(sys.executable)).run(SCRIPT, json.dumps(options))
    return {name: float(str(value)) for name, value in found.items()}


def by_vocabulary() -> Table:
    rows: list[list[str]] = []
    for vocabulary in VOCABULARIES:
        made = [run(vocabulary, whole=whole) for whole in (False, True)]
        above = [found["peak"] - found["loaded"] for found in made]
        rows.append(
            [
                f"{vocabulary:,}",
                *(f"{each:,.0f}" for each in above),
                *(f"{found['cpu_s']:.1f}" for found in made),
            ]
        )
        print(rows[-1], flush=True)
    columns = ["tokens of vocabulary", "MiB, in chunks", "MiB, whole", "CPU s, in chunks", "CPU s, whole"]
    title = "Memory of a gradient above the loaded model, by vocabulary; gradients and moments are part of it"
    return Table(title, columns, rows)
