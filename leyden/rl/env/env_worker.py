"""The worker process: a group of environments, which are stepped at the parent's command.

The process ends when the parent closes its pipe or has ended. The forkserver imports this module before any worker is
started, so that all workers share the memory of the imported modules.
"""

from __future__ import annotations

import contextlib
import pickle
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from leyden._lib.host.child import ChildFailure, Parent, end_with_parent
from leyden._lib.pickling import pack_by_value
from leyden.rl.batch import select
from leyden.rl.data_queue import address_of
from leyden.rl.env.channel import SIGNAL, Channel, SharedMemoryFile
from leyden.rl.env.group import EnvFailure, EnvGroup, Infos, Rows, Start
from leyden.rl.env.randomness import WorkerGenerators
from leyden.rl.spaces import AnySpace, Batch, Layout, layout_of


@dataclass(frozen=True, slots=True)
class EnvsReady:
    """A worker's message that it has made its environments."""

    observation_space: AnySpace
    action_space: AnySpace
    own_seeds: str | None = None
    """The address of the DataQueue that its environments were made with; empty for another kind of seed iterator; None
    if they have none."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers of environments and workers, which decide the size of the shared memory."""

    n_envs: int
    """The number of environments of all workers."""
    n_workers: int


@dataclass(frozen=True, slots=True)
class BeginEpisodes:
    """The command to begin episodes."""

    starts: list[Start]


@dataclass(frozen=True, slots=True)
class StepEnvs:
    """The command to step, for actions that are not in shared memory."""

    envs: list[int]
    """The environments to step, by their number in the worker."""
    actions: Batch
    """One row for each environment of the worker, in the worker's order."""


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a command."""

    infos: Infos
    failures: list[EnvFailure]
    rows: Rows | None = None
    """The results of all environments of the worker; None if they are in shared memory."""


class View(NamedTuple):
    """The shared memory, as arrays.

    Observations, actions and results lie in it if all are of a fixed size. Otherwise messages carry them.
    """

    progress: NDArray[np.int64]
    """(workers,): the environment that each worker began or stepped last, by its number there."""
    todo: NDArray[np.bool_]
    """(N,): whether each environment is to be stepped."""
    actions: Batch
    """The actions of all N environments; None if messages carry them."""
    rows: Rows | None
    """The results of all N environments; None if messages carry them."""

    @classmethod
    def of(cls, file: SharedMemoryFile, sizes: Sizes, layout: Layout, actions: Layout, *, resize: bool) -> View:
        """Return arrays over the file, which parent and workers divide in the same way.

        layout, actions: of observations and actions.
        resize: set the file's size first; the parent does, once.
        """
        n, end = sizes.n_envs, 0
        shares = layout.unshared is None and actions.unshared is None

        def room(nbytes: int) -> int:
            """Return the offset of the next part, which begins at a multiple of 64 bytes."""
            nonlocal end
            start, end = end, end + -(-nbytes // 64) * 64
            return start

        progress, todo, rewards, terminated, truncated = (room(size) for size in (8 * sizes.n_workers, n, 8 * n, n, n))
        obs, acts = (room(layout.nbytes(n)), room(actions.nbytes(n))) if shares else (0, 0)
        if resize:
            file.resize(end)
        memory = file.map()
        rows = Rows(
            layout.allocate(n, memory, obs),
            np.ndarray(n, np.float64, memory, rewards),
            np.ndarray(n, np.bool_, memory, terminated),
            np.ndarray(n, np.bool_, memory, truncated),
        ) if shares else None  # fmt: skip
        return cls(
            np.ndarray(sizes.n_workers, np.int64, memory, progress),
            np.ndarray(n, np.bool_, memory, todo),
            actions.allocate(n, memory, acts) if shares else None,
            rows,
        )


def run_worker(
    parent: Parent,
    number: int,
    part: range,
    file: SharedMemoryFile,
    packed: bytes,
    sizes: Sizes,
    wants_steps: bool,
    generators: WorkerGenerators,
) -> None:
    """Make and step the environments `part`, in worker process `number`, by their `packed` factories."""
    end_with_parent(parent.pid)
    channel = Channel(parent.connection)
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent has closed, or gone
        try:
            factories = pickle.loads(packed)
            generators.seed()
            group = EnvGroup(factories, wants_steps=wants_steps)
            own = None if group.own_seeds is None else address_of(group.own_seeds) or ""
            channel.send(EnvsReady(group.observation_space, group.action_space, own))
            channel.receive()  # "open": the shared memory has its size now
            _serve(channel, group, number, part, file, sizes, generators)
        except (EOFError, BrokenPipeError):
            raise
        except BaseException as error:  # noqa: BLE001 -- the parent reports it
            channel.send(ChildFailure.of(error))


def _serve(
    channel: Channel,
    group: EnvGroup,
    number: int,
    part: range,
    file: SharedMemoryFile,
    sizes: Sizes,
    generators: WorkerGenerators,
) -> None:
    """Carry out the parent's commands until its pipe is closed, then close the environments.

    With shared memory, SIGNAL is the command to step the environments that are marked in `todo`, and a reply without
    infos and failures is a SIGNAL too.
    """
    layout, actions = layout_of(group.observation_space), layout_of(group.action_space)
    view = View.of(file, sizes, layout, actions, resize=False)
    file.close()
    mine = slice(part.start, part.stop)
    rows = Rows.allocate(layout, len(part)) if view.rows is None else view.rows.part(mine)
    group.open(layout, actions, rows, view.progress[number : number + 1])
    acts = None if view.rows is None else select(view.actions, mine)
    todo, everyone = view.todo[mine], list(range(len(part)))
    sent = rows if view.rows is None else None
    channel.signal()
    try:
        while True:
            command = channel.receive()
            if command is SIGNAL:
                infos, failures = group.step(everyone if todo.all() else np.flatnonzero(todo).tolist(), acts)
                if infos or failures:
                    _send(channel, Results(infos, _for_parent(failures)))
                else:
                    channel.signal()
            elif isinstance(command, BeginEpisodes):
                generators.seed()  # a simulator may load torch late
                channel.send(Results({}, _for_parent(group.begin(command.starts)), sent))
            else:
                infos, failures = group.step(command.envs, command.actions)
                _send(channel, Results(infos, _for_parent(failures), sent))
    finally:
        with contextlib.suppress(Exception):  # the worker ends, whatever their close() says
            group.close()


def _send(channel: Channel, results: Results) -> None:
    """Send results. Leave out entries of infos that cannot be pickled."""
    try:
        channel.send(results)
    except OSError:
        raise
    except Exception:  # noqa: BLE001 -- pickling runs any object's code
        channel.send(replace(results, infos={env: _picklable(info) for env, info in results.infos.items()}))


def _picklable(info: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of an info that can be pickled. "note" names the others."""
    kept: dict[str, Any] = {}
    notes: list[str] = []
    for name, value in info.items():
        try:
            pack_by_value(value)
            kept[name] = value
        except Exception as error:  # noqa: BLE001 -- pickling runs any object's code
            notes.append(f"info[{name!r}] cannot be sent from a worker process and is left out: {error}")
    if notes:
        kept["note"] = "; ".join([*([str(kept["note"])] if "note" in kept else []), *notes])
    return kept


def _for_parent(failures: list[EnvFailure]) -> list[EnvFailure]:
    """Return the failures without their exceptions, which may not be picklable; tracebacks are text."""
    return [replace(failure, error=None) for failure in failures] if failures else failures
