"""Servers of a running run, asked now: its gateway, and the model servers that its configuration and resources name."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from leyden.doctor.evidence import Evidence
from leyden.doctor.rule import Finding, Rule
from leyden.errors import redact
from leyden.training.runs.rollouts import latest_resources

_SECONDS = 2.0
_MAX_SERVERS = 16
_ADDRESSES = ("api_base", "base_url", "endpoint")


def _find(run: Evidence) -> Finding | None:
    if run.run.state != "running":
        return None
    resources = run.query("its resources", lambda store: latest_resources(run.run, store))
    given = {} if resources is None else {name: each.model_dump() for name, each in resources.resources.items()}
    addresses = list(dict.fromkeys((*_addresses(run.config.get("not_default")), *_addresses(given))))[:_MAX_SERVERS]
    with ThreadPoolExecutor(_MAX_SERVERS) as threads:
        troubles = dict(zip(addresses, threads.map(_trouble, addresses), strict=True))
    wrong = [f"{redact(address)} {trouble}" for address, trouble in troubles.items() if trouble is not None]
    if not wrong:
        return None
    return Finding(
        cause="a server of the run does not answer",
        evidence=tuple(wrong[:5]),
        remedy="Start it again, or correct its address. Calls under way are tried again by their clients, as far as they do so.",
        command=f"leyden show {run.source} --failed",
        severity="critical" if len(wrong) == len(addresses) else "warning",
        share=len(wrong) / len(addresses),
    )


def _addresses(value: Any, name: str = "") -> Iterator[str]:
    """Yield the addresses of servers in JSON data."""
    if isinstance(value, Mapping):
        for key, part in cast("Mapping[str, Any]", value).items():
            yield from _addresses(part, key.rpartition(".")[2])
    elif isinstance(value, list):
        for part in cast("list[Any]", value):
            yield from _addresses(part, name)
    elif isinstance(value, str) and name in _ADDRESSES and value.startswith(("http://", "https://")):
        yield value


def _trouble(address: str) -> str | None:
    """Return why a server does not answer; None if it does, whatever its status below 500."""
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(address, timeout=_SECONDS).close()
    except urllib.error.HTTPError as error:
        return f"answers {error.code}" if error.code >= 500 else None
    except TimeoutError:
        return f"does not answer within {_SECONDS:g} s"
    except urllib.error.URLError as error:
        slow = isinstance(error.reason, TimeoutError)
        return f"does not answer within {_SECONDS:g} s" if slow else f"cannot be reached: {error.reason}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"cannot be reached: {error}"
    return None


RULE = Rule("live-servers", _find, live=True, explains=("upstream-unreachable", "upstream-refuses", "stuck-agent"))
