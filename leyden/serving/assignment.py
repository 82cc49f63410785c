"""Choose the version that a request runs with: pure functions of the request, the rules and the labels.

The module knows labels by name, and no store. A user's place between 0 and 100 is a keyed hash, so a user stays in one
arm, in every process that has the key, and no user can choose the arm. Requests without a user would all have one
place, so they stay with the control.
"""

from __future__ import annotations

import hmac
import logging
import threading
import unicodedata
import uuid
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from leyden._lib.clock import unix_time
from leyden._lib.options import check_number
from leyden._lib.text import shown
from leyden.errors import ConfigError
from leyden.types import VersionKey

logger = logging.getLogger(__name__)

CONTROL = "control"
"""The arm of requests that run with the version in production."""
NO_USER = "no_user"
"""The metadata of a request without a user, which counts for no canary."""
_NOBODY = frozenset(
    (
        *("null", "none", "nil", "undefined", "nan", "n/a", "anonymous", "anon", "guest", "unknown"),
        str(uuid.UUID(int=0)),
        *("false", "[objectobject]", "{}", "[]", '""', "''", "(null)", "<null>", "-", "?"),
    )
)
"""Texts in lower case and without white space that programs give for a user who is not there.

A number such as "0" or "-1" is none of them, because it is the id of a user where users are counted. Where it is a
constant, its share of the requests shows it (`Users`)."""
_SHOWN = 100
"""The characters at the beginning of a user's id that are looked at for a name."""
_BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Characters that Unicode counts as letters or symbols, and that show nothing."""
_WINDOW, _MIN_SEEN, _MAX_SHARE = 1000, 200, 0.5
"""The latest requests that are looked at, from how many on, and the share of one user from which on the user's id is
taken for a constant."""


@dataclass(frozen=True)
class AssignmentRule:
    """The labels and the policy for requests of one kind. Of several rules the first that fits a request applies."""

    task_type: str | None = None
    """The task type that the rule is for; None for any."""
    min_quality: float | None = None
    """The rule is for requests that require at least this quality; None for any request."""
    label: str = "production"
    """The label of the version in production for such requests."""
    canary: str = "canary"
    """The label of the version that a share of the users gets."""
    policy: str | None = None
    """A name, of your choice, of the optimisation policy that learns from such requests. It is recorded with each
    rollout."""

    def fits(self, task_type: str | None, quality: float | None) -> bool:
        of_type = self.task_type is None or self.task_type == task_type
        return of_type and (self.min_quality is None or (quality is not None and quality >= self.min_quality))


@dataclass(frozen=True)
class CanaryShare:
    """The share of users that a release gives its canary to, the same in every session."""

    share: float
    """The share of the users who get the version, in (0, 1)."""
    salt: str
    """Part of the hash that decides which users get the version. Another salt chooses other users."""
    until: float | None = None
    """The release's deadline, in Unix seconds. From then on all users get the version in production, even if no
    controller runs that could end the release."""


@dataclass(frozen=True)
class Assigned:
    arm: str
    """`control`, or the label of the canary."""
    label: str
    version: VersionKey
    policy: str | None
    """The policy of the rule that applied."""


@dataclass(frozen=True)
class Assignment:
    """How requests are assigned to versions: the share of users that the canary gets, and rules by task type.

    Raise ConfigError for a share that leaves the control less than `min_control_percent`.
    """

    canary_percent: float = 0.0
    """The share of users, from 0 to 100, who get a canary that belongs to no release. A release has its own share and
    salt."""
    min_control_percent: float = 1.0
    """The share of users, in percent, that always stays with the control, so that there is a group to compare with.
    Above 0."""
    rules: Sequence[AssignmentRule] = field(default_factory=lambda: (AssignmentRule(),))
    """The first rule that fits a request applies."""
    salt: str = ""
    """Part of the hash that decides which users get a canary. Give each experiment its own salt to draw other users;
    with the same salt the same users get every canary first. Each release has another salt."""

    def __post_init__(self) -> None:
        check_number("min_control_percent", self.min_control_percent, above=0, at_most=100)
        check_number("canary_percent", self.canary_percent, at_least=0, at_most=100)
        if self.canary_percent > 100 - self.min_control_percent:
            raise ConfigError(
                f"canary_percent is {self.canary_percent}; it must be from 0 to {100 - self.min_control_percent:g}, because "
                f"{self.min_control_percent:g} % stay with the control (min_control_percent)"
            )
        if not self.rules:
            raise ConfigError("rules is empty; give at least AssignmentRule(), which fits every request")

    def assign(
        self,
        key: str,
        user: str | None,
        labels: Mapping[str, VersionKey],
        *,
        shares: Mapping[VersionKey, CanaryShare] | None = None,
        now: float | None = None,
        task_type: str | None = None,
        quality: float | None = None,
    ) -> Assigned:
        """Return the arm, the version and the policy for a request of `user`.

        key: the secret of the hash.
        user: the user's id; None gets no canary.
        labels: the version of each label.
        shares: the shares of users for the canaries of releases, by version. At least `min_control_percent` stay with
            the control.
        now: in Unix seconds; None: the present time.
        task_type, quality: the request's, which choose the rule.
        Raise ConfigError if no rule fits, or if the label of the rule that fits is on no version.
        """
        rule = next((rule for rule in self.rules if rule.fits(task_type, quality)), None)
        if rule is None:
            raise ConfigError(
                f"no rule fits task_type={task_type!r}, quality={quality!r}; end the rules with AssignmentRule(), which fits every request"
            )
        canary = labels.get(rule.canary)
        if canary is not None and user is not None:
            percent, salt = self.canary_percent, self.salt
            if (given := (shares or {}).get(canary)) is not None:
                ended = given.until is not None and (unix_time() if now is None else now) >= given.until
                percent = 0.0 if ended else min(100 * given.share, 100 - self.min_control_percent)
                salt = given.salt
            if place_of(key, user, salt) < percent:
                return Assigned(rule.canary, rule.canary, canary, rule.policy)
        if rule.label not in labels:
            raise ConfigError(
                f"no version has the label {rule.label!r}; put it on one with `leyden resources promote ID VERSION --label "
                f"{rule.label}`, or LightningStore.set_label"
            )
        return Assigned(CONTROL, rule.label, labels[rule.label], rule.policy)


class Users:
    """Tells requests of users from others, and warns of ids that are no user's. Safe in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: deque[int] = deque()
        """The users of the latest requests, by the hash of their text, which may be long."""
        self._counts: Counter[int] = Counter()
        self._warned: set[str] = set()
        """What was warned of: placeholders in lower case, and "share"."""

    def identify(self, user: object) -> str | None:
        """Return the user's id in Unicode's composed form, so that one user has one arm in every spelling; None if it
        names nobody. Raise ConfigError for a value that is no text.
        """
        if user is None:
            return None
        if not isinstance(user, str):
            raise ConfigError(f"user is {shown(user)}; give the user's id as a text, or None for a request without one")
        text = unicodedata.normalize("NFC", user)
        name = text[:_SHOWN]
        if name.isascii() and name.isprintable():
            name = name.replace(" ", "")
        else:
            name = "".join(filter(_is_visible, unicodedata.normalize("NFKC", name)))
        name = name.casefold()
        if not name or (len(text) < _SHOWN and name in _NOBODY):
            self._warn(
                name[:20],
                "user is %.100r, which names nobody, so such requests get no canary; give user=None for them",
                text,
            )
            return None
        number = hash(text)
        with self._lock:
            self._latest.append(number)
            self._counts[number] += 1
            if len(self._latest) > _WINDOW:
                oldest = self._latest.popleft()
                self._counts[oldest] -= 1
                if not self._counts[oldest]:
                    del self._counts[oldest]
            top = self._counts[number]
            seen = len(self._latest)
        if seen >= _MIN_SEEN and top > _MAX_SHARE * seen:
            self._warn(
                "share",
                "%d of the last %d requests have the same user, and all of them the same arm; if that id is a constant, "
                "give each user's own, or None",
                top,
                seen,
            )
        return text

    def _warn(self, about: str, message: str, *arguments: object) -> None:
        with self._lock:
            if about in self._warned or len(self._warned) > len(_NOBODY) + 1:
                return
            self._warned.add(about)
        logger.warning(message, *arguments)


def _is_visible(char: str) -> bool:
    marks = unicodedata.category(char) in ("Mn", "Me")  # such as a variation selector
    return char.isprintable() and not char.isspace() and not marks and char not in _BLANK


def user_hash(key: str, user: str) -> str:
    """Return the pseudonym of a user for records: equal for equal users, and irreversible without `key`."""
    return hmac.digest(key.encode(), f"leyden user\x1e{user}".encode(errors="surrogatepass"), "sha256").hex()[:32]


def place_of(key: str, user: str, salt: str = "") -> float:
    """Return a user's place in [0, 100): equal for equal arguments, uniform over users (HMAC-SHA256, 53 bits).

    salt: a text such as a release's id, so that each release draws other users.
    """
    digest = hmac.digest(key.encode(), f"{salt}\x1f{user}".encode(errors="surrogatepass"), "sha256")
    # 53 of the 64 bits, because a float holds no more.
    return 100.0 * (int.from_bytes(digest[:8], "big") >> 11) / 2**53
