"""The calls of a `PolicyBackend` over HTTP: encode and decode their arguments and results.

A call is `POST /control/<method>` with a JSON object; the answer is `{"ok": ...}` or `{"error":
{"kind", "message"}}`. Long lists are sent as packed 32-bit arrays in base64. Paths name files of a
file system that both processes share. To add a method, add it to `_METHODS` and to
`IsolatedBackend`.
"""

from __future__ import annotations

import base64
import functools
import importlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from leyden import errors
from leyden.engine.base import ForwardResult, OptimParams, PolicyBackend, SampledResponse, SamplingParams
from leyden.errors import ConfigError, EngineError, LeydenError
from leyden.host.http import JSON, Handler, HttpReply, RequestHeaders
from leyden.maths.losses import LOSSES, Loss, find_loss, make_loss
from leyden.types import TrainingSequence, pack_floats, pack_ints, unpack_floats, unpack_ints

logger = logging.getLogger("leyden.engine")

PREFIX = "/control/"
Json = dict[str, Any]
N = TypeVar("N", int, float)


def control_handlers(backend: PolicyBackend) -> dict[str, Handler]:
    """Return the handlers of all control calls to `backend`, by path."""
    return {PREFIX + name: functools.partial(_serve, backend, method) for name, method in _METHODS.items()}


def read_answer(body: bytes | str) -> Any:
    """Return the result of a call, given the body of its answer. Raise the error that the call
    ended with, as the same class.
    """
    answer = json.loads(body)
    if "error" not in answer:
        return answer["ok"]
    kind = getattr(errors, answer["error"]["kind"], EngineError)
    raise kind(answer["error"]["message"])


def describe_error(error: Exception) -> Json:
    """Return an error as the JSON that `read_answer` reads. An error that is not a LeydenError
    becomes an EngineError with the error's class in its message.
    """
    if isinstance(error, LeydenError):
        return {"error": {"kind": type(error).__name__, "message": str(error)}}
    return {"error": {"kind": "EngineError", "message": f"{type(error).__name__}: {error}"}}


def write_prompts(prompts: Sequence[Sequence[int]]) -> Json:
    """Return prompts of token ids as JSON, in packed form."""
    return _pack(prompts, pack_ints)


def write_sequences(sequences: Sequence[TrainingSequence]) -> Json:
    """Return training sequences as JSON: one packed array for each field, with the sequences'
    lengths.

    Raise ConfigError unless all sequences have the same columns.
    """
    names = list(sequences[0].columns) if sequences else []
    for index, sequence in enumerate(sequences):
        if sequence.columns.keys() != set(names):
            raise ConfigError(
                f"sequence {index} has the columns {sorted(sequence.columns)} and sequence 0 has {sorted(names)}; "
                "the sequences of one call have the same columns"
            )
    return {
        "token_ids": _pack([s.token_ids for s in sequences], pack_ints),
        "weights": _pack([s.weights for s in sequences], pack_floats),
        "columns": {name: _pack([s.columns[name] for s in sequences], pack_floats) for name in names},
    }


def read_samples(data: Json) -> list[SampledResponse]:
    """Return the responses that the other process has packed."""
    columns = (
        _unpack(data["token_ids"], unpack_ints),
        _unpack(data["logprobs"], unpack_floats),
        _unpack(data["policy_versions"], unpack_ints),
        data["finish_reasons"],
    )
    return [SampledResponse(*sample) for sample in zip(*columns, strict=True)]


def _write_samples(samples: Sequence[SampledResponse]) -> Json:
    """Return responses as JSON; `read_samples` is the inverse."""
    return {
        "token_ids": _pack([s.token_ids for s in samples], pack_ints),
        "logprobs": _pack([s.logprobs for s in samples], pack_floats),
        "policy_versions": _pack([s.policy_versions for s in samples], pack_ints),
        "finish_reasons": [s.finish_reason for s in samples],
    }


def _read_sequences(data: Json) -> list[TrainingSequence]:
    """Return the training sequences of a control call; the inverse of `write_sequences`."""
    token_ids = _unpack(data["token_ids"], unpack_ints)
    weights = _unpack(data["weights"], unpack_floats)
    columns = {name: _unpack(packed, unpack_floats) for name, packed in data["columns"].items()}
    return [
        TrainingSequence(ids, each, {name: lists[index] for name, lists in columns.items()})
        for index, (ids, each) in enumerate(zip(token_ids, weights, strict=True))
    ]


def write_loss(loss: Loss) -> Json:
    """Return a loss as JSON: its name, its constants and the module that registers it."""
    return {"name": find_loss(loss).name, "constants": asdict(loss), "module": type(loss).__module__}


def _pack(lists: Sequence[Sequence[N]], pack: Callable[[list[N]], bytes]) -> Json:
    """Return lists as one packed array in base64, and their lengths."""
    try:
        values = pack([value for values in lists for value in values])
    except (OverflowError, TypeError) as error:
        raise ConfigError(f"a list holds a value that is not a 32-bit number: {error}") from error
    lengths = pack_ints([len(values) for values in lists])
    return {"lengths": base64.b64encode(lengths).decode(), "values": base64.b64encode(values).decode()}


def _unpack(data: Json, unpack: Callable[[bytes], list[N]]) -> list[list[N]]:
    """Return the lists that `_pack` has packed."""
    values = unpack(base64.b64decode(data["values"]))
    lists: list[list[N]] = []
    start = 0
    for length in unpack_ints(base64.b64decode(data["lengths"])):
        lists.append(values[start : start + length])
        start += length
    return lists


Method = Callable[[PolicyBackend, Json], Awaitable[Any]]
"""A call to a backend, given its arguments as JSON. It returns the result as JSON."""


async def _serve(backend: PolicyBackend, method: Method, body: bytes, headers: RequestHeaders) -> HttpReply:
    """Reply to a control call with the method's result, or with a description of its error; the
    status is 200 in both cases.
    """
    try:
        answer = {"ok": await method(backend, json.loads(body))}
    except Exception as error:  # sent as the answer, because the caller is in another process
        if not isinstance(error, LeydenError):
            logger.exception("a control call failed")
        answer = describe_error(error)
    return HttpReply(200, json.dumps(answer).encode(), JSON)


async def _sample(backend: PolicyBackend, data: Json) -> Json:
    params: Json = {**data["params"], "stop_token_ids": tuple(data["params"]["stop_token_ids"])}
    return _write_samples(await backend.sample(_unpack(data["prompts"], unpack_ints), SamplingParams(**params)))


async def _forward(backend: PolicyBackend, data: Json) -> Json:
    """Return the result of `forward` as JSON; `read_forward` is the inverse."""
    sequences = _read_sequences(data["sequences"])
    result = await backend.forward(sequences, temperature=data["temperature"], values=data["values"])
    lists = {"logprobs": result.logprobs, "entropies": result.entropies, "values": result.values}
    return {name: None if each is None else _pack(each, pack_floats) for name, each in lists.items()}


def read_forward(data: Json) -> ForwardResult:
    """Return the result of a call of `forward`, given its JSON."""
    values = None if data["values"] is None else _unpack(data["values"], unpack_floats)
    return ForwardResult(_unpack(data["logprobs"], unpack_floats), _unpack(data["entropies"], unpack_floats), values)


async def _forward_backward(backend: PolicyBackend, data: Json) -> Json:
    if data["loss"]["name"] not in LOSSES:  # a loss of the user's, which its module registers
        importlib.import_module(data["loss"]["module"])
    loss = make_loss(data["loss"]["name"], data["loss"]["constants"])
    sequences = _read_sequences(data["sequences"])
    return asdict(await backend.forward_backward(sequences, loss, temperature=data["temperature"]))


async def _optim_step(backend: PolicyBackend, data: Json) -> Json:
    params: Json = {**data["params"], "betas": tuple(data["params"]["betas"])}
    return asdict(await backend.optim_step(OptimParams(**params)))


async def _save_state(backend: PolicyBackend, data: Json) -> None:
    await backend.save_state(Path(data["path"]))


async def _snapshot_state(backend: PolicyBackend, data: Json) -> bool:
    return await backend.snapshot_state(Path(data["path"]))


async def _state_written(backend: PolicyBackend, data: Json) -> None:
    await backend.state_written(Path(data["path"]))


async def _load_state(backend: PolicyBackend, data: Json) -> int:
    """Load a state, and return the policy version that it has."""
    await backend.load_state(Path(data["path"]))
    return backend.policy_version


async def _save_pretrained(backend: PolicyBackend, data: Json) -> None:
    await backend.save_pretrained(Path(data["path"]))


async def _save_adapter(backend: PolicyBackend, data: Json) -> None:
    await backend.save_adapter(Path(data["path"]))


async def _device(backend: PolicyBackend, data: Json) -> str:
    return await backend.device()


async def _share_weights(backend: PolicyBackend, data: Json) -> Json:
    return asdict(await backend.share_weights())


async def _statistics(backend: PolicyBackend, data: Json) -> Json:
    return asdict(await backend.statistics())


_METHODS: Mapping[str, Method] = {
    "sample": _sample,
    "forward": _forward,
    "forward_backward": _forward_backward,
    "optim_step": _optim_step,
    "save_state": _save_state,
    "snapshot_state": _snapshot_state,
    "state_written": _state_written,
    "load_state": _load_state,
    "save_pretrained": _save_pretrained,
    "save_adapter": _save_adapter,
    "device": _device,
    "share_weights": _share_weights,
    "statistics": _statistics,
}
