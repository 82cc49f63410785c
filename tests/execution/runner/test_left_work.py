"""What a program has left: what a checker takes of it, and that all of it can be deleted."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from leyden.execution.runner.process import remove_tree, take_work


@pytest.fixture
def left(tmp_path: Path) -> Path:
    (folder := tmp_path / "left").mkdir()
    (folder / "answer.py").write_text("x = 1\n")
    (tmp_path / "secret").write_text("42")
    return folder


def deep(folder: Path, levels: int) -> None:
    line = f"import os\nfor _ in range({levels}): os.mkdir('d' * 100); os.chdir('d' * 100)\nopen('f', 'w').close()"
    subprocess.run([sys.executable, "-c", line], cwd=folder, check=True)


def test_links_that_lead_out_are_left_out_however_they_are_written(left: Path, tmp_path: Path) -> None:
    (left / "sub").mkdir()
    for name, target in {
        "absolute": str(tmp_path / "secret"),
        "to_itself": str(left / "answer.py"),
        "up": "../secret",
        "by_itself": "../left/../secret",
        "by_link": "up",
        "folder": "..",
        "by_folder": "folder/secret",
        "to_root": ".",
        "loop": "loop",
        "proc": "/proc/self/environ",
        "sub/up": "../../secret",
        "later": "../tests/answer",  # which is only there when the tests run
    }.items():
        (left / name).symlink_to(target)
    (left / "good").symlink_to("answer.py")
    (left / "sub/good").symlink_to("../good")
    left_out = take_work(left, into := tmp_path / "into")
    assert len(left_out) == 12
    assert all(each.endswith("a link that leads out of the folder") for each in left_out)
    assert {str(path.relative_to(into)) for path in into.rglob("*")} == {"answer.py", "good", "sub", "sub/good"}
    assert (into / "sub/good").read_text() == "x = 1\n"


def test_only_plain_files_are_taken(left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(left / "pipe")
    monkeypatch.chdir(left)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        (left / "__pycache__").mkdir()
        (left / "__pycache__/answer.cpython-311.pyc").write_bytes(b"cheat")
        (left / "answer.py").chmod(0o6755)
        left_out = take_work(left, into := tmp_path / "into")
    assert [each.split(":")[0] for each in left_out] == ["pipe", "socket"]
    assert [each.name for each in into.iterdir()] == ["answer.py"]
    assert (into / "answer.py").stat().st_mode & 0o7777 == 0o755


def test_patterns_name_all_that_is_taken(left: Path, tmp_path: Path) -> None:
    for name in ("conftest.py", "pytest.ini", "src/a.py", "src/deep/b.py", "sitecustomize.py"):
        (left / name).parent.mkdir(parents=True, exist_ok=True)
        (left / name).write_text("cheat")
    (into := tmp_path / "into").mkdir()
    (into / "conftest.py").write_text("ours")
    assert take_work(left, into, only=["answer.py", "src/*.py"]) == []
    taken = {str(path.relative_to(into)): path.read_text() for path in into.rglob("*") if path.is_file()}
    assert taken == {"answer.py": "x = 1\n", "src/a.py": "cheat", "src/deep/b.py": "cheat", "conftest.py": "ours"}


def test_what_is_in_the_way_is_replaced_and_not_written_through(left: Path, tmp_path: Path) -> None:
    (into := tmp_path / "into").mkdir()
    (into / "answer.py").symlink_to(tmp_path / "secret")
    (into / "pkg").symlink_to(tmp_path)
    (left / "pkg").mkdir()
    (left / "pkg/secret").write_text("cheat")
    (into / "module").mkdir()
    (left / "module").write_text("a file now")
    assert take_work(left, into) == []
    assert (tmp_path / "secret").read_text() == "42"
    assert [(into / name).read_text() for name in ("pkg/secret", "module", "answer.py")] == ["cheat", "a file now", "x = 1\n"]  # fmt: skip


def test_much_and_deep_work_is_left_out_with_its_reason(left: Path, tmp_path: Path) -> None:
    with (left / "sparse").open("wb") as file:
        file.truncate(2**40)
    deep(left, 60)
    left_out = take_work(left, tmp_path / "into")
    assert any(each.startswith("sparse: more than 2,147,483,648 bytes") for each in left_out)
    assert any(each.endswith("File name too long") for each in left_out)
    assert (tmp_path / "into/answer.py").exists()
    (left_out,) = take_work(left, tmp_path / "few", limit_files=1)
    assert "more than 1 files" in left_out


def test_a_tree_is_deleted_however_deep_or_unreadable(left: Path, tmp_path: Path) -> None:
    deep(left, 1500)  # deeper than Python's recursion
    (left / "closed/inner").mkdir(parents=True)
    (left / "closed/inner/f").write_text("x")
    (left / "out").symlink_to(tmp_path)
    (left / "closed/inner").chmod(0)
    (left / "closed").chmod(0)
    left.chmod(0)
    remove_tree(left)
    assert [each.name for each in tmp_path.iterdir()] == ["secret"]


def test_a_link_in_the_place_of_a_folder_is_deleted_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to("kept")
    remove_tree(tmp_path / "link")
    assert [each.name for each in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o755
