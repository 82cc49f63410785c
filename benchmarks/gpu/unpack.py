"""Put together what `prepare.py` packed, on a machine without a package index. It needs Python alone.

    python benchmarks/gpu/unpack.py .gpu/gemma3/part-00 --to /tmp/gemma3               # once for each part that arrives
    python benchmarks/gpu/unpack.py .gpu/tests/part-* --to /tmp/tests --site /tmp/site  # and install the wheels there

Parts may come in any order and twice. A chunk with another digest is refused and not kept. When all are there, the files lie in the folder
`--to`, and with `--site` their wheels are installed into that folder, for PYTHONPATH; until then the exit code is 3.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

INCOMPLETE = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", type=Path, nargs="+", help="folders that prepare.py wrote")
    parser.add_argument("--to", type=Path, required=True, help="the folder for the files, the same for all parts")
    parser.add_argument("--site", type=Path, help="the folder to install wheels into")
    options = parser.parse_args()
    kept: Path = options.to / ".chunks"
    kept.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, Any] = {}
    for part in options.parts:
        if not (part / "manifest.json").is_file():
            parser.error(f"{part} has no manifest.json; give the folders that prepare.py wrote")
        text = (part / "manifest.json").read_text()
        known = kept / "manifest.json"
        if known.exists() and known.read_text() != text:
            parser.error(f"{part} belongs to other files than the parts in {options.to}; give another --to")
        known.write_text(text)
        manifest = json.loads(text)
        chunks = {chunk["name"]: chunk for file in manifest["files"] for chunk in file["chunks"]}
        for path in sorted(part.iterdir()):
            if path.name in chunks:
                if digest(path.read_bytes()) != chunks[path.name]["sha256"]:
                    raise SystemExit(f"{path} was damaged on its way; send {part.name} again")
                shutil.copyfile(path, kept / path.name)
    missing = sorted(
        {
            chunk["part"]
            for file in manifest["files"]
            for chunk in file["chunks"]
            if not (kept / chunk["name"]).exists() or (kept / chunk["name"]).stat().st_size != chunk["bytes"]
        }
    )
    if missing:
        print("still missing: " + ", ".join(f"part-{part:02}" for part in missing))
        raise SystemExit(INCOMPLETE)
    for file in manifest["files"]:
        with (options.to / file["name"]).open("wb") as out:
            for chunk in file["chunks"]:
                out.write((kept / chunk["name"]).read_bytes())
        if digest((options.to / file["name"]).read_bytes()) != file["sha256"]:
            raise SystemExit(f"{file['name']} differs from the file that was packed; send all parts again")
    print(
        f"{options.to}: {len(manifest['files'])} files, {sum(file['bytes'] for file in manifest['files']) / 2**20:.0f} MiB"
    )
    if options.site is not None:
        wheels = [str(path) for path in sorted(options.to.glob("*.whl"))]
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--no-cache-dir",
        ]
        subprocess.run([*pip, "--upgrade", "--target", str(options.site), *wheels], check=True)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    main()
