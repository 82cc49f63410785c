"""The calls of a `PolicyBackend` over HTTP: their arguments and results as JSON.

A call is `POST /control/<method>` with the method's arguments by name; the answer is `{"ok": ...}` or `{"error":
{"kind", "message"}}`. The types of arguments and results are those of the method's signature. Paths name files of a
file system that both processes share. A new asynchronous method of the protocol can be called at once; add it to
`IsolatedBackend`, too.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, cast, get_type_hints

from pydantic import BaseModel, ValidationError, create_model
from pydantic_core import to_json

from leyden import errors
from leyden._lib.host.http import JSON, Handler, HttpReply, RequestHeaders
from leyden._lib.json import Json
from leyden._lib.text import fault_reason, shown
from leyden.engine.policy_backend import PolicyBackend
from leyden.errors import ConfigError, EngineError, LeydenError
from leyden.objectives.losses import LOSSES, Loss, find_loss, make_loss

logger = logging.getLogger("leyden.engine")
Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])

PREFIX: Final = "/control/"
METHODS: Final = [
    name
    for name, _ in inspect.getmembers(PolicyBackend, inspect.iscoroutinefunction)
    if name not in ("start", "stop") and not name.startswith("_")
]
"""The names of the methods that can be called: the asynchronous ones of the protocol."""


def remote(method: Method) -> Method:
    """Return a method that makes the same call in another process: through `post` of the object, an asynchronous method
    that takes the name and the arguments of a call and returns the answer.
    """
    name, signature, returned = method.__name__, inspect.signature(method), get_type_hints(method)["return"]

    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        del arguments["self"]
        return read_answer(await self.post(name, write_arguments(arguments)), returned)

    return cast(Method, call)


def write_arguments(arguments: Mapping[str, Any]) -> bytes:
    """Return a call's arguments as JSON: a loss by its name, constants and registering module, and absolute paths."""
    return to_json(
        {name: _wire_form(value) for name, value in arguments.items()},
        inf_nan_mode="constants",
        fallback=lambda value: value.tolist() if hasattr(value, "tolist") else list(value),
    )


def importable_loss(loss: Loss) -> tuple[str, str]:
    """Return a loss's name, and the module that registers it. Raise ConfigError if it is the script that runs, which no
    other process can import.
    """
    name, kind = find_loss(loss).name, type(loss)
    if kind.__module__ == "__main__":
        raise ConfigError(
            f"the loss {name!r} is registered in the script that runs, which the engine's process cannot import; move "
            f"{kind.__name__} and its function to a module beside the script, and import it there"
        )
    return name, kind.__module__


def import_loss(name: str, module: str) -> None:
    """Import the module that registers a loss, unless the loss is known. Raise ConfigError, which names both, if that
    fails.
    """
    if name in LOSSES:
        return
    try:
        importlib.import_module(module)
    except Exception as error:  # a module of the user's may raise any error
        raise ConfigError(
            f"the engine's process cannot import {module!r}, the module of the loss {name!r}: {type(error).__name__}: {error}"
        ) from error
    if name not in LOSSES:
        raise ConfigError(
            f"the module {module!r} does not register the loss {name!r} when it is imported; call register_loss({name!r}, ...) "
            "at the top level of the module that defines the loss's constants"
        )


def read_answer(body: bytes | str, returned: Any = Any) -> Any:
    """Return the result of a call, given the body of its answer. Raise the error that the call ended with, as the same
    class.

    returned: the type of the result.
    """
    answer: Any = _answer_of(returned).model_validate_json(body)
    if answer.error is None:
        return answer.ok
    kind = getattr(errors, answer.error["kind"], EngineError)
    raise kind(answer.error["message"])


def describe_error(error: Exception) -> Json:
    """Return an error as the JSON that `read_answer` reads. An error that is not a LeydenError becomes an EngineError
    with the error's class in its message.
    """
    if isinstance(error, LeydenError):
        return {"error": {"kind": type(error).__name__, "message": str(error)}}
    return {"error": {"kind": "EngineError", "message": f"{type(error).__name__}: {error}"}}


def control_handlers(backend: PolicyBackend) -> dict[str, Handler]:
    """Return the handlers of all control calls to `backend`, by path."""
    return {PREFIX + name: functools.partial(_serve, backend, name) for name in METHODS}


async def _serve(backend: PolicyBackend, name: str, body: bytes, headers: RequestHeaders) -> HttpReply:
    """Reply to a control call with the method's result, or with a description of its error, both with status 200."""
    try:
        answer: Json = {"ok": await getattr(backend, name)(**_read_arguments(name, body))}
    except Exception as error:  # sent as the answer, because the caller is in another process
        if not isinstance(error, LeydenError):
            logger.exception("a control call failed")
        answer = describe_error(error)
    return HttpReply(200, to_json(answer, inf_nan_mode="constants"), JSON)


def _read_arguments(name: str, body: bytes) -> Json:
    """Return the arguments of a call. Raise ConfigError for a value of another type than the method's."""
    model = _arguments_of(name)
    try:
        found = model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise ConfigError(f"{name}: {where} is {shown(first['input'])}; it {fault_reason(first)}") from error
    arguments = {each: getattr(found, each) for each in model.model_fields if each in found.model_fields_set}
    if (loss := arguments.get("loss")) is not None:
        import_loss(loss["name"], loss["module"])
        arguments["loss"] = make_loss(loss["name"], loss["constants"])
    return arguments


@functools.cache
def _arguments_of(name: str) -> type[BaseModel]:
    """Return a model of a method's arguments, all of which may be left out of a body."""
    hints = get_type_hints(getattr(PolicyBackend, name))
    fields = {each: (Json if hint is Loss else hint, None) for each, hint in hints.items() if each != "return"}
    return create_model(name, **cast(Any, fields))


@functools.cache
def _answer_of(returned: Any) -> type[BaseModel]:
    return create_model("Answer", ok=(returned, None), error=(dict[str, str] | None, None))


def _wire_form(argument: Any) -> Any:
    if isinstance(argument, Loss):
        name, module = importable_loss(argument)
        return {"name": name, "constants": argument, "module": module}
    return str(Path(argument).absolute()) if isinstance(argument, str | Path) else argument
