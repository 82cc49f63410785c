"""`leyden resources` shows versions and moves labels, with an audit log and a token of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from leyden.cli import main
from leyden.store import LightningStoreServer, SqliteLightningStore
from leyden.types import LLM, PromptTemplate

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def leyden(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process; return its exit code and what it printed."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["leyden", "resources", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


async def _write(path: str) -> None:
    async with SqliteLightningStore(path) as store:
        for text in ("one", "two", "three"):
            llm = LLM(endpoint="http://model/v1", model="m", api_key="secret-key")
            await store.update_resources(
                "rs", {"prompt": PromptTemplate(template=f"say\n{text}"), "llm": llm}, author="apo"
            )


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "store.db")
    asyncio.run(_write(path))
    return path


def test_a_version_is_promoted_rolled_back_and_frozen(leyden: Run, path: str) -> None:
    at = ("--store", path, "--who", "ada")
    assert leyden("promote", "rs", "1", *at)[:2] == (0, "production: no version -> rs 1\n")
    assert leyden("promote", "rs", "2", *at, "--why", "better")[:2] == (0, "production: rs 1 -> rs 2\n")
    code, printed, _ = leyden("list", "--store", path)
    assert code == 0
    assert [line.split()[0:2] + line.split()[6:] for line in printed.splitlines()] == [
        ["rs", "1", "previous"],
        ["rs", "2", "production"],
        ["rs", "3"],
    ]
    assert leyden("rollback", *at, "--why", "worse", "--freeze")[:2] == (
        0,
        "production: rs 2 -> rs 1; rs 2 is frozen\n",
    )
    code, _, error = leyden("promote", "rs", "2", *at)
    assert code == 1
    assert "frozen" in error
    code, _, error = leyden("rollback", *at)
    assert (code, "nothing was changed" in error) == (1, True)
    assert leyden("freeze", "rs", "2", "--undo", *at)[:2] == (0, "rs 2 may have labels again\n")
    code, printed, error = leyden("freeze", "rs", "2", "--undo", *at)
    assert (code, printed) == (1, "")
    assert "rs 2 is not frozen; nothing was changed" in error
    _, printed, _ = leyden("list", "--audit", "--json", "--store", path)
    log = json.loads(printed)
    assert [(one["action"], one["who"], one["why"]) for one in log][:3] == [
        ("unfreeze", "ada", None),
        ("freeze", "ada", "worse"),
        ("set_label", "ada", "worse"),
    ]


def test_a_version_that_is_frozen_on_going_back_loses_its_other_labels(leyden: Run, path: str) -> None:
    at = "--who", "ada", "--store", path
    assert leyden("promote", "rs", "2", "--label", "canary", *at)[0] == 0
    assert leyden("promote", "rs", "1", *at)[0] == 0
    assert leyden("promote", "rs", "2", *at)[0] == 0
    assert leyden("rollback", "--freeze", *at)[:2] == (
        0,
        "production: rs 2 -> rs 1; rs 2 is frozen and no longer canary\n",
    )
    _, printed, _ = leyden("list", "--store", path)
    assert "canary" not in printed


def test_a_first_version_is_written_from_a_file(leyden: Run, tmp_path: Path) -> None:
    path, file = str(tmp_path / "store.db"), tmp_path / "first.json"
    asyncio.run(SqliteLightningStore(path).close())
    assert leyden("list", "--store", path)[1].startswith("no version yet")
    assert leyden("list", "--audit", "--store", path)[1] == "no label has been moved yet\n"
    file.write_text('{"prompt": {"resource_type": "prompt_template", "template": "say {text}"}}')
    assert leyden("add", "rs", str(file), "--store", path)[:2] == (0, "rs 1\n")
    assert leyden("add", "rs", str(file), "--store", path)[:2] == (0, "rs 1\n"), "a repeat is no second version"
    shown = json.loads(leyden("show", "rs", "1", "--store", path)[1])["resources"]
    assert shown["prompt"]["template"] == "say {text}"
    file.write_text(json.dumps(shown).replace("say", "tell"))
    assert leyden("add", "rs", str(file), "--store", path)[:2] == (0, "rs 2\n")


@pytest.mark.parametrize("text", ["", "[]", '{"prompt": "say"}', '{"prompt": {"resource_type": "prompt_template"}}'])
def test_a_file_without_resources_is_refused_with_an_example(leyden: Run, path: str, tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    code, _, error = leyden("add", "rs", str(tmp_path / "bad.json"), "--store", path)
    assert (code, "bad.json has no resources" in error, "resource_type" in error) == (1, True, True)


def test_versions_are_shown_without_keys_and_compared(leyden: Run, path: str) -> None:
    _, printed, _ = leyden("show", "rs", "2", "--store", path)
    assert json.loads(printed)["resources"]["prompt"]["template"] == "say\ntwo"
    assert "secret-key" not in printed
    _, printed, _ = leyden("diff", "rs", "1", "2", "--store", path)
    assert [line for line in printed.splitlines() if line[:1] in "+-"][2:] == [
        "-prompt.template: one",
        "+prompt.template: two",
    ]
    assert leyden("diff", "rs", "1", "1", "--store", path)[1] == "the two versions are equal\n"
    code, _, error = leyden("show", "rs", "9", "--store", path)
    assert (code, "version 9" in error) == (1, True)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[LightningStoreServer]:
    await _write(str(tmp_path / "store.db"))
    async with (
        SqliteLightningStore(tmp_path / "store.db") as store,
        LightningStoreServer(store, token="trainers", operator_token="operators") as server,
    ):
        yield server


async def test_labels_move_with_the_operators_token_alone(
    served: LightningStoreServer, leyden: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEYDEN_STORE_TOKEN", "trainers")
    promote = ("promote", "rs", "1", "--store", served.endpoint)
    code, _, error = await asyncio.to_thread(leyden, *promote)
    assert (code, "LEYDEN_OPERATOR_TOKEN" in error) == (1, True)
    assert (await asyncio.to_thread(leyden, "list", "--store", served.endpoint))[0] == 0
    code, _, error = await asyncio.to_thread(leyden, *promote, "--token", "wrong")
    assert (code, "token" in error) == (1, True)
    assert (await asyncio.to_thread(leyden, *promote, "--token", "operators"))[0] == 0


@pytest.mark.slow
@pytest.mark.merge
async def test_of_two_operators_one_wins(served: LightningStoreServer) -> None:
    await served.store.set_label("production", "rs", 1)

    def promote(version: int) -> tuple[int, str]:
        import subprocess

        words = ["promote", "rs", str(version), "--store", served.endpoint, "--token", "operators"]
        command = [sys.executable, "-c", _TOGETHER, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    with ThreadPoolExecutor(2) as pool:
        running = [asyncio.get_running_loop().run_in_executor(pool, promote, version) for version in (2, 3)]
        done = await asyncio.gather(*running)
    assert sorted(code for code, _ in done) == [0, 1]
    (error,) = [error for code, error in done if code]
    assert "another process was faster" in error


_TOGETHER = """
import asyncio, sys, time
from leyden.cli import main, resources
found = resources._labels
async def slow(store):
    labels = await found(store)
    await asyncio.sleep(3.0)  # until the other has read them, too
    return labels
resources._labels = slow
sys.argv = ["leyden", "resources", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("words", [("list",), ("list", "--audit"), ("show", "rs", "1"), ("diff", "rs", "1", "2")])
def test_a_command_that_only_reads_makes_no_store_out_of_a_wrong_path(
    leyden: Run, tmp_path: Path, words: tuple[str, ...]
) -> None:
    code, _, error = leyden(*words, "--store", str(tmp_path / "stroe.db"))
    assert code == 1 and "does not exist" in error
    assert list(tmp_path.iterdir()) == []
