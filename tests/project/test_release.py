"""What a release publishes, what `pip install leyden` and `pip install leyden-compat` bring, and what is refused."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

pytest.importorskip("hatchling")
from tools import release
from tools.release import COMPAT, DISTRIBUTIONS, LEYDEN, Distribution, NotReleasable

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://code.example/team/leyden"
WORKFLOW = ROOT / ".github" / "workflows" / "release.yml"
PROGRAM = """
import agentlightning as agl

store = agl.InMemoryLightningStore()
print(type(store).__name__, agl.__name__)
"""


class Built:
    """Both distributions, built from a copy of the working tree."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.files = folder / "source", folder / "files"
        self.tree.mkdir(), self.files.mkdir()
        self.version = release.copy_source(ROOT, self.tree)
        release.declare(self.tree, self.version, REPOSITORY)
        release.build_all(self.tree, self.files)

    def wheel(self, each: Distribution) -> Path:
        return self.files / release.wheel_of(each, self.version)

    def metadata(self, each: Distribution):
        return release.metadata_of(each, self.files, self.version)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("release"))


# ---- what is built ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("each", DISTRIBUTIONS, ids=lambda each: each.name)
def test_the_files_hold_the_package_and_nothing_beside_it_and_their_metadata_are_complete(
    built: Built, each: Distribution
):
    release.check_contents(each, built.files, built.tree, built.version)
    release.check_metadata(each, built.metadata(each), built.version, REPOSITORY)
    if release.is_clone(ROOT):
        tracked = set(release.run(["git", "-C", str(ROOT / each.folder), "ls-files", each.package]).stdout.split())
        shipped = set(zipfile.ZipFile(built.wheel(each)).namelist())
        assert tracked == {name for name in shipped if ".dist-info/" not in name}


@pytest.mark.parametrize("each", DISTRIBUTIONS, ids=lambda each: each.name)
def test_the_source_distribution_builds_the_same_wheel(built: Built, each: Distribution):
    release.check_rebuilt(each, built.files, built.version)


def test_the_version_is_that_of_the_package_and_in_the_changelog(built: Built):
    import leyden

    assert built.version == leyden.__version__
    release.check_version(built.tree, built.version, f"v{built.version}")


def test_a_clone_declares_neither_the_extra_nor_an_address():
    for each in DISTRIBUTIONS:
        text = (ROOT / each.folder / "pyproject.toml").read_text()
        assert "[project.urls]" not in text
        assert not re.search(r"^compat = \[", text, re.MULTILINE)


def test_the_same_files_have_the_same_digests_under_another_umask(built: Built, tmp_path: Path):
    for path in built.tree.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)  # as with another umask
    release.build_all(built.tree, tmp_path)
    assert {path.name: release.digest(path) for path in tmp_path.iterdir()} == {
        path.name: release.digest(path) for path in built.files.iterdir()
    }


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(built: Built, tmp_path: Path) -> Path:
    """The built files, to be spoilt."""
    return shutil.copytree(built.files, tmp_path / "files")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("leyden/__pycache__/app.cpython-311.pyc", b"", "also holds"),
        ("tests/test_it.py", b"", "also holds tests/test_it.py"),
        ("leyden/notes.txt", b"", "also holds leyden/notes.txt"),
    ],
)
def test_a_wheel_with_a_stray_file_is_refused(built: Built, copied: Path, name: str, content: bytes, message: str):
    with zipfile.ZipFile(copied / release.wheel_of(LEYDEN, built.version), "a") as wheel:
        wheel.writestr(name, content)
    with pytest.raises(NotReleasable, match=re.escape(message)):
        release.check_contents(LEYDEN, copied, built.tree, built.version)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("leyden/tests/test_it.py", b"", "belongs into no release"),
        ("leyden/.env", b"KEY=1", "belongs into no release"),
        ("leyden/store.sqlite", b"", "belongs into no release"),
        ("leyden/other.safetensors", b"0" * 300_000, "300,000 bytes"),
    ],
)
def test_a_committed_file_that_belongs_into_no_release_is_refused(
    built: Built, copied: Path, tmp_path: Path, name: str, content: bytes, message: str
):
    tree = shutil.copytree(built.tree, tmp_path / "source")
    (tree / name).parent.mkdir(exist_ok=True)
    (tree / name).write_bytes(content)
    with zipfile.ZipFile(copied / release.wheel_of(LEYDEN, built.version), "a") as wheel:
        wheel.writestr(name, content)
    sdist = copied / release.sdist_of(LEYDEN, built.version)
    with tarfile.open(sdist) as old:
        old.extractall(tmp_path, filter="data")
    folder = f"leyden-{built.version}"
    (tmp_path / folder / name).parent.mkdir(exist_ok=True)
    (tmp_path / folder / name).write_bytes(content)
    with tarfile.open(sdist, "w:gz") as new:
        new.add(tmp_path / folder, folder)
    with pytest.raises(NotReleasable, match=message):
        release.check_contents(LEYDEN, copied, tree, built.version)


def test_a_wheel_that_lacks_a_file_is_refused(built: Built, copied: Path):
    wheel = copied / release.wheel_of(COMPAT, built.version)
    with zipfile.ZipFile(built.wheel(COMPAT)) as old, zipfile.ZipFile(wheel, "w") as new:
        for entry in old.infolist():
            if entry.filename != "leyden_compat/py.typed":
                new.writestr(entry, old.read(entry))
    with pytest.raises(NotReleasable, match=r"lacks leyden_compat/py\.typed"):
        release.check_contents(COMPAT, copied, built.tree, built.version)


def test_files_of_another_version_beside_the_built_ones_are_refused(built: Built, copied: Path):
    (copied / "leyden-0.0.9-py3-none-any.whl").touch()
    with pytest.raises(NotReleasable, match=r"leyden-0\.0\.9"):
        release.check_names(copied, built.version)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("Author", "gives no Author"),
        ("Classifier", "gives no Classifier"),
        ("Requires-Dist", "does not require"),
        ("Project-URL", "does not name its repository"),
    ],
)
@pytest.mark.parametrize("each", DISTRIBUTIONS, ids=lambda each: each.name)
def test_incomplete_metadata_are_refused(built: Built, each: Distribution, header: str, message: str):
    found = built.metadata(each)
    del found[header]
    with pytest.raises(NotReleasable, match=message):
        release.check_metadata(each, found, built.version, REPOSITORY)


def test_another_version_in_the_metadata_is_refused(built: Built):
    with pytest.raises(NotReleasable, match=f"leyden {built.version}"):
        release.check_metadata(LEYDEN, built.metadata(LEYDEN), "9.9.9", REPOSITORY)


@pytest.mark.parametrize(
    ("tag", "version", "message"),
    [
        ("v0.2.0", "0.1.0", "the tag is v0.2.0"),
        ("0.1.0", "0.1.0", "tag v0.1.0"),
        (None, "0.1.1", "no heading '## 0.1.1"),
    ],
)
def test_a_tag_or_changelog_of_another_version_is_refused(tmp_path: Path, tag: str | None, version: str, message: str):
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 0.1.0 - 2026-11-28\n")
    with pytest.raises(NotReleasable, match=re.escape(message)):
        release.check_version(tmp_path, version, tag)


# ---- the source ------------------------------------------------------------------------------------------------------


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A small repository with the parts of a release, a file that git ignores and one that it does not know."""
    root = tmp_path / "clone"
    (root / "leyden" / "__pycache__").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "leyden/a.py"):
        (root / name).write_text("text\n")
    (root / release.VERSION_FILE).write_text('__version__ = "1.2.3"\n')
    (root / ".gitignore").write_text("__pycache__/\n/dist/\n")
    (root / "leyden" / "__pycache__" / "a.pyc").write_text("")
    (root / "dist").mkdir()
    (root / "dist" / "leyden-0.0.9-py3-none-any.whl").write_text("old")
    (root / "packages" / "leyden-compat").mkdir(parents=True)
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "all")
    return root


def git(root: Path, *arguments: str) -> None:
    who = ["-c", "user.name=A", "-c", "user.email=a@example.com"]
    subprocess.run(["git", *who, *arguments], cwd=root, check=True)


def test_only_committed_files_are_released(clone: Path):
    (clone / "leyden" / "scratch.py").write_text("")
    names = release.source_files(clone)
    assert sorted(name for name in names if "leyden/" in name) == ["leyden/__init__.py", "leyden/a.py"]
    with pytest.raises(NotReleasable, match=r"\?\? leyden/scratch\.py"):
        release.check_committed(clone)


def test_a_changed_file_is_refused_and_dist_stays_as_it_is(clone: Path):
    (clone / "leyden" / "a.py").write_text("changed\n")
    with pytest.raises(NotReleasable, match=r"M leyden/a\.py"):
        release.release(clone)
    assert (clone / "dist" / "leyden-0.0.9-py3-none-any.whl").read_text() == "old"


def test_a_file_outside_of_the_packages_may_be_anything(clone: Path):
    (clone / "notes.txt").write_text("")
    release.check_committed(clone)


def test_without_history_ignored_files_are_left_out_all_the_same(clone: Path):
    known = sorted(release.source_files(clone))
    shutil.rmtree(clone / ".git")
    assert not release.is_clone(clone)
    assert sorted(release.source_files(clone)) == known


def test_a_copy_inside_another_repository_is_no_clone(clone: Path):
    inside = shutil.copytree(clone / "leyden", clone / "copy" / "leyden").parent
    assert not release.is_clone(inside)


@pytest.mark.parametrize(
    ("link", "whole"),
    [
        ("[a](docs/a.md#top)", f"[a]({REPOSITORY}/blob/v1.0/docs/a.md#top)"),
        ("![a](docs/a.svg)", f"![a]({REPOSITORY}/raw/v1.0/docs/a.svg)"),
        ("[a](#here)", "[a](#here)"),
        ("[a](https://example.com/x.md)", "[a](https://example.com/x.md)"),
        ("[two\nlines](CHANGELOG.md)", f"[two\nlines]({REPOSITORY}/blob/v1.0/CHANGELOG.md)"),
    ],
)
def test_links_of_a_readme_work_on_other_sites(link: str, whole: str):
    assert release.with_whole_links(f"See {link}.", ".", REPOSITORY, "1.0") == f"See {whole}."


def test_links_are_those_of_the_folder_of_the_readme():
    text = release.with_whole_links("[a](../../docs/a.md)", "packages/leyden-compat", REPOSITORY, "1.0")
    assert text == f"[a]({REPOSITORY}/blob/v1.0/docs/a.md)"


def test_files_of_earlier_builds_are_deleted_and_others_stay(tmp_path: Path):
    dist = tmp_path / "dist"
    dist.mkdir()
    for name in (
        "leyden-0.0.9-py3-none-any.whl",
        "leyden-0.0.9.tar.gz",
        "leyden-0.0.9.cdx.json",
        "SHA256SUMS",
        "mine.txt",
    ):
        (dist / name).touch()
    (tmp_path / "leyden-0.1.0.tar.gz").touch()
    release.replace_dist(dist, [tmp_path / "leyden-0.1.0.tar.gz"])
    assert sorted(path.name for path in dist.iterdir()) == ["leyden-0.1.0.tar.gz", "mine.txt"]


def test_a_program_that_fails_is_told_with_its_last_words():
    with pytest.raises(NotReleasable, match=r"(?s)no index.* ends with status 1"):
        release.run([sys.executable, "-c", "raise SystemExit('no index')"])


# ---- publishing ------------------------------------------------------------------------------------------------------


def test_the_workflow_pins_its_actions_and_only_publishing_may_sign():
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    used = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used)
    assert [name for name, job in jobs.items() if "id-token" in job["permissions"]] == ["publish"]
    assert {"check", "build"} <= set(jobs["publish"]["needs"])
    assert {each["project"]: each["files"] for each in jobs["publish"]["strategy"]["matrix"]["include"]} == {
        each.name: each.package for each in DISTRIBUTIONS
    }


def test_the_workflow_calls_release_with_options_that_it_has(capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setattr(sys, "argv", ["release.py", "--help"])
    with pytest.raises(SystemExit):
        release.main()
    options = set(re.findall(r"--[a-z]+", WORKFLOW.read_text().partition("make release ")[2].partition("\n")[0]))
    assert options == {"--tag", "--repository"}
    assert options <= set(re.findall(r"--[a-z]+", capsys.readouterr().out))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_command_builds_and_checks_everything_twice_with_the_same_digests(tmp_path: Path):
    if not release.is_clone(ROOT):
        pytest.skip("this is not a git checkout")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    sums: list[str] = []
    for _ in range(2):
        arguments = f"--tag v{release.copy_source(clone, tmp_path / 'source')} --repository {REPOSITORY}"
        subprocess.run(["make", "release", f"ARGS={arguments}"], cwd=clone, check=True)
        sums.append((clone / "dist" / "SHA256SUMS").read_text())
    assert sums[0] == sums[1]
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=clone / "dist", check=True)
    assert len(list((clone / "dist").iterdir())) == 7


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_core_works_alone_and_says_what_brings_the_aliases(built: Built, tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = str(tmp_path / "env" / "bin" / "python")

    def run(*command: str, status: int = 0) -> list[str]:
        done = subprocess.run([python, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        return (done.stdout + done.stderr).splitlines()

    run("-m", "pip", "install", "--quiet", str(built.wheel(LEYDEN)))
    rl = ["-m", "leyden", "rl"]
    for command in (["-m", "leyden.compat", "program.py"], [*rl, "train", "ppo.yaml"], [*rl, "--help"], rl):
        (line,) = run(*command, status=1)
        assert "leyden-compat, which is not installed" in line and "pip install" in line
    for module in ("leyden.compat", "leyden.compat.qlib"):
        assert "leyden-compat, which is not installed" in run("-c", f"import {module}", status=1)[-1]

    run("-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(built.files), "leyden[compat]")
    assert run("-m", "leyden.compat", "program.py") == ["InMemoryLightningStore agentlightning"]
    assert "backtest" in "\n".join(run("-m", "leyden", "rl", "--help"))

    (folder,) = (tmp_path / "env" / "lib").glob("python*/site-packages/leyden_compat")
    shutil.rmtree(folder)
    assert "runs" in "\n".join(run("-m", "leyden", "--help")), "other commands do not need it"
    for command in (["-m", "leyden.compat", "program.py"], [*rl, "train", "ppo.yaml"]):
        (line,) = run(*command, status=1)
        assert "leyden-compat, which is installed and cannot be loaded (No module named 'leyden_compat')" in line
