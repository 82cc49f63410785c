"""Pass on the outcomes of requests in the order in which the requests were assigned to an arm.

Feedback arrives in any order, and bad answers often get theirs sooner. A test that took values as they arrive would see
too many bad ones early. So the outcome of a request is passed on only after those of all earlier requests, and without
the values that have not arrived within the waiting time. The order then does not depend on when values arrive.

Arms are drawn once for each key (a user, a session), so only the *first* request of each key
counts: later ones have the same arm with certainty, and are no further draws.

This module knows no store. Times are seconds on any one clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from leyden._lib.options import check_number
from leyden.serving.continual.guard import RequestOutcome


@dataclass(slots=True)
class _Request:
    """A request whose outcome waits: when it was made (Unix seconds), and the values of metrics that have arrived."""

    canary: bool
    share: float
    time: float
    values: dict[str, float] = field(default_factory=dict[str, float])


class RequestOrder:
    """The requests of one release whose outcomes wait for values.

    metrics: the names of the metrics whose values are awaited.
    waiting_seconds: how long after a request a missing value is awaited.
    """

    def __init__(self, metrics: Collection[str], *, waiting_seconds: float) -> None:
        check_number("waiting_seconds", waiting_seconds, at_least=0)
        self._metrics, self._waiting_seconds = frozenset(metrics), waiting_seconds
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self._keys: set[str] = set()
        self.repeated = 0
        """The number of requests that were left out because their key had an earlier one."""
        self.late = 0
        """The number of values that arrived for a request that was passed on or left out."""

    def __len__(self) -> int:
        return len(self._requests)

    def assign(self, request_id: str, *, key: str, canary: bool, share: float, time: float) -> None:
        """Add the next request, in the order of assignment. Ignore a request that was added already.

        key: the user or the session. Further requests with the same key are left out.
        canary: whether the request was assigned to the canary.
        share: the probability with which it could be assigned to the canary.
        time: when it was assigned, in Unix seconds.
        """
        if request_id in self._requests:
            return
        if key in self._keys:
            self.repeated += 1
            return
        self._keys.add(key)
        self._requests[request_id] = _Request(canary, share, time)

    def value(self, request_id: str, metric: str, value: float) -> None:
        """Set the value of a metric of a request. Until the request is passed on, the last value counts."""
        request = self._requests.get(request_id)
        if request is None:
            self.late += 1
        else:
            request.values[metric] = value

    def release(self, now: float) -> Iterator[RequestOutcome]:
        """Yield and remove outcomes from the front while all their values are there or their time is over at `now`."""
        while self._requests:
            request_id, request = next(iter(self._requests.items()))
            if not self._metrics <= request.values.keys() and now < request.time + self._waiting_seconds:
                return
            del self._requests[request_id]
            yield RequestOutcome(request.canary, request.share, dict(request.values))
