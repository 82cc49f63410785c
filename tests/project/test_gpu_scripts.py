"""The scripts for a GPU run on a CPU with tiny shapes, and what they need travels in parts.

Those for verl and vLLM are tried in these groups.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks.gpu.prepare import split

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "gpu"


def run(script: str, *options: str, out: Path | None = None) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **({"OUT": str(out)} if out else {})}
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environ)


def figures(script: str, out: Path) -> dict[str, Any]:
    done = run(script, "--cpu", out=out)
    assert done.returncode == 0, done.stdout + done.stderr
    line = done.stdout.splitlines()[-1]
    assert (out / f"{script}.json").read_text() == line + "\n"
    found = json.loads(line)
    assert found["script"] == script and found["complete"] and found["card"]
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_decoding_is_measured_in_each_way_and_is_exact_in_each(tmp_path: Path) -> None:
    found = figures("decode", tmp_path)
    for way in ("ordinary", "graphs", "graphs, compiled pieces"):
        assert found[way]["tokens/s at 2"] > 0
        assert found[way]["apart"] < 1e-2
    assert {"decode_ordinary_kernels.txt", "decode_graphs_kernels.txt"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_gradient_is_measured_in_each_way(tmp_path: Path) -> None:
    found = figures("gradient", tmp_path)
    ways = {name: way for name, way in found.items() if "rows" in name}
    assert set(ways) == {"1 rows", "1 rows, checkpointing", "1 rows, compiled pieces"}
    for way in ways.values():
        assert 0 < way["share"] == pytest.approx(way["flops"] / found["product_flops"])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", ["offload", "gpu_tests", "learning"])
def test_a_script_for_a_gpu_runs_on_a_cpu(script: str, tmp_path: Path) -> None:
    found = figures(script, tmp_path)
    if script == "offload":
        assert found["apart"] == 0 and len(found["offload"]["seconds"]) == 4
    elif script == "gpu_tests":
        assert found["tests"] > found["skipped"] and not found["not_passed"]
    else:
        assert found["runs"] and found["runs"][0]["before"] >= 0


@pytest.mark.slow
def test_a_script_that_is_not_done_in_time_prints_what_it_has(tmp_path: Path) -> None:
    done = run("offload", "--cpu", "--limit", "0.01", out=tmp_path)
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["complete"] is False


@pytest.mark.slow
def test_a_script_without_a_gpu_says_so() -> None:
    done = run("offload")
    assert done.returncode == 2
    assert "torch finds no GPU here; --cpu tries the script without one" in done.stderr


def unpacked(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run("unpack", *map(str, arguments))


def test_files_travel_in_parts_that_may_come_in_any_order_and_twice(tmp_path: Path) -> None:
    rng = random.Random(0)
    files = [tmp_path / "one.gguf", tmp_path / "two.gguf", tmp_path / "empty"]
    for path, n in zip(files, (2500, 1700, 0), strict=True):
        path.write_bytes(rng.randbytes(n))
    assert split(files, tmp_path / "parts", 1000) == 5
    parts = sorted((tmp_path / "parts").iterdir())
    for part in parts:
        assert sum(each.stat().st_size for each in part.iterdir() if each.name != "manifest.json") <= 1000
    for part in (parts[3], parts[0], parts[3], parts[4]):
        done = unpacked(part, "--to", tmp_path / "there")
        assert done.returncode == 3
    assert done.stdout == "still missing: part-01, part-02\n"
    assert unpacked(parts[1], parts[2], "--to", tmp_path / "there").returncode == 0
    for path in files:
        assert (tmp_path / "there" / path.name).read_bytes() == path.read_bytes()


def test_a_damaged_part_and_one_of_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(200)) * 10)
    split([tmp_path / "file"], tmp_path / "parts", 1000)
    first, second = sorted((tmp_path / "parts").iterdir())
    assert unpacked(first, "--to", tmp_path / "there").returncode == 3
    (chunk,) = [path for path in second.iterdir() if path.name != "manifest.json"]
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"\0")
    damaged = unpacked(second, "--to", tmp_path / "there")
    assert damaged.returncode == 1 and "was damaged on its way; send part-01 again" in damaged.stderr
    (tmp_path / "other").write_bytes(b"other")
    split([tmp_path / "other"], tmp_path / "others", 1000)
    foreign = unpacked(tmp_path / "others" / "part-00", "--to", tmp_path / "there")
    assert foreign.returncode == 2 and "belongs to other files" in foreign.stderr
