"""PPO from simulator to weights: environment steps a CPU second, against Stable-Baselines3 and tianshou 2.

Every side trains the same 64-64 tanh networks on the same simulator (16 numbers, episodes of 200 steps, NumPy, next to no work of its
own), 4 environments in its process, one thread: an iteration is 8,000 steps, then 4 epochs of minibatches of 250, and a sample is one
iteration. The program is `peers/rl_ppo_side.py`; sides are processes that stay and take turns. CPU seconds are those of the whole
process, so that other work on the machine counts for neither. Beside the ratio stands where the time goes.

Leyden runs twice: on the bare Gymnasium environment, as the peers do, and through all that its users have (finite seeds, a simulator,
interpreters that validate, a value logged in each step, means over episodes), which the peers do without.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness import Peer, PeerFailed, Row, Sample
from benchmarks.report import Table
from benchmarks.sides import Side, alternate, row

PEER = "bench-rl"
SCRIPT = Path(__file__).parent / "peers" / "rl_ppo_side.py"
PAIRS = 7
PEERS = {"sb3": "stable-baselines3 2.9.2", "tianshou": "tianshou 2.0.1"}
TITLE = "PPO in 4 environments, 64-64 network"
OURS = {"leyden": TITLE, "leyden-stack": f"{TITLE}, Leyden's with seeds, interpreters and logs"}
UNIT = "steps/CPU s"
HEADLINES = (
    "PPO in 4 environments, 64-64 network, Leyden's with seeds, interpreters and logs, against stable-baselines3 2.9.2",
)


def main(peer: Peer | None) -> list[Row | Table]:
    with ExitStack() as stack:
        sides = {name: stack.enter_context(Side("leyden", Path(sys.executable), SCRIPT, name)) for name in OURS}
        for side in sides.values():
            side.ask("iterate")
        for name in PEERS if peer else ():
            assert peer is not None
            side = stack.enter_context(Side(name, peer.python, SCRIPT, name))
            try:
                side.ask("iterate")  # caches, compilation on first use
            except PeerFailed as failure:
                print(f"without {PEERS[name]}: {failure}", flush=True)
                continue
            sides[name] = side
        parts: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        samples = dict(zip(sides, alternate([turn(s, parts[n]) for n, s in sides.items()], pairs=PAIRS), strict=True))
    rows: list[Row | Table] = []
    for which, title in OURS.items():
        rows += [
            row(f"{title}, against {shown}", UNIT, samples[which], samples[name], shown)
            for name, shown in PEERS.items()
            if name in samples
        ] or [row(title, UNIT, samples[which], [], None)]
    shown = [
        [
            {"leyden": "Leyden", "leyden-stack": "Leyden with seeds, interpreters and logs", **PEERS}[name],
            *(f"{statistics.median(column):.1f}" for column in zip(*taken, strict=True)),
        ]
        for name, taken in parts.items()
    ]
    columns = ["side", "collecting, CPU us a step", "learning, CPU us a step"]
    return [*rows, Table("PPO: where the CPU time of a step goes", columns, shown)]


def turn(side: Side, parts: list[tuple[float, float]]) -> Callable[[], Sample]:
    """One iteration; its value is environment steps a CPU second."""

    def run() -> Sample:
        answer = side.ask("iterate")
        collect, learn, steps = answer["collect_cpu_s"], answer["learn_cpu_s"], answer["steps"]
        parts.append((collect / steps * 1e6, learn / steps * 1e6))
        return Sample(value=steps / (collect + learn), cpu_s=collect + learn)

    return run
