"""What a run was started from: the settings of its file, and the dotted paths that name options in them.

Settings are the content of a file of `leyden run`, with the sections of `SECTIONS`. `run.json` keeps them as
`config["start"]`, from which the run can be repeated. This module knows the sections, and no option.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, cast

from leyden._lib.json import is_list, is_object
from leyden._lib.options import nearest
from leyden.errors import ConfigError

SECTIONS: Final = ("agent", "train", "val", "algorithm", "trainer", "vessel")
"""The sections of a file: all but `vessel` for an agent, `vessel` and `trainer` for a policy in a simulator."""

started_from: ContextVar[dict[str, Any] | None] = ContextVar("leyden_started_from", default=None)
"""What the run that begins in this context was started from. None for a run that a program starts.

`file` is the file, `file.py:function` or `module:function`, `folder` the one that it works in, and `cwd` the one in
which the command was given. `settings` are those of the run, `overrides` the values of `--set` among them by their
paths, `arguments` those of the function. `hidden` lists the places within all of these at which a secret is left out.
"""


def how_to_continue(start: object, directory: Path) -> str:
    """Return the command that continues a run, or the call if a program has started it.

    start: the entry `start` of the run's configuration.
    """
    if start:
        return f"leyden run --from {shlex.quote(str(directory))} --resume"
    return f"Trainer(..., run_dir={str(directory)!r}).fit(..., resume=True)"


def option_path(path: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the parts of a dotted path, such as `trainer.n_runners`, from the section on.

    A path that begins with no section names an option of the algorithm, or of the vessel if the settings have one.
    Raise ConfigError for an empty part.
    """
    parts = path.strip().split(".")
    if not all(parts):
        example = "policy.lr" if "vessel" in settings else "optim.learning_rate"
        raise ConfigError(f"{path!r} names no option; write one such as {example}")
    if parts[0] not in SECTIONS:
        close = get_close_matches(parts[0], SECTIONS, n=1, cutoff=0.9) if len(parts) > 1 else []
        if close:
            raise ConfigError(f"{path} begins with no section; did you mean {close[0]!r}?")
        parts.insert(0, "vessel" if "vessel" in settings else "algorithm")
    return tuple(parts)


def short_path(path: str) -> str:
    """Return a dotted path as `--set` takes it, without the section of the algorithm or the vessel."""
    return path.removeprefix("algorithm.").removeprefix("vessel.")


def option_value(settings: Any, path: Sequence[str], default: Any = None) -> Any:
    """Return the value at a path of `option_path`, or `default` if the settings do not have it."""
    found: Any = settings
    for part in path:
        if is_object(found) and part in found:
            found = found[part]
        elif is_list(found) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            return default
    return found


def with_option(settings: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a copy of the settings in which the option at a path of `option_path` has this value.

    A component that is only named, such as `algorithm: baseline`, becomes one with options. Raise ConfigError for an
    option of something that has none.
    """
    made = dict(settings)
    inner: Any = made
    for index, part in enumerate(path[:-1]):
        held = option_value(inner, [part])
        if held is None:
            held = {}
        elif isinstance(held, str) and part not in ("agent", "train", "val"):
            held = {"type": held}
        elif not isinstance(held, Mapping | list):
            raise ConfigError(
                f"{'.'.join(path[: index + 1])} is {held!r:.100}, which has no options; {'.'.join(path)} cannot be set"
            )
        held = copy.copy(cast(Any, held))
        _set(inner, part, held)
        inner = held
    _set(inner, path[-1], value)
    return made


def _set(inner: Any, part: str, value: Any) -> None:
    if is_list(inner) and not (part.isdecimal() and int(part) < len(inner)):
        raise ConfigError(f"{part!r} is no place in a list of {len(inner)}; count from 0")
    cast(Any, inner)[int(part) if is_list(inner) else part] = value


def check_sections(settings: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a section that does not exist, and for sections of both halves.

    where: the file, for the message.
    """
    for name in settings:
        if name not in SECTIONS:
            raise ConfigError(f"{where} has the section {name!r}, which does not exist; {nearest(name, SECTIONS)}")
    if "vessel" in settings and (others := [name for name in settings if name not in ("vessel", "trainer")]):
        raise ConfigError(f"{where} has a vessel, which brings its policy and its data; leave {', '.join(others)} out")
