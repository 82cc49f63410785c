"""`import leyden` is light: a fresh interpreter says what it loaded and how long that took."""

import json
import os
import shutil
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


def test_leyden_is_imported_from_a_zip_file(tmp_path: Path):
    archive = shutil.make_archive(str(tmp_path / "packages"), "zip", ROOT, "leyden")
    program = (
        f"import sys; sys.path.insert(0, {archive!r}); import leyden, leyden.store, leyden.algorithm.verl\n"
        "print(leyden.__file__, leyden.Trainer.__name__, leyden.store.open_store.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [f"{archive}/leyden/__init__.py", "Trainer", "open_store"], done.stderr


def test_leyden_without_its_source_says_so(tmp_path: Path):
    folder = tmp_path / "leyden"
    shutil.copytree(ROOT / "leyden", folder, ignore=shutil.ignore_patterns("__pycache__"))
    compile_all = [
        sys.executable,
        "-m",
        "compileall",
        "-q",
        "-b",
        str(folder / "__init__.py"),
        str(folder / "_lib"),
        str(folder / "errors.py"),
    ]
    subprocess.run(compile_all, check=True)
    for file in (folder / "__init__.py", folder / "errors.py", *(folder / "_lib").rglob("*.py")):
        file.unlink()
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import leyden"
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "leyden needs its own source, and only its bytecode is here" in done.stderr
