"""The configuration of a run, as JSON: what it was started with, and with which code.

`describe` turns any object into JSON. Secrets are hidden: text goes through `leyden.errors`, and the value of an option
whose name says that it is secret is left out. To record something more, add it to the dictionary that the trainer
passes, or here if every kind of run has it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import inspect
import json
import math
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final, cast

from pydantic import BaseModel

from leyden._lib.components import arguments_of
from leyden.errors import HIDDEN, ConfigError, redact
from leyden.training.runs.start import started_from

_SECRET_NAMES = r"pass(?:word|wd|phrase)?|pgpassword|secret|token|api_?key|key|credentials?|auth(?:orization)?|bearer"
_SECRET = re.compile(rf"(?:^|[_.-])(?:{_SECRET_NAMES}|passwords|secrets|api_?keys|(?:access|auth)_tokens)$", re.I)
_SECRET_IN_CAMEL_CASE = re.compile(r"[a-z](?:Passw(?:or)?d|Secret|Token|Key|Credentials?)$")
_COUNT = re.compile(r"(?:^|[._-])(?:n|num|max|min|total|per|eos|bos|pad|unk|stop)(?:[_-]|(?=[A-Z]))[\w-]*$")
"""Names of numbers that count or number tokens and keys, such as `n_key`, `max_token` and `pad_token`."""
_KEY = re.compile(r"\b(?:sk-(?!leyden-)[\w-]{16,}|hf_\w{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|AKIA[A-Z0-9]{12,})")
"""Keys whose form shows that they are secret, under any name."""
_MAX_TEXT = 500
"""Characters; a longer text is cut, and has a digest, so that two of them can be told apart."""
_MAX_ITEMS = 100
_MAX_DEPTH = 6
"""Objects that are nested deeper are recorded by the name of their class alone."""

_MAX_HEADER = 100_000_000
"""Bytes that the format allows for the header of a safetensors file."""

_DIGEST_ITEMS = 10_000
"""A longer data set is digested by this many items, evenly spaced."""
_DIGEST_CHARACTERS = 8_000_000
"""Items after this many characters of JSON are not digested."""
_DIGEST_SECONDS = 1.0
"""A data set whose items take longer to read has no digest."""

_PACKAGES = (
    "leyden",
    "torch",
    "transformers",
    "peft",
    "numpy",
    "gymnasium",
    "openai",
    "openai-agents",
    "anthropic",
    "langchain",
    "langgraph",
    "crewai",
    "autogen-agentchat",
    "litellm",
    "vllm",
    "verl",
    "ray",
)


def import_path(thing: object) -> str:
    """Return `module.name` of a class or function, or of an object's class.

    A script's own classes and functions are `__main__.name`.
    """
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{getattr(named, '__module__', '?')}.{getattr(named, '__qualname__', '?')}"


def describe(value: Any, *, depth: int = 0) -> Any:
    """Return the value as JSON that a person can read, without secrets.

    An object becomes its class and the arguments that it was made with. Long texts and lists are cut.
    depth: how many containers the value is inside of; callers leave it out.
    """
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str | Path):
        return _shortened(redact(str(value)))
    if isinstance(value, enum.Enum):
        return describe(value.value, depth=depth)
    if depth >= _MAX_DEPTH:
        return import_path(value)
    if isinstance(value, BaseModel):
        return {"type": import_path(value), **_options(dict(value), depth)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        return {"type": import_path(value), **_options(fields, depth)}
    if isinstance(value, Mapping):
        return _options(cast("Mapping[Any, Any]", value), depth)
    if isinstance(value, list | tuple | set | frozenset):
        items = list(cast("Sequence[Any]", value))
        return [describe(item, depth=depth + 1) for item in items[:_MAX_ITEMS]]
    given = arguments_of(value)
    return {"type": import_path(value), **_options(given, depth)} if given else import_path(value)


NOT_DEFAULT = "not_default"
"""The entry of a run's configuration with its options that are not defaults, by dotted path."""
_REQUIRED: Final = object()
"""The default of an option that has none."""


def changed_options(made: object, section: str, *, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the options of a component that differ from the defaults of this version, as JSON by dotted path.

    An option of an option has a path of its own, such as `algorithm.optim.learning_rate`. Nothing is returned for a
    component that does not remember its arguments.
    section: the first name of each path.
    without: names of options to leave out.
    """
    changed: dict[str, Any] = {}
    given = {name: value for name, value in arguments_of(made).items() if name not in without}
    _add_changed(changed, section, given, _defaults_of(type(made)), 0)
    return changed


def _add_changed(
    changed: dict[str, Any], path: str, given: Mapping[str, Any], defaults: Mapping[str, Any], depth: int
) -> None:
    for name, value in list(given.items())[:_MAX_ITEMS]:
        default = defaults.get(name, _REQUIRED)
        if _is_same(value, default):
            continue
        parts = None if depth >= _MAX_DEPTH or hides(name) else _parts_of(value)
        kind = cast("type[Any]", type(value))
        within = _parts_of(default) if kind is type(default) else None
        if not parts or (issubclass(kind, Mapping) and within and within.keys() - parts.keys()):
            changed[f"{path}.{name}"] = _options({name: value}, depth)[name]
            continue
        if within is None and not issubclass(kind, Mapping):
            changed[f"{path}.{name}"] = import_path(kind)
        _add_changed(changed, f"{path}.{name}", parts, within or _defaults_of(kind), depth + 1)


def _is_same(value: Any, default: Any) -> bool:
    try:
        return value is default or bool(value == default)
    except Exception:  # noqa: BLE001 -- arrays compare item by item, and an object may raise anything
        return False


def _parts_of(value: Any) -> dict[str, Any] | None:
    """Return the options of an option by name; None for a plain value."""
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, BaseModel | Mapping):
        return {str(name): part for name, part in dict(cast("Mapping[Any, Any]", value)).items()}
    return arguments_of(value)


def _defaults_of(kind: Any) -> dict[str, Any]:
    """Return the default of each option of a class, those of its base classes included, because a class may pass
    `**options` on to them.
    """
    if issubclass(kind, BaseModel):
        fields = kind.model_fields.items()
        return {name: each.get_default(call_default_factory=True) for name, each in fields if not each.is_required()}
    found: dict[str, Any] = {}
    if dataclasses.is_dataclass(kind):
        for each in dataclasses.fields(kind):
            if each.default_factory is not dataclasses.MISSING:
                found[each.name] = each.default_factory()
            elif each.default is not dataclasses.MISSING:
                found[each.name] = each.default
        return found
    for base in kind.__mro__:
        with contextlib.suppress(ValueError, TypeError):  # a constructor in C may have no signature
            for each in inspect.signature(base.__init__).parameters.values():
                found.setdefault(each.name, _REQUIRED if each.default is each.empty else each.default)
    return found


def without_secrets(
    value: Any, name: str = "", *, hidden: list[list[str]] | None = None, at: tuple[str, ...] = ()
) -> Any:
    """Return settings as JSON without secrets: of the same form, and whole, so that they can be read again.

    name: the name of the value, which may say that it is secret.
    hidden: gets the path of each value in which something was hidden.
    at: the path of the value.
    """
    if isinstance(value, Mapping | list | tuple):
        listed = None if isinstance(value, Mapping) else cast("Sequence[Any]", value)
        items = cast("Mapping[Any, Any]", value) if listed is None else dict(enumerate(listed))
        made = {
            str(key): without_secrets(
                each, name if listed is not None or hides(name) else str(key), hidden=hidden, at=(*at, str(key))
            )
            for key, each in items.items()
        }
        return made if listed is None else list(made.values())
    if hides(name, value):
        shown = HIDDEN if value else ""
    elif isinstance(value, str):
        shown = _KEY.sub(HIDDEN, redact(value))
    elif isinstance(value, float) and not math.isfinite(value):
        return f".{value}".replace(".-", "-.")
    else:
        return value if value is None or isinstance(value, bool | int | float) else describe(value)
    if hidden is not None and shown != value:
        hidden.append([*at])
    return shown


def _options(options: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    return {
        str(key): (HIDDEN if value else "") if hides(str(key), value) else describe(value, depth=depth + 1)
        for key, value in list(options.items())[:_MAX_ITEMS]
    }


def hides(name: str, value: object = HIDDEN) -> bool:
    """Return whether the value of an option is secret, because the option's name says so. A number is no secret if its
    name counts something, and True, False, None and 0 are none.
    """
    if (
        value is None
        or isinstance(value, bool)
        or (isinstance(value, int | float) and (not value or _COUNT.search(name)))
    ):
        return False
    return bool(_SECRET.search(name) or _SECRET_IN_CAMEL_CASE.search(name))


def _shortened(text: str) -> str:
    text = _KEY.sub(HIDDEN, text.encode("utf-8", "backslashreplace").decode())
    if len(text) <= _MAX_TEXT:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{text[: _MAX_TEXT - 21]}... (sha256 {digest})"


# ---- models and data -----------------------------------------------------------------------------


def describe_model(model: Any) -> dict[str, Any]:
    """Return the name of a model. For a folder, add the number of its weights and a digest.

    The digest covers `config.json` and the names and sizes of the files, and not the weights themselves, which take
    long to read.
    model: a folder, a hub name, or a model object, of which only the class is recorded.
    """
    if not isinstance(model, str | Path):
        return {"name": import_path(model), "digest": None}
    folder = Path(model)
    if not folder.is_dir():
        return {"name": redact(str(model)), "digest": None}
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file():
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    if (config := folder / "config.json").is_file():
        digest.update(config.read_bytes())
    return {"name": str(folder.resolve()), "digest": digest.hexdigest()[:16], "n_weights": _n_weights(folder)}


def weights_of(model: Any) -> tuple[int, int] | None:
    """Return how many weights of a model are trained, and how many it has.

    Return None for a hub name, a folder of an adapter and an object that is no torch module: their numbers are unknown
    until the model is loaded.
    model: a folder, a hub name, or a model object, whose frozen parameters are not trained.
    """
    if isinstance(model, str | Path):
        folder = Path(model)
        is_adapter = (folder / "adapter_config.json").is_file()  # its files lack the weights of the model beneath
        n = None if is_adapter else _n_weights(folder)
        return None if n is None else (n, n)
    try:
        sizes = [(bool(each.requires_grad), int(each.numel())) for each in model.parameters()]
    except (AttributeError, TypeError):  # no torch module
        return None
    return sum(size for is_trained, size in sizes if is_trained), sum(size for _, size in sizes)


def _n_weights(folder: Path) -> int | None:
    """Return how many weights the folder's safetensors files declare in their headers; None without such files."""
    shapes = tensor_shapes(folder)
    return sum(map(math.prod, shapes.values())) if shapes else None


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shapes of the tensors in a folder's safetensors files by name, as their headers declare them. Empty if
    there are no such files, or one cannot be read.
    """
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                header = json.loads(file.read(min(_MAX_HEADER, int.from_bytes(file.read(8), "little"))))
            shapes.update({name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"})
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}  # the engine reports the error when it loads the model
    return shapes


def describe_dataset(dataset: Sequence[Any], *, seconds: float = _DIGEST_SECONDS) -> dict[str, Any]:
    """Return the length of a data set and a digest of its items as JSON.

    The cost is bounded. At most 10,000 evenly spaced items are digested, and the last ones are left out once 8 million
    characters are reached; `digested_items` says how many were digested. The digest is None if an item cannot be read,
    or if reading takes longer than `seconds`.
    """
    length = len(dataset)
    step = max(1, math.ceil(length / _DIGEST_ITEMS))
    encode = json.JSONEncoder(sort_keys=True, default=_as_json).encode
    digest, characters, items, deadline = hashlib.sha256(), 0, 0, time.monotonic() + seconds
    try:
        for index in range(0, length, step):
            text = encode(dataset[index])
            digest.update(f"{text}\n".encode("utf-8", "backslashreplace"))
            items += 1
            characters += len(text)
            if characters > _DIGEST_CHARACTERS:
                break
            if time.monotonic() > deadline:
                return {"length": length, "digest": None, "digested_items": 0}
    except Exception:  # noqa: BLE001 -- a data set is the user's code; the algorithm meets the same error, and reports it
        return {"length": length, "digest": None, "digested_items": 0}
    return {"length": length, "digest": digest.hexdigest()[:16], "digested_items": items}


def _as_json(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, set | frozenset):
        return sorted(map(repr, cast("set[Any]", value)))
    return import_path(value)  # its repr may hold an address, which differs in each process


# ---- the program ---------------------------------------------------------------------------------


def describe_program() -> dict[str, Any]:
    """Return what the run was started from, the program, its arguments, the versions of the installed packages that
    matter, and the git commit.
    """
    path, start = getattr(sys.modules.get("__main__"), "__file__", None), started_from.get()
    return {
        "start": start,
        "program": None if path is None or "ipykernel" in path else str(Path(path).resolve()),
        "argv": _without_secrets(sys.argv),
        "command": _without_secrets(sys.orig_argv),
        "cwd": start["cwd"] if start else _working_directory(),
        "versions": _versions(),
        "git": {"commit": _git_commit(), "dirty": None},  # the recorder fills it in; it may take git a while
    }


def _working_directory() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return None


def command_of(config: Mapping[str, Any]) -> str | None:
    """Return the command that started a run, ready to paste into a shell. Return None for an interactive session, and
    for a run of a version that did not record it. Secrets in it are replaced by `***`.
    """
    words, folder = config.get("command"), config.get("cwd")
    if not config.get("program") or not isinstance(words, list) or not words:
        return None
    line = [str(word) for word in cast("list[object]", words)]
    if len(line) > 1 and Path(line[1]).name == "leyden":  # the script that pip has made, run by its interpreter
        line = ["leyden", *line[2:]]
    there = f"cd {shlex.quote(folder)} && " if isinstance(folder, str) else ""
    return there + shlex.join(line)


def _without_secrets(argv: Sequence[str]) -> list[str]:
    """Return the command line with the values of secret options hidden and long words shortened."""
    shown: list[str] = []
    hide_next = False
    for word in argv[:_MAX_ITEMS]:
        is_value = hide_next and not word.startswith("-")
        shown.append(HIDDEN if is_value else _shortened(_word_without_secrets(word)))
        hide_next = word.startswith("-") and "=" not in word and hides(word.lstrip("-"))
    return shown


def _word_without_secrets(word: str) -> str:
    """Return a word of a command line, such as `--set=store.token=...`, without the value of a secret option."""
    from leyden._lib.config_file import parse_value  # here, because it imports yaml

    parts = word.split("=")
    for place in range(1, len(parts)):
        before, value = "=".join([*parts[:place], ""]), "=".join(parts[place:])
        number = float(value) if value.replace(".", "", 1).isdecimal() else value
        if value and hides(parts[place - 1].lstrip("-+"), number):
            return f"{before}{HIDDEN}"
        if value.lstrip()[:1] in ("{", "["):  # within which others may be secret
            with contextlib.suppress(ConfigError):
                return f"{before}{json.dumps(without_secrets(parse_value(value, name='the option')))}"
    return redact(word)


@cache
def _versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def _git_commit() -> str | None:
    return _git("rev-parse", "HEAD")


@cache
def git_is_dirty() -> bool | None:
    """Return whether tracked files of the repository differ from its commit.

    Return None outside a repository. May take seconds in a large repository.
    """
    status = _git("status", "--porcelain", "--untracked-files=no")
    return None if status is None else bool(status)


def _git(*arguments: str) -> str | None:
    """Return the output of a git command in the current folder; None if it fails."""
    try:
        # Without locks: a git command that the user runs meanwhile would find the index locked.
        done = subprocess.run(
            ["git", "--no-optional-locks", *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
