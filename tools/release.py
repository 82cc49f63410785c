"""Build what a release publishes, and check it: `make release`.

Wheels and source distributions of both packages are made from the files of the commit, never from untracked ones. Their
copies, and only they, declare what a clone must not: the extra `compat` (in a clone it would install whatever package
somebody registers under that name), the addresses of the repository, and links that work outside of it. Nothing is
published here; `.github/workflows/release.yml` does that. `dist/` is written when every check has passed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION_FILE = "leyden/__init__.py"
MAX_WHEEL_BYTES = 4_000_000
LARGE_BYTES = 200_000
LARGE_FILES = {"leyden/cli/demo/weights/model.safetensors", "leyden/cli/project/model/model.safetensors"}
"""The files of a package that may be larger than LARGE_BYTES."""
UNWANTED = re.compile(r"(^|/)(tests?|__pycache__|node_modules|\.[^/]+)(/|$)|\.(pyc|orig|rej|log|sqlite|db)$")
REQUIRED = ("Summary", "Author", "License-Expression", "License-File", "Keywords", "Requires-Python", "Classifier")
WRITTEN = ("*.whl", "*.tar.gz", "*.cdx.json", "SHA256SUMS")
"""What `dist/` gets, and what of an earlier build is deleted there."""


class NotReleasable(Exception):
    """A check has failed; the message says what to do."""


@dataclass(frozen=True)
class Distribution:
    name: str
    package: str
    folder: str
    beside: frozenset[str]
    """Files of its source distribution beside the package."""


LEYDEN = Distribution("leyden", "leyden", ".", frozenset({"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"}))
COMPAT = Distribution(
    "leyden-compat",
    "leyden_compat",
    "packages/leyden-compat",
    frozenset({"pyproject.toml", "README.md", "LICENSE", "hatch_build.py"}),
)
DISTRIBUTIONS = (LEYDEN, COMPAT)
PARTS = [*sorted({"leyden", *LEYDEN.beside}), COMPAT.folder]


# ---- the source ------------------------------------------------------------------------------------------------------


def is_clone(root: Path) -> bool:
    """Whether git knows the files of `root`. It does not without git or history, or for another user's clone."""
    with contextlib.suppress(OSError):
        done = run(["git", "-C", str(root), "rev-parse", "--show-toplevel"], check=False)
        return done.returncode == 0 and Path(done.stdout.strip()).resolve() == root.resolve()
    return False


def check_committed(root: Path) -> None:
    changed = run(["git", "-C", str(root), "status", "--porcelain", "--", *PARTS]).stdout.splitlines()
    if changed:
        listed = "".join(f"\n  {line}" for line in changed[:10])
        raise NotReleasable(f"a release is made from a commit, and these files differ from it; commit them:{listed}")


def source_files(root: Path) -> list[str]:
    """Return the files that the distributions are made from: those that git knows; without git, those that
    `.gitignore` does not name.
    """
    if is_clone(root):
        listed = run(["git", "-C", str(root), "ls-files", "-z", "--", *PARTS]).stdout.split("\0")
        return [name for name in listed if name and (root / name).is_file()]
    from pathspec import GitIgnoreSpec

    ignored = GitIgnoreSpec.from_lines((root / ".gitignore").read_text().splitlines())
    paths = [path for part in PARTS for path in ((root / part).rglob("*") if (root / part).is_dir() else [root / part])]
    names = sorted(path.relative_to(root).as_posix() for path in paths if path.is_file())
    return [name for name in names if not ignored.match_file(name)]


def copy_source(root: Path, tree: Path) -> str:
    """Copy the files of both distributions, and return their version."""
    for name in source_files(root):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, tree / name)
    found = re.search(r'^__version__ = "([^"]+)"$', (tree / VERSION_FILE).read_text(), re.MULTILINE)
    if found is None:
        raise NotReleasable(f'{VERSION_FILE} has no line __version__ = "..."')
    return found[1]


def check_version(tree: Path, version: str, tag: str | None) -> None:
    if tag is not None and tag != f"v{version}":
        raise NotReleasable(f"the tag is {tag}, and {VERSION_FILE} says {version}; tag v{version}, or change the file")
    if not re.search(
        rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$", (tree / "CHANGELOG.md").read_text(), re.MULTILINE
    ):
        raise NotReleasable(f"CHANGELOG.md has no heading '## {version} - YYYY-MM-DD'; cut it from Unreleased")


def declare(tree: Path, version: str, repository: str | None) -> None:
    """Write into the copy what only a release declares."""
    extras = "[project.optional-dependencies]\n"
    for each in DISTRIBUTIONS:
        path = tree / each.folder / "pyproject.toml"
        text = path.read_text()
        if text.count(extras) != 1:
            raise NotReleasable(f"{each.folder}/pyproject.toml has not one line {extras.strip()}")
        compat = f'compat = ["{COMPAT.name}=={version}"]\n' if each is LEYDEN else ""
        urls = ""
        if repository is not None:
            blob = f"{repository}/blob/v{version}"
            places = {"Repository": repository, "Issues": f"{repository}/issues"}
            places |= {"Documentation": f"{blob}/docs/README.md", "Changelog": f"{blob}/CHANGELOG.md"}
            urls = "[project.urls]\n" + "".join(f'{name} = "{url}"\n' for name, url in places.items()) + "\n"
            readme = tree / each.folder / "README.md"
            readme.write_text(with_whole_links(readme.read_text(), each.folder, repository, version))
        path.write_text(text.replace(extras, urls + extras + compat))


RELATIVE_LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?![a-z]+:|#)([^)\s]+)\)")


def with_whole_links(text: str, folder: str, repository: str, version: str) -> str:
    """Return Markdown whose links to files of the repository work on other sites."""

    def whole(link: re.Match[str]) -> str:
        place = "raw" if link[1] else "blob"
        return (
            f"{link[1]}{link[2]}{repository}/{place}/v{version}/{posixpath.normpath(posixpath.join(folder, link[3]))})"
        )

    return RELATIVE_LINK.sub(whole, text)


# ---- the files -------------------------------------------------------------------------------------------------------


def build(folder: Path, target: Path, *kinds: str) -> list[Path]:
    """Build a distribution, and return its files. Its tools are those of this environment, so no index is asked."""
    before = set(target.iterdir()) if target.is_dir() else set[Path]()
    arguments = [argument for kind in kinds for argument in ("-t", kind)]
    run([sys.executable, "-m", "hatchling", "build", *arguments, "-d", str(target)], cwd=folder)
    return sorted(set(target.iterdir()) - before)


def build_all(tree: Path, target: Path) -> None:
    for each in DISTRIBUTIONS:
        build(tree / each.folder, target, "sdist", "wheel")


def wheel_of(each: Distribution, version: str) -> str:
    return f"{each.package}-{version}-py3-none-any.whl"


def sdist_of(each: Distribution, version: str) -> str:
    return f"{each.package}-{version}.tar.gz"


def check_names(folder: Path, version: str) -> None:
    wanted = {name for each in DISTRIBUTIONS for name in (wheel_of(each, version), sdist_of(each, version))}
    found = {path.name for path in folder.iterdir()}
    if found != wanted:
        raise NotReleasable(f"the build made {', '.join(sorted(found))}; expected {', '.join(sorted(wanted))}")


def check_contents(each: Distribution, folder: Path, tree: Path, version: str) -> None:
    """Check that both files hold the package, all of it, and nothing else."""
    home = tree / each.folder
    package = {path.relative_to(home).as_posix() for path in (home / each.package).rglob("*") if path.is_file()}
    wheel, sdist = folder / wheel_of(each, version), folder / sdist_of(each, version)
    info = f"{each.package}-{version}.dist-info"
    with zipfile.ZipFile(wheel) as opened:
        sizes = {entry.filename: entry.file_size for entry in opened.infolist()}
    about = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    _check_same(wheel.name, set(sizes), package | about)
    with tarfile.open(sdist) as opened:
        members = {member.name.partition("/")[2] for member in opened if member.isfile()}
        others = [member.name for member in opened if not (member.isfile() or member.isdir())]
    if others:
        raise NotReleasable(f"{sdist.name} holds links or devices: {', '.join(others[:5])}")
    _check_same(sdist.name, members, package | each.beside | {"PKG-INFO"})
    if f"{each.package}/py.typed" not in package:
        raise NotReleasable(f"{wheel.name} has no {each.package}/py.typed, so type checkers would ignore its types")
    for name, size in sizes.items():
        if UNWANTED.search(name):
            raise NotReleasable(f"{wheel.name} holds {name}, which belongs into no release")
        if size > LARGE_BYTES and name not in LARGE_FILES:
            raise NotReleasable(
                f"{wheel.name} holds {name} of {size:,} bytes; LARGE_FILES names those that belong there"
            )
    if (size := wheel.stat().st_size) > MAX_WHEEL_BYTES:
        raise NotReleasable(f"{wheel.name} has {size:,} bytes, more than {MAX_WHEEL_BYTES:,}")


def _check_same(file: str, found: set[str], wanted: set[str]) -> None:
    for what, names in (("lacks", wanted - found), ("also holds", found - wanted)):
        if names:
            raise NotReleasable(f"{file} {what} {', '.join(sorted(names)[:10])}")


def metadata_of(each: Distribution, folder: Path, version: str) -> Message:
    """Return the metadata of a wheel. Raise NotReleasable if the source distribution has others."""
    with zipfile.ZipFile(folder / wheel_of(each, version)) as opened:
        text = opened.read(f"{each.package}-{version}.dist-info/METADATA").decode()
    with tarfile.open(folder / sdist_of(each, version)) as opened:
        file = opened.extractfile(f"{each.package}-{version}/PKG-INFO")
        assert file is not None
        if file.read().decode() != text:
            raise NotReleasable(f"{each.name}: wheel and source distribution have different metadata")
    return message_from_string(text)


def check_metadata(each: Distribution, found: Message, version: str, repository: str | None) -> None:
    missing = [name for name in REQUIRED if not found.get_all(name)]
    if missing:
        raise NotReleasable(f"{each.folder}/pyproject.toml gives no {', '.join(missing)}")
    if (found["Name"], found["Version"]) != (each.name, version):
        raise NotReleasable(f"the metadata of {each.name} {version} say {found['Name']} {found['Version']}")
    requires = found.get_all("Requires-Dist") or []
    own = f"{COMPAT.name}=={version}; extra == 'compat'" if each is LEYDEN else f"{LEYDEN.name}=={version}"
    if own not in requires:
        raise NotReleasable(f"{each.name} does not require {own!r}")
    classifiers = found.get_all("Classifier") or []
    lowest = str(found["Requires-Python"]).removeprefix(">=")
    if f"Programming Language :: Python :: {lowest}" not in classifiers:
        raise NotReleasable(f"{each.name} requires Python {found['Requires-Python']}, and no classifier says {lowest}")
    if repository is not None:
        if len(found.get_all("Project-URL") or []) < 4:
            raise NotReleasable(f"{each.name} does not name its repository, issues, documentation and changelog")
        if left := RELATIVE_LINK.search(str(found.get_payload())):
            raise NotReleasable(f"the README of {each.name} has the relative link {left[0]}")


def check_rebuilt(each: Distribution, folder: Path, version: str) -> None:
    """Check that the source distribution, alone, builds the same wheel."""
    wheel = folder / wheel_of(each, version)
    with tempfile.TemporaryDirectory() as temporary:
        with tarfile.open(folder / sdist_of(each, version)) as opened:
            opened.extractall(temporary, filter="data")
        (again,) = build(Path(temporary) / f"{each.package}-{version}", Path(temporary) / "again", "wheel")
        if (again.name, digest(again)) != (wheel.name, digest(wheel)):
            raise NotReleasable(f"{sdist_of(each, version)} builds another wheel than {wheel.name}")


# ---- the installed packages ------------------------------------------------------------------------------------------


def install(each: Distribution, folder: Path, version: str, environment: Path) -> Path:
    """Install a distribution into an empty environment, and return its Python.

    Leyden's own files come from `folder`, without an index. The index is asked for dependencies alone.
    """
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    own = [f"{each.name}=={version}"] if each is LEYDEN else [f"{LEYDEN.name}=={version}", f"{each.name}=={version}"]
    pip(python, "install", "--no-index", "--no-deps", "--find-links", str(folder), *own)
    wanted = metadata_of(LEYDEN, folder, version).get_all("Requires-Dist") or []  # leyden-compat requires only Leyden
    pip(python, "install", "--only-binary", ":all:", *(each for each in wanted if "extra ==" not in each))
    pip(python, "check")
    return python


def pip(python: Path, command: str, *arguments: str) -> None:
    tool = [sys.executable, "-m", "pip", "--python", str(python), "--no-input", "--disable-pip-version-check"]
    try:
        run([*tool, command, *arguments])
    except NotReleasable as failed:
        raise NotReleasable(
            f"{failed}\npip cannot {command} {' '.join(arguments)}; is a package index in reach?"
        ) from None


def check_installed(each: Distribution, python: Path, folder: Path, version: str) -> None:
    """Check that what is installed starts and has the version, and that core and extra find each other."""
    leyden = str(python.with_name("leyden"))
    probe = f"import {each.package}, leyden; from importlib.metadata import version; print(leyden.__version__, version({each.name!r}))"
    _check_output([str(python), "-I", "-c", probe], f"{version} {version}", python.parent)
    _check_output([leyden, "--version"], f"leyden {version}", python.parent)
    _check_output([leyden, "--help"], "eval", python.parent)
    if each is LEYDEN:
        pip(python, "install", "--no-index", "--find-links", str(folder), f"leyden[compat]=={version}")
    _check_output([leyden, "rl", "--help"], "backtest", python.parent)


def _check_output(command: list[str], expected: str, cwd: Path) -> None:
    if expected not in (said := run(command, cwd=cwd).stdout):
        raise NotReleasable(f"{' '.join(command)} does not print {expected!r}:\n{said}")


def write_sbom(each: Distribution, python: Path, version: str, target: Path) -> int:
    """Write a CycloneDX document of everything that the environment holds, checked against CycloneDX's schema. Return
    the number of packages, the distribution itself included.
    """
    listing = "from importlib.metadata import distributions; import json; print(json.dumps([[d.name, d.version] for d in distributions()]))"
    installed = {tuple(pair) for pair in json.loads(run([str(python), "-I", "-c", listing]).stdout)}
    tool = [sys.executable, "-m", "cyclonedx_py", "environment", str(python), "--output-reproducible", "--validate"]
    run([*tool, "--spec-version", "1.6", "--output-format", "JSON", "--output-file", str(target)])
    document = json.loads(target.read_text())
    named = {(one["name"], one["version"]) for one in document["components"]}
    if named != installed:
        raise NotReleasable(f"{target.name} and the environment differ in {sorted(named ^ installed)}")
    (root,) = (one for one in document["components"] if one["name"] == each.name)
    document["metadata"]["component"] = root
    document["components"].remove(root)
    target.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    check_sbom(target)
    return len(installed)


def check_sbom(document: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    if (trouble := JsonStrictValidator(SchemaVersion.V1_6).validate_str(document.read_text())) is not None:
        raise NotReleasable(f"{document.name} is no CycloneDX 1.6: {trouble}")


# ---- everything ------------------------------------------------------------------------------------------------------


def release(root: Path, *, tag: str | None = None, repository: str | None = None) -> Path:
    """Build, check and write `dist/`. Raise NotReleasable at the first check that fails; `dist/` is then as before."""
    committed = is_clone(root)
    if committed:
        check_committed(root)
    with tempfile.TemporaryDirectory(prefix="leyden-release-") as temporary:
        tree, built, about = (Path(temporary) / name for name in ("source", "built", "about"))
        for folder in (tree, built, about):
            folder.mkdir()
        version = copy_source(root, tree)
        check_version(tree, version, tag)
        declare(tree, version, repository)
        say(f"1/5 building {version}" + ("" if committed else ", of files that git does not know"))
        build_all(tree, built)
        check_names(built, version)
        say("2/5 contents and metadata")
        for each in DISTRIBUTIONS:
            check_contents(each, built, tree, version)
            check_metadata(each, metadata_of(each, built, version), version, repository)
        run([sys.executable, "-m", "twine", "check", "--strict", *map(str, built.iterdir())])
        say("3/5 the source distributions build the same wheels")
        for each in DISTRIBUTIONS:
            check_rebuilt(each, built, version)
        say("4/5 installing each into an empty environment")
        for each in DISTRIBUTIONS:
            python = install(each, built, version, Path(temporary) / each.name)
            n = write_sbom(each, python, version, about / f"{each.package}-{version}.cdx.json")
            check_installed(each, python, built, version)
            say(f"    {each.name} installs {n} packages")
        say("5/5 digests")
        files = sorted([*built.iterdir(), *about.iterdir()], key=lambda path: path.name)
        (about / "SHA256SUMS").write_text("".join(f"{digest(path)}  {path.name}\n" for path in files))
        replace_dist(root / "dist", [*files, about / "SHA256SUMS"])
    say((root / "dist" / "SHA256SUMS").read_text(), end="")
    if repository is None:
        say(
            "without --repository: no addresses in the metadata, and relative links in the READMEs. Publish none of these."
        )
    return root / "dist"


def replace_dist(dist: Path, files: list[Path]) -> None:
    """Move files into `dist`, and delete those of earlier builds there, so that nobody publishes them too."""
    dist.mkdir(exist_ok=True)
    for pattern in WRITTEN:
        for old in dist.glob(pattern):
            old.unlink()
    for path in files:
        shutil.move(path, dist / path.name)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def run(command: list[str], *, cwd: Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a program. Raise NotReleasable, with the end of what it printed, if it fails."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        command, cwd=cwd, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if check and done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise NotReleasable(f"{tail}\n{' '.join(command[:4])} ... ends with status {done.returncode}")
    return done


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)


def address(text: str) -> str:
    if not re.fullmatch(r"https://[^\s\"]+[^/\s\"]", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be like https://HOST/OWNER/NAME")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(prog="make release", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tag", help="the tag that is released; it must be v and the version")
    parser.add_argument("--repository", type=address, metavar="URL", help="where the repository is, for links")
    options = parser.parse_args()
    try:
        release(ROOT, tag=options.tag, repository=options.repository)
    except NotReleasable as failed:
        print(failed, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
