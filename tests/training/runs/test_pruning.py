"""Pruning removes what nothing needs any more, whole or still listed, and nothing of the user's."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest

import leyden as ly
from leyden.errors import ConfigError, StoreError
from leyden.store import SqliteLightningStore, open_store
from leyden.training.runs import RecordedRun, open_run
from leyden.training.runs.notes import add_notes
from leyden.training.runs.opening import begin_run
from leyden.training.runs.pruning import choose_runs, remove_run


def make(root: Path, name: str, *, days: float = 10, status: str = "succeeded", **config: Any) -> Path:
    directory, manifest = begin_run(root / name, config=config)
    record = manifest.record
    record.start_time = record.end_time = time.time() - days * 86_400
    record.status = status  # type: ignore[assignment]
    manifest.write(directory)
    for part in ("checkpoints/step-000001", "model"):
        (directory / part).mkdir(parents=True)
        (directory / part / "weights").write_bytes(b"x" * 1000)
    (directory / "metrics.jsonl").write_text("")
    return directory


def plan(root: Path, **options: Any) -> dict[str, str | None]:
    """What is chosen, by folder, with the reason why it stays."""
    defaults: dict[str, Any] = {"days": 1}
    return {each.directory.name: each.needed for each in choose_runs(root, **(defaults | options))[0]}


def test_runs_are_chosen_by_age_state_and_number(tmp_path: Path) -> None:
    for number, (status, days) in enumerate([("failed", 0.5), ("succeeded", 5), ("failed", 20), ("stopped", 40)]):
        make(tmp_path, f"r{number}", status=status, days=days)
    assert plan(tmp_path, days=None, keep=0) == {"r0": None, "r1": None, "r2": None, "r3": None}
    assert plan(tmp_path, days=3) == {"r1": None, "r2": None, "r3": None}
    assert plan(tmp_path, days=None, states=["failed", "stopped"], keep=1) == {"r2": None, "r3": None}
    assert plan(tmp_path, days=30, states=["failed"]) == {}
    assert plan(tmp_path / "none") == {}


def test_what_a_removal_frees_is_said_by_part(tmp_path: Path) -> None:
    run = make(tmp_path, "run")
    (run / "best").mkdir()
    (run / "best" / "weights").hardlink_to(next(path for path in (run / "checkpoints").rglob("*") if path.is_file()))
    (pruned,), _ = choose_runs(tmp_path, days=1)
    assert pruned.sizes["checkpoints"] == pruned.sizes["model"] == 1000
    assert pruned.sizes["store"] == 0 and pruned.sizes["records"] == (tmp_path / "run" / "run.json").stat().st_size


def test_a_run_that_works_or_is_tagged_stays(tmp_path: Path) -> None:
    tagged, works = make(tmp_path, "tagged"), make(tmp_path, "works")
    add_notes(tagged, lambda: open_run(tagged).notes, "ada", [("tag", "paper")])
    manifest = json.loads((works / "run.json").read_text())
    started = {"pid": os.getpid(), "host": socket.gethostname(), "status": "running", "end_time": None}
    (works / "run.json").write_text(json.dumps({**manifest, **started}))
    assert plan(tmp_path, days=0) == {"tagged": "it has the tag paper", "works": "it is running"}
    with pytest.raises(ConfigError, match="it is running"):
        remove_run(open_run(works))
    assert (works / "model").is_dir()


@pytest.mark.parametrize(
    "config",
    [
        {"model": {"name": "ROOT/base/model"}},
        {"store": "sqlite:///ROOT/base/store.sqlite"},
        {"not_default": {"algorithm.reference.model": ".runs/base/model"}},
        {"algorithm": {"options": {"backend": {"adapter": "ROOT/base"}}}},
        {"argv": ["train.py", "--from=.runs/base/checkpoints"]},
    ],
)
def test_a_run_that_another_one_names_stays_unless_both_go(tmp_path: Path, config: dict[str, Any]) -> None:
    root = tmp_path / ".runs"
    make(root, "base")
    named = json.loads(json.dumps(config).replace("ROOT", str(root)))
    make(root, "child", days=0, **named)
    make(root, "base-2")
    make(root, "ase")
    assert plan(root) == {"base": "run child names its folder", "base-2": None, "ase": None}
    assert plan(root, days=0) == {"base": None, "child": None, "base-2": None, "ase": None}


def test_a_chain_of_runs_stays_down_to_its_beginning(tmp_path: Path) -> None:
    make(tmp_path, "a")
    make(tmp_path, "b", model={"name": f"{tmp_path}/a/model"})
    make(tmp_path, "c", model={"name": f"{tmp_path}/b/model"})
    add_notes(tmp_path / "c", lambda: open_run(tmp_path / "c").notes, "ada", [("tag", "paper")])
    assert plan(tmp_path) == {"a": "run b names its folder", "b": "run c names its folder", "c": "it has the tag paper"}


def test_a_run_into_which_a_link_leads_stays(tmp_path: Path) -> None:
    make(tmp_path, "a")
    child = make(tmp_path, "b", days=0)
    shutil.rmtree(child / "checkpoints" / "step-000001")
    (child / "checkpoints" / "step-000001").symlink_to(tmp_path / "a" / "checkpoints" / "step-000001")
    (tmp_path / "c").symlink_to(tmp_path / "a")
    found = plan(tmp_path)
    assert found.pop("a") in ("run b names its folder", "run c names its folder")
    assert found == {"c": "its folder is a link; remove the link by hand"}
    (tmp_path / "c").unlink()
    assert plan(tmp_path) == {"a": "run b names its folder"}


@ly.rollout
async def agent(task: int) -> float:
    return 1.0


def fitted(folder: Path) -> RecordedRun:
    ly.Trainer(algorithm="baseline", run_dir=folder, progress=False).fit(agent, [1])
    return open_run(folder)


async def labelled(path: Path, label: str, template: str = "hello") -> None:
    async with SqliteLightningStore(path) as store:
        made = await store.add_resources({"prompt": ly.PromptTemplate(template=template)})
        await store.set_label(label, made.resources_id, made.version)


def test_a_run_whose_resources_have_a_label_stays_and_so_does_one_that_they_name(tmp_path: Path) -> None:
    run, base = fitted(tmp_path / "run"), make(tmp_path, "base")
    assert plan(tmp_path, days=0) == {"run": None, "base": None}
    asyncio.run(labelled(run.directory / "store.sqlite", f"prompts/{run.record.run_id}/best"))  # type: ignore[operator]
    assert plan(tmp_path, days=0)["run"] is None, "every run of a prompt optimiser has this label"
    asyncio.run(labelled(run.directory / "store.sqlite", "production", f"uses {base}/model"))  # type: ignore[operator]
    assert plan(tmp_path, days=0) == {
        "run": "the label production is on its resources",
        "base": "run run names its folder",
    }


def test_a_run_whose_store_is_open_or_cannot_be_read_stays(tmp_path: Path) -> None:
    run, damaged = fitted(tmp_path / "run"), fitted(tmp_path / "damaged")
    (tmp_path / "damaged" / "store.sqlite").write_bytes(b"no database" * 1000)

    async def chosen() -> dict[str, str | None]:
        async with open_store(tmp_path / "run" / "store.sqlite"):
            found = await asyncio.to_thread(plan, tmp_path, days=0)
            with pytest.raises(StoreError, match=r"in use|already"):
                remove_run(run)
            return found

    found = asyncio.run(chosen())
    assert found["run"] == f"its store is open in process {os.getpid()}"
    assert str(found["damaged"]).startswith("its store cannot be read: ")
    assert run.metrics() and damaged.metrics()
    assert remove_run(run) == [] and not (tmp_path / "run").exists()


def test_files_of_the_user_stay_in_a_folder_that_the_user_has_named(tmp_path: Path) -> None:
    mine, made = make(tmp_path, "mine"), make(tmp_path, "20261123-010101-ab12")
    for folder in (mine, made):
        (folder / "train.py").write_text("")
        (folder / "model-notes").mkdir()
    assert remove_run(open_run(mine)) == ["model-notes", "train.py"]
    assert sorted(each.name for each in mine.iterdir()) == ["model-notes", "train.py"]
    assert remove_run(open_run(made)) == [] and not made.exists()


def test_the_target_of_a_link_in_a_run_is_not_removed(tmp_path: Path) -> None:
    run = make(tmp_path / "runs", "run")
    shutil.rmtree(run / "model")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "weights").write_bytes(b"x")
    (run / "model").symlink_to(tmp_path / "models")
    assert remove_run(open_run(run)) == [] and (tmp_path / "models" / "weights").exists()


def test_a_removal_that_fails_in_the_middle_leaves_a_run_that_is_listed_and_can_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "run")
    rmtree = shutil.rmtree

    def denied(path: Path) -> None:
        if path.name == "model":
            raise PermissionError(13, "Permission denied", str(path))
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", denied)  # root may remove everything, so the system's answer is made here
    with pytest.raises(PermissionError):
        remove_run(open_run(tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoints").exists() and plan(tmp_path) == {"run": None}
    monkeypatch.undo()
    assert remove_run(open_run(tmp_path / "run")) == [] and list(tmp_path.iterdir()) == []


def test_a_store_that_does_not_answer_keeps_its_runs_and_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyden.training.runs.pruning._READ_SECONDS", 1.0)
    with socket.socket() as server:  # it accepts connections and never answers
        server.bind(("127.0.0.1", 0))
        server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name in ("a", "b", "c"):
            make(tmp_path, name, store=url)
        make(tmp_path, "other")
        began = time.monotonic()
        found = plan(tmp_path)
        assert time.monotonic() - began < 20
    reason = f"its store cannot be read: {url} does not answer"
    assert found == {"a": reason, "b": reason, "c": reason, "other": None}


@pytest.mark.parametrize("name", ["model", "model-last", "best"])
def test_no_run_begins_where_it_would_write_over_files_of_the_user(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine").write_text("kept")
    with pytest.raises(ConfigError, match=f"has {name}, over which the run would write; choose another run_dir"):
        begin_run(tmp_path, config={})
    assert [path.name for path in tmp_path.iterdir()] == [name]
