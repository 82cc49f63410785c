"""The states of a release as a table: states, events, and the label moves of each transition.

A release takes one version of resources, the *candidate*, through an offline check and a canary into production, or
ends before. The cycle of learning that searches for the candidate is a row of the same table, whose version is the one
that the cycle starts from. `next_state` and `effects` are pure; `advance` writes one transition with its label moves in
one transaction of the store. So a crash leaves a release in the state before or after a transition, never between, and
the next process that opens it continues from there.

To add a state: its rows in TRANSITIONS, and its row in `effects`. This module does not decide which event happens
(`guard`), and knows no traffic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, cast, get_args

from leyden.errors import (
    ConfigError,
    IllegalTransition,
    LabelMoved,
    LeydenError,
    ReleaseAdvanced,
    StoreClosed,
    StoreError,
)
from leyden.store.base import LightningStore
from leyden.types import LabelMove, Release

State: TypeAlias = Literal[
    "training", "trained", "abandoned", "gating", "shadow", "canary", "promoted", "refused", "rolled_back"
]
"""`training`: a cycle searches for a candidate. It ends as `trained`, once the candidate's release is a row of its own,
or as `abandoned`. `gating`: the candidate is measured on held-out tasks.
`shadow`: the candidate answers live tasks, unseen by users. `canary`: it serves a share of the users. All other states
are final.
"""
Event: TypeAlias = Literal["propose", "give_up", "observe", "release", "refuse", "better", "worse", "deadline", "stop"]
"""`propose`, `give_up`: a cycle has found a candidate, or has not. `observe`, `release`: a check has passed, so the
candidate answers in the shadow, or serves as a canary. `refuse`: a check has failed. `better`, `worse`: the verdict on
the canary. `deadline`: no result in time. `stop`: a person or the kill switch has intervened.
"""

PRODUCTION: Final = "production"
"""The label of the version that serves users."""
CANARY: Final = "canary"
"""The label of the candidate while it is a canary."""
PREVIOUS: Final = "previous"
"""The label of the version that was in production before the last promotion."""
LEARNING_STOPPED: Final = "learning-stopped"
"""The label that is the kill switch."""

TRANSITIONS: Mapping[State, Mapping[Event, State]] = {
    "training": {"propose": "trained", "give_up": "abandoned", "deadline": "abandoned", "stop": "abandoned"},
    "gating": {
        "observe": "shadow",
        "release": "canary",
        "refuse": "refused",
        "deadline": "refused",
        "stop": "refused",
    },
    "shadow": {"release": "canary", "refuse": "refused", "deadline": "refused", "stop": "refused"},
    "canary": {
        "better": "promoted",
        "worse": "rolled_back",
        "deadline": "rolled_back",
        "stop": "rolled_back",
    },
    "trained": {},
    "abandoned": {},
    "promoted": {},
    "refused": {},
    "rolled_back": {},
}
"""The next state by state and event. Any other event is refused with IllegalTransition."""

OPEN_STATES: tuple[State, ...] = tuple(state for state, events in TRANSITIONS.items() if events)
"""States that are not final."""

Version: TypeAlias = tuple[str, int]
"""Resources id and version."""


@dataclass(frozen=True, slots=True)
class Effects:
    """The changes that a transition makes besides the state, in the same transaction."""

    labels: tuple[LabelMove, ...] = ()
    freeze: tuple[Version, ...] = ()
    """Versions that can get no label from now on."""


def next_state(state: State, event: Event) -> State:
    """Return the state of a release after an event.

    Raise IllegalTransition if the event cannot happen in this state.
    """
    if event not in TRANSITIONS[state]:
        possible = ", ".join(sorted(TRANSITIONS[state])) or "none, because it is final"
        raise IllegalTransition(f"a release that is {state!r} takes no event {event!r}; possible: {possible}")
    return TRANSITIONS[state][event]


def effects(entered: State, *, candidate: Version, production: Version | None) -> Effects:
    """Return the changes that a release makes when it enters a state.

    candidate: the version that is released.
    production: the version in production when the release began; None if there was none.
    Each label is moved by compare-and-set, so a label that another process has moved stops the transition.
    """
    match entered:
        case "canary":
            return Effects(labels=(LabelMove(label=CANARY, to=candidate, expected=None),))
        case "promoted":
            moves = [
                LabelMove(label=CANARY, to=None, expected=candidate),
                LabelMove(label=PRODUCTION, to=candidate, expected=production),
            ]
            return Effects(labels=tuple(moves))
        case "rolled_back":
            return Effects(labels=(LabelMove(label=CANARY, to=None, expected=candidate),), freeze=(candidate,))
        case "refused":
            return Effects(freeze=(candidate,))
        case "training" | "trained" | "abandoned" | "gating" | "shadow":
            return Effects()


def state_of(release: Release) -> State:
    """Return the state of a stored release. Raise ConfigError for a state that is not in the table."""
    if release.state not in get_args(State):
        raise ConfigError(
            f"release {release.release_id!r} is {release.state!r}, which is no state of continual learning; "
            f"known: {', '.join(get_args(State))}"
        )
    return cast(State, release.state)


async def begin(
    store: LightningStore,
    release_id: str,
    *,
    candidate: Version,
    production: Version | None,
    details: Mapping[str, Any] | None = None,
    deadline: float | None = None,
    who: str | None = None,
    why: str | None = None,
) -> Release:
    """Create a release in the state `gating`. Safe to retry with the same id and candidate.

    candidate: the version to release.
    production: the version in production; None if there is none.
    details: recorded with the release.
    deadline: Unix seconds at which the check ends at the latest; None: any time.
    who, why: for the audit log.
    If the kill switch is on, the release is refused at once, and returned as refused.
    Raise UnknownResources for a version that is not in the store.
    """
    release = await store.create_release(
        release_id,
        candidate,
        state="gating",
        from_version=production,
        details=dict(details or {}),
        deadline=deadline,
        who=who,
        why=why,
    )
    # Read the switch after the insert: either `stop_learning` sees the release, or this call sees
    # the switch.
    if release.state in OPEN_STATES and await is_stopped(store):
        return await advance(store, release, "stop", who=who, why="learning is stopped")
    return release


async def advance(
    store: LightningStore,
    release: Release,
    event: Event,
    *,
    details: Mapping[str, Any] | None = None,
    deadline: float | None = None,
    who: str | None = None,
    why: str | None = None,
) -> Release:
    """Write the transition of an event, with its label moves and freezes, in one transaction. Return the release in its
    new state.

    release: as last read; its state is the one that the store must have.
    details: added to the release's.
    who, why: for the audit log.
    deadline: Unix seconds at which the new state ends without a verdict; None for none.
    A release that ends without a promotion leaves a label alone that a person has moved, and does not freeze a
    candidate that a person has given another label.
    Raise IllegalTransition for an event that the state does not take, ReleaseAdvanced if another process has advanced
    the release. Raise LabelMoved if a label is not where the release left it, which happens to `release` and `better`
    only. Nothing is changed then. Safe to retry.
    """
    state = next_state(state_of(release), event)
    there = await _labels(store)
    while True:
        changes = _changes(release, state, there)
        try:
            return await store.advance_release(
                release.release_id,
                expected_state=release.state,
                state=state,
                details=dict(details or {}),
                deadline=deadline,
                labels=changes.labels,
                freeze=changes.freeze,
                who=who,
                why=why,
            )
        except (LabelMoved, ConfigError):  # ConfigError: the candidate got a label, so it cannot be frozen
            before, there = there, await _labels(store)
            if there == before:
                raise


def _changes(release: Release, entered: State, there: Mapping[str, Version]) -> Effects:
    """Return the changes of a transition, given the labels that are there now.

    A label that a person has moved, or has put on the candidate, must not keep the release open.
    """
    candidate = release.canary_version
    changes = effects(entered, candidate=candidate, production=release.from_version)
    if entered == "promoted" and release.from_version is not None:
        previous = LabelMove(label=PREVIOUS, to=release.from_version, expected=there.get(PREVIOUS))
        return replace(changes, labels=(*changes.labels, previous))
    if entered in ("rolled_back", "refused"):
        labels = tuple(move for move in changes.labels if there.get(move.label) == candidate)
        stay = {label for label, version in there.items() if version == candidate} - {move.label for move in labels}
        return Effects(labels, () if stay else changes.freeze)
    return changes


async def open_releases(store: LightningStore) -> Sequence[Release]:
    """Return the releases that are not in a final state, the oldest first."""
    return await store.query_releases(state_in=list(OPEN_STATES), sort_order="asc")


# ---- the kill switch -----------------------------------------------------------------------------


async def stop_learning(store: LightningStore, *, who: str | None = None, why: str | None = None) -> Sequence[Release]:
    """Roll back or refuse every open release, and let none begin until `allow_learning`. Return the releases that this
    call has ended.

    The switch is the label `learning-stopped`, so it is in the audit log, survives restarts and holds for all
    processes. It is put on the version in production; without one, on a version that an open release came from or is
    of. Safe to retry, and to call from any process.
    Raise ConfigError if there is neither a version in production nor an open release. Raise StoreError, after trying
    all of them, if releases could not be ended.
    """
    labels, opened = await _labels(store), await open_releases(store)
    if LEARNING_STOPPED not in labels:
        of_releases = [version for row in opened for version in (row.from_version, row.canary_version) if version]
        if not (versions := [labels[PRODUCTION]] if PRODUCTION in labels else of_releases):
            raise ConfigError(
                f"no version in {store.url} has the label {PRODUCTION!r}; set it before continual learning"
            )
        await store.set_label(LEARNING_STOPPED, *versions[0], who=who, why=why)
    ended: list[Release] = []
    failed: list[str] = []
    for row in await open_releases(store):
        try:
            if (last := await _stop(store, row, who=who, why=why)) is not None:
                ended.append(last)
        except StoreClosed:
            raise
        except LeydenError as error:
            failed.append(f"{row.release_id!r} ({error})")
    if failed:
        done = ", ".join(repr(row.release_id) for row in ended) or "none"
        raise StoreError(
            f"learning is stopped, but these releases are still open: {', '.join(failed)}; stop learning again "
            f"(ended now: {done})"
        )
    return ended


async def _stop(store: LightningStore, row: Release, *, who: str | None, why: str | None) -> Release | None:
    """Stop an open release, and return it; None if another process has ended it."""
    while row.state in OPEN_STATES:
        try:
            return await advance(store, row, "stop", who=who, why=why)
        except ReleaseAdvanced:  # the release's own process was faster, and its new state may be open, too
            row = await store.get_release(row.release_id)
    return None


async def allow_learning(store: LightningStore, *, who: str | None = None, why: str | None = None) -> None:
    """Allow releases again after `stop_learning`. Safe to retry."""
    await store.remove_label(LEARNING_STOPPED, who=who, why=why)


async def is_stopped(store: LightningStore) -> bool:
    """Return whether the kill switch is on."""
    return LEARNING_STOPPED in await _labels(store)


async def _labels(store: LightningStore) -> dict[str, Version]:
    return {label.label: (label.resources_id, label.version) for label in await store.get_labels()}
