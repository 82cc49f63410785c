"""Pretrained models on one CPU thread: Gemma 3 270M and SmolLM2-135M-Instruct, beside transformers, llama.cpp and TRL.

The models come from `leyden models get gemma3 .models/gemma3` and `leyden models get smollm2 .models/smollm2`, or lie in the folder that
LEYDEN_BENCH_MODELS names; a model that is not there is skipped, by name. llama.cpp (xllamacpp, in the environment `llama-cpp`) gets
the same weights in float32 and in 8 bits, written by `leyden models export`, and in 4 bits where a file `gemma3.gguf` or `smollm2.gguf`
lies beside the folder. TRL runs in the environment `bench-trl`, which `make bench NAME=rl_tiny` makes. Without a peer its rows are missing.

Decoding: prompts of 22 tokens, 16 tokens more for each of 1, 8 and 32 at once, from the whole distribution, after the prompts and the
first 18 tokens with these weights. Shared prompts: 32 rollouts of 4 tasks, 63 tokens of which 50 are common to all, and 6 sampled
ones. Gradient: those rollouts, all weights, with the optimizer's step; and LoRA of rank 16 with 8 rollouts of 256 tokens, half of
them trained. Start: CPU seconds of a process from its start to its first new
weights. Every run is a process of its own; a table has the largest resident size of each. Rows are by CPU seconds.

`LEYDEN_BENCH_REAL_MODEL=smollm2,decode:8,gradient` measures a part (models and works), and keeps the other rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.harness import MINIMUM_RUNS, ROOT, Peer, PeerFailed, Row, Sample, summary
from constraints.install import environment, is_installed

PEER = "llama-cpp"
SCRIPT = Path(__file__).parent / "peers" / "real_model_side.py"
LLAMA, TRL = SCRIPT.with_name("real_model_llama.py"), SCRIPT.with_name("rl_tiny_trl.py")
MODELS = {"gemma3": "Gemma 3 270M", "smollm2": "SmolLM2-135M"}
BATCHES = (1, 8, 32)
WORKS = {
    **{f"decode:{batch}": (f"decode, {batch} at once", "tokens/CPU s") for batch in BATCHES},
    "shared": ("32 rollouts with shared prompts", "tokens/CPU s"),
    "gradient": ("gradient of 32 short rollouts", "trained tokens/CPU s"),
    "lora": ("gradient of 8 rollouts of 256 tokens, LoRA", "trained tokens/CPU s"),
    "start": ("first step after the start", "CPU s"),
}
HEADLINES = ()
MEMORY, FLOOR = "Largest resident size of a run, MiB (medians)", "Matrix products of a decoding step alone, one thread"
Run = Callable[[], dict[str, Any]]


def main(peer: Peer | None) -> list[Row | report.Table]:
    """Return the rows of the parts that LEYDEN_BENCH_REAL_MODEL names, or of all, and those that were measured before."""
    wanted = [part for part in os.environ.get("LEYDEN_BENCH_REAL_MODEL", "").split(",") if part]
    works = [work for work in [*WORKS, "floor"] if work in wanted] or [*WORKS, "floor"]
    names = [name for name in MODELS if name in wanted] or list(MODELS)
    models = Path(os.environ.get("LEYDEN_BENCH_MODELS", ROOT / ".models"))
    before = report.load("real_model") if (report.RESULTS / "real_model.json").exists() else []
    rows = {(row.row, row.peer_name): row for row in before}
    tables = {table.title: {tuple(line[:2]): line for line in table.rows} for table in report.load_tables("real_model")}
    memory, floors = tables.get(MEMORY, {}), tables.get(FLOOR, {})
    for name in names:
        folder = models / name
        if not (folder / "config.json").is_file():
            print(f"{MODELS[name]}: not measured; `leyden models get {name} {folder}` brings it", flush=True)
            continue
        with tempfile.TemporaryDirectory() as temporary:
            for work in works:
                if work == "floor":
                    floors |= {(line[0], line[1]): line for line in floor_lines(name, folder, rows)}
                    continue
                found, sizes = measure(name, work, peers(name, work, folder, peer, Path(temporary)))
                rows = {key: row for key, row in rows.items() if key[0] != found[0].row}
                rows |= {(row.row, row.peer_name): row for row in found}
                memory |= {(line[0], line[1]): line for line in sizes}
                print("".join(report.line(row) for row in found), end="", flush=True)
    order = [f"{MODELS[name]}: {title}" for name in MODELS for title, _ in WORKS.values()]
    in_order = sorted(
        rows.values(), key=lambda row: next(i for i, each in enumerate(order) if row.row.startswith(each))
    )
    return [
        *in_order,
        report.Table(FLOOR, ["model", "at once", "MB of weights", "GB/s", "tokens/CPU s by bytes", "by products",
                             "Leyden reaches of the lower"], list(floors.values())),
        report.Table(MEMORY, ["row", "side", "MiB"], list(memory.values())),
    ]  # fmt: skip


def side(name: str, work: str, folder: Path) -> dict[str, Any]:
    """One run of Leyden, transformers or the floor."""
    return Peer(name, Path(sys.executable)).run(SCRIPT, name, work, str(folder))


def peers(name: str, work: str, folder: Path, llama: Peer | None, temporary: Path) -> dict[str, Run]:
    """The sides of one work by name, Leyden's first; those that are not installed are left out, with a word."""
    if work in ("gradient", "lora"):
        job = temporary / f"{work}.json"
        side("leyden", f"job:{job}", folder)
        found: dict[str, Run] = {"leyden": partial(side, "leyden", f"gradient:{job}", folder)}
        if is_installed("bench-trl"):
            trl = Peer("trl", environment("bench-trl").python)
            found["trl"] = partial(trl_step, trl, job)
        else:
            print(f"{MODELS[name]}, {work}: without TRL, .venvs/bench-trl is not installed", flush=True)
        return found
    found = {"leyden": partial(side, "leyden", work, folder)}
    if work == "start":
        return found
    found[f"transformers {version('transformers')}"] = partial(side, "transformers", work, folder)
    if llama is None:
        print(f"{MODELS[name]}, {work}: without llama.cpp", flush=True)
        return found
    files = {
        "float32": temporary / "f32.gguf",
        "8 bits": temporary / "q8_0.gguf",
        "4 bits": folder.with_suffix(".gguf"),
    }
    for label, file in files.items():
        if label != "4 bits" and not file.exists():
            export = [sys.executable, "-m", "leyden", "models", "export", folder, file, "--type", file.stem]
            subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
        if file.exists():
            found[f"llama.cpp, {label}"] = partial(llama.run, LLAMA, work, str(file))
    return found


def trl_step(trl: Peer, job: Path) -> dict[str, Any]:
    """TRL's whole step on the job's rollouts."""
    from benchmarks.peers.real_model_side import MICRO_BATCH, n_trained

    episodes = json.loads(job.read_text())["episodes"]
    answer: dict[str, Any] = trl.run(TRL, str(job), "--micro-batch", str(min(MICRO_BATCH, len(episodes))))
    seconds = float(answer["step_cpu_s"][-1])
    return {"value": n_trained(episodes) / seconds, "cpu_s": seconds, **answer}


def measure(
    name: str, work: str, sides: dict[str, Run], *, runs: int = MINIMUM_RUNS
) -> tuple[list[Row], list[list[str]]]:
    """Run all sides in turn. Return a row for each peer (one without a peer if there is none), and lines of memory."""
    found: dict[str, list[dict[str, Any]]] = {each: [] for each in sides}
    for _ in range(runs):
        for each in list(found):
            try:
                found[each].append(sides[each]())
            except PeerFailed as failure:
                if each == "leyden":
                    raise
                print(f"{name}, {work}: without {each}, {failure}", flush=True)
                del found[each]
    title, unit = f"{MODELS.get(name, name)}: {WORKS[work][0]}", WORKS[work][1]
    # An adapter's first weights, and so its gradient, are random.
    norms = [each[0]["grad_norm"] for each in found.values() if "grad_norm" in each[0] and work != "lora"]
    if norms and max(norms) > 1.01 * min(norms):
        raise RuntimeError(f"the gradient norms are {norms}; the sides do not do the same work")
    ours = [Sample(each["value"], each["cpu_s"]) for each in found["leyden"]]
    rows = [
        summary(title, unit, ours, [Sample(e["value"], e["cpu_s"]) for e in runs_of], peer, higher_is_better=True)
        for peer, runs_of in found.items()
        if peer != "leyden"
    ] or [summary(title, unit, ours, [], None, higher_is_better=work != "start")]
    lines = [
        [title, each, f"{sorted(run['peak_mib'] for run in runs_of)[len(runs_of) // 2]:,.0f}"]
        for each, runs_of in found.items()
    ]
    return rows, lines


def floor_lines(name: str, folder: Path, rows: dict[tuple[str, str | None], Row]) -> list[list[str]]:
    """A line for each batch: what the bytes of the weights and the products alone allow, and Leyden's share."""
    lines: list[list[str]] = []
    for batch in BATCHES:
        found = side("floor", f"decode:{batch}", folder)
        by_bytes = batch * 1000 * found["bandwidth"] / found["megabytes"]
        lowest = min(by_bytes, found["value"])
        ours = next(
            (row.leyden for row in rows.values() if row.row == f"{MODELS[name]}: decode, {batch} at once"), None
        )
        lines.append(
            [
                MODELS[name],
                str(batch),
                f"{found['megabytes']:,.0f}",
                f"{found['bandwidth']:.0f}",
                f"{by_bytes:,.0f}",
                f"{found['value']:,.0f}",
                "" if ours is None else f"{ours / lowest:.0%}",
            ]
        )
    return lines
