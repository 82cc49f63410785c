"""`leyden init`: write a project that trains.

Its files stand in `project/`, next to this module. The name of a Python file ends in `.in` there, because it is part of
no package. To add a file, put it there.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from leyden.cli.output import AsJson, echo_data
from leyden.errors import ConfigError

_PROJECT = Path(__file__).parent / "project"
_ELSEWHERE = {"gitignore": ".gitignore", "SKILL.md": ".claude/skills/leyden/SKILL.md"}
"""Files whose name in a project is another than in `project/`."""
_REQUIREMENT = "leyden[openai,torch]"
_NEEDED = ("torch", "transformers", "safetensors", "openai")


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Where to write it.", show_default="here")
    ] = Path(),
    force: Annotated[
        bool, typer.Option("--force", help="Write to a folder that has files, and only what is missing there.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a project that trains an agent: the agent with a tool, tasks, train.yaml, a test, a model of half a
    megabyte, and a skill that tells coding agents how to use Leyden.

    No file is overwritten. Hidden files, such as those of git, are no reason to refuse a folder.

    \b
    Examples:
      leyden init weather
      cd weather && leyden run train.yaml
      leyden init --force
    """
    targets = _targets()
    try:
        found = sorted(each.name for each in folder.iterdir()) if folder.exists() else []
        in_the_way = [name for name in found if not name.startswith(".") or any(t.parts[0] == name for t in targets)]
        if in_the_way and not force:
            names = ", ".join(in_the_way[:8]) + ", ..." * (len(in_the_way) > 8)
            raise ConfigError(
                f"{folder.absolute()} is not empty, it has {names}; give a new folder, or --force, which writes only the "
                "files that are missing"
            )
        written, kept = list[str](), list[str]()
        for name, source in targets.items():
            (written if _write(source, folder / name) else kept).append(str(name))
    except OSError as error:
        raise ConfigError(
            f"cannot write {error.filename or folder}: {error.strerror}; give another folder, or make room there and "
            "repeat with --force, which writes only the files that are missing"
        ) from error
    missing = [name for name in _NEEDED if find_spec(name) is None]
    install = f"pip install '{_REQUIREMENT}'" if missing else None
    here = folder.absolute() == Path.cwd()
    data = {"folder": folder.absolute(), "written": written, "kept": kept, "missing": missing, "install": install}
    steps = [
        *([] if here else [f"cd {shlex.quote(str(folder))}"]),
        *([f"{install}    # brings {', '.join(missing)}"] if install else []),
        "leyden run train.yaml    # trains the agent, a minute or two on two cores",
        "leyden show latest",
    ]
    kept_text = f"; kept {len(kept)} that were there" if kept else ""
    echo_data(
        as_json,
        data,
        f"wrote {len(written)} files to {folder}{kept_text}; README.md explains them. Next:",
        *(f"  {step}" for step in steps),
    )


def _targets() -> dict[Path, Path]:
    """Return the path of each file and folder in a project, and what is copied there."""
    return {Path(_ELSEWHERE.get(each.name, each.name.removesuffix(".in"))): each for each in sorted(_PROJECT.iterdir())}


def _write(source: Path, target: Path) -> bool:
    """Copy a file or a folder as a whole, unless something has the name of the copy. Return whether it was written."""
    if os.path.lexists(target):  # also a link to nothing
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".tmp-") as aside:
        copy = Path(aside) / "copy"
        if source.is_dir():
            shutil.copytree(source, copy, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(source, copy)
        copy.rename(target)
    return True
