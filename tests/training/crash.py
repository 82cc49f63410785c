"""A program that trains the toy vessel and is killed: by its own hand before its n-th change to the file system, or by whoever runs it.

python -m tests.training.crash run DIR      train to the end, from the newest checkpoint if there is one
python -m tests.training.crash explore DIR  for each n: kill a run before its n-th change, resume it, compare; prints the number of points
"""

import csv
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from leyden.training import Checkpoint, CheckpointStore, CsvWriter, JsonlWriter, MetricsWriter, TrainLoop
from tests.training.toy import ToyVessel

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.truncate"}


class SlowVessel(ToyVessel):
    """Long enough that a kill from outside can arrive anywhere."""

    def step(self, iteration: int) -> dict[str, Any]:
        time.sleep(0.01)
        return super().step(iteration)


def train(folder: Path, vessel: ToyVessel, max_iters: int) -> None:
    random.seed(7)
    checkpoint = Checkpoint(folder / "checkpoints", monitor="val/reward", mode="min", save_latest="link")
    loop = TrainLoop(
        max_iters=max_iters,
        val_every_n_iters=2,
        validate_first=True,
        callbacks=[checkpoint, MetricsWriter(folder)],
        writers=[CsvWriter(folder / "metrics.csv"), JsonlWriter(folder / "metrics.jsonl")],
    )
    loop.run(vessel, resume=checkpoint.latest())
    (folder / "result.json").write_text(json.dumps([vessel.weight, vessel.steps]))


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run leaves, without wall-clock times."""
    content: dict[str, Any] = {"result": (folder / "result.json").read_text()}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            content[path.name] = [{**row, "seconds": ""} for row in csv.DictReader(file)]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    content["jsonl"] = [{**json.loads(line), "seconds": ""} for line in lines]
    best = CheckpointStore(folder / "checkpoints").best()
    content["best"], content["latest"] = best and best.iteration, str((folder / "checkpoints" / "latest").readlink())
    content["checkpoints"] = sorted(path.name for path in (folder / "checkpoints").iterdir())
    return content


def kill_before_change(n: int) -> None:
    """SIGKILL this process when it is about to change the file system for the n-th time."""
    changes = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal changes
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES or writes:
            changes += 1
            if changes == n:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def in_child(work: Any) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 -- a child must not return into its parent's code
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def explore(root: Path, max_iters: int = 4) -> int:
    in_child(lambda: train(root / "whole", ToyVessel(), max_iters))
    whole, n = outcome(root / "whole"), 0
    while True:
        n += 1
        folder = root / f"killed-{n}"

        def killed(n: int = n, folder: Path = folder) -> None:
            kill_before_change(n)
            train(folder, ToyVessel(), max_iters)

        code = in_child(killed)
        if code == 0:
            return n - 1
        assert code == -signal.SIGKILL, f"point {n}: exit code {code}"
        store = CheckpointStore(folder / "checkpoints")
        assert all(store.damage(step) is None for step in store.steps()), f"point {n}: what has its name is whole"
        assert in_child(lambda folder=folder: train(folder, ToyVessel(), max_iters)) == 0, f"point {n}"
        assert outcome(folder) == whole, f"point {n}: see {folder}"


if __name__ == "__main__":
    mode, where = sys.argv[1], Path(sys.argv[2])
    where.mkdir(parents=True, exist_ok=True)
    if mode == "explore":
        print(explore(where))
    else:
        train(where, SlowVessel(), max_iters=25)
