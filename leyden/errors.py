"""Every error that Leyden raises on purpose, one root and a few kinds.

Each kind also inherits the builtin that it is, so `except ValueError` works too. A message says what happened, to which
id or option, and what to do about it. To add a kind: a class with one docstring sentence that says when it is raised.

Messages hide passwords and keys: `redact` is the one rule for text that people, logs and stores get to see. It knows
the forms in which addresses carry credentials and the form of the gateway's keys, and no credential itself. To cover
another form, add a pattern here.
"""

from __future__ import annotations

import re

HIDDEN = "***"
_SECRET_WORDS = ("password", "secret", "token", "key")

_LOGIN = re.compile(r"(://[^\s:/?#@]*):(?:[^\s/]*|(?!\d+/|[^\s/]*\])(?:(?!://)[^\s'\"])*)@")
"""`scheme://user:password@host`, in which the password may hold a colon, a slash or an at sign. A port and a path are
no password."""
_QUERY = re.compile(
    r"([?&](?:[a-z_-]*(?:password|passwd|token|secret|signature)|pwd|sig|apikey|(?:[a-z_-]*[_-])?key)=)[^\s&#'\"]+",
    re.I,
)
"""A parameter of a URL whose name says that its value is secret."""
_CONNECTION = re.compile(r"\b((?:ssl)?password\s*=\s*)(?!\.\.\.)(?:'(?:[^'\\]|\\.)*'|[^\s'\"&;,)]+)", re.I)
"""`password=...` in a connection string of libpq."""

_ATTEMPT_KEY = re.compile(r"(\bsk-leyden-\S+?\.)[0-9a-f]{40}\b")
"""An attempt's API key (`leyden._lib.attempt_key`). Its ids are kept, its signature is hidden."""

_HEADER = re.compile(r"(authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic)\s+)(?!sk-leyden-)[^\s'\",;)]+", re.I)
"""The value of an HTTP header, as programs print it."""
_MEMBER = re.compile(
    r"(['\"](?:[a-z_-]*(?:password|secret|token)|[a-z_-]*api[_-]?key)['\"]\s*:\s*(['\"]))(?!\2).*?\2", re.I
)
"""A string value in JSON or in a Python dict whose key says that it is secret."""


def redact(text: str) -> str:
    """Return `text` with `***` in the place of each secret.

    Secrets are passwords and keys in an address, a connection string, an HTTP header, JSON or a dict, and the signature
    of an attempt's key.
    """
    if "sk-leyden-" in text:
        text = _ATTEMPT_KEY.sub(rf"\1{HIDDEN}", text)
    if "://" in text:
        text = _LOGIN.sub(rf"\1:{HIDDEN}@", text)
        text = _QUERY.sub(rf"\1{HIDDEN}", text)
    folded = text.lower()
    if "password" in folded:
        text = _CONNECTION.sub(rf"\1{HIDDEN}", text)
    if "authorization" in folded:
        text = _HEADER.sub(rf"\1{HIDDEN}", text)
    if any(word in folded for word in _SECRET_WORDS):
        text = _MEMBER.sub(rf"\1{HIDDEN}\2", text)
    return text


class LeydenError(Exception):
    """The root of Leyden's errors. A password in an address is hidden from the message."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(LeydenError, ValueError):
    """An option, an argument, a component's name or a signature is wrong, so the call would fail again. It is raised
    before anything is changed, where the fault can be seen that early.
    """


class InvalidArgument(ConfigError, TypeError):
    """A function or class was called with an argument that it does not take, or with one of the wrong kind."""


class MissingExtra(ConfigError, ImportError):
    """A package that only some users need is not installed.

    The message names the extra to install.
    """


class MissingResource(LeydenError, LookupError):
    """The agent needs a resource that the algorithm or the user did not give."""


class StoreError(LeydenError, RuntimeError):
    """The store could not carry out an operation: disk full, file in use, newer file format, server unavailable."""


class StoreClosed(StoreError):
    """The store was used after `close()`."""


class StoreAway(StoreError):
    """The store's server could not be reached, so the call has changed nothing. Repeat it when the server is back."""


class StoreFull(StoreError):
    """The store has no room for the write. Repeat the call when there is room again."""


class UnknownRollout(LeydenError, ValueError):
    """A rollout id that this store does not have: it never had it, or its retention has deleted it."""


class UnknownAttempt(LeydenError, ValueError):
    """An attempt id that its rollout does not have."""


class UnknownResources(LeydenError, ValueError):
    """A resources id that this store does not have: it never had it, or its retention has deleted it."""


class UnknownRelease(LeydenError, ValueError):
    """A release id that this store does not have."""


class VersionFrozen(LeydenError, ValueError):
    """A label was to be put on a version of resources that is frozen."""


class ReleaseAdvanced(LeydenError, ValueError):
    """A release is not in the state that the caller expected, so it was not changed."""


class UnknownRun(LeydenError, ValueError):
    """A run id that this store does not have."""


class UnknownWorker(LeydenError, ValueError):
    """A worker id that this store has never seen."""


class LabelMoved(LeydenError, ValueError):
    """A label is not where the caller expected it, so it was not moved."""


class IllegalTransition(LeydenError, ValueError):
    """A status change that the lifecycle does not allow; the record is unchanged."""


class NoActiveTrace(LeydenError, RuntimeError):
    """Something was emitted outside any trace, so it belongs to no attempt."""


class AgentError(LeydenError, RuntimeError):
    """The agent failed; the attempt's record holds the reason."""


class InvalidReturn(AgentError, TypeError):
    """The agent returned something other than None, finite numbers or spans of its attempt."""


class InvalidEmission(AgentError, ValueError):
    """The agent emitted a value that cannot be recorded (a reward that is not finite, an object that is not JSON)."""


class ProcessFailed(AgentError):
    """The program of a ProcessAgent ended in a way that is no result."""


class InvalidMetrics(LeydenError, TypeError):
    """A training step returned something that is not a mapping of names to numbers."""


class GatewayError(LeydenError, RuntimeError):
    """The gateway could not start, or the model behind it could not answer."""


class ChildDied(LeydenError, RuntimeError):
    """A child process ended by itself, or did not start in time. The message has its last lines."""


class EngineError(LeydenError, RuntimeError):
    """The policy backend could not sample or train."""


class PolicyDiverged(EngineError):
    """A loss or a gradient of the policy is no finite number."""


class CheckpointError(LeydenError, RuntimeError):
    """A checkpoint is missing, damaged, or from another configuration."""


class NoTrainingData(LeydenError, RuntimeError):
    """A step has no rollout that could be trained on; the message counts the reasons."""


class BudgetExceeded(LeydenError, RuntimeError):
    """An algorithm requested more than its budget has left. Nothing of the request was enqueued."""


class ReflectionFailed(LeydenError, RuntimeError):
    """Every call of one optimisation round to the models that improve prompts has failed."""


class RunnerDied(LeydenError, RuntimeError):
    """A runner's process could not start, or died at once again and again; the message has its own traceback."""


class SimulatorError(LeydenError, RuntimeError):
    """A simulator raised or hung, or its worker died. The message names environment, seed and step."""

    def __init__(
        self, message: str, *, env_id: int | None = None, seed_index: int | None = None, step: int | None = None
    ) -> None:
        """Name the episode that failed.

        env_id: the environment's index in its vector environment.
        seed_index: the index of the episode's seed in the data set.
        step: the number of steps that the episode had made.
        """
        super().__init__(message)
        self.env_id = env_id
        self.seed_index = seed_index
        self.step = step


class SeedsExhausted(LeydenError, RuntimeError):
    """An environment was reset after its last seed."""


class DataQueueClosed(LeydenError, RuntimeError):
    """A data queue was used after the process that made it left its `with` block, or ended."""


class RunInterrupted(LeydenError, KeyboardInterrupt):
    """The run was stopped by Ctrl-C, SIGTERM or `leyden stop`. All that was finished is kept; the message says how to
    resume."""


class InvalidTrade(LeydenError, ValueError):
    """A simulator was asked to trade a negative amount, or more than is left; it is unchanged."""


class OrderDone(LeydenError, AssertionError):
    """A simulator was asked for a step after its order was done."""


class Untranslatable(LeydenError, ValueError):
    """A request or a response has content that the target API cannot express, and is refused as a whole."""

    def __init__(self, field: str, problem: str) -> None:
        """Name the field that cannot be translated.

        field: its path, such as `messages[2].content[0].type`.
        problem: the rest of the message, such as "is an image; ...".
        """
        super().__init__(f"{field} {problem}")
        self.field = field
