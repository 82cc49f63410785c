"""Commands to a running gateway over HTTP, from an operator or a trainer in another process.

Each request carries the gateway's control key.

- `GET /control/state` reports what the gateway is doing;
- `GET /control/upstreams` returns the status of each server;
- `POST /control/pause`, `/control/drain` and `/control/resume` hold calls up while weights change;
- `POST /control/models` replaces the models;
- `POST /control/policy_version` sets the version of a model's weights.

Every POST command returns the gateway's state after it. `RemoteGateway` is the client. A gateway in several processes
sends a request to each, and joins their replies. To add a command, add its name to `_COMMANDS`, a case to
`Control.handle`, and a method to `RemoteGateway`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NotRequired, cast

import aiohttp
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from typing_extensions import TypedDict

from leyden._lib.host.http import Refusal
from leyden._lib.per_loop import PerLoop
from leyden.errors import ConfigError, GatewayError
from leyden.gateway.gate import Gate
from leyden.gateway.remote import client_session, control_key_of, found_secret
from leyden.gateway.upstream import UpstreamModel
from leyden.gateway.upstream_metrics import UpstreamStatus

PREFIX = "control/"
_SECONDS = 600.0
"""Seconds that a request may take. `drain` waits for the models."""


class ModelState(TypedDict):
    """A model's server, and the version of the model's weights."""

    model_name: str
    endpoint: str
    policy_version: int | None
    """The version of the weights that was set; None if none was."""


class GatewayState(TypedDict):
    """The calls, records and models of a gateway at one moment."""

    paused: bool
    calls_waiting: int
    """Calls that wait because the gateway is paused."""
    calls_at_models: int
    """Calls that a model is answering."""
    records_pending: int
    """Calls whose record is not in the store yet."""
    models: list[ModelState]


class PolicyVersion(TypedDict):
    model_name: str
    version: int | None


class _Model(TypedDict):
    """An entry of the list of models: the fields of `UpstreamModel` that JSON can express."""

    model_name: str
    endpoint: NotRequired[str]
    api_key: NotRequired[str | None]
    upstream_model: NotRequired[str | None]
    sampling_parameters: NotRequired[dict[str, Any]]
    record_tokens: NotRequired[bool | None]
    dialects: NotRequired[tuple[str, ...]]
    part_of_run: NotRequired[bool]
    price_per_million: NotRequired[list[float] | dict[str, float | None] | None]
    litellm_params: NotRequired[dict[str, Any] | None]


_COMMANDS = ("pause", "drain", "resume", "models", "policy_version")
_MODELS = TypeAdapter(list[_Model])
_VERSION = TypeAdapter(PolicyVersion)
_STATE = TypeAdapter(GatewayState)


class Control:
    """The commands of one gateway process. Everything runs in the gateway's event loop."""

    def __init__(
        self,
        gate: Gate,
        *,
        models: Callable[[], Mapping[str, Sequence[UpstreamModel]]],
        policy_versions: Mapping[str, int],
        records_pending: Callable[[], int],
        update_models: Callable[[list[Any]], None],
        set_policy_version: Callable[[str, int | None], None],
        upstreams: Callable[[], list[UpstreamStatus]],
    ) -> None:
        self.gate = gate
        self._models = models
        self._policy_versions = policy_versions
        self._records_pending = records_pending
        self._update_models = update_models
        self._set_policy_version = set_policy_version
        self._upstreams = upstreams

    def state(self) -> GatewayState:
        """Return the gateway's calls, records and models at this moment, without keys and passwords."""
        return GatewayState(
            paused=self.gate.closed,
            calls_waiting=self.gate.waiting,
            calls_at_models=self.gate.inside,
            records_pending=self._records_pending(),
            models=[
                ModelState(model_name=name, endpoint=server.address, policy_version=self._policy_versions.get(name))
                for name, servers in self._models().items()
                for server in servers
            ],
        )

    async def handle(self, command: str, verb: str, body: bytes) -> GatewayState | list[dict[str, Any]]:
        """Carry out a command, and return the state after it or the status of each server.

        Raise Refusal for an unknown command and for an invalid body.
        """
        if (verb, command) == ("GET", "upstreams"):
            return [asdict(status) for status in self._upstreams()]
        if (verb, command) != ("GET", "state"):
            if command not in _COMMANDS or verb != "POST":
                raise Refusal(
                    404,
                    "route_not_found",
                    f"the gateway has no route {verb} /{PREFIX}{command}; there are GET /{PREFIX}state, GET /{PREFIX}upstreams and "
                    f"POST /{PREFIX} with {', '.join(_COMMANDS)}",
                )
            try:
                match command:
                    case "pause":
                        self.gate.close()
                    case "drain":
                        await self.gate.drain()
                    case "resume":
                        self.gate.open()
                    case "models":
                        self._update_models(cast(list[Any], _MODELS.validate_json(body)))
                    case _:
                        given = _VERSION.validate_json(body)
                        self._set_policy_version(given["model_name"], given["version"])
            except (ConfigError, ValidationError) as error:
                raise Refusal(400, "invalid_request_error", f"/{PREFIX}{command}: {error}") from error
        return self.state()


def join_states(states: Sequence[GatewayState]) -> GatewayState:
    """Return the state of a gateway in several processes: paused if all are, counts added up."""
    return GatewayState(
        paused=all(state["paused"] for state in states),
        calls_waiting=sum(state["calls_waiting"] for state in states),
        calls_at_models=sum(state["calls_at_models"] for state in states),
        records_pending=sum(state["records_pending"] for state in states),
        models=states[0]["models"],
    )


class RemoteGateway:
    """A gateway in another process or on another machine, controlled over HTTP.

    Each method returns the state after the command, and raises GatewayError if the gateway cannot be reached or
    refuses.
    """

    def __init__(self, url: str, secret: str | None = None) -> None:
        """Open no connection yet; the first command does.

        url: the gateway's address, such as `http://127.0.0.1:8000`, with or without `/v1`.
        secret: the LEYDEN_STORE_TOKEN that the gateway was started with, or else its token. None if it has neither:
            this process must then run on the gateway's machine, as its user.
        """
        self._root = url.rstrip("/").removesuffix("/v1")
        self._secret = secret
        self._sessions = PerLoop(partial(client_session, total_seconds=_SECONDS))

    async def state(self) -> GatewayState:
        """Return the gateway's calls, records and models at this moment."""
        return await self._ask("GET", "state")

    async def pause(self) -> GatewayState:
        """Hold up new calls until `resume`; calls at a model continue."""
        return await self._ask("POST", "pause")

    async def drain(self) -> GatewayState:
        """Hold up new calls, and wait until those at the models are answered."""
        return await self._ask("POST", "drain")

    async def resume(self) -> GatewayState:
        """Let the waiting calls continue."""
        return await self._ask("POST", "resume")

    async def update_model_list(self, models: Sequence[Mapping[str, Any]]) -> GatewayState:
        """Replace the models from the next call on.

        models: the fields of an `UpstreamModel` for each.
        """
        return await self._ask("POST", "models", list(models))

    async def set_policy_version(self, model_name: str, version: int | None) -> GatewayState:
        """Set the version of a model's weights, which is recorded with each call, or None for no version."""
        return await self._ask("POST", "policy_version", {"model_name": model_name, "version": version})

    async def _ask(self, verb: str, command: str, body: Any = None) -> GatewayState:
        session = await self._sessions.get()
        headers = {"Authorization": f"Bearer {control_key_of(self._secret or found_secret(self._root))}"}
        try:
            async with session.request(verb, f"{self._root}/{PREFIX}{command}", json=body, headers=headers) as reply:
                answer = await reply.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise GatewayError(
                f"the gateway at {self._root} cannot be reached: {error or type(error).__name__}; is it running there?"
            ) from error
        if reply.status != 200:
            raise GatewayError(f"the gateway at {self._root} refused {command}: {error_message(answer)}")
        return _STATE.validate_json(answer)


def error_message(answer: bytes) -> str:
    """Return the message of an error's body, or the body if it has none."""
    try:
        return str(from_json(answer)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.decode(errors="replace")
