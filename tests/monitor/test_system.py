"""What a machine does, as metrics: against what is done to it here."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from leyden.monitor import SystemProbe, gpu
from leyden.monitor.gpu import gpu_metrics
from leyden.monitor.metric_names import SYSTEM_METRICS, base_name


def test_the_metrics_are_those_of_the_system(tmp_path: Path) -> None:
    probe = SystemProbe(tmp_path)
    (tmp_path / "file").write_bytes(b"x" * 2**20)
    metrics = probe.read()
    assert (metrics["pid"], metrics["process_start_time"]) == (os.getpid(), psutil.Process().create_time())
    assert float(metrics["disk_free_percent"]) == pytest.approx(100 - psutil.disk_usage(str(tmp_path)).percent, abs=5)
    assert 0 < float(metrics["memory_percent"]) <= 100
    assert float(metrics["process_rss_bytes"]) > 2**20
    assert {base_name(name) for name in metrics} - {"host", "pid", "process_start_time"} <= SYSTEM_METRICS.keys()
    assert all(isinstance(metrics[name], int | float) for name in SYSTEM_METRICS.keys() & metrics.keys())


def test_a_process_that_works_is_seen_to_work() -> None:
    probe = SystemProbe()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    metrics = probe.read()
    assert float(metrics["process_cpu_percent"]) > 1
    assert 0 < float(metrics["cpu_percent"]) <= 100


def test_two_probes_of_one_process_do_not_take_each_others_time() -> None:
    first, second = SystemProbe(), SystemProbe()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert float(first.read()["cpu_percent"]) > 0
    assert float(second.read()["cpu_percent"]) > 0


def test_a_directory_that_is_gone_takes_only_its_own_metric(tmp_path: Path) -> None:
    (gone := tmp_path / "gone").mkdir()
    probe = SystemProbe(gone)
    gone.rmdir()
    metrics = probe.read()
    assert "disk_free_percent" not in metrics
    assert "memory_percent" in metrics


def test_reading_all_of_it_is_cheap() -> None:
    probe = SystemProbe()
    probe.read()
    started = time.process_time()
    for _ in range(50):
        probe.read()
    assert (time.process_time() - started) / 50 < 0.02  # each 10 s: 0.2 % of a CPU; 0.5 ms on an idle machine


@pytest.mark.skipif(gpu._nvml() is not None, reason="this machine has an NVIDIA driver")
def test_without_a_driver_there_are_no_gpu_metrics() -> None:
    assert gpu_metrics() == {}


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a driver's library that tells of three GPUs."""
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("nvml_stand_in.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    return folder


ASK = """
import json, os, sys
from leyden.monitor.gpu import gpu_metrics

for visible in json.loads(sys.argv[1]):
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    print(json.dumps(gpu_metrics()))
"""


def metrics_there(nvml: Path, *visible: str | None) -> list[dict[str, float]]:
    """What a process that finds the library in this folder sees with each value of CUDA_VISIBLE_DEVICES."""
    return [json.loads(line) for line in printed_there(nvml, ASK, json.dumps(visible)).splitlines()]


def printed_there(nvml: Path, program: str, *arguments: str) -> bytes:
    """What a program prints that finds the library in this folder."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(nvml)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler, which makes the driver's stand-in")
def test_each_gpu_has_device_metrics_its_own_and_the_highest_are_told_too(nvml: Path) -> None:
    total = 150754820096
    first = {
        "gpu_device_percent:0": 35,
        "gpu_device_memory_used_bytes:0": total / 2,
        "gpu_device_memory_total_bytes:0": total,
        "gpu_device_temperature_celsius:0": 41,
    }
    third = {
        "gpu_device_percent:2": 97,
        "gpu_device_memory_used_bytes:2": 30150964019,
        "gpu_device_memory_total_bytes:2": total,
        "gpu_device_temperature_celsius:2": 68,
    }
    in_parts = {"gpu_device_memory_used_bytes:1": 15075482009, "gpu_device_memory_total_bytes:1": total}
    everything = {**first, **in_parts, **third, "gpu_percent": 97, "gpu_memory_percent": pytest.approx(50)}
    third_alone = {**third, "gpu_percent": 97, "gpu_memory_percent": pytest.approx(20)}
    seen = metrics_there(nvml, None, "2", "GPU-c", "")
    assert seen == [everything, third_alone, third_alone, {}]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler, which makes the driver's stand-in")
def test_a_training_step_reports_the_busiest_and_the_fullest_gpu(nvml: Path) -> None:
    ask = "import json; from leyden.algorithm.policy_gradient.rollout_metrics import gpu_use; print(json.dumps(gpu_use()))"
    assert json.loads(printed_there(nvml, ask)) == {"gpu_percent": 97, "gpu_memory_percent": pytest.approx(50)}


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler, which makes the driver's stand-in")
def test_without_the_package_that_reads_them_there_are_no_gpu_metrics(nvml: Path) -> None:
    ask = "import json, sys; sys.modules['pynvml'] = None; from leyden.monitor.gpu import gpu_metrics; print(json.dumps(gpu_metrics()))"
    assert json.loads(printed_there(nvml, ask)) == {}


@pytest.mark.gpu
def test_a_gpu_that_is_filled_is_seen_to_be_full(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    assert cuda.cuInit(0) == 0
    context, device, memory = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_ulonglong()
    assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device) == 0
    before = gpu_metrics()
    assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(8 * 2**30)) == 0
    after = gpu_metrics()
    assert after["gpu_memory_percent"] > before["gpu_memory_percent"] + 1
    used = [max(v for n, v in f.items() if n.startswith("gpu_device_memory_used_bytes:")) for f in (before, after)]
    assert used[1] >= used[0] + 8 * 2**30
    assert any(0 < value < 120 for name, value in after.items() if name.startswith("gpu_device_temperature_celsius:"))
    assert cuda.cuMemFree_v2(memory) == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_metrics() == {}
