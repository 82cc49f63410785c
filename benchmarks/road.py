"""The road of a model call: official client, gateway, recording in a file, embedded engine with the demo's policy.

Four arrangements answer the same calls, 64 agents at a time with one call after the other each:

- **one process**: agents, gateway and engine together;
- **the engine apart** (`IsolatedBackend`, as the demo runs): agents, gateway and store in one process;
- **gateway and engine apart** (`LLMProxy(launch_mode="engine")`): agents and store in one process, the gateway in the engine's, which
  it asks without HTTP;
- **the agents apart**: agents in one process, all else in the other.

The floor is the official client before uvicorn with a fixed answer, each in a process of its own. Short slices take turns. The rows
are by the CPU of all processes. The table has the calls a second beside it, which mean something on two idle cores only, and how many such
cores would allow at that CPU. All calls must be in the store with their tokens.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import MINIMUM_RUNS, Peer, Row, Sample
from benchmarks.report import Table
from benchmarks.sides import Side, alternate, row

SCRIPT = Path(__file__).parent / "peers" / "road_side.py"
CALLS = 150
"""In a slice."""
HEADLINES = ()


@dataclass(frozen=True)
class Slice:
    """CPU and time of one slice of calls."""

    agents_cpu: float
    """CPU seconds of the process with the agents, and of what shares it."""
    serving_cpu: float
    """Of the other process with gateway and engine; 0 if there is none."""
    engine_cpu: float
    """Of the engine's own process; 0 if there is none."""
    seconds: float

    @property
    def sample(self) -> Sample:
        cpu_s = self.agents_cpu + self.serving_cpu + self.engine_cpu
        return Sample(CALLS / cpu_s, cpu_s)


class Arrangement:
    """Processes that answer calls."""

    def __init__(self, stack: ExitStack, folder: Path, engine: str | None, *, apart: bool) -> None:
        """engine: "embedded", "isolated" or "hosting"; None: uvicorn with a fixed answer. apart: agents have a process of their own."""
        self._serving = stack.enter_context(Side("leyden", Path(sys.executable), SCRIPT, str(folder)))
        self._agents = self._serving
        if apart:
            self._agents = stack.enter_context(Side("leyden", Path(sys.executable), SCRIPT, str(folder)))
        self._is_floor = engine is None
        asked = self._serving.ask("bare") if engine is None else self._serving.ask("serve", engine=engine)
        self._urls: list[str] = asked["urls"]
        self.slices: list[Slice] = []
        self._n_calls = 0
        self._ask(CALLS)  # connections, code that is loaded when first used

    def run(self) -> Sample:
        """Run one slice."""
        before = self._cpu()
        seconds = self._ask(CALLS)
        after = self._cpu()
        agents, serving, engine = (b - a for a, b in zip(before, after, strict=True))
        self.slices.append(Slice(agents, serving, engine, seconds))
        return self.slices[-1].sample

    def check(self) -> None:
        """Raise RuntimeError unless every call is in the store with its tokens."""
        if not self._is_floor and (found := self._serving.ask("recorded")["calls"]) != self._n_calls:
            raise RuntimeError(f"{found} of {self._n_calls} calls are in the store with their tokens")

    def _ask(self, calls: int) -> float:
        self._n_calls += calls
        return self._agents.ask("ask", urls=self._urls, calls=calls)["seconds"]

    def _cpu(self) -> tuple[float, float, float]:
        serving = self._serving.ask("cpu")
        if self._agents is self._serving:
            return serving["own"], 0.0, serving["children"]
        return self._agents.ask("cpu")["own"], serving["own"], serving["children"]


def main(peer: Peer | None) -> list[Row | Table]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arrangements = {
            "one process": Arrangement(stack, folder, "embedded", apart=False),
            "the engine in a process of its own": Arrangement(stack, folder, "isolated", apart=False),
            "gateway and engine in a process of their own": Arrangement(stack, folder, "hosting", apart=False),
            "agents in a process of their own": Arrangement(stack, folder, "embedded", apart=True),
            "floor": Arrangement(stack, folder, None, apart=True),
        }
        taken = alternate([each.run for each in arrangements.values()], pairs=MINIMUM_RUNS)
        for each in arrangements.values():
            each.check()
    floor = taken[-1]
    rows: list[Row | Table] = [
        row(f"road: {name}", "calls/CPU s", ours, floor, "the client alone, before uvicorn")
        for name, ours in zip(arrangements, taken[:-1], strict=False)
    ]
    print(*rows, sep="\n", flush=True)
    return [*rows, parts(arrangements)]


def parts(arrangements: dict[str, Arrangement]) -> Table:
    """Return the CPU of a call by process, and what follows for two idle cores."""
    rows: list[list[str]] = []
    for name, each in arrangements.items():
        columns = [[getattr(s, part) for s in each.slices] for part in ("agents_cpu", "serving_cpu", "engine_cpu")]
        ms = [1000 * statistics.median(values) / CALLS for values in columns]
        limit = max(*ms, sum(ms) / 2)
        rows.append([name, *(f"{value:.2f}" if value else "" for value in ms), f"{sum(ms):.2f}", f"{1000 / limit:.0f}"])
        rows[-1].append(f"{CALLS / statistics.median(s.seconds for s in each.slices):.0f}")
    columns = [
        "milliseconds of CPU of a call",
        "process with the agents",
        "process with gateway, store and engine",
        "process with the engine",
        "together",
        "calls/s that two idle cores allow at this CPU",
        "calls/s measured",
    ]
    return Table("Road: where the CPU of a call goes (medians)", columns, rows)
