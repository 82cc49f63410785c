"""Import tasks of Agent Lightning, and the content of a running Agent Lightning 0.3 store.

    python -m leyden_compat.importing store http://localhost:4747 .leyden/imported.sqlite
    python -m leyden_compat.importing qlib checkpoints/009.pth weights.pth

`read_tasks` returns the tasks of a Parquet or JSONL file. `import_store` copies resources, rollouts, attempts and spans
through the store's REST API, whatever its database. It may be stopped and repeated: rollouts that are complete in the
target are skipped. `leyden_compat.qlib.checkpoint` reads checkpoints of Qlib.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import aiohttp
from pydantic import TypeAdapter

from leyden._lib.extras import import_optional
from leyden._lib.host.http import MAX_BODY_BYTES
from leyden._lib.json import check_json_work
from leyden.errors import ConfigError, LeydenError
from leyden.store import LightningStore, open_store
from leyden.types import Attempt, NamedResources, Rollout, RolloutConfig, Span

PAGE: Final = 100
"""Rollouts or spans in one request."""
IMPORTED: Final = "imported"
"""The key of a rollout's metadata that holds the address of the source, and the rollout's times there."""
_ENDED: Final = ("succeeded", "failed", "cancelled")
_WAITING: Final = ("queuing", "requeuing")

OnProgress = Callable[[int, int], None]
"""Called with the number of rollouts done so far, and their total."""


class ImportFailed(LeydenError, RuntimeError):
    """The source cannot be reached, or its reply is not that of an Agent Lightning store."""


@dataclass(frozen=True)
class ImportCounts:
    """How many items an import has copied, found in the target, or skipped."""

    resources: int
    rollouts: int
    """Rollouts copied now, with their attempts and spans."""
    present: int
    """Rollouts that an earlier import had copied."""
    spans: int
    running: int
    """Rollouts that were running in the source, and were skipped."""


def read_tasks(path: str | Path) -> list[Any]:
    """Return the tasks of a `.parquet` file, one for each row, or of a `.jsonl` file, one for each line.

    A task of a Parquet file is a dict of its columns. Reading Parquet needs the extra `export`. Raise ConfigError, with
    the line, for a file of another kind or with a damaged line.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path} is no file; give a .parquet or .jsonl file of tasks")
    if path.suffix == ".parquet":
        parquet = import_optional("pyarrow.parquet", extra="export", needed_by="a Parquet file of tasks")
        try:
            return parquet.read_table(path).to_pylist()
        except Exception as error:  # pyarrow raises what its parsers raise
            raise ConfigError(f"{path} is no Parquet file that can be read: {error}") from error
    if path.suffix not in (".jsonl", ".ndjson"):
        raise ConfigError(f"{path} ends in {path.suffix or 'nothing'}; give a .parquet or .jsonl file of tasks")
    tasks: list[Any] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    check_json_work(line.encode())
                    tasks.append(json.loads(line))
                except ValueError as error:
                    raise ConfigError(f"{path}, line {number}: {error}; each line is one JSON value") from None
    return tasks


async def import_store(url: str, store: LightningStore, progress: OnProgress | None = None) -> ImportCounts:
    """Copy the content of the Agent Lightning 0.3 store that serves `url` into `store`.

    Ended rollouts are copied with their attempts, statuses and spans. Rollouts that wait in the source are enqueued in
    `store`. Ids are kept. The times of a rollout in the source are under `metadata["imported"]`, because a store sets
    its own. Rollouts that are running in the source are skipped; import again when they have ended.

    url: the address of the source's server.
    progress: called after each rollout with the number done and the total.
    Raise ImportFailed if the source fails, and ConfigError for an id that `store` has with other content. Safe to
    repeat.
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        source = _Source(session, url)
        resources = await source.all("resources", {})
        for update in resources:
            await store.add_resources(
                _RESOURCES.validate_python(update["resources"]), resources_id=update["resources_id"]
            )
        present = copied = spans = running = done = 0
        offset = 0
        while True:
            page, total = await source.page("rollouts", {"sort_by": "start_time"}, offset)
            known = (
                {
                    each.rollout_id: each
                    for each in await store.query_rollouts(rollout_id_in=[item["rollout_id"] for item in page])
                }
                if page
                else {}
            )
            for item in page:
                rollout = Rollout.model_validate(_without_none(item))
                there = known.get(rollout.rollout_id)
                if there is not None and (there.finished or rollout.status in _WAITING):
                    present += 1
                elif rollout.status in _ENDED:
                    spans += await _copy(source, store, rollout, url)
                    copied += 1
                elif rollout.status in _WAITING:
                    await store.enqueue_rollout(
                        rollout.input,
                        rollout.mode,
                        rollout.resources_id,
                        rollout.config,
                        _metadata(rollout, url),
                        rollout_id=rollout.rollout_id,
                        run_id=None,
                    )
                    copied += 1
                else:
                    running += 1
                done += 1
                if progress is not None:
                    progress(done, total)
            offset += len(page)
            if not page or offset >= total:
                return ImportCounts(len(resources), copied, present, spans, running)


_RESOURCES: Final[TypeAdapter[NamedResources]] = TypeAdapter(NamedResources)


async def _copy(source: _Source, store: LightningStore, rollout: Rollout, url: str) -> int:
    """Copy an ended rollout with its attempts and spans. Return the number of spans."""
    rollout_id = rollout.rollout_id
    attempts = [
        Attempt.model_validate(_without_none(item))
        for item in await source.all(f"rollouts/{rollout_id}/attempts", {"sort_by": "sequence_id"})
    ]
    if not attempts:  # cancelled before any worker took it
        await store.enqueue_rollout(
            rollout.input,
            rollout.mode,
            rollout.resources_id,
            None,
            _metadata(rollout, url),
            rollout_id=rollout_id,
            run_id=None,
        )
    else:
        await store.start_rollout(
            rollout.input,
            rollout.mode,
            rollout.resources_id,
            RolloutConfig(),  # the source's would put failed rollouts in the queue again
            _metadata(rollout, url),
            rollout_id=rollout_id,
            attempt_id=attempts[0].attempt_id,
            run_id=None,
        )
    for attempt in attempts[1:]:
        await store.start_attempt(rollout_id, attempt_id=attempt.attempt_id)
    found: list[Span] = []
    for item in await source.all("spans", {"rollout_id": rollout_id}):
        fields = _without_none(item)
        resource: Mapping[str, Any] = fields.pop("resource", None) or {}
        found.append(Span.model_validate({**fields, "resource": resource.get("attributes") or {}}))
    for start in range(0, len(found), PAGE):
        await store.add_many_spans(found[start : start + PAGE])
    for attempt in attempts:
        now = await store.get_attempt_by_id(rollout_id, attempt.attempt_id)
        if attempt.finished and not now.finished:
            await store.update_attempt(rollout_id, attempt.attempt_id, status=attempt.status, metadata=attempt.metadata)
    if (await store.get_rollout_by_id(rollout_id)).status != rollout.status:
        await store.update_rollout(rollout_id, status=rollout.status)
    await store.update_rollout(rollout_id, resources_id=rollout.resources_id, config=rollout.config)
    return len(found)


def _metadata(rollout: Rollout, url: str) -> dict[str, Any]:
    origin: dict[str, Any] = {"store": url, "start_time": rollout.start_time, "end_time": rollout.end_time}
    own = {name: value for name, value in rollout.metadata.items() if name.startswith("leyden.")}
    return {name: value for name, value in rollout.metadata.items() if name not in own} | {IMPORTED: origin | own}


def _without_none(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item of the source without its nulls, so that Leyden's defaults apply. The input of a task may be
    null.
    """
    return {name: value for name, value in item.items() if value is not None or name == "input"}


class _Source:
    """The REST API of an Agent Lightning 0.3 store."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no address of a store's server; give one such as http://localhost:4747")
        self._session, self._url = session, url.rstrip("/").removesuffix("/v1/agl")

    async def page(self, path: str, query: Mapping[str, str], offset: int) -> tuple[list[dict[str, Any]], int]:
        """Return the items of a list route from `offset` on, at most `PAGE`, and their total. Raise ImportFailed if the
        source cannot be reached or replies with something else.
        """
        address = f"{self._url}/v1/agl/{path}"
        parameters = {**query, "limit": str(PAGE), "offset": str(offset)}
        try:
            async with self._session.get(address, params=parameters) as response:
                body = b""
                async for piece in response.content.iter_chunked(2**20):
                    body += piece
                    if len(body) > MAX_BODY_BYTES:
                        raise ImportFailed(
                            f"{address} returned more than {MAX_BODY_BYTES:,} bytes, the most of one page"
                        )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ImportFailed(
                f"{address} cannot be reached: {error or type(error).__name__}; is the store running?"
            ) from error
        try:
            check_json_work(body)
            answer = json.loads(body)
            return cast("list[dict[str, Any]]", answer["items"]), int(answer["total"])
        except (ValueError, TypeError, KeyError):
            raise ImportFailed(
                f"{address} returned status {response.status} and no page of a store: {body[:200]!r}; is it an Agent Lightning 0.3 store?"
            ) from None

    async def all(self, path: str, query: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the items of all pages of a list route of the source's server."""
        items: list[dict[str, Any]] = []
        while True:
            page, total = await self.page(path, query, len(items))
            items += page
            if not page or len(items) >= total:
                return items


_EPILOG = """examples:
  python -m leyden_compat.importing store http://localhost:4747 .leyden/imported.sqlite
  python -m leyden_compat.importing qlib checkpoints/009.pth weights.pth     for PPO(..., weight_file=)
"""


def main(arguments: Sequence[str]) -> int:
    """Run the import that the command line names. Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m leyden_compat.importing",
        description="Import a running Agent Lightning 0.3 store, or a checkpoint of Qlib.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    of_store = kinds.add_parser("store", help="copy the content of a running Agent Lightning 0.3 store")
    of_store.add_argument("source", help="the address of its server")
    of_store.add_argument("target", help="a store of Leyden: a file, postgresql://..., or http://... of its server")
    of_qlib = kinds.add_parser("qlib", help="convert the weights in a checkpoint of Qlib's PPO or DQN")
    of_qlib.add_argument("source", help="the .pth file")
    of_qlib.add_argument("target", help="the file to write")
    options = parser.parse_args(arguments)
    try:
        if options.kind == "qlib":
            from leyden_compat.qlib.checkpoint import convert_checkpoint

            read = convert_checkpoint(options.source, options.target)
            sys.stdout.write(f"{options.target}: the weights of iteration {read.iteration}\n")
        else:
            sys.stdout.write(asyncio.run(_import_to(options.source, options.target)) + "\n")
    except LeydenError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("stopped; repeat the command to go on\n")
        return 130
    return 0


async def _import_to(source: str, target: str) -> str:
    """Import the content of the source into the store at `target`, show progress on standard error, and return a
    summary in one line.
    """

    def show(done: int, total: int) -> None:
        if done % PAGE == 0 or done == total:
            sys.stderr.write(f"{done:,} of {total:,} rollouts\n")

    if "://" not in target:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
    async with open_store(target) as store:
        found = await import_store(source, store, show)
    left_out = f"; {found.running:,} are running there and were left out" if found.running else ""
    return (
        f"{target}: {found.rollouts:,} rollouts ({found.present:,} were there already), {found.spans:,} spans, "
        f"{found.resources:,} resources{left_out}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
