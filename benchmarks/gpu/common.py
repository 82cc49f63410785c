"""What the scripts of this folder share: options, the time limit, the JSON line, and a model of a given shape."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "packages" / "leyden-compat")]
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

LIMIT_SECONDS = 470.0
TIMED_OUT = 3
"""The exit code of a script that was not done in time."""


class Measurement:
    """The figures of one script, and its options."""

    def __init__(self, script: str, options: argparse.Namespace) -> None:
        self.script = Path(script).stem
        self.options = options
        self.cpu: bool = options.cpu
        self.device = "cpu" if options.cpu else "cuda"
        self.figures: dict[str, Any] = {}
        """Fill it as soon as a figure is there, because it is printed if the time is over, too."""

    def out(self, name: str) -> Path | None:
        """Return a path in the folder for results, or None if there is no such folder."""
        folder = os.environ.get("OUT")
        return Path(folder) / name if folder else None

    def report(self, *, complete: bool) -> None:
        """Print the JSON line, and write it to the folder for results."""
        import torch

        about = {"script": self.script, "card": card(self.device), "torch": torch.__version__, "complete": complete}
        line = json.dumps(about | self.figures)
        if (path := self.out(f"{self.script}.json")) is not None:
            path.write_text(line + "\n")
        print(line, flush=True)


def card(device: str) -> str:
    """Return the name of the GPU, or of the processor."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()


def main(
    script: str,
    doc: str | None,
    measure: Callable[[Measurement], None],
    arguments: Sequence[tuple[str, dict[str, Any]]] = (),
) -> None:
    """Run a script: read its options, measure within its time, and print the figures.

    arguments: further arguments of `ArgumentParser.add_argument`, each a name and its options.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="tiny shapes on a CPU, to try the script")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds (default: %(default)g)")
    for name, options in arguments:
        parser.add_argument(name, **options)
    measurement = Measurement(script, parser.parse_args())
    if not measurement.cpu:
        import torch

        if not torch.cuda.is_available():
            parser.exit(2, "torch finds no GPU here; --cpu tries the script without one\n")

    def give_up() -> None:
        measurement.report(complete=False)
        os._exit(TIMED_OUT)

    timer = threading.Timer(measurement.options.limit, give_up)
    timer.daemon = True
    timer.start()
    measure(measurement)
    timer.cancel()
    measurement.report(complete=True)


def model_of(config: dict[str, Any], device: str) -> Any:
    """Return a Qwen2 in bfloat16 with random weights, made on the device. It has no end-of-turn token."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape: Any = Qwen2Config(
        **config, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Qwen2ForCausalLM(shape).eval()
    finally:
        torch.set_default_dtype(before)


@contextmanager
def compiled_pieces(backend: str) -> Any:
    """Within the block, the engine's norms, rotations and gates are compiled: one kernel each instead of several.

    backend: of torch.compile.
    """
    import torch

    from leyden.engine.forward import layout

    compile: Any = torch.compile(backend=backend, dynamic=True)

    @compile
    def gated(gate: Any, up: Any) -> Any:
        return torch.nn.functional.silu(gate) * up

    before = {name: getattr(layout, name) for name in ("_norm", "_rotate", "gated_mlp")}
    norm, mlp = before["_norm"], before["gated_mlp"]

    @compile
    def root_mean_square(x: Any, weight: Any, eps: float) -> Any:
        scale = x.float().pow(2).mean(-1, keepdim=True).add(eps).rsqrt()
        return (x.float() * scale).to(x.dtype) * weight

    def normed(module: Any, x: Any) -> Any:
        if type(module).__name__ == "Qwen2RMSNorm":
            return root_mean_square(x, module.weight, module.variance_epsilon)
        return norm(module, x)

    def mlp_of(act: Any, gate: Any, up: Any, down: Any) -> Any:
        return mlp(act, gate, up, down) if torch.is_grad_enabled() else down(gated(gate, up))

    replaced = {"_norm": normed, "_rotate": compile(before["_rotate"]), "gated_mlp": mlp_of}
    for name, function in replaced.items():
        setattr(layout, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(layout, name, function)


def profile(measurement: Measurement, name: str, work: Callable[[], Any]) -> None:
    """Run `work` under torch's profiler, and write the kernels by their time to the folder for results, if there is one."""
    path = measurement.out(f"{name}_kernels.txt")
    if path is None:
        return
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    kinds = [ProfilerActivity.CPU, *([] if measurement.cpu else [ProfilerActivity.CUDA])]
    with profiled(activities=kinds) as found:
        work()
    by = "self_cpu_time_total" if measurement.cpu else "self_cuda_time_total"
    path.write_text(found.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=80))
