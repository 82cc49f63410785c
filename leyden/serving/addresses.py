"""Give a request's models the gateway's address, or their own while the gateway is unavailable.

The module knows resources and an HTTP address, and neither stores nor assignments.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from http import HTTPStatus

import aiohttp

from leyden.errors import ConfigError, GatewayError
from leyden.types import LIVE_KEY_PREFIX, LLM, NamedResources, ResourceUnion, VersionKey

logger = logging.getLogger(__name__)

_HEALTH_SECONDS = 2.0
"""Seconds that the gateway may take to answer a check."""
_UNAVAILABLE = "is away, so calls could not be recorded; start it again"
_REFUSED = "has another live_key, so it would refuse all calls; give it and the sessions the same LEYDEN_LIVE_KEY"


class ModelAddresses:
    """Gives the resources of each request the gateway's address, or the models' own addresses while the gateway is
    away.

    `resources` may be called from any thread. `watch` runs in one event loop until it is cancelled.
    """

    def __init__(self, gateway: str, own: Mapping[str, LLM] | None, *, claim: str) -> None:
        """gateway: its address, with or without `/v1`.
        own: the models' own addresses by model name, for the time without the gateway; None: while the gateway is
            unavailable, requests fail.
        claim: any claim that the session has signed. Checks send it, because a gateway with another live key refuses
            every call of the session.
        """
        self._gateway = gateway.rstrip("/").removesuffix("/v1")
        self._own = own
        self._check_url = f"{self._gateway}/live/{claim}/v1/models"
        self._why: str | None = None
        """Why the gateway cannot be used, as a phrase after "the gateway"; None if it can."""

    @property
    def gateway_is_away(self) -> bool:
        """Whether the gateway did not answer the last check, or refused its claim."""
        return self._why is not None

    def resources(self, resources: NamedResources, version: VersionKey, claim: str) -> tuple[NamedResources, bool]:
        """Return a copy of the resources with addresses for their models, and whether the calls will be recorded (by
        the gateway).

        claim: the signed claim of the rollout.
        Raise GatewayError if the gateway is unavailable and no own addresses were given, ConfigError if they lack one
        of the models.
        """
        if self._why is None:
            return {name: self._at_gateway(resource, claim) for name, resource in resources.items()}, True
        if self._own is None:
            raise GatewayError(
                f"the gateway at {self._gateway} {self._why}, or give the session fallback=True and models= to serve "
                "unrecorded meanwhile"
            )
        return {name: self._at_own_address(resource, version) for name, resource in resources.items()}, False

    async def watch(self, pause_seconds: float) -> None:
        """Check every `pause_seconds` whether the gateway answers."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_HEALTH_SECONDS)) as http:
            while True:
                await asyncio.sleep(pause_seconds)
                await self._poll(http)

    async def check(self) -> None:
        """Check once whether the gateway answers."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_HEALTH_SECONDS)) as http:
            await self._poll(http)

    async def _poll(self, http: aiohttp.ClientSession) -> None:
        """Query the gateway's health once, and log a change."""
        try:
            async with http.get(self._check_url) as response:
                why = _REFUSED if response.status == HTTPStatus.UNAUTHORIZED else None if response.ok else _UNAVAILABLE
        except (aiohttp.ClientError, TimeoutError, OSError):
            why = _UNAVAILABLE
        if why != self._why:
            level = logging.WARNING if why else logging.INFO
            logger.log(level, "the gateway at %s %s", self._gateway, why or "answers again")
        self._why = why

    def _at_gateway(self, resource: ResourceUnion, claim: str) -> ResourceUnion:
        if not isinstance(resource, LLM):
            return resource.model_copy()
        return LLM(
            endpoint=f"{self._gateway}/live/{claim}/v1",
            model=resource.model,
            api_key=LIVE_KEY_PREFIX + claim,
            sampling_parameters=dict(resource.sampling_parameters),
        )

    def _at_own_address(self, resource: ResourceUnion, version: VersionKey) -> ResourceUnion:
        if not isinstance(resource, LLM):
            return resource.model_copy()
        model = (self._own or {}).get(resource.model)
        if model is None:
            raise ConfigError(f"models= lacks {resource.model!r}, which version {version} uses; add its own address")
        return model.model_copy(update={"sampling_parameters": dict(resource.sampling_parameters)})
