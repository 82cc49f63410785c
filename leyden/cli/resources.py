"""`leyden resources`: list, show, compare, add, promote, roll back and freeze versions."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leyden._lib.text import fault_reason
from leyden.cli.output import AsJson, echo, echo_data, echo_json
from leyden.cli.store_options import DEFAULT_STORE, OperatorToken, StoreUrl, Who, Why, login, name_of, with_store
from leyden.errors import ConfigError, LabelMoved

if TYPE_CHECKING:
    from leyden.store import LightningStore
    from leyden.types import ResourcesUpdate, VersionKey

resources_commands = typer.Typer(rich_markup_mode=None, no_args_is_help=True)

_Label = Annotated[str, typer.Option(help="The label to move.")]
_Previous = Annotated[str, typer.Option(help="The label for the version that had it before.")]
_Id = Annotated[str, typer.Argument(metavar="ID", help="The id of the resources.")]
_Version = Annotated[int, typer.Argument(metavar="VERSION", help="The number of the version.")]


@resources_commands.callback()
def resources() -> None:
    """Show versions of resources, and decide which of them serves users.

    \b
    Examples:
      leyden resources list
      leyden resources add helpdesk first.json
      leyden resources diff rs-1 3 4
      leyden resources promote rs-1 4 --why "better on the held-out tasks"
      leyden resources rollback --why "users complain"
      leyden resources freeze rs-1 4 --why "leaks addresses"
    """


@resources_commands.command("list")
def list_versions(
    store: StoreUrl = DEFAULT_STORE,
    token: OperatorToken = None,
    audit: Annotated[bool, typer.Option("--audit", help="Show the changes of labels instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the versions with their labels, or with --audit who moved which label, when and why.

    \b
    Examples:
      leyden resources list
      leyden resources list --audit --json
    """
    from datetime import UTC, datetime

    def day(seconds: float) -> str:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")

    async def read(opened: LightningStore) -> None:
        """Print the versions with their labels, or the last hundred audit records."""
        if audit:
            records = await opened.query_audit(limit=100)
            if as_json:
                echo_json([one.model_dump(mode="json") for one in records])
                return
            if not records:
                echo("no label has been moved yet")
            for one in records:
                moved = f"{name_of(one.before)} -> {name_of(one.after)}" if one.label else name_of(one.after)
                why = f": {one.why}" if one.why else ""
                echo(
                    f"{day(one.time)}  {one.action} {one.label or one.state or ''} {moved} by {one.who or 'unknown'}{why}"
                )
            return
        labels: dict[VersionKey, list[str]] = {}
        for each in await opened.get_labels():
            labels.setdefault((each.resources_id, each.version), []).append(each.label)
        rows = [
            (update, labels.get((update.resources_id, update.version), []) + ["frozen"] * update.frozen)
            for update in await opened.query_resources(all_versions=True)
        ]
        if as_json:
            echo_json(
                [{"id": u.resources_id, "version": u.version, "labels": names, "author": u.author} for u, names in rows]
            )
        elif not rows:
            echo("no version yet; write the first one with `leyden resources add ID FILE`")
        for update, names in () if as_json else rows:
            by = f" by {update.author}" if update.author else ""
            echo(f"{update.resources_id} {update.version}  {day(update.update_time)}{by}  {' '.join(names)}".rstrip())

    with_store(store, token, read, read_only=True)


@resources_commands.command()
def show(
    resources_id: _Id,
    version: _Version,
    store: StoreUrl = DEFAULT_STORE,
    token: OperatorToken = None,
    as_json: AsJson = False,
) -> None:
    """Print one version as JSON, without API keys, with and without --json.

    \b
    Examples:
      leyden resources show rs-1 4
    """

    update = with_store(
        store, token, lambda opened: opened.get_resources_by_id(resources_id, version=version), read_only=True
    )
    echo_json(_content(update))


@resources_commands.command()
def add(
    resources_id: _Id,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="JSON with a resource for each name, as `show` prints them.")
    ],
    author: Annotated[str | None, typer.Option(help="Who wrote it; your login name by default.")] = None,
    store: StoreUrl = DEFAULT_STORE,
    token: OperatorToken = None,
    as_json: AsJson = False,
) -> None:
    """Write the next version of resources, or the first one of a new id. Requests get it once it is promoted.

    \b
    Examples:
      echo '{"prompt": {"resource_type": "prompt_template", "template": "{question}"}}' > first.json
      leyden resources add helpdesk first.json
      leyden resources promote helpdesk 1 --why "first release"
    """
    from pydantic import TypeAdapter, ValidationError

    from leyden.types import NamedResources

    try:
        given: NamedResources = TypeAdapter[NamedResources](NamedResources).validate_json(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ConfigError(
            f"{file} has no resources: {where}: {fault_reason(first)}; write a JSON object with a resource for each name, such as "
            '{"prompt": {"resource_type": "prompt_template", "template": "Answer: {question}"}}'
        ) from error
    written = with_store(
        store, token, lambda opened: opened.update_resources(resources_id, given, author=author or login())
    )
    echo_data(as_json, {"id": resources_id, "version": written.version}, f"{resources_id} {written.version}")


@resources_commands.command()
def diff(
    resources_id: _Id,
    version: _Version,
    other: Annotated[int, typer.Argument(metavar="OTHER", help="The version to compare with.")],
    store: StoreUrl = DEFAULT_STORE,
    token: OperatorToken = None,
    as_json: AsJson = False,
) -> None:
    """Print what differs between two versions, line by line.

    \b
    Examples:
      leyden resources diff rs-1 3 4
    """
    import difflib

    async def read(opened: LightningStore) -> tuple[list[str], list[str]]:
        before = await opened.get_resources_by_id(resources_id, version=version)
        after = await opened.get_resources_by_id(resources_id, version=other)
        return _lines(before), _lines(after)

    before, after = with_store(store, token, read, read_only=True)
    changed = list(difflib.unified_diff(before, after, f"version {version}", f"version {other}", lineterm=""))
    data = {"id": resources_id, "before": version, "after": other, "diff": changed}
    echo_data(as_json, data, *(changed or ["the two versions are equal"]))


@resources_commands.command()
def promote(
    resources_id: _Id,
    version: _Version,
    label: _Label = "production",
    previous: _Previous = "previous",
    who: Who = None,
    why: Why = None,
    store: StoreUrl = DEFAULT_STORE,
    token: OperatorToken = None,
    as_json: AsJson = False,
) -> None:
    """Put the label production on a version, and previous on the one that had it, in one transaction.

    \b
    Examples:
      leyden resources promote rs-1 4 --why "better on the held-out tasks"
      leyden resources promote rs-1 5 --label canary --previous canary-before
    """
    from leyden.types import LabelMove

    async def move(opened: LightningStore) -> None:
        """Move `label` to the version, and `previous` to where it was, unless another process moves one first."""
        labels = await _labels(opened)
        now = labels.get(label)
        if now == (resources_id, version):
            raise ConfigError(f"{label} is on {name_of(now)} already; nothing was changed")
        moves = [LabelMove(label=label, to=(resources_id, version), expected=now)]
        if now is not None:
            moves.append(LabelMove(label=previous, to=now, expected=labels.get(previous)))
        await _moved(opened.move_labels(moves, who=who or login(), why=why))
        to = (resources_id, version)
        echo_data(as_json, {"label": label, "before": now, "after": to}, f"{label}: {name_of(now)} -> {name_of(to)}")

    with_store(store, token, move)


@resources_commands.command()
def rollback(
    label: _Label = "production",
    previous: _Previous = "previous",
    freeze_it: Annotated[
        bool, typer.Option("--freeze", help="Freeze the version that is rolled back, without any label.")
    ] = False,
    who: Who = None,
    why: Why = None,
    store: StoreUrl = DEFAULT_STORE,
    token: OperatorToken = None,
    as_json: AsJson = False,
) -> None:
    """Put the label production back on the version with the label previous. One transaction.

    \b
    Examples:
      leyden resources rollback --freeze --why "users complain"
    """
    from leyden.types import LabelMove

    async def move(opened: LightningStore) -> None:
        """Move `label` to the version that `previous` is on, unless another process moves one first."""
        labels = await _labels(opened)
        now, before = labels.get(label), labels.get(previous)
        if now is None or before is None:
            raise ConfigError(
                f"there is no version to go back to: {label} is on {name_of(now)}, {previous} on {name_of(before)}; "
                "put the label on a version with `leyden resources promote`"
            )
        if now == before:
            raise ConfigError(f"{label} is on {name_of(now)}, which is {previous} too; nothing was changed")
        others = sorted(each for each, version in labels.items() if freeze_it and version == now and each != label)
        moves = [LabelMove(label=label, to=before, expected=now)]
        moves += [LabelMove(label=each, to=None, expected=now) for each in others]
        await _moved(opened.move_labels(moves, freeze=[now] if freeze_it else [], who=who or login(), why=why))
        lost = f" and no longer {', '.join(others)}" if others else ""
        echo_data(
            as_json,
            {"label": label, "before": now, "after": before, "frozen": freeze_it, "lost": others},
            f"{label}: {name_of(now)} -> {name_of(before)}"
            + (f"; {name_of(now)} is frozen{lost}" if freeze_it else ""),
        )

    with_store(store, token, move)


@resources_commands.command()
def freeze(
    resources_id: _Id,
    version: _Version,
    thaw: Annotated[bool, typer.Option("--undo", help="Allow labels on it again.")] = False,
    who: Who = None,
    why: Why = None,
    store: StoreUrl = DEFAULT_STORE,
    token: OperatorToken = None,
    as_json: AsJson = False,
) -> None:
    """Freeze a version, so that no label can be put on it.

    \b
    Examples:
      leyden resources freeze rs-1 4 --why "leaks addresses"
      leyden resources freeze rs-1 4 --undo
    """
    name = name_of((resources_id, version))

    async def change(opened: LightningStore) -> None:
        if thaw and not (await opened.get_resources_by_id(resources_id, version=version)).frozen:
            raise ConfigError(f"{name} is not frozen; nothing was changed")
        await opened.freeze_resources(resources_id, version, frozen=not thaw, who=who or login(), why=why)

    with_store(store, token, change)
    data = {"id": resources_id, "version": version, "frozen": not thaw}
    echo_data(as_json, data, f"{name} {'may have labels again' if thaw else 'is frozen'}")


async def _moved(moving: Awaitable[None]) -> None:
    try:
        await moving
    except LabelMoved as error:
        raise LabelMoved(f"another process was faster: {error}. See `leyden resources list --audit`") from error


async def _labels(store: LightningStore) -> dict[str, VersionKey]:
    return {each.label: (each.resources_id, each.version) for each in await store.get_labels()}


def _content(update: ResourcesUpdate) -> dict[str, Any]:
    """Return a version of resources as JSON data, without API keys."""
    kept = {
        "resources": {
            name: resource.model_dump(mode="json", exclude={"api_key"}) for name, resource in update.resources.items()
        }
    }
    return {
        "id": update.resources_id,
        "version": update.version,
        "frozen": update.frozen,
        "parent": update.parent,
        **kept,
    }


def _lines(update: ResourcesUpdate) -> list[str]:
    """Return the fields of all resources as lines `NAME.FIELD: TEXT`, for a line-by-line diff."""
    lines: list[str] = []
    for name, fields in sorted(_content(update)["resources"].items()):
        for field, value in fields.items():
            text = value if isinstance(value, str) else repr(value)
            lines += [f"{name}.{field}: {line}" for line in text.splitlines() or [""]]
    return lines
