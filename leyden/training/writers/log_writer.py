"""`LogWriter`: the base of all writers, and how it is notified of stages, episodes and steps.

A writer takes rows of one kind. A training loop gives it the row of each stage; vectorised environments report each
episode to it and, if it `wants_steps`, each step. The base class counts episodes and steps and makes their rows; it
does not know where they go.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from leyden._lib.options import NamedOptions
from leyden.errors import ConfigError
from leyden.training.metrics import ROW_KINDS, EpisodeRow, EpisodeStats, LogLevel, Row, RowKind, Stage, StepRow

_COUNTERS: Final = ("global_episode", "global_step", "episode_count", "step_count", "_begun")
_EVENTS: Final = (
    "write",
    "log_episode",
    "log_step",
    "on_env_step",
    "on_env_reset",
    "on_env_all_ready",
    "on_env_all_done",
    "on_stage_start",
)


@dataclass(slots=True)
class _RunningEpisode:
    """A running episode of one environment, with its rewards and logs if they are wanted."""

    number: int
    """Counts episodes in the order in which they began, from 1."""
    length: int = 0
    """Steps that were reported so far."""
    rewards: list[float] = field(default_factory=list[float])
    contents: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


class LogWriter(NamedOptions):
    """Writes the rows of one run. A run calls load_state_dict if it is resumed, then open, write for each row, and
    close.

    After `close`, a writer may serve another run.

    loglevel: take the values that a step logged at this level or above.
    rows: which rows the writer takes: "stage" (one for each training and validation stage), "episode" or "step".

    To add a writer, subclass and override at least one of these methods; a class that overrides none raises TypeError
    when it is made.

        write(row)                   a row of the writer's kind
        log_episode(episode)         an `EpisodeStats`
        log_episode(length, rewards, contents)
                                     the same in Qlib's form
        log_step(reward, contents)   contents: the values of this writer's level and above, by name
        on_env_step(env_id, obs, reward, done, info)
                                     everything; call super() to keep the counters
        on_env_all_ready(), on_env_reset(env_id, obs), on_env_all_done()

    A writer that overrides a method for steps makes its environments send every step, which costs time.
    """

    row_kind: RowKind = "stage"
    loglevel: LogLevel = LogLevel.PERIODIC
    iteration: int = 0
    """The iteration of the current stage, as in its row."""
    stage: Stage = "train"
    episode_count: int = 0
    """Episodes that ended since the last `clear`, with which each collect begins."""
    step_count: int = 0
    """Steps since the last `clear`."""
    global_episode: int = 0
    """Episodes ended since the run began, over all its processes."""
    global_step: int = 0
    """Steps since the run began, over all its processes."""
    _begun: int = 0
    """Episodes that began since the run began."""
    _handled: EpisodeStats | None = None
    """The episode that `log_episode` is handling."""
    _overrides_steps: ClassVar[bool] = False
    _gathers: ClassVar[bool] = False
    """Whether to gather an episode's steps, because `log_episode` has Qlib's form and takes them."""

    @staticmethod
    def _counting(handle: Callable[[Any, EpisodeStats], None]) -> Callable[[Any, EpisodeStats], None]:
        """Return a `log_episode` that counts the episode, then calls `handle`.

        The episode counts once, even if `handle` calls `super().log_episode`.
        """

        @functools.wraps(handle)
        def counted(self: LogWriter, episode: EpisodeStats) -> None:
            outermost = self._handled is not episode
            if outermost:
                self._count(episode)
            try:
                handle(self, episode)
            finally:
                if outermost:
                    self._handled = None

        return counted

    @staticmethod
    def _from_stats(handle: Callable[..., None]) -> Callable[[Any, EpisodeStats], None]:
        @functools.wraps(handle)
        def log_episode(self: LogWriter, episode: EpisodeStats) -> None:
            handle(self, episode.length, self._ended_episode.rewards, self._ended_episode.contents)

        return log_episode

    def __init__(self, loglevel: int = LogLevel.PERIODIC, *, rows: RowKind = "stage") -> None:
        if not any(getattr(type(self), name) is not getattr(LogWriter, name) for name in _EVENTS):
            raise TypeError(f"{type(self).__name__} would write nothing: it overrides none of {', '.join(_EVENTS)}")
        if rows not in ROW_KINDS:
            raise ConfigError(f"rows is {rows!r}; choose one of {', '.join(ROW_KINDS)}")
        self.row_kind, self.loglevel = rows, LogLevel(loglevel)
        self._running: dict[int, _RunningEpisode] = {}
        self._ended: list[tuple[int, _RunningEpisode]] = []

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap the subclass's `log_episode`, so that it counts, and note whether it needs steps."""
        super().__init_subclass__(**options)
        if handle := cls.__dict__.get("log_episode"):
            parameters = list(inspect.signature(handle).parameters.values())[1:]
            required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
            qlibs = cls._gathers = len(required) == 3
            cls.log_episode = LogWriter._counting(LogWriter._from_stats(handle) if qlibs else handle)
        watched = ("on_env_step", "log_step")
        cls._overrides_steps = any(getattr(cls, name) is not getattr(LogWriter, name) for name in watched)

    @property
    def state_key(self) -> str:
        """The name of this writer's state in a checkpoint."""
        return type(self).__name__.lower()

    @property
    def wants_steps(self) -> bool:
        """Whether environments must report each step to the writer."""
        return self.row_kind == "step" or self._overrides_steps or self._gathers

    # ---- the record ------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin a new record, or continue from the state that was loaded since the last `open`."""

    def write(self, row: Row) -> None:
        """Take a row of the writer's kind; the base class drops it. Raise OSError if it cannot be kept."""

    def close(self) -> None:
        """Flush and release files, connections and processes. Calling it again does nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and how much was written, as JSON.

        What the state counts is durable when this returns. May be called after `close`.
        """
        counters = {name: getattr(self, name) for name in _COUNTERS}
        return {"counters": counters} if any(counters.values()) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next `open` keep the rows that `state` covers and cut the later ones."""
        for name, count in state.get("counters", {}).items():
            if name in _COUNTERS:
                setattr(self, name, int(count))

    def clear(self) -> None:
        """Set `episode_count` and `step_count` to 0, and drop running episodes. The global counters continue."""
        self.episode_count = self.step_count = 0
        self._running, self._ended = {}, []

    # ---- what happens ----------------------------------------------------------------------------

    def on_stage_start(self, iteration: int, stage: Stage) -> None:
        """Called when a stage begins, with the iteration that its row will have."""
        self.iteration, self.stage = iteration, stage

    def on_env_all_ready(self) -> None:
        """Called when a collect begins. Clears the counters."""
        self.clear()

    def on_env_all_done(self) -> None:
        """Called when the collect is over."""

    def on_env_reset(self, env_id: int, obs: Any) -> None:
        """Called when an episode begins in an environment."""
        self._begin(env_id)

    def on_env_step(self, env_id: int, obs: Any, reward: float, done: bool, info: Mapping[str, Any]) -> None:
        """Called after each step. `info["log"]` has the level and the value of each logged name."""
        if not self.wants_steps:
            return
        logs: Mapping[str, tuple[int, Any]] = info.get("log", {})
        contents = {name: value for name, (level, value) in logs.items() if level >= self.loglevel}
        reward = float(reward)
        running = self._running.get(env_id) or self._begin(env_id)
        running.length += 1
        self.step_count += 1
        self.global_step += 1
        if self._gathers:
            running.rewards.append(reward)
            running.contents.append(contents)
        self.log_step(reward, contents)
        if self.row_kind == "step":
            row = (running.number, running.length, env_id, reward, contents, self.global_step)
            self.write(StepRow(self.iteration, self.stage, *row))
        if done:
            self._ended.append((env_id, self._running.pop(env_id)))

    def log_step(self, reward: float, contents: dict[str, Any]) -> None:
        """Called after each step, with its values of this writer's level and above."""

    @_counting
    def log_episode(self, episode: EpisodeStats) -> None:
        """Called when an episode has ended, after `on_env_step` of its last step."""
        if self.row_kind == "episode":
            self.write(EpisodeRow(self.iteration, self.stage, self._ended_episode.number, episode))

    # ---- counting --------------------------------------------------------------------------------

    def _begin(self, env_id: int) -> _RunningEpisode:
        self._begun += 1
        running = self._running[env_id] = _RunningEpisode(self._begun)
        return running

    def _count(self, episode: EpisodeStats) -> None:
        self._ended_episode = self._find_ended(episode.env_id)
        self._handled = episode
        self.episode_count += 1
        self.global_episode += 1
        # environments that need not send steps call no `on_env_step`, so count from the episode
        unheard = max(0, episode.length - self._ended_episode.length)
        self.step_count += unheard
        self.global_step += unheard

    def _find_ended(self, env_id: int | None) -> _RunningEpisode:
        """Return, and drop, the episode that has ended in an environment.

        First look among those whose last step was reported, then among the running ones. An episode that was never
        reported to begin gets the next number.
        env_id: None if unknown; the first ended episode, or the only running one, is taken.
        """
        for index, (each, running) in enumerate(self._ended):
            if env_id is None or each == env_id:
                del self._ended[index]
                return running
        if env_id in self._running:
            return self._running.pop(env_id)
        if env_id is None and len(self._running) == 1:
            return self._running.popitem()[1]
        self._begun += 1
        return _RunningEpisode(self._begun)
