"""`import leyden` is light: a fresh interpreter says what it loaded and how long that took."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS_ALLOWED = 0.3
HEAVY = {
    *("torch", "transformers", "tokenizers", "safetensors", "numpy", "matplotlib", "ray", "verl", "vllm", "litellm"),
    *("fastapi", "starlette", "uvicorn", "aiohttp", "httpx", "openai", "anthropic", "opentelemetry", "typer", "rich"),
    *(
        "agentops",
        "weave",
        "gymnasium",
        "psycopg",
        "pyarrow",
        "wandb",
        "mlflow",
        "tensorboard",
        "gepa",
        "reasoning_gym",
    ),
}
PROBE = """
import json, sys, time
began = time.perf_counter()
import leyden
print(json.dumps({"seconds": time.perf_counter() - began, "modules": sorted(sys.modules)}))
"""


def import_in_a_fresh_interpreter() -> tuple[float, list[str]]:
    # bytecode may be written, or each of the three runs would compile everything anew
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    report = json.loads(done.stdout)
    return report["seconds"], report["modules"]


def test_importing_leyden_loads_no_model_library_and_no_web_framework():
    _, modules = import_in_a_fresh_interpreter()
    assert "leyden" in modules
    assert HEAVY.isdisjoint(name.partition(".")[0] for name in modules)


def test_importing_leyden_takes_under_three_tenths_of_a_second():
    best = min(import_in_a_fresh_interpreter()[0] for _ in range(3))
    assert best < SECONDS_ALLOWED
