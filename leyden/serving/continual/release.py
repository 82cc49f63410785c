"""The life of a release, as a table: states, events, and what each transition does to labels.

A release brings one version of resources, the *candidate*, from an offline check over a canary into
production, or out. Before it, a cycle of learning looks for the candidate; it is a row of the same
table, whose version is the one that it starts from. `next_state` and `effects` are pure; `advance`
writes one transition with its label moves in one transaction of the store. So a crash leaves a
release in the state before or after a transition, never between, and the next process that opens it
continues from there.

To add a state: its rows in TRANSITIONS, and its row in `effects`. This module does not decide which
event happens (`guard`), and knows no traffic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, cast, get_args

from leyden.errors import ConfigError, IllegalTransition, ReleaseAdvanced
from leyden.store.base import LightningStore
from leyden.types import LabelMove, Release

State: TypeAlias = Literal[
    "training", "trained", "abandoned", "gating", "shadow", "canary", "promoted", "refused", "rolled_back"
]
"""`training`: a cycle looks for a candidate. It ends `trained`, when the release of its candidate
is a row of its own, or `abandoned`. `gating`: the candidate is measured on held-out tasks.
`shadow`: it answers live tasks, unseen by users. `canary`: it serves a share of the traffic. All
others are final.
"""
Event: TypeAlias = Literal["propose", "give_up", "observe", "release", "refuse", "better", "worse", "deadline", "stop"]
"""`propose`, `give_up`: a cycle has found a candidate, or has not. `observe`, `release`:
a check has passed;
answer in the shadow, or serve. `refuse`: a check has failed. `better`, `worse`:
the canary's verdict.
`deadline`: no result in time. `stop`: a person or the kill switch.
"""

PRODUCTION: Final = "production"
CANARY: Final = "canary"
PREVIOUS: Final = "previous"
LEARNING_STOPPED: Final = "learning-stopped"

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
"""Which state follows which event. An event that is not here is refused with IllegalTransition."""

OPEN_STATES: tuple[State, ...] = tuple(state for state, events in TRANSITIONS.items() if events)
"""States that are not final."""

Version: TypeAlias = tuple[str, int]
"""Resources id and version."""


@dataclass(frozen=True, slots=True)
class Effects:
    """Changes that a transition makes besides the state, in the same transaction."""

    labels: tuple[LabelMove, ...] = ()
    freeze: tuple[Version, ...] = ()
    """Versions to which no label can be put from now on."""


def next_state(state: State, event: Event) -> State:
    """Return the state of a release after an event.

    Raise IllegalTransition if the event cannot happen in this state.
    """
    if event not in TRANSITIONS[state]:
        possible = ", ".join(sorted(TRANSITIONS[state])) or "none, because it is final"
        raise IllegalTransition(f"a release that is {state!r} knows no event {event!r}; possible: {possible}")
    return TRANSITIONS[state][event]


def effects(entered: State, *, candidate: Version, production: Version | None) -> Effects:
    """Return the changes that go with entering a state.

    production: version in production when the release began; None if there was none.
    Each label is moved by compare-and-set, so a label that another process has moved stops the
    transition.
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
    """Return the state of a stored release.

    Raise ConfigError for one that the table does not know.
    """
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

    deadline: Unix seconds by which the check has to end.
    If the kill switch is on, the release is refused at once and returned as it is then.
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
    """Write the transition of an event, with its label moves and freezes, in one transaction.

    deadline: Unix seconds at which the new state ends without a verdict; None for none.
    A release that ends without a promotion leaves labels alone that a person has moved, and does
    not freeze a candidate that a person has given another label. Raise IllegalTransition for an
    event that the state does not know, ReleaseAdvanced if another process has advanced the release,
    LabelMoved if a label is not where the release left it. Nothing is changed then. Safe to retry.
    """
    state = next_state(state_of(release), event)
    candidate = release.canary_version
    changes = effects(state, candidate=candidate, production=release.from_version)
    labels, freeze = changes.labels, changes.freeze
    now = await _labels(store)
    if state == "promoted" and release.from_version is not None:
        labels = (*labels, LabelMove(label=PREVIOUS, to=release.from_version, expected=now.get(PREVIOUS)))
    elif state in ("rolled_back", "refused"):  # what a person has moved meanwhile must not keep it open
        labels = labels if now.get(CANARY) == candidate else ()
        others = [label for label, version in now.items() if version == candidate and label != CANARY]
        freeze = () if others else freeze
    return await store.advance_release(
        release.release_id,
        expected_state=release.state,
        state=state,
        details=dict(details or {}),
        deadline=deadline,
        labels=labels,
        freeze=freeze,
        who=who,
        why=why,
    )


async def open_releases(store: LightningStore) -> Sequence[Release]:
    """Return the releases that are not final, the oldest first."""
    return await store.query_releases(state_in=list(OPEN_STATES), sort_order="asc")


# ---- the kill switch -----------------------------------------------------------------------------


async def stop_learning(store: LightningStore, *, who: str | None = None, why: str | None = None) -> Sequence[Release]:
    """Roll back or refuse every open release, and let none begin until `allow_learning`.

    Return the releases that it ended.

    The switch is the label `learning-stopped` on the version in production, so it is in the audit
    log, survives restarts and holds for all processes. Safe to retry, and to call from any process.
    Raise ConfigError if no version is in production, because there is nothing to return to.
    """
    labels = await _labels(store)
    if PRODUCTION not in labels:
        raise ConfigError(f"no version in {store.url} has the label {PRODUCTION!r}; set it before continual learning")
    if LEARNING_STOPPED not in labels:
        await store.set_label(LEARNING_STOPPED, *labels[PRODUCTION], who=who, why=why)
    ended: list[Release] = []
    for release in await open_releases(store):
        try:
            ended.append(await advance(store, release, "stop", who=who, why=why))
        except ReleaseAdvanced:  # its own process was faster; another state may still be open
            latest = await store.get_release(release.release_id)
            if latest.state in OPEN_STATES:
                ended.append(await advance(store, latest, "stop", who=who, why=why))
    return ended


async def allow_learning(store: LightningStore, *, who: str | None = None, why: str | None = None) -> None:
    """Allow releases again after `stop_learning`. Safe to retry."""
    await store.remove_label(LEARNING_STOPPED, who=who, why=why)


async def is_stopped(store: LightningStore) -> bool:
    """Return whether the kill switch is on."""
    return LEARNING_STOPPED in await _labels(store)


async def _labels(store: LightningStore) -> dict[str, Version]:
    return {label.label: (label.resources_id, label.version) for label in await store.get_labels()}
